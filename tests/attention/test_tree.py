"""Rows in which sequences share their common beginning."""

import pytest

from dtrain.attention.tree import split_nodes


@pytest.mark.parametrize("num_chunks", [2, 4, 6])
@pytest.mark.parametrize("node_lengths", [[1], [5, 3, 2], [7, 1, 1, 1, 12, 4], [3, 3, 3, 3, 3, 3, 3]])
def test_every_chunk_has_the_same_share_of_every_node(node_lengths, num_chunks):
    """Pieces of a node, and chunks, differ by at most one token, and no token is lost."""
    pieces, chunk_length = split_nodes(node_lengths, num_chunks)
    assert [sum(of_node) for of_node in zip(*pieces, strict=True)] == node_lengths
    for of_node in zip(*pieces, strict=True):
        assert max(of_node) - min(of_node) <= 1
    chunk_sizes = [sum(of_chunk) for of_chunk in pieces]
    assert chunk_length - 1 <= min(chunk_sizes) <= max(chunk_sizes) == chunk_length
