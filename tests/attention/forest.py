"""Rows with shared beginnings for tests: their streams, and attention sequence by sequence without any sharing."""

import random
from itertools import accumulate
from typing import NamedTuple

import torch

from dtrain.attention.tree import split_nodes
from tests.attention.dense import attention


class Forest(NamedTuple):
    """Nodes in preorder: their lengths, and the index of each one's parent, or -1."""

    lengths: list[int]
    parents: list[int]

    def path(self, node):
        """The nodes from the root to `node`."""
        nodes = []
        while node >= 0:
            nodes.insert(0, node)
            node = self.parents[node]
        return nodes

    def last(self, node):
        """The last node of the subtree of `node`."""
        return max(other for other in range(len(self.lengths)) if node in self.path(other))

    def streams(self, padding=0):
        """position_ids, seq_ids and last_seq_ids, [1, T] each, in preorder with padding at the end."""
        positions, nodes, last = [], [], []
        for node, length in enumerate(self.lengths):
            start = sum(self.lengths[other] for other in self.path(node)[:-1])
            positions += range(start, start + length)
            nodes += [node] * length
            last += [self.last(node)] * length
        rows = [positions + [0] * padding, nodes + [-1] * padding, last + [-1] * padding]
        return [torch.tensor([row]) for row in rows]

    def tokens_of_path(self, node):
        """The tokens, in preorder, of the sequence from the root to the end of `node`."""
        starts = list(accumulate(self.lengths, initial=0))
        return torch.cat([torch.arange(starts[other], starts[other + 1]) for other in self.path(node)])

    def in_chunks(self, num_chunks):
        """For each place of the row under context parallel, the index of its token in preorder, -1 for padding."""
        pieces, chunk_length = split_nodes(self.lengths, num_chunks)
        next_token = list(accumulate(self.lengths, initial=0))[:-1]
        order = []
        for of_chunk in pieces:
            chunk = []
            for node, length in enumerate(of_chunk):
                chunk += range(next_token[node], next_token[node] + length)
                next_token[node] += length
            order += chunk + [-1] * (chunk_length - len(chunk))
        return torch.tensor(order)

    def attend(self, q, k, v, window, scale, sinks=None):
        """Attention of each node's tokens at the end of the sequence from the root to it, [1, T, H, hd_v] float64."""
        outputs = []
        for node, length in enumerate(self.lengths):
            tokens = self.tokens_of_path(node)
            distance = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))
            seen = (distance >= 0) & (distance < (window or 10**9))
            sequence = [tensor[:, tokens] for tensor in (q, k, v)]
            outputs.append(attention(*sequence, seen[None], scale, sinks)[:, -length:])
        return torch.cat(outputs, 1)


FORESTS = {
    "a prompt with three completions": Forest([37, 12, 1, 20], [-1, 0, 0, 0]),
    "three levels, two trees": Forest([11, 5, 3, 9, 2, 14, 6, 4, 30, 7, 8], [-1, 0, 1, 2, 2, 0, -1, 6, -1, 8, 8]),
    "documents without children": Forest([5, 9, 1], [-1, -1, -1]),
    "a long row": Forest([150, 40, 33, 64, 90, 17], [-1, 0, 0, -1, 3, 3]),
    "a chain": Forest([4, 3, 2, 1], [-1, 0, 1, 2]),
}


def drawn(seed):
    """A forest of any shape."""
    draw = random.Random(seed)
    lengths, parents, path = [], [], []
    for node in range(draw.randint(1, 9)):
        del path[draw.randint(0, len(path)) :]
        lengths.append(draw.choice([1, 2, draw.randint(1, 9), draw.randint(1, 40)]))
        parents.append(path[-1] if path else -1)
        path.append(node)
    return Forest(lengths, parents)
