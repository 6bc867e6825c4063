"""The one error that the commands report instead of a traceback."""


class CommandError(Exception):
    """Bad input or a missing part; its text is one line for the user, exit status 2."""
