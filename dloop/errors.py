"""Errors that are the user's to mend."""


class UserError(ValueError):
    """An error of the user's input: shown as one line, exit 2."""
