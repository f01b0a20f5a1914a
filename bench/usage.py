"""The one error that means: the command was called wrongly, nothing is broken."""


class UsageError(ValueError):
    """Shown as one sentence without a traceback; the exit code is 2."""
