"""Ranks that act together: an error on one rank is raised on every rank, and files are compared by their content.

Without this, an error on one rank, such as a full disk, would leave the others waiting in a collective. Only OSError
and UserError are passed on to the other ranks. Any other exception is a bug: it ends its rank, and with it the run.

Files are compared by content. Names, directories and time stamps are ignored. The digest of a file is a SHA-256 over
the digests of its chunks, which the processes of one machine read in parallel. For example, with a file of 200 MiB,
chunks of 64 MiB and two processes on a machine, one process reads chunks 0 and 2, and the other one chunks 1 and 3.
Machines that see different files, such as copies on local disks, each read their own.

`balance_by_cost` distributes work over ranks by its cost. It needs no communication.
"""

import hashlib
import math
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from dtrain.base.errors import UserError, describe_error
from dtrain.base.json_files import digest

CHUNK_BYTES = 64 << 20  # of a file, for each task of a thread
BLOCK_BYTES = 1 << 16  # that are read and hashed at once
READ_THREADS = 8
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # a text that differs for each machine and boot
T = TypeVar("T")


class Outcome(NamedTuple):
    """Result of a call, or the text of the error that it raised.

    Attributes:
        value: The result. None if there was an error.
        problem: The text of the error. None if there was none.
    """

    value: Any
    problem: str | None


class Ranks:
    """The ranks of a process group, for calls that succeed or fail on all of them together.

    Objects are pickled by torch.distributed on their way between the ranks of one run. They never come from a file.

    Attributes:
        group: The process group; None for all ranks.
        distributed: Whether there are several ranks that communicate.
        rank: This process's rank in the group.
        size: Number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, single_process: bool = False):
        """Represent the ranks of a process group.

        Args:
            group: The process group. None: all ranks, or only this process if torch.distributed is not initialised.
            single_process: Represent only this process, also if torch.distributed is initialised.
        """
        self.group = group
        self.distributed = not single_process and dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.distributed else 0
        self.size = dist.get_world_size(group) if self.distributed else 1

    @property
    def description(self) -> str:
        """This rank and its host, for messages."""
        return f"rank {self.rank} on {socket.gethostname()}"

    @property
    def is_first(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def run_on_first(self, act: Callable[[], T]) -> T:
        """Call `act` on rank 0, and return its result on every rank.

        Raises:
            UserError: On every rank, if `act` raised a UserError or OSError.

        Collectives:
            One broadcast of an object.
        """
        outcomes: list[Any] = [None]
        if self.is_first:
            outcomes[0] = _attempt(act)
        if self.distributed:
            dist.broadcast_object_list(outcomes, group=self.group, group_src=0)
        outcome = outcomes[0]
        if outcome.problem is not None:
            raise UserError(outcome.problem)
        return outcome.value

    def gather_results(self, act: Callable[[], T]) -> list[T]:
        """Call `act` on every rank, and return all results in the order of the ranks, on every rank.

        Raises:
            UserError: On every rank, with all errors, if `act` raised a UserError or OSError on a rank.

        Collectives:
            One all-gather of objects.
        """
        local_outcome = _attempt(act)
        outcomes: list[Any] = [local_outcome]
        if self.distributed:
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, local_outcome, group=self.group)
        problems = [outcome.problem for outcome in outcomes if outcome.problem is not None]
        if problems:
            raise UserError("\n".join(dict.fromkeys(problems)))
        return [outcome.value for outcome in outcomes]

    def ranks_with_same(self, values: Sequence[T]) -> list[int]:
        """Return the ranks whose value equals this rank's, including this rank.

        Args:
            values: The value of every rank, from `gather_results`.
        """
        return [rank for rank, value in enumerate(values) if value == values[self.rank]]

    def check_same(self, value: str | None, mismatch: str) -> None:
        """Check that a value is the same on all ranks.

        Args:
            value: This rank's value. None: this rank has none, and is not compared.
            mismatch: The message if the values differ. The ranks that differ are added.

        Raises:
            UserError: On every rank, if the values differ.

        Collectives:
            One all-gather of objects.
        """
        results = self.gather_results(lambda: (self.description, value))
        compared = [(rank, rank_value) for rank, rank_value in results if rank_value is not None]
        differing = [rank for rank, rank_value in compared if rank_value != compared[0][1]]
        if differing:
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise UserError(f"{mismatch}: that of {', '.join(differing[:3])}{more} is not that of {compared[0][0]}")

    def run_on_all(self, act: Callable[[], T]) -> T:
        """Call `act` on every rank, and return this rank's result, which is not sent to the others.

        Raises:
            UserError: On every rank, with all errors, if `act` raised a UserError or OSError on a rank.

        Collectives:
            One all-gather of objects.
        """
        value, problem = _attempt(act)

        def raise_problem() -> None:
            if problem is not None:
                raise UserError(problem)

        self.gather_results(raise_problem)
        return value


def _attempt(act: Callable[[], T]) -> Outcome:
    """Call `act`. A UserError or OSError becomes the outcome's problem."""
    try:
        return Outcome(act(), None)
    except (OSError, UserError) as error:
        return Outcome(None, describe_error(error))


def file_digests(files: Sequence[Path], mismatch: str | None = None, ranks: Ranks | None = None) -> list[str]:
    """Return the digest of the content of each file, as this rank sees it.

    Ranks that see the same files (same machine, device and inode) divide the chunks among themselves. The module's
    docstring has an example.

    Args:
        files: The files.
        mismatch: The message if machines have files of different content. None: differences are allowed.
        ranks: The ranks that share the work. None: all ranks.

    Raises:
        UserError: On every rank, if a file cannot be read or changes while it is read, or if the content differs and
            `mismatch` is set.

    Collectives:
        Three all-gathers of objects over `ranks`, and a fourth one if machines see different files and `mismatch` is
        set.
    """
    ranks = ranks or Ranks()
    identities = ranks.gather_results(lambda: file_identity(files))
    readers = ranks.ranks_with_same(identities)  # the ranks that share the reading of these files

    def read() -> dict[tuple[int, int], str]:
        """Return the digests of this rank's chunks by (number of the file, number of the chunk)."""
        chunks = []
        for number, file in enumerate(files):
            num_chunks = math.ceil(file.stat().st_size / CHUNK_BYTES)
            chunks += [(number, index) for index in range(num_chunks)]
        local_chunks = chunks[readers.index(ranks.rank) :: len(readers)]
        with ThreadPoolExecutor(READ_THREADS) as threads:
            digests = threads.map(lambda chunk: _chunk_digest(files[chunk[0]], chunk[1]), local_chunks)
            return dict(zip(local_chunks, digests, strict=True))

    results = ranks.gather_results(read)
    chunk_digests: dict[tuple[int, int], str] = {}
    for rank in readers:
        chunk_digests.update(results[rank])
    num_chunks = Counter(number for number, _ in chunk_digests)

    def join() -> list[str]:
        """Return the digest of each file. Raises UserError if ranks saw different sizes of it."""
        joined = []
        for number, file in enumerate(files):
            parts = [chunk_digests.get((number, index)) for index in range(num_chunks[number])]
            if None in parts:
                raise UserError(f"{file} changed while it was read: start again")
            joined.append(digest(parts))
        return joined

    joined = ranks.run_on_all(join)
    if mismatch is not None and len(set(identities)) > 1:
        ranks.check_same(digest(joined), mismatch)
    return joined


def file_identity(files: Sequence[Path]) -> str:
    """Return a text that is equal for processes of one machine that see the same files, whatever their mounts."""
    machine = _BOOT_ID.read_text() if _BOOT_ID.is_file() else socket.gethostname()
    stats = [file.stat() for file in files]
    return digest(machine, [(stat.st_dev, stat.st_ino) for stat in stats])


def _chunk_digest(file: Path, chunk: int) -> str:
    """Return the SHA-256 of one chunk of a file."""
    hasher = hashlib.sha256()
    remaining = CHUNK_BYTES
    with file.open("rb", buffering=0) as stream:
        stream.seek(chunk * CHUNK_BYTES)
        while remaining:
            block = stream.read(min(BLOCK_BYTES, remaining))
            if not block:
                break
            hasher.update(block)
            remaining -= len(block)
    return hasher.hexdigest()


def balance_by_cost(costs: Sequence[float], num_bins: int, max_items: int | None = None) -> list[list[int]]:
    """Distribute items over bins, such as ranks, so that the bins have about the same cost.

    The items are assigned in the order of their costs, the most expensive item first, each to the bin with the lowest
    total cost so far. Without `max_items`, the largest total cost of a bin is at most 4/3 of the best possible one.

    Args:
        costs: Cost of each item.
        num_bins: Number of bins.
        max_items: Maximum number of items of a bin. All bins together must have room for all items. None: no limit.

    Returns:
        The indices of each bin's items, in ascending order.

    Example:
        >>> balance_by_cost([5, 1, 4, 3, 3], num_bins=2)
        [[0, 4], [1, 2, 3]]

    Reference:
        R. L. Graham, Bounds on multiprocessing timing anomalies, SIAM Journal on Applied Mathematics 17, 1969.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0.0] * num_bins
    by_cost = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    for index in by_cost:
        candidates = [number for number in range(num_bins) if max_items is None or len(bins[number]) < max_items]
        cheapest = min(candidates, key=lambda number: (loads[number], number))
        loads[cheapest] += costs[index]
        bins[cheapest].append(index)
    return [sorted(items) for items in bins]
