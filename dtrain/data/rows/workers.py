"""Building rows ahead of time in worker processes of torchdata's StatefulDataLoader.

A worker sends each batch as two tensors, because every tensor that is sent between processes needs an open file
descriptor, and a batch of many rows would need hundreds. For example, two rows of 3 and 2 tokens are sent as

    streams       tensor of shape [5, num columns]   the tokens of both rows; columns input_ids, labels, ...
    pixels        tensor of shape [patches, values]  the images of both rows
    lengths       the list [3, 2]                    to split `streams` into rows again
    num_patches   the list [504, 0]                  to split `pixels` into rows again
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from dtrain.base.batch import STREAMS

Row = dict[str, Tensor]
RowsAndExtra = tuple[list[Row], Any]  # the rows of a batch, and an object that is sent with them


def load_with_workers(
    batches_of_worker: Callable[[int, int], Iterator[RowsAndExtra]], num_workers: int
) -> Iterator[RowsAndExtra]:
    """Yield batches that worker processes build ahead of time, in the order of their numbers.

    Args:
        batches_of_worker: Called in each process with its number and the number of processes. Yields every
            `num_workers`-th batch.
        num_workers: Number of processes.
    """
    loader = StatefulDataLoader(
        _FlatBatches(batches_of_worker),
        batch_size=None,
        num_workers=num_workers,
        collate_fn=tuple,  # batches are passed through unchanged
        worker_init_fn=_ignore_signals,
        # Without a generator, the loader would use torch's global one, and so change the random numbers of training.
        generator=torch.Generator(),
        snapshot_every_n_steps=1 << 30,
    )
    for flat, extra in loader:
        yield _unflatten_rows(flat), extra


class _FlatBatches(IterableDataset):
    """The batches of one worker process, each flattened into two tensors."""

    def __init__(self, batches_of_worker: Callable[[int, int], Iterator[RowsAndExtra]]):
        self.batches_of_worker = batches_of_worker

    def __iter__(self):
        worker = get_worker_info()
        assert worker is not None  # only worker processes iterate
        for rows, extra in self.batches_of_worker(worker.id, worker.num_workers):
            yield _flatten_rows(rows), extra


class _FlatRows(NamedTuple):
    """Rows in two tensors.

    Attributes:
        widths: Columns of each stream in `streams`, by its name.
        streams: All streams of all rows, int64 [tokens, sum of widths].
        lengths: Tokens of each row.
        pixels: Pixels of all rows, [patches, values].
        num_patches: Patches of each row. Empty if the rows have no images.
        image_lists: `grids` and `image_keys` of each row, as lists. Empty if the rows have no images.
    """

    widths: dict[str, int]
    streams: Tensor
    lengths: list[int]
    pixels: Tensor
    num_patches: list[int]
    image_lists: list[dict[str, list]]


def _flatten_rows(rows: Sequence[Row]) -> _FlatRows:
    """Put rows into two tensors. A short last batch may have no rows."""
    widths: dict[str, int] = {}
    streams = []
    for name in STREAMS:
        if not rows or name not in rows[0]:
            continue
        # A stream is [tokens], or [tokens, width] such as rotary_ids.
        columns = [row[name].view(len(row["input_ids"]), -1) for row in rows]
        widths[name] = columns[0].shape[1]
        streams.append(torch.cat(columns))
    rows_with_images = [row for row in rows if "pixels" in row]
    pixels = [row["pixels"] for row in rows_with_images if len(row["pixels"])]
    image_lists = []
    for row in rows_with_images:
        image_lists.append({"grids": row["grids"].tolist(), "image_keys": row["image_keys"].tolist()})
    return _FlatRows(
        widths=widths,
        streams=torch.cat(streams, 1) if streams else torch.empty(0, 0, dtype=torch.int64),
        lengths=[len(row["input_ids"]) for row in rows],
        pixels=torch.cat(pixels) if pixels else torch.empty(0, 0),
        num_patches=[len(row["pixels"]) for row in rows_with_images],
        image_lists=image_lists,
    )


def _unflatten_rows(flat: _FlatRows) -> list[Row]:
    """Return the rows of `_flatten_rows`, as views of the two tensors."""
    rows: list[Row] = [{} for _ in flat.lengths]
    stream_columns = flat.streams.split(list(flat.widths.values()), 1)
    for (name, width), columns in zip(flat.widths.items(), stream_columns, strict=True):
        stream = columns if width > 1 else columns[:, 0]
        for row, part in zip(rows, stream.split(flat.lengths), strict=True):
            row[name] = part
    # If the rows have no images, num_patches is empty, and no row gets pixels.
    pixels_of_rows = flat.pixels.split(flat.num_patches)
    for row, pixels, image_lists in zip(rows, pixels_of_rows, flat.image_lists, strict=False):
        row["pixels"] = pixels
        row["grids"] = torch.tensor(image_lists["grids"], dtype=torch.int64).view(-1, 3)
        row["image_keys"] = torch.tensor(image_lists["image_keys"], dtype=torch.int64)
    return rows


def _ignore_signals(worker: int) -> None:
    """Ignore the stop signals, which every process of the group gets. The run needs rows until it has saved."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
