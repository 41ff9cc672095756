"""The exception class of the lab."""

from gradcast.errors import Error


class LabError(Error):
    """An error of the laboratory, by default of this machine. Its message may end with the last lines of a worker."""

    has_lines = True

    def __init__(self, message: str, code: str = "environment") -> None:
        super().__init__(message, code)
