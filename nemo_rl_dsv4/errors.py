"""Errors that are the user's to fix."""


class UserError(Exception):
    """Bad input: a key, file or value that the user can correct.

    The message is one line that names what was found, what was wanted, and the fix. Command lines print it without a
    traceback (unless ``--debug``) and exit with status 2.
    """
