"""Hosts of the setup functions: a rank of a run, and the dry run of `dtrain validate`.

A rank stops at the first problem, which is raised on every rank. A dry run is one process that represents all ranks. It
collects all problems, writes no file, and reads large files only in part. Functions of `training.setup` that
communicate or print have a parameter `host`. For example, with a function `read` that raises UserError("no such file"):

    Host(ranks, print_line).attempt("data.train", read)    raises the error
    DryHost().attempt("data.train", read)           returns None, and `problems` has a problem of the key data.train
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from dtrain.base.errors import Problem, UserError, problems_of_error
from dtrain.base.ranks import Ranks

T = TypeVar("T")


def _print_nothing(line: str) -> None:
    """Print nothing: the `print_line` of a dry run."""


@dataclass(frozen=True)
class Host:
    """A rank that resolves the spec of its run.

    Attributes:
        ranks: All ranks of the run.
        print_line: Prints a line, on rank 0.
        is_dry: Whether this is a dry run.
    """

    ranks: Ranks
    print_line: Callable[[str], None]
    is_dry: bool = False

    def attempt(self, key: str, act: Callable[[], T]) -> T | None:
        """Call `act` and return its result. Errors are raised; `DryHost` collects them instead.

        Args:
            key: The recipe's key that an error would be about.
            act: The function.
        """
        return act()

    def on_first_rank(self, key: str, act: Callable[[], T]) -> T | None:
        """Call `act` on rank 0. Return its result there, and None on the other ranks. The result is not sent.

        Args:
            key: The recipe's key that an error would be about.
            act: The function.

        Raises:
            UserError: On every rank, if `act` raises one. In a dry run the error is collected instead.

        Collectives:
            One broadcast.
        """
        results: list[T] = []

        def keep_result() -> None:
            results.append(act())

        self.ranks.run_on_first(keep_result)
        return results[0] if results else None


@dataclass(frozen=True)
class DryHost(Host):
    """The host of a dry run.

    Attributes:
        problems: The problems that were found so far.
    """

    ranks: Ranks = field(default_factory=lambda: Ranks(single_process=True))
    print_line: Callable[[str], None] = _print_nothing
    is_dry: bool = True
    problems: list[Problem] = field(default_factory=list)

    def attempt(self, key: str, act: Callable[[], T]) -> T | None:
        """Call `act` and return its result. On an OSError or UserError, add a problem of `key`, and return None."""
        try:
            return act()
        except (OSError, UserError) as error:
            self.problems.extend(problems_of_error(key, error))
            return None

    def on_first_rank(self, key: str, act: Callable[[], T]) -> T | None:
        """Call `act` as `attempt` does, because a dry run is rank 0."""
        return self.attempt(key, act)
