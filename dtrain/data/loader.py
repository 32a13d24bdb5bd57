"""Global batches for one data-parallel rank: its share of the rows by arithmetic, moved and prefetched by torchdata.

The only state is the global cursor that each batch carries; a loader's own state is never saved.
"""

import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from dtrain.data.rows import Cursor, Row, Rows

STREAMS = ("input_ids", "labels", "position_ids", "seq_ids")


@dataclass(frozen=True)
class GlobalBatch:
    """One step's rows. Placements are dealt out: packed rows, or samples (a pair that is not packed is two rows).

    rows      those of this data-parallel rank's placements, i of the global batch with i % dp_size == dp_rank; may be
              none in a short last batch
    samples   the samples that these rows hold, in the rows' order
    size      placements of the whole global batch
    cursor    where the next batch begins
    epoch     how many epochs are done after this batch, as a fraction
    """

    rows: list[Row]
    samples: list[int]
    size: int
    cursor: Cursor
    epoch: float


class Batches:
    """The global batches from `cursor` on; iterable, each time from there.

    A batch may span epochs; where `rows` ends, the last one may be short. With num_workers > 0 that many processes
    make rows ahead of time; the sequence is the same.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        global_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        cursor: Cursor = Cursor(),  # noqa: B008 (immutable)
        num_workers: int = 0,
    ):
        self.rows, self.global_batch = rows, global_batch
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.cursor, self.num_workers = Cursor(*cursor), num_workers

    def __iter__(self) -> Iterator[GlobalBatch]:
        if self.num_workers == 0:
            yield from self._local()
            return
        from torchdata.stateful_dataloader import StatefulDataLoader  # only where it is used: its import is slow

        loader = StatefulDataLoader(
            _Flat(self),
            batch_size=None,
            num_workers=self.num_workers,
            collate_fn=tuple,  # an item as it is
            worker_init_fn=_leave_signals_to_the_run,
            generator=torch.Generator(),  # else it would draw from the global one, and shift what training draws
            snapshot_every_n_steps=1 << 30,
        )
        for item in loader:
            yield _unflatten(*item)

    def _local(self, first: int = 0, step: int = 1) -> Iterator[GlobalBatch]:
        """Batches number first, first + step, ..."""
        placements = self.rows.placements(self.cursor)
        number = 0
        while group := list(islice(placements, self.global_batch)):
            if number % step == first:
                mine = [placement.samples for placement in group[self.dp_rank :: self.dp_size]]
                rows = [row for samples in mine for row in self.rows.build(samples)]
                yield GlobalBatch(rows, list(chain(*mine)), len(group), group[-1].after, group[-1].epochs)
            number += 1


class _Flat(IterableDataset):
    """The batches of one worker process, each flattened into one tensor: a tensor sent is a file descriptor held."""

    def __init__(self, batches: Batches):
        self.batches = batches

    def __iter__(self):
        worker = get_worker_info()
        assert worker is not None  # only worker processes draw from it
        for batch in self.batches._local(worker.id, worker.num_workers):
            rows = [torch.stack([row[name] for name in STREAMS]) for row in batch.rows]
            empty = torch.empty(len(STREAMS), 0, dtype=torch.int64)  # a short last batch may have no row
            flat = torch.cat([empty, *rows], dim=1)  # [4, tokens]
            yield flat, [row.shape[1] for row in rows], replace(batch, rows=[])


def _unflatten(flat: Tensor, lengths: list[int], batch: GlobalBatch) -> GlobalBatch:
    rows = [dict(zip(STREAMS, piece, strict=True)) for piece in flat.split(lengths, dim=1)]
    return replace(batch, rows=rows)


def _leave_signals_to_the_run(worker: int) -> None:
    """A batch system signals every process; the run needs its rows until it has saved, and ends this process then."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
