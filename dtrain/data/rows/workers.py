"""Rows made ahead of time by worker processes of torchdata's StatefulDataLoader."""

import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from dtrain.base.batch import STREAMS

Row = dict[str, Tensor]
Made = tuple[list[Row], Any]


def load_with_workers(batches: Callable[[int, int], Iterator[Made]], num_workers: int) -> Iterator[Made]:
    """Yield the batches of rows, each with more beside it, that so many processes make ahead of time.

    batches: called with the number of a process and how many there are; yields its part of all batches, in turn.
    """
    loader = StatefulDataLoader(
        _Flat(batches),
        batch_size=None,
        num_workers=num_workers,
        collate_fn=tuple,  # an item as it is
        worker_init_fn=_leave_signals_to_the_run,
        generator=torch.Generator(),  # else it would draw from the global one, and shift what training draws
        snapshot_every_n_steps=1 << 30,
    )
    for flat, beside in loader:
        yield _rows_of(flat), beside


class _Flat(IterableDataset):
    """The batches of one worker process, each flattened into two tensors: a tensor sent is a file descriptor held."""

    def __init__(self, batches: Callable[[int, int], Iterator[Made]]):
        self.batches = batches

    def __iter__(self):
        worker = get_worker_info()
        assert worker is not None  # only worker processes draw from it
        for rows, beside in self.batches(worker.id, worker.num_workers):
            yield _flattened(rows), beside


class _FlatRows(NamedTuple):
    """Rows in two tensors. widths: of each stream in `streams` [tokens, widths]; lengths: tokens of each row; pixels
    [patches, values]: of all rows; patches, and lists of grids and image_keys: of each row, none without images."""

    widths: dict[str, int]
    streams: Tensor
    lengths: list[int]
    pixels: Tensor
    patches: list[int]
    lists: list[dict[str, list]]


def _flattened(rows: Sequence[Row]) -> _FlatRows:
    """Return rows in two tensors; a short last batch may have no row."""
    names = [name for name in STREAMS if rows and name in rows[0]]
    columns = {name: [row[name].view(len(row["input_ids"]), -1) for row in rows] for name in names}
    streams = [torch.cat(parts) for parts in columns.values()]
    with_images = [row for row in rows if "pixels" in row]
    pixels = [row["pixels"] for row in with_images if len(row["pixels"])]
    return _FlatRows(
        {name: parts[0].shape[1] for name, parts in columns.items()},
        torch.cat(streams, 1) if streams else torch.empty(0, 0, dtype=torch.int64),
        [len(row["input_ids"]) for row in rows],
        torch.cat(pixels) if pixels else torch.empty(0, 0),
        [len(row["pixels"]) for row in with_images],
        [{name: row[name].tolist() for name in ("grids", "image_keys")} for row in with_images],
    )


def _rows_of(flat: _FlatRows) -> list[Row]:
    """Return the rows that `_flattened` made these of, as views."""
    columns = zip(flat.widths.items(), flat.streams.split(list(flat.widths.values()), 1), strict=True)
    parts = {name: (stream if width > 1 else stream[:, 0]).split(flat.lengths) for (name, width), stream in columns}
    rows = [{name: part[number] for name, part in parts.items()} for number in range(len(flat.lengths))]
    for row, own, of_row in zip(rows, flat.pixels.split(flat.patches), flat.lists, strict=False):
        grids, keys = (torch.tensor(of_row[name], dtype=torch.int64) for name in ("grids", "image_keys"))
        row |= {"pixels": own, "grids": grids.view(-1, 3), "image_keys": keys}
    return rows


def _leave_signals_to_the_run(worker: int) -> None:
    """Ignore signals, sent to every process: the run needs its rows until it has saved, then it ends this process."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
