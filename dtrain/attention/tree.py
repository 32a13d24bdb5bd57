"""Rows in which sequences share their common beginning, and the variable-length calls that compute them.

A row is a forest of nodes in depth-first preorder. A node is a run of tokens, for example a prompt, or one of its
completions. A token sees the tokens of its own node up to itself, and all tokens of the ancestors of its node.

Example: a prompt of 4 tokens with completions of 2, 3 and 1 tokens. The row has 10 tokens, and three documents that
each repeat the prompt would have 18:

    node          0        1    2      3
    parent       -1        0    0      0
    tokens       0 1 2 3   4 5  6 7 8  9
    positions    0 1 2 3   4 5  4 5 6  4

Two calls compute it without a mask. All queries first see their own node. The completions then see the prompt, which
is one segment, so that its keys are read once for all completions:

    call 1    queries 0-3 | 4 5 | 6-8 | 9    over keys 0-3 | 4 5 | 6-8 | 9    lengths 4 2 3 1 over 4 2 3 1    (-1, 0)
    call 2    queries 4-9                    over keys 0-3                    length 6 over 4                 (-1, -1)

`segments.VarlenBlocks` merges the two results by their log-sum-exp. In a deeper forest there is one call more for each
depth d: the queries below the nodes of depth d, over the keys of these nodes.

With a window of 3 there is one call. A segment has the keys of its node after those of its ancestors that are within
the window of its first query, which are copied for each node:

    call 1    queries 0-3 | 4 5 | 6-8 | 9    over keys 0-3 | 2-5 | 2 3 6 7 8 | 2 3 9    lengths 4 2 3 1 over 4 4 5 3

Under context parallel, every node is cut into one piece for each chunk of the row (`split_nodes`), so that the ranks
have the same work. A chunk has its pieces in the order of the nodes. With cp = 2 the row of the example has 4 chunks of
up to 3 tokens, here with the numbers of the tokens above and `-` for padding. Rank 0 has the chunks 0 and 3:

    chunk 0    0 4 6        chunk 1    1 5 9        chunk 2    2 7 -        chunk 3    3 8 -
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.attention.packing import Call
from dtrain.parallel.context.batch import get_chunk_indices


class SplitNodes(NamedTuple):
    """The nodes of a row, cut into pieces for the chunks of a context-parallel row.

    Attributes:
        pieces: Number of tokens of each node in each chunk: `pieces[chunk][node]`.
        chunk_length: Number of tokens of every chunk, with its padding at the end.
    """

    pieces: list[list[int]]
    chunk_length: int


def split_nodes(node_lengths: Sequence[int], num_chunks: int) -> SplitNodes:
    """Cut every node into one piece per chunk, so that each chunk has the same share of every node.

    Piece c of a node is c-th in the order of the node's tokens. The pieces of a node differ by at most one token, and
    so do the chunks: the chunks that receive the remainder of a node follow those that received the remainder of the
    node before. A node that has fewer tokens than there are chunks has empty pieces.

    Args:
        node_lengths: Number of tokens of each node of a row.
        num_chunks: Number of chunks, twice the context-parallel size.

    Returns:
        The pieces, and the length of a chunk: that of the largest one. So a chunk has at most one token of padding.

    Example:
        >>> split_nodes([5, 3, 2], num_chunks=4)
        SplitNodes(pieces=[[2, 0, 1], [1, 1, 1], [1, 1, 0], [1, 1, 0]], chunk_length=3)
    """
    pieces: list[list[int]] = [[] for _ in range(num_chunks)]
    next_chunk = 0  # the chunk that receives the next token of a remainder
    for length in node_lengths:
        size, remainder = divmod(length, num_chunks)
        for chunk in range(num_chunks):
            has_extra_token = (chunk - next_chunk) % num_chunks < remainder
            pieces[chunk].append(size + has_extra_token)
        next_chunk = (next_chunk + remainder) % num_chunks
    chunk_length = -(-sum(node_lengths) // num_chunks)
    return SplitNodes(pieces, chunk_length)


class _Piece(NamedTuple):
    """Consecutive tokens of one node in one chunk.

    Attributes:
        node: Index of the node.
        begin: Number of the node's tokens in earlier chunks.
        length: Number of tokens.
        offset: Index of the first token in the chunk.
    """

    node: int
    begin: int
    length: int
    offset: int


@dataclass(frozen=True)
class TreePacking:
    """The nodes of one row with shared beginnings, on the host. It has the role of a `packing.Packing`.

    Attributes:
        parents: Index of each node's parent, -1 for a root.
        pieces: Number of tokens of each node in each chunk: `pieces[chunk][node]`. Without context parallel the row is
            one chunk.
        chunk_length: Number of tokens of each chunk, with its padding at the end.
    """

    parents: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...]
    chunk_length: int

    @classmethod
    def of(
        cls, node_lengths: Sequence[int], parents: Sequence[int], num_chunks: int = 1, chunk_length: int | None = None
    ) -> "TreePacking":
        """Return the packing of a row of nodes in preorder.

        Args:
            node_lengths: Number of tokens of each node.
            parents: Index of each node's parent, -1 for a root.
            num_chunks: 1 without context parallel, otherwise twice the context-parallel size. The nodes are cut as by
                `split_nodes`.
            chunk_length: Number of tokens of a chunk with its padding. None: that of `split_nodes`.

        Raises:
            ValueError: If a node is empty, the nodes are not in preorder, or the chunks are too short.

        Example:
            >>> TreePacking.of([4, 2, 3, 1], [-1, 0, 0, 0])
            TreePacking(parents=(-1, 0, 0, 0), pieces=((4, 2, 3, 1),), chunk_length=10)
        """
        path: list[int] = []  # the node before, and its ancestors
        for node, (length, parent) in enumerate(zip(node_lengths, parents, strict=True)):
            if length < 1:
                raise ValueError(f"node {node} has {length} tokens. A node needs at least one token.")
            while path and path[-1] != parent:
                path.pop()
            if parent != -1 and not path:
                raise ValueError(f"node {node} is not behind its parent {parent} in preorder: parents={list(parents)}.")
            path.append(node)
        pieces, shortest_length = split_nodes(node_lengths, num_chunks)
        if chunk_length is None:
            chunk_length = shortest_length
        if chunk_length < shortest_length:
            raise ValueError(
                f"a chunk of {chunk_length} tokens is too short for {shortest_length} tokens of the nodes."
            )
        return cls(tuple(parents), tuple(tuple(of_chunk) for of_chunk in pieces), chunk_length)

    @property
    def is_tree(self) -> bool:
        """True, other than in a `packing.Packing`."""
        return True

    @property
    def length(self) -> int:
        """Number of tokens of the full row, with its padding."""
        return self.chunk_length * len(self.pieces)

    def streams(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the positions, the nodes and the last nodes of the row's tokens, as `MaskStreams` has them.

        Returns:
            int64 [1, S] each. Padding has the position 0 and the nodes -1.

        Example:
            >>> streams = TreePacking.of([2, 2, 1], [-1, 0, 0]).streams()
            >>> [stream.tolist() for stream in streams]
            [[[0, 1, 2, 3, 2]], [[0, 0, 1, 1, 2]], [[2, 2, 1, 1, 2]]]
        """
        first_positions: list[int] = []  # of each node
        for parent in self.parents:
            first_positions.append(first_positions[parent] + self._node_lengths[parent] if parent >= 0 else 0)
        positions = torch.zeros(1, self.length, dtype=torch.int64)
        nodes, last_nodes = torch.full_like(positions, -1), torch.full_like(positions, -1)
        for chunk in range(len(self.pieces)):
            for piece in self._pieces_of(chunk):
                tokens = self._local_slice(chunk, piece)  # slices of the full row, because all chunks count
                first = first_positions[piece.node] + piece.begin
                positions[0, tokens] = torch.arange(first, first + piece.length)
                nodes[0, tokens] = piece.node
                last_nodes[0, tokens] = self._last_nodes[piece.node]
        return positions, nodes, last_nodes

    def of_rows(self, window: int | None) -> list[Call]:
        """Return the calls of a rank that has the full row.

        Args:
            window: Number of keys that a query sees, its own included. None: no window.

        Example:
            >>> own, of_ancestors = TreePacking.of([4, 2, 3, 1], [-1, 0, 0, 0]).of_rows(window=None)
            >>> own.query_lengths, own.key_lengths, own.window
            ([4, 2, 3, 1], [4, 2, 3, 1], (-1, 0))
            >>> of_ancestors.queries, of_ancestors.keys, of_ancestors.window
            ([slice(4, 10, None)], [slice(0, 4, None)], (-1, -1))
        """
        return self._over_full_row(window, [0])

    def in_ring(self, window: int | None, rank: int, size: int) -> list[list[Call]]:
        """Return the calls of a rank's queries over the keys of each rank in a ring, its own first.

        Args:
            window: None. There are no calls under a window.
            rank: The cp rank.
            size: The number of cp ranks.

        Returns:
            A list of calls for each rank whose keys arrive: this rank, the rank before it, and so on. The first call of
            the first list has all queries. Slices are into the tokens of a rank, [2c].

        Raises:
            NotImplementedError: If there is a window.
        """
        if window is not None:
            raise NotImplementedError(f"a ring has no calls for a window of {window} over shared beginnings")
        chunks = get_chunk_indices(rank, size)
        own = Call((-1, 0))
        for slot, chunk in enumerate(chunks):
            for piece in self._pieces_of(chunk):
                tokens = self._local_slice(slot, piece)
                own.add_segment([tokens], [tokens])
            if sum(self.pieces[chunk]) < self.chunk_length:
                padding = slice(slot * self.chunk_length + sum(self.pieces[chunk]), (slot + 1) * self.chunk_length)
                own.add_segment([padding], [padding])
        steps = []
        for distance in range(size):
            source = (rank - distance) % size  # the rank whose keys arrive
            calls = [own] if distance == 0 else []
            candidates = [self._earlier_pieces(chunks, get_chunk_indices(source, size))]
            for nodes in self._inner_nodes_by_depth:
                candidates.append(self._ancestor_pieces(nodes, chunks, get_chunk_indices(source, size)))
            calls += [call for call in candidates if call.query_lengths]
            steps.append(calls)
        return steps

    def _earlier_pieces(self, chunks: Sequence[int], key_chunks: Sequence[int]) -> Call:
        """Return the call of the pieces in `chunks` over the pieces of the same nodes in those `key_chunks` before."""
        call = Call((-1, -1))
        for slot, chunk in enumerate(chunks):
            for piece in self._pieces_of(chunk):
                keys = self._local_pieces(piece.node, key_chunks, before=chunk)
                if keys:
                    call.add_segment([self._local_slice(slot, piece)], keys)
        return call

    def _ancestor_pieces(self, nodes: Sequence[int], chunks: Sequence[int], key_chunks: Sequence[int]) -> Call:
        """Return the call of the descendants of nodes, in `chunks`, over the pieces of these nodes in `key_chunks`."""
        call = Call((-1, -1))
        for node in nodes:
            queries = self._below(node, chunks)
            keys = self._local_pieces(node, key_chunks)
            if queries and keys:
                call.add_segment(queries, keys)
        return call

    def _local_pieces(self, node: int, chunks: Sequence[int], before: int | None = None) -> list[slice]:
        """Return the slices of a rank's tokens that are in a node.

        Args:
            node: Index of the node.
            chunks: The chunks of the rank.
            before: Return only slices of chunks before this one. None: of all chunks.
        """
        slices = []
        for slot, chunk in enumerate(chunks):
            length = self.pieces[chunk][node]
            if length and (before is None or chunk < before):
                start = slot * self.chunk_length + self._offsets[chunk][node]
                slices.append(slice(start, start + length))
        return slices

    def over_gathered(self, window: int | None, rank: int, size: int) -> list[Call]:
        """Return the calls of a rank's two chunks over the keys of the full row.

        Args:
            window: Number of keys that a query sees, its own included. None: no window.
            rank: The cp rank.
            size: The number of cp ranks.

        Returns:
            Calls, of which the first has all queries. Slices of queries are into the tokens of a rank, [2c]. Slices of
            keys are into the full row, [S].
        """
        return self._over_full_row(window, get_chunk_indices(rank, size))

    def _over_full_row(self, window: int | None, chunks: Sequence[int]) -> list[Call]:
        """Return the calls of the queries of some chunks over the keys of the full row."""
        if window is not None and window < self._longest_path:
            return [self._own_and_ancestors_in_window(window, chunks)]
        own = Call((-1, 0))
        for slot, chunk in enumerate(chunks):
            for piece in self._pieces_of(chunk):
                keys = self._slices_of(piece.node, 0, piece.begin + piece.length)
                own.add_segment([self._local_slice(slot, piece)], keys)
            self._add_padding(own, slot, chunk)
        calls = [own]
        for nodes in self._inner_nodes_by_depth:
            call = Call((-1, -1))
            for node in nodes:
                queries = self._below(node, chunks)
                if queries:
                    call.add_segment(queries, self._slices_of(node, 0, self._node_lengths[node]))
            if call.query_lengths:
                calls.append(call)
        return calls

    def _own_and_ancestors_in_window(self, window: int, chunks: Sequence[int]) -> Call:
        """Return the call of the queries of some chunks over the keys of the full row that a window shows."""
        call = Call((window - 1, 0))
        for slot, chunk in enumerate(chunks):
            for piece in self._pieces_of(chunk):
                keys = self._slices_of(piece.node, max(0, piece.begin - window + 1), piece.begin + piece.length)
                missing = window - 1 - piece.begin  # keys of ancestors that the first query of the piece sees
                ancestor = self.parents[piece.node]
                while missing > 0 and ancestor >= 0:
                    length = self._node_lengths[ancestor]
                    keys = self._slices_of(ancestor, max(0, length - missing), length) + keys
                    missing -= length
                    ancestor = self.parents[ancestor]
                call.add_segment([self._local_slice(slot, piece)], keys)
            self._add_padding(call, slot, chunk)
        return call

    def _add_padding(self, call: Call, slot: int, chunk: int) -> None:
        """Add the padding of a chunk as a segment of its own, so that the call has all queries of the chunk."""
        start = sum(self.pieces[chunk])
        if start < self.chunk_length:
            queries = slice(slot * self.chunk_length + start, (slot + 1) * self.chunk_length)
            keys = slice(chunk * self.chunk_length + start, (chunk + 1) * self.chunk_length)
            call.add_segment([queries], [keys])

    def _pieces_of(self, chunk: int) -> Iterator[_Piece]:
        """Yield the pieces of a chunk that have tokens."""
        offset = 0
        for node, length in enumerate(self.pieces[chunk]):
            if length:
                yield _Piece(node, self._begins[chunk][node], length, offset)
            offset += length

    def _local_slice(self, slot: int, piece: _Piece) -> slice:
        """Return the slice of a piece in the tokens of a rank, whose chunk number `slot` contains it."""
        start = slot * self.chunk_length + piece.offset
        return slice(start, start + piece.length)

    def _slices_of(self, node: int, begin: int, end: int) -> list[slice]:
        """Return the slices of the full row that contain the tokens `begin` to `end` of a node."""
        slices = []
        for chunk, of_chunk in enumerate(self.pieces):
            first = max(begin, self._begins[chunk][node])
            last = min(end, self._begins[chunk][node] + of_chunk[node])
            if first < last:
                # The index in the row is that in the node plus `shift`.
                shift = chunk * self.chunk_length + self._offsets[chunk][node] - self._begins[chunk][node]
                slices.append(slice(first + shift, last + shift))
        return slices

    def _below(self, node: int, chunks: Sequence[int]) -> list[slice]:
        """Return the slices of a rank's tokens that are in the descendants of a node. They are contiguous in a chunk.

        Args:
            node: Index of the node.
            chunks: The chunks of the rank.
        """
        slices = []
        for slot, chunk in enumerate(chunks):
            offsets = self._offsets[chunk]
            start, stop = offsets[node + 1], offsets[self._last_nodes[node] + 1]
            if start < stop:
                slices.append(slice(slot * self.chunk_length + start, slot * self.chunk_length + stop))
        return slices

    @cached_property
    def _node_lengths(self) -> list[int]:
        """Number of tokens of each node in all chunks."""
        return [sum(of_node) for of_node in zip(*self.pieces, strict=True)]

    @cached_property
    def _begins(self) -> list[list[int]]:
        """Number of tokens of each node before each chunk: `[chunk][node]`."""
        begins = [[0] * len(self.parents)]
        for of_chunk in self.pieces[:-1]:
            begins.append([begin + length for begin, length in zip(begins[-1], of_chunk, strict=True)])
        return begins

    @cached_property
    def _offsets(self) -> list[list[int]]:
        """Index in its chunk at which each piece begins, and the end of the last piece: `[chunk][node]`."""
        return [list(accumulate(of_chunk, initial=0)) for of_chunk in self.pieces]

    @cached_property
    def _last_nodes(self) -> list[int]:
        """Index of the last node of each node's subtree, its own without children."""
        last_nodes = list(range(len(self.parents)))
        for node in reversed(range(len(self.parents))):
            parent = self.parents[node]
            if parent >= 0:
                last_nodes[parent] = max(last_nodes[parent], last_nodes[node])
        return last_nodes

    @cached_property
    def _inner_nodes_by_depth(self) -> list[list[int]]:
        """The nodes that have children, by their depth: roots first."""
        depths: list[int] = []
        by_depth: list[list[int]] = []
        for node, parent in enumerate(self.parents):
            depth = 0 if parent < 0 else depths[parent] + 1
            depths.append(depth)
            if self._last_nodes[node] == node:
                continue
            while len(by_depth) <= depth:
                by_depth.append([])
            by_depth[depth].append(node)
        return by_depth

    @cached_property
    def _longest_path(self) -> int:
        """Number of tokens from the first one of a root to the last one of a leaf, at most."""
        lengths: list[int] = []
        for node, parent in enumerate(self.parents):
            lengths.append(self._node_lengths[node] + (lengths[parent] if parent >= 0 else 0))
        return max(lengths, default=0)
