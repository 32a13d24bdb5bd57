"""Ranks that act together: an error on one rank is raised on every rank, and files are compared by their content.

Without this agreement, a full disk on one rank leaves the others waiting in a collective. Only OSError and UserError
travel; any other exception is a bug and ends its rank, and with it the run.

On files they agree by content: names, places and time stamps play no part. A file's digest is a SHA-256 over those of
its chunks, which the processes of a machine read side by side: each takes its share, in several threads. A machine with
copies of its own reads these, and not those of another.

`balance_by_cost` divides work among ranks by its cost. It needs no communication.
"""

import hashlib
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from dtrain.base.errors import UserError, describe_error
from dtrain.base.json_files import digest

CHUNK_BYTES = 64 << 20
BLOCK_BYTES = 1 << 16
READ_THREADS = 8
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
T = TypeVar("T")


class Ranks:
    """The ranks of `group` (None: the whole world; this process alone where no process group is up).

    single_process: this process by itself although a process group is up. Objects that travel between the ranks of one
    run are pickled by torch.distributed; they never come from a file.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, single_process: bool = False):
        self.group = group
        self.distributed = not single_process and dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.distributed else 0
        self.size = dist.get_world_size(group) if self.distributed else 1

    @property
    def description(self) -> str:
        return f"rank {self.rank} on {socket.gethostname()}"

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def run_on_first(self, act: Callable[[], T]) -> T:
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

    def gather_results(self, act: Callable[[], T]) -> list[T]:
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

    def ranks_with_same(self, values: Sequence[T]) -> list[int]:
        """Return the ranks whose value is this rank's, itself among them. values: of every rank, as `every` gives
        them."""
        return [rank for rank, value in enumerate(values) if value == values[self.rank]]

    def check_same(self, value: str | None, mismatch: str) -> None:
        """Raise UserError on every rank, `mismatch` and the ranks that differ from the first, where `value` is not the
        same on all; None is no answer. Collective: one all-gather of objects."""
        answers = [answer for answer in self.gather_results(lambda: (self.description, value)) if answer[1] is not None]
        differing = [name for name, other in answers if other != answers[0][1]]
        if differing:
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise UserError(f"{mismatch}: that of {', '.join(differing[:3])}{more} is not that of {answers[0][0]}")

    def run_on_all(self, act: Callable[[], T]) -> T:
        """Call `act` on every rank; return this rank's result, which does not travel, or raise all errors in one
        UserError on every rank.

        Collective: one all-gather of objects.
        """
        value, problem = _attempt(act)

        def raise_problem() -> None:
            if problem is not None:
                raise UserError(problem)

        self.gather_results(raise_problem)
        return value


def _attempt(act: Callable[[], T]) -> tuple[Any, str | None]:
    try:
        return act(), None
    except (OSError, UserError) as error:
        return None, describe_error(error)


def file_digests(files: Sequence[Path], mismatch: str | None = None, ranks: Ranks | None = None) -> list[str]:
    """Return the digest of each file, as this rank sees it. Collective over `ranks`: 3 or 4 all-gathers of objects.

    mismatch: what to say, in a UserError on every rank, where machines have files of other content. A file that cannot
    be read, or changes meanwhile, is a UserError on every rank too.
    """
    ranks = ranks or Ranks()
    seen = ranks.gather_results(lambda: file_identity(files))
    beside = ranks.ranks_with_same(seen)

    def read() -> dict[tuple[int, int], str]:
        counts = [-(-file.stat().st_size // CHUNK_BYTES) for file in files]
        chunks = [(number, at) for number, count in enumerate(counts) for at in range(count)]
        mine = chunks[beside.index(ranks.rank) :: len(beside)]
        with ThreadPoolExecutor(READ_THREADS) as threads:
            return dict(
                zip(mine, threads.map(lambda chunk: _chunk_digest(files[chunk[0]], chunk[1]), mine), strict=True)
            )

    per_rank = ranks.gather_results(read)
    table = {chunk: value for rank in beside for chunk, value in per_rank[rank].items()}
    counts = Counter(number for number, _ in table)

    def join() -> list[str]:
        whole = []
        for number, file in enumerate(files):
            parts = [table.get((number, at)) for at in range(counts[number])]
            if None in parts:
                raise UserError(f"{file} changed while it was read: start again")
            whole.append(digest(parts))
        return whole

    whole = ranks.run_on_all(join)
    if mismatch is not None and len(set(seen)) > 1:
        ranks.check_same(digest(whole), mismatch)
    return whole


def file_identity(files: Sequence[Path]) -> str:
    """Return a text that is the same for processes of one machine that see the same `files`, whatever their mounts."""
    machine = _BOOT_ID.read_text() if _BOOT_ID.is_file() else socket.gethostname()
    return digest(machine, [(stat.st_dev, stat.st_ino) for stat in (file.stat() for file in files)])


def _chunk_digest(file: Path, chunk: int) -> str:
    hasher, left = hashlib.sha256(), CHUNK_BYTES
    with file.open("rb", buffering=0) as stream:
        stream.seek(chunk * CHUNK_BYTES)
        while left and (block := stream.read(min(BLOCK_BYTES, left))):
            hasher.update(block)
            left -= len(block)
    return hasher.hexdigest()


def balance_by_cost(costs: Sequence[float], places: int, max_items: int | None = None) -> list[list[int]]:
    """Deal indices to places, each place's ascending: the dearest first, each to the place with the least so far.

    max_items: items that a place takes at most (None: any number). At most 4/3 of the best (R. L. Graham, Bounds on
    multiprocessing timing anomalies, SIAM Journal on Applied Mathematics 17, 1969).
    """
    shares: list[list[int]] = [[] for _ in range(places)]
    loads = [0.0] * places
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        free = [place for place in range(places) if max_items is None or len(shares[place]) < max_items]
        place = min(free, key=lambda place: (loads[place], place))
        loads[place] += costs[index]
        shares[place].append(index)
    return [sorted(share) for share in shares]
