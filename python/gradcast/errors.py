"""The one exception of gradcast, raised by C++ and Python alike."""


class Error(ValueError):
    """What is wrong, with the field, and what to do: a sentence for the user.

    ``code`` is "invalid_profile", "invalid_plan", "invalid_link", "invalid_option" or, for a defect of gradcast itself,
    "internal".
    """

    def __init__(self, message: str, code: str = "invalid_option") -> None:
        super().__init__(message)
        self.code = code
