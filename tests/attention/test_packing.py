"""The attention calls of a context-parallel rank, for any documents, ranks, rows and windows: those of
all ranks, made one after the other, are dense attention and its gradients in float64."""

import random

import pytest
import torch

from dtrain.attention.packing import Packing
from dtrain.attention.varlen import CheckCase, attend_gathered, attend_in_ring
from dtrain.attention.visibility import Visibility
from tests.attention.dense import attention, tensors, visible
from tests.attention.flash import WrittenFlash


def streams(rows, length):
    """positions and documents [B, S] of rows given by the lengths of their documents; what is left is padding."""
    documents = torch.full((len(rows), length), -1)
    positions = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, sizes in enumerate(rows):
        at = 0
        for document, size in enumerate([*sizes, length - sum(sizes)]):
            positions[row, at : at + size] = torch.arange(size)
            documents[row, at : at + size] = document if document < len(sizes) else -1
            at += size
    return positions, documents


def drawn(seed):
    """A case of any kind: (ranks, rows of document lengths, tokens of a row, window)."""
    draw = random.Random(seed)
    size = draw.choice([1, 2, 2, 3, 4, 8])
    length = 2 * size * draw.randint(1, 9)
    rows = []
    for _ in range(draw.randint(1, 3)):
        sizes, left = [], length - draw.choice([0, 0, draw.randint(0, length)])  # padding, of whole pieces too
        while left > 0:
            sizes.append(min(left, draw.choice([1, 2, draw.randint(1, 6), draw.randint(1, length)])))
            left -= sizes[-1]
        rows.append(sizes)
    return size, rows, length, draw.choice([None, None, 1, 2, draw.randint(1, 6), draw.randint(1, 2 * length)])


NAMED = {
    "one document": (4, [[64]], 64, None),
    "one document, a window less than a chunk": (4, [[64]], 64, 3),
    "one document, a window of a chunk": (4, [[64]], 64, 8),
    "one document, a window of a chunk and a token": (4, [[64]], 64, 9),
    "one document, a window of many chunks": (4, [[64]], 64, 30),
    "documents of one token": (3, [[1] * 12], 12, None),
    "two rows that reach unlike far, under a window": (2, [[9, 23], [30]], 32, 6),
    "rows of padding alone": (4, [[], [3]], 32, None),
    "a chunk of one token": (8, [[5, 11]], 16, None),
}


@pytest.mark.trap(
    "a mask of ones, or a cache, switches the borders of packed rows off",
    "huggingface/transformers PR#46634",
    "samples see each other; the loss still falls",
    "dense attention in float64 under the mask of documents",
)
@pytest.mark.parametrize("exchange", [attend_gathered, attend_in_ring])
@pytest.mark.parametrize("case", [*NAMED, *range(60)], ids=str)
def test_the_numbers_of_dense_attention(case, exchange):
    size, rows, length, window = NAMED[case] if case in NAMED else drawn(case)
    positions, documents = streams(rows, length)
    packing = Packing.of(positions, documents)
    heads, kv_heads = [(4, 2), (3, 1), (2, 2)][length % 3]
    q, k, v, grad = tensors(len(rows), length, heads, kv_heads, 4, value_size=[4, 3, 6][length // 3 % 3])
    wide = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = attention(*wide, visible(positions, documents, window), 0.25)
    expected.backward(grad)
    seen = Visibility(length, length, window, rows=len(rows), packing=packing)
    found = exchange(WrittenFlash(), CheckCase(q, k, v, grad, seen, packing, 0.25), size)
    for mine, right in zip(found, [expected.detach(), *(x.grad for x in wide)], strict=True):
        assert (mine - right).abs().max() <= 1e-12 * right.abs().max().clamp(min=1)


def pairs(calls):
    return sum(q * k for call in calls for q, k in zip(call.query_lengths, call.key_lengths, strict=True))


def test_what_is_hidden_costs_nothing():
    """Long rows: the pairs that kernels are told of are at most those that the ranks would see under one whole
    document, even between the ranks; documents and windows leave out the rest; no list grows with the tokens."""
    length, size = 2**17, 8
    whole = [pairs(Packing.one_document_per_row(1, length).over_gathered(None, rank, size)) for rank in range(size)]
    assert len(set(whole)) == 1 and whole[0] == (length // 16) ** 2 * 17
    in_turn = [
        pairs(sum(Packing.one_document_per_row(1, length).in_ring(None, rank, size), [])) for rank in range(size)
    ]
    assert len(set(in_turn)) == 1 and in_turn[0] == whole[0]  # a chunk on itself twice, 15 on those before them
    short = Packing((tuple(range(0, length, 4096)),), length)
    assert all(pairs(sum(short.in_ring(None, rank, size), [])) == 2 * 2 * 4096**2 for rank in range(size))
    under = [pairs(sum(Packing.one_document_per_row(1, length).in_ring(512, rank, size), [])) for rank in range(size)]
    assert max(under) <= 2 * (length // 16) ** 2 + 4 * 512**2
    calls = [call for step in Packing.one_document_per_row(4, length).in_ring(None, 3, size) for call in step]
    assert all(len(call.query_lengths) <= 8 for call in calls) and len(calls) == 1 + 1 + 2 * (size - 1)


def test_what_is_no_packing():
    positions, documents = streams([[5, 7], [12]], 16)
    assert Packing.of(positions, documents) == Packing(((0, 5, 12), (0, 12)), 16)
    assert Packing.of(torch.arange(16)[None] + 3) == Packing.one_document_per_row(1, 16)
    jumps = positions.clone()
    jumps[0, 3:5] += 1
    torn = documents.clone()
    torn[0, 14:] = 0
    assert Packing.of(jumps, documents) is None and Packing.of(positions, torn) is None
    assert Packing.of(positions[:, 2:], documents[:, 2:]) == Packing(((0, 3, 10), (0, 10)), 14)
