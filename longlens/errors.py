"""What can go wrong, with the exit code of a command. Any other exception is a bug and keeps its traceback."""


def first_line(error: Exception) -> str:
    """What an error of another library says, or its name if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class LongLensError(Exception):
    """An error whose sentence is enough: what was given, what is allowed, what to do."""

    exit_code = 1


class BadInput(LongLensError, ValueError):  # noqa: N818 (a name for people)
    """An option, a file or a record cannot be used as it is."""

    exit_code = 2


class RunError(LongLensError):
    """A run cannot go on. Its checkpoints are as they were."""

    exit_code = 3


class Interrupted(LongLensError):  # noqa: N818 (nothing is wrong)
    """Someone asked to stop. What was done is saved, and the same command resumes."""

    exit_code = 75  # EX_TEMPFAIL: try again
