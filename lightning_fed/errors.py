"""The one exception a user can cause."""


class FederationError(ValueError):
    """Something the user asked for cannot be done.

    The message says what was got, what was expected and what to do. The command line prints it as one line and exits with code 2.
    """


class DamagedError(FederationError):
    """A file is missing, cut short, or not as it was written; another one may be whole."""


def require(condition: bool, message: str) -> None:
    """Raise a FederationError unless the condition holds."""
    if not condition:
        raise FederationError(message)
