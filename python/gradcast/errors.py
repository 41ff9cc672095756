"""The exception classes of gradcast, raised by C++ and Python alike."""


class Error(RuntimeError):
    """An error with a sentence for the user: the fault, its field, and the remedy.

    ``code`` is "invalid_profile", "invalid_plan", "invalid_link", "invalid_option", "invalid_use" (training code that
    gradcast cannot follow), "communication" (the network or a peer failed), "environment" (a tool or a right is
    missing, or a file cannot be written) or "internal" (a defect of gradcast). The exit code of a command follows from
    it (cli/main.py). With a code that begins with "invalid", it is a ``UsageError``.

    ``on_all_ranks``: every rank of the group raises an error for the same reason.
    """

    on_all_ranks = False

    def __new__(cls, message: str, code: str = "invalid_option") -> "Error":
        # The class follows from the code, so no place can raise one that contradicts the other.
        return super().__new__(UsageError if cls is Error and code.startswith("invalid") else cls, message, code)

    def __init__(self, message: str, code: str = "invalid_option") -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple:
        # Errors are sent between ranks; pickled by default, an exception would lose the code.
        return (type(self), (str(self), self.code))


class UsageError(Error, ValueError):
    """Wrong use: an option, a file or training code. Also a ValueError."""


def refused(message: str) -> Error:
    """Returns an Error for training code that gradcast cannot follow."""
    return Error(message, "invalid_use")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message; torch's messages continue with a stack trace."""
    return str(error).strip().splitlines()[0]
