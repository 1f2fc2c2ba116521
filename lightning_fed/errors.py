"""The one exception a user can cause."""


class FederationError(ValueError):
    """Something the user asked for cannot be done.

    The message says what was got, what was expected and what to do. The command line prints it as one line and exits with code 2.
    """
