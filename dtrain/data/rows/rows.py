"""The endless sequence of training rows, a cursor for a position in it, and its global batches.

Rows are a function of the samples, the seed, the epoch and max_length alone: no rank, mesh or batch size enters.
Epochs follow one another, each in an order of its own and packed anew. A data-parallel rank takes its share of a global
batch by arithmetic; torchdata moves and prefetches it. The only state is the cursor that each batch carries.

The order of an epoch is a function of (seed, epoch, position) that needs no memory: a permutation of [0, n) is a
Feistel network over the next power of four, walked until it lands inside ("cycle walking"; Black and Rogaway, Ciphers
with Arbitrary Finite Domains, 2002). Its round function is SplitMix64's mixer.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dtrain.base.batch import IGNORE_INDEX
from dtrain.base.errors import UserError
from dtrain.base.randomness import mix, random_key
from dtrain.base.ranks import balance_by_cost
from dtrain.data.rows.cache import Samples, SourceSamples

if TYPE_CHECKING:
    from dtrain.data.images.reader import ImageReader

ROUNDS = 8
WINDOW = 4096  # samples packed together; bounds what packing holds in memory

Row = dict[str, Tensor]


def permute(positions: Tensor, size: int, permutation: int) -> Tensor:
    """Map `positions` by the permutation of 0 ... size - 1 with that key. Both int64 [n], each below `size`."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1

    def once(values: Tensor) -> Tensor:
        left, right = values >> half, values & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (mix(right + random_key(permutation, number)) & mask)
        return (left << half) | right

    result = once(positions)
    outside = result >= size
    while bool(outside.any()):
        result[outside] = once(result[outside])
        outside = result >= size
    return result


class EpochOrder:
    """The samples of one epoch.

    A source of weight w gives every sample ⌊w⌋ times, and round((w − ⌊w⌋) · count) of them once more: the next so many
    of one order drawn from the seed, around and around, so that after any number of epochs no sample is more than one
    visit ahead of another. Shuffled, all of these are permuted together; else they come source by source.
    """

    def __init__(self, shares: Sequence[SourceSamples], *, seed: int, epoch: int, shuffle: bool):
        self.shares, self.seed, self.epoch, self.shuffle = tuple(shares), seed, epoch, shuffle
        self.total = sum(share.total for share in self.shares)

    def samples(self, start: int, stop: int) -> Tensor:
        """Return the sample at each position in [start, stop), int64 [stop - start], fewer where the epoch ends."""
        positions = torch.arange(start, min(stop, self.total))
        if self.shuffle:
            positions = permute(positions, self.total, random_key("order", self.seed, self.epoch))
        result = torch.empty_like(positions)
        base = 0
        for number, share in enumerate(self.shares):
            inside = (positions >= base) & (positions < base + share.total)
            local = positions[inside] - base
            chosen = local >= share.copies * share.count
            sample = local % max(1, share.count)
            if bool(chosen.any()):
                drawn = local[chosen] - share.copies * share.count
                drawn = (drawn + self.epoch * share.extra) % share.count
                sample[chosen] = permute(drawn, share.count, random_key("choice", self.seed, number))
            result[inside] = share.first + sample
            base += share.total
        return result


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit-decreasing bin packing: bins of indices into `lengths`, every index in one bin, no bin above `capacity`.

    The longest first, each into the fullest bin that still has room for it (of equals, the first opened), else into
    a new one. Within a bin the indices ascend; the bins stand in the order of their first index.

    Raises ValueError for a length above `capacity`.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (room left, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"a sample of {length} tokens does not fit into a row of {capacity}")
        place = bisect_left(room, (length, -1))
        if place < len(room):
            left, number = room.pop(place)
            bins[number].append(index)
        else:
            left, number = capacity, len(bins)
            bins.append([index])
        insort(room, (left - length, number))
    for members in bins:
        members.sort()
    return sorted(bins)


class Cursor(NamedTuple):
    """The next row: `row` counts within `epoch`, both from 0. As JSON a list of two, which `Cursor(*pair)` reads."""

    epoch: int = 0
    row: int = 0


class SampleGroup(NamedTuple):
    """The samples that stand together, the cursor after them, and how many epochs are then done, as a fraction."""

    samples: list[int]
    next_cursor: Cursor
    epochs: float


@dataclass(eq=False)
class Rows:
    """The rows of `samples`. Counts, cursors and batches count placements: packed rows, or samples.

    packing     a row holds as many whole samples as fit into it (best fit, within a window of 4096 samples of the
                epoch's order), else one document
    capacity    tokens that a packed row has room for: max_length for each document of one sample
    shuffle     False: the order of the files, and rows in the order of their first sample within a window
    epochs      passes over the samples, such as 2 or 2.5; None: without end
    images      reader of the samples' images, where they have any
    fingerprint a hash of the tokens that these rows are made of: another one means other data
    """

    samples: Samples
    _: KW_ONLY
    max_length: int
    packing: bool = True
    shuffle: bool = True
    seed: int = 0
    epochs: float | None = None
    images: "ImageReader | None" = None

    def __post_init__(self) -> None:
        self.fingerprint = self.samples.fingerprint
        self.capacity = self.max_length * self.samples.documents_per_sample
        self._counts: dict[tuple[int, int], int] = {}  # (epoch, window) → its rows, as far as known
        if self._order(0).total == 0:
            raise UserError("the weights of data.train.sources leave no row in an epoch; raise them")

    def rows_in_epoch(self, epoch: int) -> int:
        """Return the number of placements in `epoch`. Packed, this packs the whole epoch by its lengths, once."""
        if not self.packing:
            return self._order(epoch).total
        return sum(self._window_rows(epoch, window) for window in range(self._windows(epoch)))

    def samples_in_epoch(self, epoch: int) -> int:
        """Return the number of samples in `epoch`, those of its rows all together."""
        return self._order(epoch).total

    def total_rows(self) -> int | None:
        """Return the number of placements in all epochs together; None where they do not end."""
        if self.epochs is None:
            return None
        begun = math.ceil(self.epochs)
        return sum(self._rows_taken(epoch, self.epochs) for epoch in range(begun))

    def _rows_taken(self, epoch: int, epochs: float) -> int:
        """Return how many placements of `epoch` belong to the first `epochs` passes: all, or those of its begun part.

        For example, the third pass of 10 rows has 5 that belong to 2.5 passes.
        """
        count, part = self.rows_in_epoch(epoch), epochs - epoch
        return count if part >= 1 else math.ceil(count * part - 1e-9)  # 0.1 * 30 is 3.0000000000000004

    def rows_before(self, cursor: Cursor) -> int:
        """Return the number of placements before `cursor`."""
        return sum(self.rows_in_epoch(epoch) for epoch in range(cursor.epoch)) + cursor.row

    def tokens_in_epoch(self, epoch: int) -> int:
        """Return the number of tokens in `epoch`, padding not counted."""
        return sum(int(self._lengths(epoch, window)[1].sum()) for window in range(self._windows(epoch)))

    def iterate(self, cursor: Cursor = Cursor()) -> Iterator[Row]:  # noqa: B008 (immutable)
        """Yield the rows from `cursor` on."""
        return (row for placement in self.sample_groups(cursor) for row in self.build(placement.samples))

    def sample_groups(self, cursor: Cursor = Cursor()) -> Iterator[SampleGroup]:  # noqa: B008 (immutable)
        """Yield the samples that each row from `cursor` on holds; much cheaper than the rows.

        Raises UserError for a cursor beyond its epoch: the data is not what it was.
        """
        epoch, skip = cursor
        epochs = math.inf if self.epochs is None else self.epochs
        while epoch < epochs:
            windows, total, row = self._windows(epoch), self._order(epoch).total, 0
            end_row = self._rows_taken(epoch, epochs) if epochs - epoch < 1 else None
            for window in range(windows):
                count = self._window_rows(epoch, window) if skip else 0
                if skip and count <= skip:
                    skip, row = skip - count, row + count
                    continue
                packed = self._window(epoch, window)
                begin, end = window * WINDOW, min(total, (window + 1) * WINDOW)
                for number in range(skip, len(packed)):
                    if end_row is not None and row + number >= end_row:
                        return
                    last = window == windows - 1 and number == len(packed) - 1
                    after = Cursor(epoch + 1, 0) if last else Cursor(epoch, row + number + 1)
                    done = begin + (end - begin) * (number + 1) / len(packed)
                    yield SampleGroup(packed[number], after, epoch + done / total)
                skip, row = 0, row + len(packed)
            if skip:
                raise UserError(
                    f"the data position to resume at is row {cursor.row} of epoch {cursor.epoch}, which has only "
                    f"{self.rows_in_epoch(epoch)} rows: the data or data.max_length is not what it was"
                )
            epoch += 1

    def build(self, samples: list[int]) -> list[Row]:
        """Build the rows of these samples: packed, one with all of their documents, else one for each document.

        A row is input_ids, labels, position_ids and seq_ids, int64, all [s], s the tokens in it. labels[t] is the token
        after input_ids[t] within its document, where that one is trained, else -100; position_ids restart and seq_ids
        count up with each document, so that the chosen documents of pairs have the even seq_ids of a packed row.
        Where the samples have images, they are decoded here, and a row has what `ImageReader.rows_of` gives too.
        """
        documents = [document for index in samples for document in self.samples[index]]
        members = [range(len(documents))] if self.packing else [[number] for number in range(len(documents))]
        rows = [build_row([documents[number] for number in some]) for some in members]
        if self.images is None:
            return rows
        records = [images for index in samples for images in self.samples.images(index)]
        with_images = [[(documents[number][0], records[number]) for number in some] for some in members]
        return [row | more for row, more in zip(rows, self.images.image_streams_of_rows(with_images), strict=True)]

    def _order(self, epoch: int) -> EpochOrder:
        return EpochOrder(self.samples.sources, seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    def _windows(self, epoch: int) -> int:
        return -(-self._order(epoch).total // WINDOW)

    def _lengths(self, epoch: int, window: int) -> tuple[Tensor, Tensor]:
        samples = self._order(epoch).samples(window * WINDOW, (window + 1) * WINDOW)
        return samples, self.samples.lengths(samples)

    def _window(self, epoch: int, window: int) -> list[list[int]]:
        samples, lengths = self._lengths(epoch, window)
        if not self.packing:
            return [[index] for index in samples.tolist()]
        bins = pack(lengths.tolist(), self.capacity)
        if self.shuffle:  # packing puts what it opened first, the long samples, in front
            order = permute(torch.arange(len(bins)), len(bins), random_key("rows", self.seed, epoch, window))
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


def build_row(documents: Sequence[tuple[Tensor, Tensor]]) -> Row:
    """Build the row of documents (ids, trained), one behind the other; see `Rows.build`."""
    input_ids = torch.cat([ids for ids, _ in documents]).to(torch.int64)  # [s]
    trained = torch.cat([mask for _, mask in documents])  # [s]
    lengths = torch.tensor([ids.shape[0] for ids, _ in documents])
    ends = lengths.cumsum(0)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    labels[:-1] = torch.where(trained[1:], input_ids[1:], IGNORE_INDEX)
    labels[ends - 1] = IGNORE_INDEX
    starts = (ends - lengths).repeat_interleave(lengths)
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": torch.arange(input_ids.shape[0]) - starts,
        "seq_ids": torch.arange(len(documents)).repeat_interleave(lengths),
    }


@dataclass(frozen=True)
class GlobalBatch:
    """Rows of a step. Placements are dealt out: packed rows, or samples (a pair that is not packed is two rows).

    rows      those of this data-parallel rank's placements, in the global batch's order; may be none in a short last
              batch
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


@dataclass(eq=False)
class Batches:
    """The global batches from `cursor` on; iterable, each time from there.

    A batch may span epochs; where `rows` ends, the last one may be short. With num_workers > 0 that many processes
    make rows ahead of time; the sequence is the same.

    balance_lengths: False: a rank takes placement i of the global batch with i % dp_size == dp_rank. True: for
    samples; the ranks' placements are alike in tokens, and at most as many as before on the fullest rank.
    """

    rows: Rows
    _: KW_ONLY
    global_batch: int
    dp_rank: int = 0
    dp_size: int = 1
    cursor: Cursor = Cursor()
    num_workers: int = 0
    balance_lengths: bool = False

    def __iter__(self) -> Iterator[GlobalBatch]:
        if self.num_workers == 0:
            yield from self._local()
            return
        from dtrain.data.rows.workers import load_with_workers  # only where it is used: its import is slow

        for rows, batch in load_with_workers(self._parts, self.num_workers):
            yield replace(batch, rows=rows)

    def _parts(self, first: int, step: int) -> Iterator[tuple[list[Row], GlobalBatch]]:
        return ((batch.rows, replace(batch, rows=[])) for batch in self._local(first, step))

    def _local(self, first: int = 0, step: int = 1) -> Iterator[GlobalBatch]:
        """Yield batches number first, first + step, ..."""
        placements = self.rows.sample_groups(self.cursor)
        number = 0
        while group := list(islice(placements, self.global_batch)):
            if number % step == first:
                mine = [placement.samples for placement in self._share(group)]
                rows = [row for samples in mine for row in self.rows.build(samples)]
                yield GlobalBatch(rows, list(chain(*mine)), len(group), group[-1].next_cursor, group[-1].epochs)
            number += 1

    def _share(self, group: list[SampleGroup]) -> list[SampleGroup]:
        if not self.balance_lengths:
            return group[self.dp_rank :: self.dp_size]
        samples = torch.tensor([placement.samples[0] for placement in group])
        most = -(-len(group) // self.dp_size)  # so that it makes no more micro-batches than fixed ones would be
        dealt = balance_by_cost(self.rows.samples.lengths(samples).tolist(), self.dp_size, most)
        return [group[index] for index in dealt[self.dp_rank]]
