"""The exception class of gradcast, raised by C++ and Python alike."""


class Error(ValueError):
    """The message is a sentence for the user: what is wrong, in which field, and what to do.

    ``code`` is "invalid_profile", "invalid_plan", "invalid_link", "invalid_option", "invalid_use" (training code that
    gradcast cannot follow), "communication" (the network or a peer failed), "environment" (a tool or a right is
    missing, or a file cannot be written) or "internal" (a defect of gradcast). The exit code of a command follows from
    it (cli/main.py).
    """

    def __init__(self, message: str, code: str = "invalid_option") -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple:
        # Errors are sent between ranks; pickled by default, an exception would lose the code.
        return (type(self), (str(self), self.code))


def refused(message: str) -> Error:
    """An Error for training code that gradcast cannot follow."""
    return Error(message, "invalid_use")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message; torch's messages continue with a stack trace."""
    return str(error).strip().splitlines()[0]
