"""Linear attention token by token, each document by itself: what the tests compare with. No code of dtrain's."""

from typing import NamedTuple

import torch
from torch import Tensor


class Sizes(NamedTuple):
    key_heads: int = 2
    value_heads: int = 4
    key: int = 5
    value: int = 3
    width: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key + self.value_heads * self.value


def heads(x: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """[.., C] after the convolution -> q, k [.., Hk, K], v [.., Hv, V]"""
    keys = sizes.key_heads * sizes.key
    q, k, v = x.split([keys, keys, sizes.value_heads * sizes.value], -1)
    return (
        q.unflatten(-1, (-1, sizes.key)),
        k.unflatten(-1, (-1, sizes.key)),
        v.unflatten(-1, (-1, sizes.value)),
    )


def inputs(rows: int, length: int, sizes: Sizes, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """x [B, S, C], weight [C, W], g and beta [B, S, Hv], some decays strong and some almost none."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    x, weight = normal(rows, length, sizes.channels), normal(sizes.channels, sizes.width)
    g = -torch.exp(2 * normal(rows, length, sizes.value_heads) - 1.5)
    beta = normal(rows, length, sizes.value_heads).sigmoid()
    return [one.to(dtype) for one in (x, weight, g, beta)]


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, C] of one document, weight [C, W]"""
    width = weight.shape[1]
    padded = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
    return torch.nn.functional.silu(sum(padded[at : at + len(x)] * weight[:, at] for at in range(width)))


def recurred(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A document, or several of one length: q, k [.., n, Hk, K], v [.., n, Hv, V], g, beta [.., n, Hv] -> outputs as v,
    and the state [.., Hv, K, V], which goes on from `state`"""
    repeats = v.shape[-2] // k.shape[-2]
    q, k = ((x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)).repeat_interleave(repeats, -2) for x in (q, k))
    out = []
    if state is None:
        state = v.new_zeros(*v.shape[:-3], v.shape[-2], k.shape[-1], v.shape[-1])
    tokens = *(x.unbind(-3) for x in (q, k, v)), *(x.unbind(-2) for x in (g, beta))
    for of_q, of_k, of_v, of_g, of_beta in zip(*tokens, strict=True):
        state = state * of_g.exp()[..., None, None]
        predicted = torch.einsum("...hk,...hkv->...hv", of_k, state)
        state = state + torch.einsum("...hk,...hv->...hkv", of_k, (of_v - predicted) * of_beta[..., None])
        out.append(torch.einsum("...hk,...hkv->...hv", of_q, state) * q.shape[-1] ** -0.5)
    return torch.stack(out, -3), state


def alone(
    x: Tensor, weight: Tensor, g: Tensor, beta: Tensor, documents: Tensor, sizes: Sizes
) -> tuple[Tensor, list[Tensor]]:
    """Rows [B, S, ..] with documents [B, S] -> [B, S, Hv, V], zeros on padding, and the last state of each document."""
    rows, states = [], []
    for row, ids in enumerate(documents):
        parts = []
        for one, count in zip(*(found.tolist() for found in ids.unique_consecutive(return_counts=True)), strict=True):
            start = sum(map(len, parts))
            at = slice(start, start + count)
            if one < 0:
                parts.append(x.new_zeros(count, sizes.value_heads, sizes.value))
                continue
            out, state = recurred(*heads(convolved(x[row, at], weight), sizes), g[row, at], beta[row, at])
            parts.append(out)
            states.append(state)
        rows.append(torch.cat(parts))
    return torch.stack(rows), states


def packed(lengths: tuple[int, ...], padding: int = 0) -> Tensor:
    """[1, S]: ids of documents of these lengths, and padding behind them."""
    ids = [torch.full((count,), one) for one, count in enumerate(lengths)]
    return torch.cat([*ids, torch.full((padding,), -1)])[None]
