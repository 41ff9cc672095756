"""The exception class of the lab."""

from gradcast.errors import Error


class LabError(Error):
    """The message is a sentence for the user: what is wrong, and what to do. Most often it is this machine. It may end
    with the last lines of a worker."""

    has_lines = True

    def __init__(self, message: str, code: str = "environment") -> None:
        super().__init__(message, code)
