"""The one exception of gradcast, raised by C++ and Python alike."""


class Error(ValueError):
    """What is wrong, with the field, and what to do: a sentence for the user.

    ``code`` is "invalid_profile", "invalid_plan", "invalid_link", "invalid_option", "invalid_use" (training code that
    gradcast cannot follow), "communication" (the network or a peer failed) or, for a defect of gradcast itself,
    "internal".
    """

    def __init__(self, message: str, code: str = "invalid_option") -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple:
        # Errors travel between ranks; an exception's own form would forget the code.
        return (type(self), (str(self), self.code))


def refused(message: str) -> Error:
    """The error for training code that gradcast cannot follow."""
    return Error(message, "invalid_use")
