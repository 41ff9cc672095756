"""The one exception of the lab."""

from gradcast.errors import Error


class LabError(Error):
    """What is wrong, and what to do: a sentence for the user."""
