"""The endless sequence of training rows, and a cursor that says where in it one stands.

Rows are a function of the samples, the seed, the epoch and max_length alone: no rank, mesh or batch size enters.
Epochs follow one another, each in an order of its own and packed anew.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.batch import IGNORE
from dtrain.data.cache import Samples
from dtrain.data.order import Order, permute
from dtrain.data.packing import pack
from dtrain.errors import UserError
from dtrain.randomness import key

WINDOW = 4096  # samples packed together; bounds what packing holds in memory

Row = dict[str, Tensor]


class Cursor(NamedTuple):
    """The next row: `row` counts within `epoch`, both from 0. As JSON a list of two, which `Cursor(*pair)` reads."""

    epoch: int = 0
    row: int = 0


class Placement(NamedTuple):
    """The samples that stand together, the cursor after them, and how many epochs are then done, as a fraction."""

    samples: list[int]
    after: Cursor
    epochs: float


class Rows:
    """The rows of `samples`. Counts, cursors and batches count placements: packed rows, or samples.

    packing     a row holds as many whole samples as fit into it (best fit, within a window of 4096 samples of the
                epoch's order), else one document
    capacity    tokens that a packed row has room for: max_length for each document of one sample
    shuffle     False: the order of the files, and rows in the order of their first sample within a window
    epochs      None: without end
    """

    def __init__(
        self,
        samples: Samples,
        *,
        max_length: int,
        packing: bool = True,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
    ):
        self.samples, self.max_length, self.packing = samples, max_length, packing
        self.capacity = max_length * samples.documents_per_sample
        self.shuffle, self.seed, self.epochs = shuffle, seed, epochs
        self._counts: dict[tuple[int, int], int] = {}  # (epoch, window) → its rows, as far as known
        if self._order(0).total == 0:
            raise UserError("the weights of data.train.sources leave no row in an epoch; raise them")

    @property
    def fingerprint(self) -> str:
        """A hash of the tokens that these rows are made of: another one means other data."""
        return self.samples.fingerprint

    def rows_in_epoch(self, epoch: int) -> int:
        """How many placements `epoch` has. Packed, this packs the whole epoch by its lengths, once."""
        if not self.packing:
            return self._order(epoch).total
        return sum(self._window_rows(epoch, window) for window in range(self._windows(epoch)))

    def total_rows(self) -> int | None:
        """How many placements all epochs have together; None where they do not end."""
        return None if self.epochs is None else sum(self.rows_in_epoch(epoch) for epoch in range(self.epochs))

    def rows_before(self, cursor: Cursor) -> int:
        """How many placements stand before `cursor`."""
        return sum(self.rows_in_epoch(epoch) for epoch in range(cursor.epoch)) + cursor.row

    def tokens_in_epoch(self, epoch: int) -> int:
        """How many tokens `epoch` has, padding not counted."""
        return sum(int(self._lengths(epoch, window)[1].sum()) for window in range(self._windows(epoch)))

    def iterate(self, cursor: Cursor = Cursor()) -> Iterator[Row]:  # noqa: B008 (immutable)
        """The rows from `cursor` on."""
        return (row for placement in self.placements(cursor) for row in self.build(placement.samples))

    def placements(self, cursor: Cursor = Cursor()) -> Iterator[Placement]:  # noqa: B008 (immutable)
        """Which samples the rows from `cursor` on hold; much cheaper than the rows.

        Raises UserError for a cursor beyond its epoch: the data is not what it was.
        """
        epoch, skip = cursor
        while self.epochs is None or epoch < self.epochs:
            windows, total, row = self._windows(epoch), self._order(epoch).total, 0
            for window in range(windows):
                count = self._window_rows(epoch, window) if skip else 0
                if skip and count <= skip:
                    skip, row = skip - count, row + count
                    continue
                packed = self._window(epoch, window)
                begin, end = window * WINDOW, min(total, (window + 1) * WINDOW)
                for number in range(skip, len(packed)):
                    last = window == windows - 1 and number == len(packed) - 1
                    after = Cursor(epoch + 1, 0) if last else Cursor(epoch, row + number + 1)
                    done = begin + (end - begin) * (number + 1) / len(packed)
                    yield Placement(packed[number], after, epoch + done / total)
                skip, row = 0, row + len(packed)
            if skip:
                raise UserError(
                    f"the data position to resume at is row {cursor.row} of epoch {cursor.epoch}, which has only "
                    f"{self.rows_in_epoch(epoch)} rows: the data or data.max_length is not what it was"
                )
            epoch += 1

    def build(self, samples: list[int]) -> list[Row]:
        """The rows of these samples: packed, one with all of their documents, else one for each document.

        A row is input_ids, labels, position_ids and seq_ids, int64, all [s], s the tokens in it. labels[t] is the token
        after input_ids[t] within its document, where that one is trained, else -100; position_ids restart and seq_ids
        count up with each document, so that the chosen documents of pairs have the even seq_ids of a packed row.
        """
        documents = [document for index in samples for document in self.samples[index]]
        return [_row(documents)] if self.packing else [_row([document]) for document in documents]

    def _order(self, epoch: int) -> Order:
        return Order(self.samples.shares, seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    def _windows(self, epoch: int) -> int:
        return -(-self._order(epoch).total // WINDOW)

    def _lengths(self, epoch: int, window: int) -> tuple[Tensor, Tensor]:
        """The samples of a window in the epoch's order, and their lengths."""
        samples = self._order(epoch).samples(window * WINDOW, (window + 1) * WINDOW)
        return samples, self.samples.lengths(samples)

    def _window(self, epoch: int, window: int) -> list[list[int]]:
        """The samples of each placement of a window."""
        samples, lengths = self._lengths(epoch, window)
        if not self.packing:
            return [[index] for index in samples.tolist()]
        bins = pack(lengths.tolist(), self.capacity)
        if self.shuffle:  # packing puts what it opened first, the long samples, in front
            order = permute(torch.arange(len(bins)), len(bins), key("rows", self.seed, epoch, window))
            bins = [bins[index] for index in order.tolist()]
        identity = samples.tolist()
        self._counts[epoch, window] = len(bins)
        return [[identity[index] for index in members] for members in bins]

    def _window_rows(self, epoch: int, window: int) -> int:
        if not self.packing:
            return min(WINDOW, self._order(epoch).total - window * WINDOW)
        if (epoch, window) not in self._counts:
            self._window(epoch, window)
        return self._counts[epoch, window]


def _row(documents: Sequence[tuple[Tensor, Tensor]]) -> Row:
    """The row of documents (ids, trained), one behind the other; see `Rows.build`."""
    input_ids = torch.cat([ids for ids, _ in documents]).to(torch.int64)  # [s]
    trained = torch.cat([mask for _, mask in documents])  # [s]
    lengths = torch.tensor([ids.shape[0] for ids, _ in documents])
    ends = lengths.cumsum(0)
    labels = torch.full_like(input_ids, IGNORE)
    labels[:-1] = torch.where(trained[1:], input_ids[1:], IGNORE)
    labels[ends - 1] = IGNORE
    starts = (ends - lengths).repeat_interleave(lengths)
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": torch.arange(input_ids.shape[0]) - starts,
        "seq_ids": torch.arange(len(documents)).repeat_interleave(lengths),
    }
