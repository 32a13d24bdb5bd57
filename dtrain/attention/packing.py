"""Packed documents of a micro-batch, and the calls of a variable-length attention kernel that compute them.

Everything here is on the host. `segments.calls_to_device` copies the lengths of a call to the device.

A call has segments of queries and segments of keys, concatenated. Query segment n sees only key segment n. A segment
may have more keys than queries. Then its last query is aligned with its last key. A window (left, right) is the number
of keys before and after a query's own key that it sees, where -1 means all. So (-1, 0) is causal, and (-1, -1) is full.

Example: a row of 8 tokens with two documents, tokens 0 to 4 and 5 to 7. One rank needs one call:

    `of_rows`    tokens 0-4 | 5-7    query lengths 5 3    key lengths 5 3    window (-1, 0)

On two context-parallel ranks the row is cut into 4 chunks of 2 tokens. Rank 0 has the chunks 0 1 and 6 7, rank 1 has 2
3 and 4 5 (`parallel.context.batch`), so documents are cut at the borders of chunks. If the keys of all ranks are
gathered, rank 1 has one call for each of its chunks:

    `over_gathered`    queries 2 3    over keys 0-3          lengths 2 over 4                  (-1, 0)
                       queries 4|5    over keys 0-4 | 5      lengths 1 over 5, 1 over 1        (-1, 0)

In a ring, rank 1 first computes on its own keys, and then on those of rank 0. Within a chunk the mask is causal. A
later chunk sees all tokens of an earlier chunk that belong to the same document:

    `in_ring`    own keys          queries 2 3 | 4 | 5    over keys 2 3 | 4 | 5    lengths 2 1 1 over 2 1 1    (-1, 0)
                                   query 4                over keys 2 3            length 1 over 2            (-1, -1)
                 keys of rank 0    queries 2 3            over keys 0 1            length 2 over 2            (-1, -1)
                                   query 4                over keys 0 1            length 1 over 2            (-1, -1)

A `Call` stores slices of a rank's own tokens. For rank 1, queries 2 3 4 5 are the slice 0:4, and query 4 is 2:3.

No segment is empty, and no query sees no key, because kernels differ in their results for those. Letters: B rows, S
tokens of a full row, c tokens of a chunk.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from dtrain.parallel.context.batch import get_chunk_indices


@dataclass
class Call:
    """A call of a variable-length kernel.

    Attributes:
        window: How many keys before and after its own key a query sees. -1: all.
        queries: Slices of a rank's flat tokens, [B · tokens of a row]. The call's queries are their concatenation.
        keys: The same for keys.
        query_lengths: Number of queries of each segment.
        key_lengths: Number of keys of each segment.
    """

    window: tuple[int, int]
    queries: list[slice] = field(default_factory=list)
    keys: list[slice] = field(default_factory=list)
    query_lengths: list[int] = field(default_factory=list)
    key_lengths: list[int] = field(default_factory=list)

    def add(self, queries: slice, keys: slice, query_lengths: Iterable[int], key_lengths: Iterable[int]) -> None:
        """Append the segments of a row.

        Args:
            queries: The row's queries, as a slice of the rank's flat tokens.
            keys: The row's keys, as a slice of flat tokens.
            query_lengths: Number of queries of each segment.
            key_lengths: Number of keys of each segment.
        """
        _append(self.queries, queries)
        _append(self.keys, keys)
        self.query_lengths += query_lengths
        self.key_lengths += key_lengths

    def add_segment(self, queries: Sequence[slice], keys: Sequence[slice]) -> None:
        """Append one segment.

        Args:
            queries: Slices of the rank's flat tokens, whose concatenation is the segment's queries.
            keys: The same for keys. Several segments may have the same keys.
        """
        for part in queries:
            _append(self.queries, part)
        for part in keys:
            _append(self.keys, part)
        self.query_lengths.append(sum(part.stop - part.start for part in queries))
        self.key_lengths.append(sum(part.stop - part.start for part in keys))


@dataclass(frozen=True)
class Packing:
    """The documents of packed rows.

    A document is a run of consecutive tokens whose positions count on by 1, so that the distance of two positions is
    that of their indices. Padding is a document.

    Attributes:
        begins: For each row, the indices at which its documents begin. The first one is 0. For example, ((0, 5), (0,)).
        length: S, the same for all rows.
    """

    begins: tuple[tuple[int, ...], ...]
    length: int

    @property
    def is_tree(self) -> bool:
        """True if documents have common beginnings (`tree.TreePacking`). Documents of a `Packing` have none."""
        return False

    @classmethod
    def one_document_per_row(cls, rows: int, length: int) -> "Packing":
        """Return the packing of rows of one document each."""
        return cls(((0,),) * rows, length)

    @classmethod
    def of(cls, positions: Tensor, documents: Tensor | None = None) -> "Packing | None":
        """Find the documents of rows from positions and documents on the host.

        Args:
            positions: [B, S].
            documents: Number of the document of each token, [B, S]. None: each row is one document.

        Returns:
            The packing. None if a document is in two pieces, or if its positions do not increase by 1.

        Example:
            >>> positions, documents = torch.tensor([[0, 1, 2, 0, 1]]), torch.tensor([[0, 0, 0, 1, 1]])
            >>> Packing.of(positions, documents)
            Packing(begins=((0, 3),), length=5)
        """
        begins = torch.zeros(positions.shape, dtype=torch.bool)
        begins[:, :1] = True
        if documents is not None:
            begins[:, 1:] = documents.diff() != 0
            ordered = documents.sort(1).values
            num_documents = (ordered.diff() != 0).sum(1) + 1
            num_pieces = begins.sum(1)
            if not torch.equal(num_documents, num_pieces):
                return None
        if not bool(((positions.diff() == 1) | begins[:, 1:]).all()):
            return None
        begins_of_rows = [tuple(row.nonzero()[:, 0].tolist()) for row in begins]
        return cls(tuple(begins_of_rows), positions.shape[1])

    def of_rows(self, window: int | None) -> list[Call]:
        """Return the only call of a rank that has full rows: every query over its document.

        Args:
            window: Number of keys that a query sees, its own included. None: no window.

        Example:
            >>> (call,) = Packing(begins=((0, 3),), length=5).of_rows(window=None)
            >>> call.query_lengths, call.key_lengths, call.window
            ([3, 2], [3, 2], (-1, 0))
        """
        call = Call(_causal(window))
        for row, begins in enumerate(self.begins):
            lengths = [end - begin for begin, end in pairwise((*begins, self.length))]
            tokens = slice(row * self.length, (row + 1) * self.length)
            call.add(tokens, tokens, lengths, lengths)
        return [call]

    def over_gathered(self, window: int | None, rank: int, size: int) -> list[Call]:
        """Return the calls over the keys of full rows: one for this rank's head chunks, and one for its tail chunks.

        Keys are taken from the beginning of the chunk's first document (or of the window of its first query) to the end
        of the chunk. The module's docstring has an example.

        Args:
            window: Number of keys that a query sees, its own included. None: no window.
            rank: The cp rank.
            size: The number of cp ranks.

        Returns:
            Two calls. Their slices of queries are into the tokens of one chunk of each row, [B · c]. Their slices of
            keys are into full rows, [B · S].
        """
        chunk = self.length // (2 * size)
        calls = []
        for index in get_chunk_indices(rank, size):
            start, stop = index * chunk, (index + 1) * chunk
            call = Call(_causal(window))
            for row in range(len(self.begins)):
                documents = list(self._documents_in(row, start, stop))
                query_lengths = [end - max(begin, start) for begin, end in documents]
                key_lengths = [end - begin for begin, end in documents]
                if window is not None:
                    # Only the first document has keys before the chunk.
                    key_lengths[0] = min(key_lengths[0], query_lengths[0] + window - 1)
                queries = _shifted(row * chunk, 0, chunk)
                keys = _shifted(row * self.length, stop - sum(key_lengths), stop)
                call.add(queries, keys, query_lengths, key_lengths)
            calls.append(call)
        return calls

    def in_ring(self, window: int | None, rank: int, size: int) -> list[list[Call]]:
        """Return the calls of a rank's queries over the keys of each rank in a ring, its own first.

        The first call has all queries, each over the keys of its own chunk, so that its output is the first partial
        result. Each other call is for a chunk of queries and an earlier chunk of keys. The only document in both is the
        one that begins before or in the chunk of keys and ends in or after the chunk of queries. Its queries see all of
        its earlier keys, unless there is a window. The module's docstring has an example.

        Args:
            window: Number of keys that a query sees, its own included. None: no window.
            rank: The cp rank.
            size: The number of cp ranks.

        Returns:
            A list of calls for each rank whose keys arrive: this rank, the rank before it, and so on. A list is empty
            if none of the keys is visible. Slices are into the tokens of a rank, [B · 2c].
        """
        chunk = self.length // (2 * size)
        local_chunks = get_chunk_indices(rank, size)
        within_chunks = Call(_causal(window))
        for row in range(len(self.begins)):
            for slot, index in enumerate(local_chunks):
                start, stop = index * chunk, (index + 1) * chunk
                lengths = [end - max(begin, start) for begin, end in self._documents_in(row, start, stop)]
                tokens = _shifted((2 * row + slot) * chunk, 0, chunk)
                within_chunks.add(tokens, tokens, lengths, lengths)
        steps = []
        for distance in range(size):
            calls = [within_chunks] if distance == 0 else []
            source = (rank - distance) % size  # the rank whose keys arrive
            for slot, index in enumerate(local_chunks):
                for key_slot, key_index in enumerate(get_chunk_indices(source, size)):
                    if key_index < index:
                        calls += self._between(window, chunk, (index, slot), (key_index, key_slot))
            steps.append(calls)
        return steps

    def _between(
        self, window: int | None, chunk: int, queries: tuple[int, int], keys: tuple[int, int]
    ) -> Iterable[Call]:
        """Return the calls for the queries of one chunk over the keys of an earlier chunk.

        Without a window, all rows are in one call. With a window, rows may need different values of `left`, and each
        value needs a call.

        Args:
            window: Number of keys that a query sees, its own included. None: no window.
            chunk: Tokens of a chunk.
            queries: Index of the queries' chunk in the row, and 0 or 1: whether it is the first or second of its rank.
            keys: The same for the keys.
        """
        (index, slot), (key_index, key_slot) = queries, keys
        start, key_stop = index * chunk, (key_index + 1) * chunk
        calls: dict[int, Call] = {}  # by `left`, because a call has one window
        for row in range(len(self.begins)):
            begin, end = next(self._documents_in(row, start, start + chunk))  # the first document of the queries
            key_begin = max(begin, key_index * chunk)
            count = end - start  # queries in this document
            left = -1
            if window is not None:
                # Query i of the chunk has index start + i, and sees the last key, key_stop - 1, if i < reach. So only
                # the first `reach` queries see any key.
                reach = window - 1 - (start - key_stop)
                count = min(count, reach)
                key_begin = max(key_begin, start - window + 1)
                # The kernel aligns the last of `count` queries with the last key, so it takes query i for index
                # key_stop - count + i. That is start - key_stop + count less than its own, and so is the window.
                left = reach - count
                if left >= key_stop - key_begin - 1:  # no key is hidden
                    left = -1
            if count <= 0 or key_begin >= key_stop:
                continue
            call = calls.setdefault(left, Call((left, -1)))
            query_slice = _shifted((2 * row + slot) * chunk, 0, count)
            key_slice = _shifted((2 * row + key_slot) * chunk, key_begin - key_index * chunk, chunk)
            call.add(query_slice, key_slice, [count], [key_stop - key_begin])
        return calls.values()

    def _documents_in(self, row: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of the documents of a row that have tokens in [start, stop). `end` is at most `stop`."""
        for begin, end in pairwise((*self.begins[row], self.length)):
            if begin < stop and end > start:
                yield begin, min(end, stop)


def _causal(window: int | None) -> tuple[int, int]:
    """Return the window (left, right) of causal attention. For example, 3 keys, the own one included: (2, 0)."""
    left = -1 if window is None else window - 1
    return left, 0


def _shifted(by: int, start: int, stop: int) -> slice:
    """Return slice(start, stop) moved by an offset."""
    return slice(by + start, by + stop)


def _append(slices: list[slice], new: slice) -> None:
    """Append a slice, or extend the last slice if the new one begins at its end."""
    if slices and slices[-1].stop == new.start:
        new = slice(slices.pop().start, new.stop)
    slices.append(new)
