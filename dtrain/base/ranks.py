"""Agreement of ranks: one acts for all, or all act, and an error on any of them is raised on every one.

Without that, a full disk on one rank leaves the others waiting in a collective. Only OSError and UserError travel; any
other exception is a bug and ends its rank, and with it the run.
"""

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from dtrain.base.errors import UserError, in_words

T = TypeVar("T")


class Ranks:
    """The ranks of `group` (None: the whole world; this process alone where no process group is up).

    alone: this process by itself although a process group is up. Objects that travel between the ranks of one run are
    pickled by torch.distributed; they never come from a file.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False):
        self.group = group
        self.distributed = not alone and dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.distributed else 0
        self.size = dist.get_world_size(group) if self.distributed else 1

    @property
    def me(self) -> str:
        return f"rank {self.rank} on {socket.gethostname()}"

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def first(self, act: Callable[[], T]) -> T:
        """Call `act` on rank 0; return its result, or raise its error as a UserError, on every rank.

        Collective: one broadcast.
        """
        outcome: list[Any] = [None]
        if self.is_first:
            outcome[0] = _attempt(act)
        if self.distributed:
            dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        value, problem = outcome[0]
        if problem is not None:
            raise UserError(problem)
        return value

    def every(self, act: Callable[[], T]) -> list[T]:
        """Call `act` on every rank; return all results in rank order, or raise all errors in one UserError, everywhere.

        Collective: one all-gather of objects.
        """
        outcomes: list[Any] = [_attempt(act)]
        if self.distributed:
            mine, outcomes = outcomes[0], [None] * self.size
            dist.all_gather_object(outcomes, mine, group=self.group)
        problems = list(dict.fromkeys(problem for _, problem in outcomes if problem is not None))
        if problems:
            raise UserError("\n".join(problems))
        return [value for value, _ in outcomes]

    def same(self, value: str | None, wrong: str) -> None:
        """Raise UserError on every rank, `wrong` and the ranks that differ from the first, where `value` is not the
        same on all; None is no answer. Collective: one all-gather of objects."""
        answers = [answer for answer in self.every(lambda: (self.me, value)) if answer[1] is not None]
        differing = [name for name, other in answers if other != answers[0][1]]
        if differing:
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise UserError(f"{wrong}: that of {', '.join(differing[:3])}{more} is not that of {answers[0][0]}")

    def together(self, act: Callable[[], T]) -> T:
        """Call `act` on every rank; return this rank's result, which does not travel, or raise all errors in one
        UserError on every rank.

        Collective: one all-gather of objects.
        """
        value, problem = _attempt(act)

        def raise_problem() -> None:
            if problem is not None:
                raise UserError(problem)

        self.every(raise_problem)
        return value


def _attempt(act: Callable[[], T]) -> tuple[Any, str | None]:
    try:
        return act(), None
    except (OSError, UserError) as error:
        return None, in_words(error)
