"""Host-side cu_seqlens of a micro-batch, and the calls of a variable-length kernel that they make.

Such a kernel takes segments of queries and segments of keys, behind one another: the nth of each are one document's.
Queries are counted from a segment's end: the last query stands at the last key. A window (left, right) says how many
keys before and after its own place a query sees, -1: all of them.

Under context parallel a rank holds two chunks of each row (`parallel.context.batch`), so a document is cut at the
borders of chunks. No segment is empty, and no query of one is without a key: what a kernel writes for those differs
from kernel to kernel. Letters: B rows, S tokens of a whole row, c of a chunk. No tensor is on a device here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from dtrain.parallel.context.batch import chunks_of


@dataclass
class Call:
    """A call of a kernel. queries, keys: slices of the flat tokens [B · tokens of a row], taken behind one another;
    the lengths are those of the segments in them."""

    window: tuple[int, int]
    queries: list[slice] = field(default_factory=list)
    keys: list[slice] = field(default_factory=list)
    query_lengths: list[int] = field(default_factory=list)
    key_lengths: list[int] = field(default_factory=list)

    def add(self, queries: slice, keys: slice, query_lengths: Iterable[int], key_lengths: Iterable[int]) -> None:
        """Segments of one more row, behind those that are there."""
        _append(self.queries, queries)
        _append(self.keys, keys)
        self.query_lengths += query_lengths
        self.key_lengths += key_lengths


@dataclass(frozen=True)
class Packing:
    """The documents of each row, one behind the other; padding is one of them.

    begins: of each row, where its documents begin, 0 first. length: S, the same for all rows. Within a document the
    positions count the tokens, so that distances are differences of places.
    """

    begins: tuple[tuple[int, ...], ...]
    length: int

    @classmethod
    def whole(cls, rows: int, length: int) -> "Packing":
        """Rows of one document each."""
        return cls(((0,),) * rows, length)

    @classmethod
    def of(cls, positions: Tensor, documents: Tensor | None = None) -> "Packing | None":
        """The packing of host tensors, positions [B, S] and documents [B, S]; None where there is none: a document lies
        in two pieces, or its positions do not count its tokens. documents None: a row is one document."""
        begins = torch.zeros(positions.shape, dtype=torch.bool)
        begins[:, :1] = True
        if documents is not None:
            begins[:, 1:] = documents.diff() != 0
            names = documents.sort(1).values
            if not torch.equal((names.diff() != 0).sum(1) + 1, begins.sum(1)):
                return None
        if not bool(((positions.diff() == 1) | begins[:, 1:]).all()):
            return None
        starts: list[list[int]] = [[] for _ in begins]
        for row, at in begins.nonzero().tolist():
            starts[row].append(at)
        return cls(tuple(map(tuple, starts)), positions.shape[1])

    def of_rows(self, window: int | None) -> list[Call]:
        """Return the call of every query over its own document, where a rank holds whole rows."""
        call = Call(_causal(window))
        for row, begins in enumerate(self.begins):
            lengths = [end - begin for begin, end in pairwise((*begins, self.length))]
            tokens = slice(row * self.length, (row + 1) * self.length)
            call.add(tokens, tokens, lengths, lengths)
        return [call]

    def over_gathered(self, window: int | None, rank: int, size: int) -> list[Call]:
        """The queries of a rank over the keys of whole rows: a call for the head chunk of the rows and one for the tail
        chunk, each over the keys from the beginning of the chunk's first document, or of its window, to the chunk's
        end. Slices of queries are of one chunk's tokens [B · c], of keys [B · S]."""
        chunk, calls = self.length // (2 * size), []
        for index in chunks_of(rank, size):
            start, stop = index * chunk, (index + 1) * chunk
            call = Call(_causal(window))
            for row in range(len(self.begins)):
                parts = list(self._parts(row, start, stop))
                query_lengths = [end - max(begin, start) for begin, end in parts]
                key_lengths = [end - begin for begin, end in parts]
                if window is not None:
                    key_lengths[0] = min(key_lengths[0], query_lengths[0] + window - 1)
                keys = _shifted(row * self.length, stop - sum(key_lengths), stop)
                call.add(_shifted(row * chunk, 0, chunk), keys, query_lengths, key_lengths)
            calls.append(call)
        return calls

    def in_ring(self, window: int | None, rank: int, size: int) -> list[list[Call]]:
        """The queries of a rank over the keys that each rank of the ring holds, its own first. Slices are of the tokens
        [B · 2c] of a rank, in its order.

        The first call of the first list has every query, over its own chunk: whoever merges begins with it. Any other
        is of pairs of chunks, the keys' before the queries': only the document that reaches from one into the other is
        seen, and nothing of it is hidden but by a window. A source of which nothing is seen has no call.
        """
        own = Call(_causal(window))
        chunk, mine = self.length // (2 * size), chunks_of(rank, size)
        for row in range(len(self.begins)):
            for place, index in enumerate(mine):
                start, stop = index * chunk, (index + 1) * chunk
                lengths = [end - max(begin, start) for begin, end in self._parts(row, start, stop)]
                tokens = _shifted((2 * row + place) * chunk, 0, chunk)
                own.add(tokens, tokens, lengths, lengths)
        steps = []
        for distance in range(size):
            calls = [own] if distance == 0 else []
            for place, index in enumerate(mine):
                for key_place, key_index in enumerate(chunks_of((rank - distance) % size, size)):
                    if key_index < index:
                        calls += self._between(window, chunk, (index, place), (key_index, key_place))
            steps.append(calls)
        return steps

    def _between(
        self, window: int | None, chunk: int, queries: tuple[int, int], keys: tuple[int, int]
    ) -> Iterable[Call]:
        """The calls for the queries of one chunk over the keys of one before it, each (which chunk, its place of a
        rank's two)."""
        (index, place), (key_index, key_place) = queries, keys
        start, key_stop = index * chunk, (key_index + 1) * chunk
        calls: dict[int, Call] = {}  # a call has one window
        for row in range(len(self.begins)):
            begin, end = next(self._parts(row, start, start + chunk))
            key_begin = max(begin, key_index * chunk)
            count, left = end - start, -1
            if window is not None:
                # The first query that is farther than the window from the last key sees none, nor do those after it.
                reach = window - 1 - (start - key_stop)
                count, key_begin = min(count, reach), max(key_begin, start - window + 1)
                left = reach - count
                if left >= key_stop - key_begin - 1:  # hides nothing
                    left = -1
            if count <= 0 or key_begin >= key_stop:
                continue
            call = calls.setdefault(left, Call((left, -1)))
            tokens = _shifted((2 * row + place) * chunk, 0, count)
            lies = _shifted((2 * row + key_place) * chunk, key_begin - key_index * chunk, chunk)
            call.add(tokens, lies, [count], [key_stop - key_begin])
        return calls.values()

    def _parts(self, row: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The documents of a row that have tokens from `start` to `stop`: where each begins, and where it ends or
        `stop`."""
        for begin, end in pairwise((*self.begins[row], self.length)):
            if begin < stop and end > start:
                yield begin, min(end, stop)


def _causal(window: int | None) -> tuple[int, int]:
    return (-1 if window is None else window - 1), 0


def _shifted(by: int, start: int, stop: int) -> slice:
    return slice(by + start, by + stop)


def _append(slices: list[slice], new: slice) -> None:
    """Append `new` to `slices`, joined with the last of them where it goes on from there."""
    if slices and slices[-1].stop == new.start:
        new = slice(slices.pop().start, new.stop)
    slices.append(new)
