"""The endless sequence of training rows, a cursor for a position in it, and its global batches.

Rows depend only on the samples, the seed, the epoch and `max_length`. No rank, mesh or batch size enters, so every mesh
trains on the same rows in the same order. Four steps lead from samples to the batches of a rank:

1. `EpochOrder` permutes the samples of an epoch. The permutation is computed from (seed, epoch, position) and needs no
   memory, so a run can start at any position.
2. `pack` fills rows with samples, one window of 4096 samples at a time.
3. `build_row` concatenates the documents of a row.
4. `Batches` cuts the sequence into global batches, and each data-parallel rank builds its own part of each batch.

For example, five samples have 5, 3, 4, 2 and 2 tokens, `max_length` is 8, and the order is the order of the file.

    pack([5, 3, 4, 2, 2], 8) = [[0, 1], [2, 3, 4]]                           two full rows instead of five padded ones

    row 0   input_ids       a0 a1 a2 a3 a4 b0 b1 b2
            position_ids     0  1  2  3  4  0  1  2                          restart with each document
            seq_ids          0  0  0  0  0  1  1  1                          attention stays within a document
            labels          a1 a2 a3 a4  - b1 b2  -                          "-" is -100: no next token in the document

    cursor  (epoch 0, row 0) -> row 0 -> (0, 1) -> row 1 -> (1, 0) -> the first row of epoch 1, packed anew

    with global_batch=2 on two ranks, rank 0 builds row 0 and rank 1 builds row 1 of each batch

The cursor is the only state. It is saved with a checkpoint, and a run that resumes on another number of ranks continues
with the same rows.

Reference:
    The permutation of 0 ... n - 1 is a Feistel network over the next power of four, applied again while a value is not
    below n ("cycle walking"; Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). Its round function is the
    mixer of SplitMix64.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dtrain.base.batch import IGNORE_INDEX
from dtrain.base.errors import UserError
from dtrain.base.randomness import mix, random_key
from dtrain.base.ranks import balance_by_cost
from dtrain.data.rows.cache import CachedDocument, Samples, SourceSamples

if TYPE_CHECKING:
    from dtrain.data.images.files import ImageRecord
    from dtrain.data.images.reader import ImageReader

ROUNDS = 8
WINDOW = 4096  # samples that are packed together; bounds the memory of packing

Row = dict[str, Tensor]


def permute(positions: Tensor, size: int, permutation: int) -> Tensor:
    """Apply a pseudo-random permutation of 0 ... size - 1.

    Args:
        positions: Values below `size`, int64 [n].
        size: Number of values that are permuted.
        permutation: Key of the permutation; another key gives another order.

    Returns:
        The permuted values, int64 [n].

    Example:
        >>> values = permute(torch.arange(6), 6, random_key("order", 0, 0))
        >>> sorted(values.tolist())
        [0, 1, 2, 3, 4, 5]
    """
    # A Feistel network permutes numbers of 2 * half_bits bits: the smallest power of four that is at least `size`.
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1

    def apply_network(values: Tensor) -> Tensor:
        left, right = values >> half_bits, values & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (mix(right + random_key(permutation, number)) & mask)
        return (left << half_bits) | right

    result = apply_network(positions)
    # Cycle walking: a value outside the range is permuted again until it is inside. The result is still one-to-one.
    outside = result >= size
    while bool(outside.any()):
        result[outside] = apply_network(result[outside])
        outside = result >= size
    return result


class EpochOrder:
    """The order of the samples in one epoch.

    A source of weight w contributes each of its samples ⌊w⌋ times, and round((w - ⌊w⌋) · count) of them once more. For
    example, a source of 4 samples and weight 2.5 contributes 4 · 2 + 2 = 10 positions. The additional samples are taken
    from one shuffled list, which the epochs go through round and round, so no sample is ever more than one visit ahead
    of another. With `shuffle` all positions are permuted together. Otherwise the sources follow one another.

    Attributes:
        sources: The samples of each source, with the source's weight.
        seed: Seed of the order.
        epoch: Number of the epoch, from 0.
        shuffle: Whether the positions are permuted.
        total: Number of positions in the epoch.
    """

    def __init__(self, sources: Sequence[SourceSamples], *, seed: int, epoch: int, shuffle: bool):
        self.sources = tuple(sources)
        self.seed = seed
        self.epoch = epoch
        self.shuffle = shuffle
        self.total = sum(source.total for source in self.sources)

    def samples(self, start: int, stop: int) -> Tensor:
        """Return the sample at each position in [start, stop), int64 [stop - start]; fewer at the end of the epoch."""
        positions = torch.arange(start, min(stop, self.total))
        if self.shuffle:
            positions = permute(positions, self.total, random_key("order", self.seed, self.epoch))
        result = torch.empty_like(positions)
        first_position = 0  # of the source
        for number, source in enumerate(self.sources):
            is_in_source = (positions >= first_position) & (positions < first_position + source.total)
            local = positions[is_in_source] - first_position
            # The first copies * count positions are the complete copies, those after them the additional samples.
            num_complete = source.copies * source.count
            is_extra = local >= num_complete
            sample = local % max(1, source.count)
            if bool(is_extra.any()):
                # Each epoch continues in the shuffled list where the epoch before it stopped.
                extra = local[is_extra] - num_complete
                extra = (extra + self.epoch * source.extra) % source.count
                sample[is_extra] = permute(extra, source.count, random_key("choice", self.seed, number))
            result[is_in_source] = source.first + sample
            first_position += source.total
        return result


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack samples into rows by best-fit decreasing.

    The longest sample comes first. Each sample goes into the fullest row that still has room for it (of equally full
    rows, the one that was opened first), or into a new row.

    Args:
        lengths: Tokens of each sample.
        capacity: Tokens of a row.

    Returns:
        The rows as lists of indices into `lengths`. The indices of a row ascend, and the rows are sorted by their first
        index.

    Raises:
        ValueError: If a sample is longer than `capacity`.

    Example:
        >>> pack([5, 3, 4, 2, 2], capacity=8)
        [[0, 1], [2, 3, 4]]
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    for index in longest_first:
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"a sample of {length} tokens does not fit into a row of {capacity}")
        # The first entry with enough room is the fullest such bin. No bin has the number -1, so that (length, -1) comes
        # before all bins with exactly `length` free tokens.
        entry = bisect_left(room, (length, -1))
        if entry < len(room):
            free, number = room.pop(entry)
            bins[number].append(index)
        else:
            free, number = capacity, len(bins)
            bins.append([index])
        insort(room, (free - length, number))
    for members in bins:
        members.sort()
    return sorted(bins)


class Cursor(NamedTuple):
    """Position of the next row. In JSON it is a list of two numbers, which `Cursor(*pair)` reads.

    Attributes:
        epoch: The epoch, from 0.
        row: The row within the epoch, from 0.
    """

    epoch: int = 0
    row: int = 0


class SampleGroup(NamedTuple):
    """The samples of one packed row, or one sample if rows are not packed.

    Attributes:
        samples: Indices into `Rows.samples`.
        next_cursor: Position after this group.
        epochs: Epochs that are complete after this group, as a fraction.
    """

    samples: list[int]
    next_cursor: Cursor
    epochs: float


@dataclass(eq=False)
class Rows:
    """The rows of `samples`, one epoch after the other.

    Counts, cursors and batches count sample groups: packed rows, or samples without packing. For example, a preference
    pair that is not packed is one group, but two rows (chosen and rejected).

    Attributes:
        samples: The tokenised samples.
        max_length: Maximum number of tokens of a document.
        packing: Whether a row has as many samples as fit into it. Otherwise each document is a row.
        shuffle: Whether the samples of an epoch are shuffled, and the rows within each window of 4096 samples.
        seed: Seed of the order.
        epochs: Passes over the samples, such as 2 or 2.5; None for an endless sequence.
        images: Reader of the samples' images, if they have any.
        fingerprint: Hash of the tokens. Different data have a different one.
        capacity: Tokens of a packed row: `max_length` for each document of a sample.
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
        self._num_rows: dict[tuple[int, int], int] = {}  # of each (epoch, window) that has been packed
        if self._order(0).total == 0:
            raise UserError(
                "the weights of data.train.sources leave no row in an epoch. Set at least one weight high enough that "
                "the source gives a sample"
            )

    def rows_in_epoch(self, epoch: int) -> int:
        """Return the number of sample groups in an epoch. With packing, all its windows are packed once."""
        if not self.packing:
            return self._order(epoch).total
        return sum(self._rows_in_window(epoch, window) for window in range(self._num_windows(epoch)))

    def samples_in_epoch(self, epoch: int) -> int:
        """Return the number of samples in an epoch."""
        return self._order(epoch).total

    def total_rows(self) -> int | None:
        """Return the number of sample groups in all epochs; None if the sequence is endless."""
        if self.epochs is None:
            return None
        num_begun_epochs = math.ceil(self.epochs)
        return sum(self._rows_used(epoch, self.epochs) for epoch in range(num_begun_epochs))

    def _rows_used(self, epoch: int, epochs: float) -> int:
        """Return the number of sample groups of `epoch` that belong to the first `epochs` passes.

        For example, with 10 rows an epoch and `epochs=2.5`, 5 rows of epoch 2 are used.
        """
        num_rows = self.rows_in_epoch(epoch)
        fraction = epochs - epoch
        if fraction >= 1:
            return num_rows
        return math.ceil(num_rows * fraction - 1e-9)  # 0.1 * 30 is 3.0000000000000004

    def rows_before(self, cursor: Cursor) -> int:
        """Return the number of sample groups before `cursor`."""
        return sum(self.rows_in_epoch(epoch) for epoch in range(cursor.epoch)) + cursor.row

    def tokens_in_epoch(self, epoch: int) -> int:
        """Return the number of tokens in an epoch, without padding."""
        total = 0
        for window in range(self._num_windows(epoch)):
            _, lengths = self._samples_of_window(epoch, window)
            total += int(lengths.sum())
        return total

    def iterate(self, cursor: Cursor = Cursor()) -> Iterator[Row]:  # noqa: B008 (immutable)
        """Yield the rows from `cursor` on; see `build` for their tensors."""
        for group in self.sample_groups(cursor):
            yield from self.build(group.samples)

    def sample_groups(self, cursor: Cursor = Cursor()) -> Iterator[SampleGroup]:  # noqa: B008 (immutable)
        """Yield the samples of each row from `cursor` on. This is much cheaper than building the rows.

        Raises:
            UserError: If the epoch of `cursor` has fewer rows, so the data has changed.
        """
        epoch, start_row = cursor
        epochs = math.inf if self.epochs is None else self.epochs
        while epoch < epochs:
            yield from self._groups_of_epoch(epoch, start_row, epochs)
            epoch += 1
            start_row = 0

    def _groups_of_epoch(self, epoch: int, start_row: int, epochs: float) -> Iterator[SampleGroup]:
        """Yield the samples of each row of an epoch from row `start_row` on.

        Args:
            epoch: The epoch.
            start_row: Index of the first row, within the epoch.
            epochs: Number of epochs, which may end within this one.

        Raises:
            UserError: If the epoch has fewer than `start_row` rows.
        """
        num_windows = self._num_windows(epoch)
        total = self._order(epoch).total
        is_cut_short = epochs - epoch < 1
        end_row = self._rows_used(epoch, epochs) if is_cut_short else math.inf
        first_row = 0  # of the window, within the epoch
        for window in range(num_windows):
            if first_row < start_row:
                # Windows before the start are only counted. Most of them have been packed before.
                num_rows = self._rows_in_window(epoch, window)
                if first_row + num_rows <= start_row:
                    first_row += num_rows
                    continue
            groups = self._pack_window(epoch, window)
            first_sample = window * WINDOW
            num_samples = min(total, (window + 1) * WINDOW) - first_sample
            for number, samples in enumerate(groups):
                row = first_row + number
                if row < start_row:
                    continue
                if row >= end_row:
                    return
                is_last_of_epoch = window == num_windows - 1 and number == len(groups) - 1
                next_cursor = Cursor(epoch + 1, 0) if is_last_of_epoch else Cursor(epoch, row + 1)
                samples_done = first_sample + num_samples * (number + 1) / len(groups)
                yield SampleGroup(samples, next_cursor, epoch + samples_done / total)
            first_row += len(groups)
        if first_row < start_row:
            raise UserError(
                f"the data position to resume at is row {start_row} of epoch {epoch}, but that epoch has only "
                f"{self.rows_in_epoch(epoch)} rows. The data or data.max_length has changed since the checkpoint was "
                "saved"
            )

    def build(self, samples: list[int]) -> list[Row]:
        """Build the rows of some samples: one row with packing, otherwise one for each document.

        A row of s tokens has these int64 tensors of shape [s]:

        - `input_ids`: The documents, one after the other.
        - `labels`: `labels[t]` is the token after `input_ids[t]` in its document if that token is trained, else -100.
        - `position_ids`: Restart at 0 with each document.
        - `seq_ids`: Number of the document. In a packed row of pairs, the chosen documents have the even numbers.

        If the samples have images, they are decoded here, and a row also has the tensors that
        `ImageReader.image_streams_of_rows` returns.
        """
        documents: list[CachedDocument] = []
        for index in samples:
            documents.extend(self.samples[index])
        if self.packing:
            documents_of_rows = [list(range(len(documents)))]
        else:
            documents_of_rows = [[number] for number in range(len(documents))]
        rows = [build_row([documents[number] for number in numbers]) for numbers in documents_of_rows]
        if self.images is None:
            return rows
        images: list[list[ImageRecord]] = []  # of each document
        for index in samples:
            images.extend(self.samples.images(index))
        documents_with_images = []
        for numbers in documents_of_rows:
            documents_with_images.append([(documents[number].ids, images[number]) for number in numbers])
        image_streams = self.images.image_streams_of_rows(documents_with_images)
        return [row | streams for row, streams in zip(rows, image_streams, strict=True)]

    def _order(self, epoch: int) -> EpochOrder:
        return EpochOrder(self.samples.sources, seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    def _num_windows(self, epoch: int) -> int:
        return -(-self._order(epoch).total // WINDOW)

    def _samples_of_window(self, epoch: int, window: int) -> tuple[Tensor, Tensor]:
        """Return the samples of a window and the tokens of each, both int64 [n]."""
        samples = self._order(epoch).samples(window * WINDOW, (window + 1) * WINDOW)
        return samples, self.samples.lengths(samples)

    def _pack_window(self, epoch: int, window: int) -> list[list[int]]:
        """Return the samples of each row of a window."""
        samples, lengths = self._samples_of_window(epoch, window)
        if not self.packing:
            return [[index] for index in samples.tolist()]
        bins = pack(lengths.tolist(), self.capacity)
        if self.shuffle:
            # `pack` opens rows with the longest samples first, so without this the rows would be sorted by length.
            order = permute(torch.arange(len(bins)), len(bins), random_key("rows", self.seed, epoch, window))
            bins = [bins[index] for index in order.tolist()]
        self._num_rows[epoch, window] = len(bins)
        sample_indices = samples.tolist()
        return [[sample_indices[index] for index in members] for members in bins]

    def _rows_in_window(self, epoch: int, window: int) -> int:
        if not self.packing:
            return min(WINDOW, self._order(epoch).total - window * WINDOW)
        if (epoch, window) not in self._num_rows:
            self._pack_window(epoch, window)  # stores the number
        return self._num_rows[epoch, window]


def build_row(documents: Sequence[tuple[Tensor, Tensor]]) -> Row:
    """Build one row of documents; `Rows.build` describes its tensors.

    Args:
        documents: Token ids (any integer dtype) and whether each is trained (bool), both [tokens of the document].

    Example:
        >>> first = (torch.tensor([5, 6, 7]), torch.tensor([False, True, True]))
        >>> second = (torch.tensor([8, 9]), torch.tensor([True, True]))
        >>> row = build_row([first, second])
        >>> row["labels"].tolist(), row["position_ids"].tolist(), row["seq_ids"].tolist()
        ([6, 7, -100, 9, -100], [0, 1, 2, 0, 1], [0, 0, 0, 1, 1])
    """
    input_ids = torch.cat([ids for ids, _ in documents]).to(torch.int64)  # [s]
    trained = torch.cat([mask for _, mask in documents])  # [s]
    lengths = torch.tensor([ids.shape[0] for ids, _ in documents])
    ends = lengths.cumsum(0)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    labels[:-1] = torch.where(trained[1:], input_ids[1:], IGNORE_INDEX)
    # The last token of a document must not predict the first token of the next one.
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
    """One data-parallel rank's part of a global batch.

    Attributes:
        rows: The rows of this rank, in the order of the global batch. There may be none in a short last batch.
        samples: The samples of these rows, in the same order.
        size: Number of sample groups in the global batch, over all ranks.
        cursor: Position of the next batch.
        epoch: Epochs that are complete after this batch, as a fraction.
    """

    rows: list[Row]
    samples: list[int]
    size: int
    cursor: Cursor
    epoch: float


@dataclass(eq=False)
class Batches:
    """The global batches from `cursor` on. Each iteration starts there again.

    A batch may span two epochs. If `rows` ends, the last batch may be short.

    Attributes:
        rows: The rows.
        global_batch: Sample groups in a global batch.
        dp_rank: This data-parallel rank.
        dp_size: Number of data-parallel ranks.
        cursor: Position of the first batch.
        num_workers: Processes that build rows ahead of time. With 0, rows are built in this process. The sequence of
            batches is the same.
        balance_lengths: False: sample group i of the batch belongs to rank i % dp_size. True: for rows without packing,
            the groups are assigned so that the ranks have about the same number of tokens. No rank gets more groups
            than the fullest rank would get otherwise, so the number of micro-batches does not grow.
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
            yield from self._build_batches()
            return
        from dtrain.data.rows.workers import load_with_workers  # torchdata takes long to import

        for rows, batch in load_with_workers(self._batches_of_worker, self.num_workers):
            yield replace(batch, rows=rows)

    def _batches_of_worker(self, worker: int, num_workers: int) -> Iterator[tuple[list[Row], GlobalBatch]]:
        """Yield the batches of one worker process, with the rows separate from the rest."""
        for batch in self._build_batches(worker, num_workers):
            yield batch.rows, replace(batch, rows=[])

    def _build_batches(self, first: int = 0, step: int = 1) -> Iterator[GlobalBatch]:
        """Yield the batches number first, first + step, ... The batches between them are counted but not built."""
        groups = self.rows.sample_groups(self.cursor)
        number = 0
        while True:
            batch_groups = list(islice(groups, self.global_batch))
            if not batch_groups:
                return
            if number % step == first:
                rows: list[Row] = []
                samples: list[int] = []
                for group in self._groups_of_rank(batch_groups):
                    rows.extend(self.rows.build(group.samples))
                    samples.extend(group.samples)
                last = batch_groups[-1]
                yield GlobalBatch(rows, samples, len(batch_groups), last.next_cursor, last.epochs)
            number += 1

    def _groups_of_rank(self, groups: list[SampleGroup]) -> list[SampleGroup]:
        if not self.balance_lengths:
            return groups[self.dp_rank :: self.dp_size]
        samples = torch.tensor([group.samples[0] for group in groups])
        max_groups = -(-len(groups) // self.dp_size)  # of the fullest rank without balancing
        indices_of_ranks = balance_by_cost(self.rows.samples.lengths(samples).tolist(), self.dp_size, max_groups)
        return [groups[index] for index in indices_of_ranks[self.dp_rank]]
