"""Rows in which sequences share their common beginning, and the variable-length calls that compute them.

A row is a forest of nodes in depth-first preorder. A node is a run of tokens, for example a prompt, or one of its
completions. A token sees the tokens of its own node up to itself, and all tokens of the ancestors of its node.
"""

from collections.abc import Sequence
from typing import NamedTuple


class SplitNodes(NamedTuple):
    """The nodes of a row, cut into pieces for the chunks of a context-parallel row.

    Attributes:
        pieces: Number of tokens of each node in each chunk: pieces[chunk][node].
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
