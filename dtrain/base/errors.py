"""Errors that dtrain raises on purpose, and mistakes in a recipe or in its files as objects.

A `UserError` is a mistake that a user can mend; `Stopped` ends a run that was asked to stop. A check of a recipe
returns every `Problem` that it finds instead of raising the first one, so that a user sees all of them at once. Code
that wants to know which key a problem is about reads `key`; nothing parses the message. Functions that cannot continue
raise a UserError as usual, and `problems_in` turns that error into a `Problem`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace


class UserError(Exception):
    """A mistake that its user can mend; the message names the file, line or key and the fix.

    The command line prints the message without a traceback and exits with status 1.
    """


class ServiceUnavailable(UserError):
    """A service that the run needs has failed, such as a rollout server. The state of the run itself is intact."""


class Interrupted(Exception):
    """Work was abandoned on every rank because the run was asked to stop. It had no effect."""


class Stopped(Exception):
    """The run has ended in order after a signal.

    Attributes:
        signum: The signal.
    """

    def __init__(self, signum: int, message: str):
        """Initialize with the signal, and a message that says what was saved or what is lost."""
        self.signum = signum
        super().__init__(message)


STOPPED_AT_START = "stopped before the first step: nothing is lost; the same command starts here again"


class StoppedAtStart(Stopped):
    """A signal ended this rank before torch.distributed was initialised, so that the other ranks do not know of it."""

    def __init__(self, signum: int):
        super().__init__(signum, STOPPED_AT_START)


def limit_problems(problems: Sequence[str], *, name_kind: bool = False) -> list[str]:
    """Return at most ten problems, and a line with the number of the others.

    Args:
        problems: All problems.
        name_kind: Add the text before the first problem's colon to the line with the number.

    Example:
        >>> limit_problems([f"line {n}: empty" for n in range(12)])[-1]
        '... and 2 more'
    """
    if len(problems) <= 10:
        return list(problems)
    more = f"... and {len(problems) - 10} more"
    if name_kind:
        more += f" {problems[0].split(':')[0]}"
    return [*problems[:10], more]


def describe_error(error: BaseException) -> str:
    """Return the text of an OSError or UserError, with the name of the file if there is one."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, or its type if it has no text."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


@dataclass(frozen=True)
class Problem:
    """A mistake in a recipe, or in a file that it names. `str(problem)` is the line that a user reads.

    Attributes:
        key: The dotted key that the problem is about, such as "parallel.tp". Empty if it is about no key.
        text: What is wrong, with the value, without a full stop at the end.
        fix: What to set, as a sentence without a full stop at the end. Empty if `text` contains the fix already.
        is_missing: Whether the problem is a missing value. `merge_problems` drops it if the value was set but refused.
        other_keys: Keys that would do instead of `key`, such as "train.epochs" for "train.steps".

    Example:
        >>> print(Problem("parallel.tp", "parallel.tp=3 does not divide the model's 8 attention heads", "Use 2 or 4"))
        parallel.tp=3 does not divide the model's 8 attention heads. Use 2 or 4.
    """

    key: str
    text: str
    fix: str = ""
    is_missing: bool = False
    other_keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.fix:
            return self.text
        end = "" if self.fix.endswith("?") else "."
        return f"{self.text}. {self.fix}{end}"

    def reworded(self, reword: Callable[[str], str]) -> "Problem":
        """Return the problem with `reword` applied to its texts, for example to hide secrets."""
        return replace(self, text=reword(self.text), fix=reword(self.fix))


class RecipeError(UserError):
    """All problems of a recipe.

    Args:
        problems: The problems. Repeated ones are reported once.
        note: A last line of the message.

    Attributes:
        problems: The problems, each once.
    """

    def __init__(self, problems: Iterable[Problem], note: str = ""):
        self.problems = list(dict.fromkeys(problems))
        count = len(self.problems)
        heading = "the recipe has a problem:" if count == 1 else f"the recipe has {count} problems:"
        lines = [f"  - {problem}" for problem in self.problems]
        if note:
            lines.append(note)
        super().__init__("\n".join([heading, *lines]))


def problems_of_error(key: str, error: OSError | UserError) -> list[Problem]:
    """Return the problems of a RecipeError, or any other error as one problem of `key`."""
    if isinstance(error, RecipeError):
        return error.problems
    return [Problem(key, describe_error(error))]


def problems_in(key: str, check: Callable[[], Iterable[Problem]]) -> list[Problem]:
    """Run a check and return its problems. A UserError or OSError that it raises becomes a problem too.

    Args:
        key: The recipe's key that a raised error is about.
        check: Returns the problems that it finds.
    """
    try:
        return list(check())
    except UserError as error:
        return problems_of_error(key, error)
    except OSError as error:  # for example a directory that this user may not enter, or a name that is too long
        fix = "Let this user read it, or name another path in the recipe"
        return [Problem(key, describe_error(error), fix)]


def merge_problems(refused: Iterable[Problem], found: Iterable[Problem]) -> list[Problem]:
    """Join the problems of parsing a recipe with the problems of checking the parsed recipe.

    A value that the parser refuses is left out of the parsed recipe, so later checks report it as missing. This second
    report is dropped. For example, `data.train.path: [1]` is refused because it is no text, and the check that reports
    a missing `data.train.path` is dropped.

    Args:
        refused: Problems of parsing, each with the key of the refused value.
        found: Problems of checking the parsed recipe.

    Returns:
        All problems of both, each once, without missing values that were refused.
    """
    refused = list(refused)
    refused_keys = [problem.key for problem in refused]
    joined = dict.fromkeys(refused)
    for problem in found:
        if not (problem.is_missing and _was_given(problem, refused_keys)):
            joined[problem] = None
    return list(joined)


def _was_given(problem: Problem, refused_keys: Iterable[str]) -> bool:
    """Check whether the key that a problem reports as missing was set to a value that was refused.

    For example, the refused key `data.train` contains `data.train.path`, and `scheduler[0]` is an entry of `scheduler`.
    """
    missing_keys = (problem.key, *problem.other_keys)
    for refused_key in refused_keys:
        for missing_key in missing_keys:
            is_within = f"{missing_key}.".startswith(f"{refused_key}.")
            has_refused_entry = refused_key.startswith(f"{missing_key}[")
            if refused_key and (is_within or has_refused_entry):
                return True
    return False
