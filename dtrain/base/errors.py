"""Errors that dtrain raises on purpose: mistakes that a user can mend, and a run that was asked to stop."""

from collections.abc import Sequence


class UserError(Exception):
    """A mistake that its user can mend; the message names the file, line or key and the fix.

    The command line prints the message without a traceback and exits with status 1.
    """


class Unavailable(UserError):
    """Something beside the run failed that it cannot go on without, such as a server; its own state is sound."""


class Interrupted(Exception):
    """The work under way was given up on every rank, since the run was asked to stop; it had no effect."""


class Stopped(Exception):
    """A signal asked the run to end, and it did so in order.

    `signum` is the signal; `message` says what was saved, or what is lost.
    """

    def __init__(self, signum: int, message: str):
        self.signum = signum
        super().__init__(message)


NOTHING_LOST = "stopped before the first step: nothing is lost; the same command starts here again"


class StoppedAtStart(Stopped):
    """A signal ended this rank before the ranks had met, so that the other ranks do not know of it."""

    def __init__(self, signum: int):
        super().__init__(signum, NOTHING_LOST)


def first(problems: Sequence[str], *, by_kind: bool = False) -> list[str]:
    """Return the first ten problems, and a line that counts the others; by_kind: with the word before the colon of the
    first."""
    more = f"... and {len(problems) - 10} more"
    if by_kind and problems:
        more += f" {problems[0].split(':')[0]}"
    return [*problems[:10], *([more] if len(problems) > 10 else [])]


def in_words(error: BaseException) -> str:
    """Return an OSError or UserError as one line that names the file where there is one."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error."""
    return (str(error).splitlines() or [type(error).__name__])[0]
