"""Attention of some queries over one block of keys, forward and backward, with what it takes to merge blocks.

Two ways to compute it: torch's CPU kernel, and plain matrix products for every device. q is [B, H, Q, hd], k and v are
[B, kv, K, hd] with H a multiple of kv, bias is [B or 1, 1, Q, K], 0 or -inf. The softmax is computed in max(float32,
the dtype).
"""

from typing import Protocol

import torch
from torch import Tensor

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Blocks(Protocol):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Softmax average [B, H, Q, hd] and its log-sum-exp [B, H, Q], both in max(float32, the dtype).

        Rows that see no key of the block get 0 and -inf.
        """
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The block's part of the gradients of q, k and v, in their dtypes.

        grad [B, H, Q, hd], out and lse are those of the whole: of the softmax over the keys of all blocks.
        """
        ...


class CpuFlash:
    """torch's CPU kernel, which never holds all scores."""

    def forward(self, q, k, v, bias, scale):
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = _cpu_forward(q, k, v, attn_mask=bias.to(q.dtype), scale=scale)
        # torch says lse 0 for a row without keys.
        return out.to(wide), lse.to(wide).masked_fill(_unseen(bias), float("-inf"))

    def backward(self, grad, q, k, v, out, lse, bias, scale):
        return _cpu_backward(grad, q, k, v, out, lse, 0.0, False, attn_mask=bias.to(q.dtype), scale=scale)


class Products:
    """Plain matrix products, on every device; holds the scores [B, H, Q, K] of a block."""

    def forward(self, q, k, v, bias, scale):
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = _scores(q, k, bias, scale, wide)
        lse = torch.logsumexp(scores, -1)
        weights = (scores - lse.masked_fill(_unseen(bias), 0.0)[..., None]).exp()
        return torch.matmul(weights, _for_heads(v, q).to(wide)), lse

    def backward(self, grad, q, k, v, out, lse, bias, scale):
        wide = lse.dtype
        grad, out = grad.to(wide), out.to(wide)
        weights = (_scores(q, k, bias, scale, wide) - lse[..., None]).exp()  # [B, H, Q, K]
        weight_grad = torch.matmul(grad, _for_heads(v, q).to(wide).transpose(-1, -2))
        score_grad = weights * (weight_grad - (grad * out).sum(-1, keepdim=True)) * scale
        q_grad = torch.matmul(score_grad, _for_heads(k, q).to(wide))
        k_grad = torch.matmul(score_grad.transpose(-1, -2), q.to(wide))
        v_grad = torch.matmul(weights.transpose(-1, -2), grad)
        return q_grad.to(q.dtype), _to_key_heads(k_grad, k), _to_key_heads(v_grad, v)


def blocks_for(device: torch.device) -> Blocks:
    """What computes blocks on `device`."""
    return CpuFlash() if device.type == "cpu" else Products()


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial softmax averages [B, H, Q, hd] over different keys, and their log-sum-exp [B, H, Q], as one: weights
    are their shares of the partition function."""
    total = torch.logaddexp(lse, block_lse)
    # A row that has seen no key yet in either has -inf in both: its share is 0, not NaN.
    shares = [torch.where(part == float("-inf"), 0.0, (part - total).exp())[..., None] for part in (lse, block_lse)]
    return out * shares[0] + block_out * shares[1], total


def _unseen(bias: Tensor) -> Tensor:
    """[B or 1, 1, Q]: queries that see no key of the block."""
    return (bias == float("-inf")).all(-1)


def _scores(q: Tensor, k: Tensor, bias: Tensor, scale: float, wide: torch.dtype) -> Tensor:
    return torch.matmul(q.to(wide), _for_heads(k, q).to(wide).transpose(-1, -2)) * scale + bias.to(wide)


def _for_heads(kv: Tensor, q: Tensor) -> Tensor:
    """[B, kv, K, hd] → [B, H, K, hd]: each key head for the query heads that read it."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _to_key_heads(grad: Tensor, kv: Tensor) -> Tensor:
    return grad.unflatten(1, (kv.shape[1], -1)).sum(2).to(kv.dtype)
