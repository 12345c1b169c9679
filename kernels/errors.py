"""The one exception that stands for a mistake the person at the keyboard can mend."""


class UserError(ValueError):
    """One line: what is wrong, what was found, what was expected, and the next step.

    Commands print it without a traceback and exit with code 2; library callers may catch it as a ValueError.
    """
