"""Attention of a few queries to some of their keys by products, and the join of such parts."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.attention.blocks import CpuFlash


class Part(NamedTuple):
    """Attention over some of the keys: Σ w·v, Σ w [..., 1] and the largest score m [..., 1], w = exp(score − m)."""

    total: Tensor
    weight: Tensor
    most: Tensor


def partial_over(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Part:
    """Return attention over these keys: q [B, kv, m, hd], scaled; k, v [B, kv, L, hd]; bias [B, 1, 1 or m, L]. In
    max(float32, the dtype); products of half precision are summed in float32, as the fused kernels do.
    """
    half = q.dtype in (torch.bfloat16, torch.float16)
    lowest = torch.finfo(torch.float32 if half else q.dtype).min
    if half and q.device.type == "cpu":
        out, lse = CpuFlash().forward(q, k, v, bias.expand(-1, 1, q.shape[2], -1), 1.0)
        return Part(out, torch.ones_like(lse)[..., None], lse.clamp(min=lowest)[..., None])
    scores = _products(q, k.transpose(-1, -2), half).add_(bias)
    most = scores.amax(-1, keepdim=True).clamp_(min=lowest)  # -inf where nothing is seen
    weights = scores.sub_(most).exp_()
    return Part(_products(weights.to(v.dtype), v, half), weights.sum(-1, keepdim=True), most)


def _products(a: Tensor, b: Tensor, half: bool) -> Tensor:
    """Return a [B, kv, m, x] @ b [B, kv, x, n], in float32 where they are of half precision."""
    flat = a.flatten(0, 1), b.flatten(0, 1)
    return (torch.bmm(*flat, out_dtype=torch.float32) if half else torch.bmm(*flat)).unflatten(0, a.shape[:2])


def join(first: Part, second: Part) -> Tensor:
    """Return the softmax average over the keys of both parts."""
    most = torch.maximum(first.most, second.most)
    shares = (first.most - most).exp_(), (second.most - most).exp_()
    weight = first.weight * shares[0] + second.weight * shares[1]
    return (first.total * shares[0]).addcmul_(second.total, shares[1]).div_(weight)


def with_sinks(part: Part, sinks: Tensor) -> Part:
    """Return part [R, kv, rep, ..] with one more key of every query, of score `sinks` [kv, rep, 1] and value zero."""
    sinks = sinks.to(part.most.dtype)
    most = torch.maximum(part.most, sinks)
    share = (part.most - most).exp_()
    return Part(part.total * share, part.weight * share + (sinks - most).exp_(), most)


def cat(parts: Sequence[Part]) -> Part:
    return parts[0] if len(parts) == 1 else Part(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
