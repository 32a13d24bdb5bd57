"""Attention of some queries over one block of keys, forward and backward, with what it takes to merge blocks.

A head may have a sink, a learnt score that takes part in the softmax of every query (Xiao et al., arXiv:2309.17453;
gpt-oss): one more block, of a single key whose value is zero. It is merged as any other, and every backward, which is
told of the whole, is right without knowing of it.

Two ways to compute it: torch's CPU kernel, and plain matrix products for every device. The products hold all scores of
a call, so `MaskedBlocks` hands them a run of queries at a time. q is [B, H, Q, hd], k and v are [B, kv, K, hd] with H a
multiple of kv, bias is [B or 1, 1, Q, K], 0 or -inf. The softmax is computed in max(float32, the dtype).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtrain.attention.visibility import Hidden

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


Partial = tuple[Tensor, Tensor]  # the output of the keys seen so far, and its log-sum-exp; max(float32, the dtype)


class Products:
    """Plain matrix products, on every device; holds the scores [B, H, Q, K] of a block."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Partial:
        """Softmax average [B, H, Q, hd] and its log-sum-exp [B, H, Q], both in max(float32, the dtype).

        Rows that see no key of the block get 0 and -inf.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = _scores(q, k, bias, scale, wide)
        lse = torch.logsumexp(scores, -1)
        weights = (scores - lse.masked_fill(_unseen(bias), 0.0)[..., None]).exp()
        return torch.matmul(weights, _for_heads(v, q).to(wide)), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The block's part of the gradients of q, k and v, in their dtypes.

        grad [B, H, Q, hd], out and lse are those of the whole: of the softmax over the keys of all blocks.
        """
        wide = lse.dtype
        grad, out = grad.to(wide), out.to(wide)
        weights = (_scores(q, k, bias, scale, wide) - lse[..., None]).exp()  # [B, H, Q, K]
        weight_grad = torch.matmul(grad, _for_heads(v, q).to(wide).transpose(-1, -2))
        score_grad = weights * (weight_grad - (grad * out).sum(-1, keepdim=True)) * scale
        q_grad = torch.matmul(score_grad, _for_heads(k, q).to(wide))
        k_grad = torch.matmul(score_grad.transpose(-1, -2), q.to(wide))
        v_grad = torch.matmul(weights.transpose(-1, -2), grad)
        return q_grad.to(q.dtype), _to_key_heads(k_grad, k), _to_key_heads(v_grad, v)


class CpuFlash:
    """torch's CPU kernel, which never holds all scores; methods as those of `Products`."""

    def forward(self, q, k, v, bias, scale):
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = _cpu_forward(q, k, v, attn_mask=bias.to(q.dtype), scale=scale)
        # torch says lse 0 for a row without keys.
        return out.to(wide), lse.to(wide).masked_fill(_unseen(bias), float("-inf"))

    def backward(self, grad, q, k, v, out, lse, bias, scale):
        options = {"dropout_p": 0.0, "is_causal": False, "attn_mask": bias.to(q.dtype), "scale": scale}
        return _cpu_backward(grad, q, k, v, out, lse, **options)


Blocks = Products | CpuFlash


def blocks_for(device: torch.device) -> Blocks:
    """Return the implementation that computes blocks on `device`."""
    return CpuFlash() if device.type == "cpu" else Products()


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial softmax averages [B, H, Q, hd] over different keys, and their log-sum-exp [B, H, Q], as one: weights
    are their shares of the partition function."""
    total = torch.logaddexp(lse, block_lse)
    # A row that has seen no key yet in either has -inf in both: its share is 0, not NaN.
    shares = [torch.where(part == float("-inf"), 0.0, (part - total).exp())[..., None] for part in (lse, block_lse)]
    return out * shares[0] + block_out * shares[1], total


class ByHead(Protocol):
    """Attention to blocks of keys (`MaskedBlocks`, `varlen.VarlenBlocks`), of which only the layout is needed."""

    def by_head(self, out: Tensor) -> Tensor:
        """Return an output, or its gradient, as [.., H, Q, hd] if it is stored in another layout, and the reverse."""


def with_sinks(attention: ByHead, whole: Partial, sinks: Tensor | None) -> Partial:
    """`whole` merged with the sinks [H] of its heads; they may be None."""
    if sinks is None:
        return whole
    out, lse = whole
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return attention.by_head(attention.by_head(out) * (lse - total).exp()[..., None]), total


def sinks_grad(attention: ByHead, grad: Tensor, whole: Partial, sinks: Tensor | None) -> Tensor | None:
    """The gradient of sinks [H], in their dtype; `whole` has them merged in."""
    if sinks is None:
        return None
    out, lse = whole
    along = (attention.by_head(grad).to(lse.dtype) * attention.by_head(out).to(lse.dtype)).sum(-1)  # [.., H, Q]
    shares = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(shares * along).sum(-1).view(-1, len(sinks)).sum(0).to(sinks.dtype)


@dataclass(frozen=True)
class MaskedBlocks:
    """Blocks of keys, kv [2, B, kv, K, hd], under what is hidden of them: a bias, or, where that would be large, what
    it is made of; a run of queries at a time, whose scores take `most` bytes. The log-sum-exp is [B, H, Q]."""

    blocks: Blocks
    scale: float
    most: int = 2**28

    def forward(self, q: Tensor, kv: Tensor, hidden: Hidden, so_far: Partial | None) -> Partial:
        """`so_far`, whose tensors may be written over, merged with the output over this block."""
        partials = [
            self.blocks.forward(q[:, :, run], kv[0, :, :, keys], kv[1, :, :, keys], bias, self.scale)
            for run, keys, bias in self._parts(q, kv, hidden)
        ]
        out, lse = partials[0] if len(partials) == 1 else (torch.cat(parts, 2) for parts in zip(*partials, strict=True))
        return (out, lse) if so_far is None else merge(*so_far, out, lse)

    def backward(
        self, grad: Tensor, q: Tensor, kv: Tensor, whole: Partial, hidden: Hidden, q_grad: Tensor, kv_grad: Tensor
    ) -> None:
        """Adds this block's part to `q_grad` and `kv_grad`; whole: over all blocks, the output in q's dtype and the
        log-sum-exp."""
        for run, keys, bias in self._parts(q, kv, hidden):
            some_grad, some_q, out, lse = (part[:, :, run] for part in (grad, q, *whole))
            k, v = kv[0, :, :, keys], kv[1, :, :, keys]
            block_q, *block_kv = self.blocks.backward(some_grad, some_q, k, v, out, lse, bias, self.scale)
            q_grad[:, :, run] += block_q
            kv_grad[:, :, :, keys] += torch.stack(block_kv)

    def _parts(self, q: Tensor, kv: Tensor, hidden: Hidden) -> Iterator[tuple[slice, slice, Tensor]]:
        """Runs of queries, the keys that they may see, and the bias of the two."""
        wide = torch.promote_types(q.dtype, torch.float32)
        row_bytes = q.shape[0] * q.shape[1] * kv.shape[3] * wide.itemsize
        if isinstance(hidden, Tensor):
            size = max(1, self.most // row_bytes)
            for run in (slice(start, start + size) for start in range(0, q.shape[2], size)):
                yield run, slice(0, kv.shape[3]), hidden[:, :, run]
            return
        for run in hidden.runs(row_bytes, self.most):
            keys = hidden.reach(run)
            yield run, keys, hidden.bias(run, q.dtype, q.device)[..., keys]

    def by_head(self, out: Tensor) -> Tensor:
        """The output, or its gradient, as [.., H, Q, hd], where the log-sum-exp is [.., H, Q]: as it is."""
        return out


class BlockByBlock(torch.autograd.Function):
    """Attention over blocks of keys, one after the other: `apply(q, kv, steps, ring, attention, sinks)` in q's dtype.

    q and kv as `attention` has them; sinks [H] or None; steps: what of each block is seen, None or empty:
    nothing. ring: what brings the blocks of other ranks, this one's first; None: there is one block. Nothing is held of
    size queries × keys."""

    @staticmethod
    def forward(ctx, q, kv, steps, ring, attention, sinks):
        whole: Any = None
        for held, step in zip([kv] if ring is None else ring.around(kv), steps, strict=True):
            if step is not None:
                whole = attention.forward(q, held, step, whole)
        out, lse = with_sinks(attention, whole, sinks)
        ctx.save_for_backward(q, kv, out.to(q.dtype), lse, sinks)
        ctx.steps, ctx.ring, ctx.attention = steps, ring, attention
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, kv, out, lse, sinks = ctx.saved_tensors
        grad = grad.contiguous()
        q_grad, kv_grad = (torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (q, kv))
        incoming = None
        for held, step in zip([kv] if ctx.ring is None else ctx.ring.around(kv), ctx.steps, strict=True):
            if incoming is not None:  # the sum before is on its way
                kv_grad = torch.zeros_like(kv_grad)
            if step is not None:
                ctx.attention.backward(grad, q, held, (out, lse), step, q_grad, kv_grad)
            if ctx.ring is not None:  # the gradient follows its keys: it travels while the next block is computed
                if incoming is not None:
                    kv_grad += incoming.wait()
                incoming = ctx.ring.pass_on(kv_grad)
        if incoming is not None:  # the last exchange brings it home
            kv_grad = incoming.wait()
        of_sinks = sinks_grad(ctx.attention, grad, (out, lse), sinks)
        return q_grad.to(q.dtype), kv_grad.to(kv.dtype), None, None, None, of_sinks


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
