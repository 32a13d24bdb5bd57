"""Attention by its definition: all scores, in float64, for tests to compare with."""

import torch


def visible(positions, documents, window):
    """[B, S, S] bool, as of `attention.kernels.Visibility`: same document, at or before, within the window."""
    distance = positions[:, :, None] - positions[:, None, :]
    seen = (distance >= 0) & (distance < (window or 10**9))
    return seen if documents is None else seen & (documents[:, :, None] == documents[:, None, :])


def attention(q, k, v, seen, scale, sinks=None):
    """q [B, S, H, hd], k [B, S, kv, hd], v [B, S, kv, hd_v], seen [B, S, S], sinks [H] → [B, S, H, hd_v]."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2).double() for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k) * scale
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., : k.shape[1]], v)


def tensors(rows, length, heads, kv_heads, size, dtype=torch.float64, seed=0, value_size=None):
    """q, k, v and a gradient of the output, random; value_size: of a head of v, if it is another one."""
    generator = torch.Generator().manual_seed(seed)
    value_size = value_size or size
    shapes = [(heads, size), (kv_heads, size), (kv_heads, value_size), (heads, value_size)]
    return [torch.randn(rows, length, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def packed_rows(rows, length):
    """positions and documents [rows, length]: documents of other lengths in each row, the last one padding (-1)."""
    positions, documents = torch.zeros(2, rows, length, dtype=torch.int64)
    for row in range(rows):
        start, document = 0, 0
        while start < length:
            end = min(length, start + 3 + 4 * row + 2 * document)
            positions[row, start:end] = torch.arange(end - start)
            documents[row, start:end] = document if end < length else -1
            start, document = end, document + 1
    return positions, documents
