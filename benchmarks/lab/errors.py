"""The one exception of the lab."""


class LabError(RuntimeError):
    """What is wrong, and what to do: a sentence for the user."""
