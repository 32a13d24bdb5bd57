"""Attention under context parallel, by a ring: keys and values travel from rank to rank, never gathered.

Each rank keeps its queries and sees one rank's keys at a time; partial outputs are merged by their log-sum-exp (Liu et
al., Ring Attention, arXiv:2310.01889; the merge is that of FlashAttention, arXiv:2205.14135, section 3.1). Backward the
keys travel again, their gradients with them, and every block uses the output and log-sum-exp of the whole.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from dtrain.attention.context import gather_keys
from dtrain.attention.kernels import Kernel
from dtrain.attention.mask import Visibility, additive
from dtrain.parallel.layout import shard_sequence


class RingStep(NamedTuple):
    """What this rank's queries see of the keys that one rank holds: bias [B or 1, 1, q, k], 0 or -inf; None: nothing."""

    bias: Tensor | None


class RingKernel:
    """q [B, S/cp, H, hd], k and v [B, S/cp, kv, hd] in the head-tail layout. cp−1 exchanges of keys and values forward,
    cp of them with their gradients backward, each with the two neighbours."""

    def __init__(self, inner: Kernel, mesh: DeviceMesh):
        self.group = mesh.get_group()
        self.name = "ring"
        self.abilities = replace(inner.abilities, cache=False, context_parallel=True)

    def keys(self, positions: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return gather_keys(positions, documents, self.group)

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> list[RingStep]:
        """One step per rank of the ring, this rank's own keys first; whether a block is empty is read on the host."""
        size, rank = self.group.size(), self.group.rank()
        everything = slice(0, visibility.queries)
        steps = []
        for distance in range(size):
            source = (rank - distance) % size
            positions = shard_sequence(visibility.key_positions, source, size)
            documents = visibility.key_documents
            part = replace(
                visibility,
                keys=positions.shape[1],
                key_positions=positions,
                key_documents=None if documents is None else shard_sequence(documents, source, size),
            )
            visible = part.visible(everything, device)
            steps.append(RingStep(additive(visible, dtype)[:, None] if bool(visible.any()) else None))
        return steps

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: list[RingStep], scale: float) -> Tensor:
        return _Ring.apply(q, k, v, prepared, scale, self.group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, steps, scale, group):
        q = q.transpose(1, 2).contiguous()  # [B, H, S/cp, hd]
        kv = torch.stack([k.transpose(1, 2), v.transpose(1, 2)])  # [2, B, kv, S/cp, hd]
        out = lse = None
        held = kv
        for index, step in enumerate(steps):
            incoming = _pass_on(held, group) if index + 1 < len(steps) else None
            if step.bias is not None:
                block = _block_forward(q, *held.unbind(0), step.bias, scale)
                out, lse = block if out is None else _merge(out, lse, *block)
            if incoming is not None:
                held = incoming.wait()
        ctx.save_for_backward(q, kv, out.to(q.dtype), lse, *(step.bias for step in steps))
        ctx.scale, ctx.group = scale, group
        return out.to(q.dtype).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, kv, out, lse, *biases = ctx.saved_tensors
        grad = grad.transpose(1, 2).contiguous()  # [B, H, S/cp, hd]
        q_grad = torch.zeros_like(q)
        held, held_grad = kv, torch.zeros_like(kv)
        for index, bias in enumerate(biases):
            incoming = _pass_on(held, ctx.group) if index + 1 < len(biases) else None
            if bias is not None:
                block_q, *block_kv = _block_backward(grad, q, *held.unbind(0), out, lse, bias, ctx.scale)
                q_grad += block_q
                held_grad += torch.stack(block_kv)
            # The gradient follows its keys, and the last exchange brings it home.
            held_grad = _pass_on(held_grad, ctx.group).wait()
            if incoming is not None:
                held = incoming.wait()
        return q_grad.transpose(1, 2), *(part.transpose(1, 2) for part in held_grad.unbind(0)), None, None, None


class _Incoming(NamedTuple):
    tensor: Tensor
    requests: list[dist.Work]

    def wait(self) -> Tensor:
        for request in self.requests:
            request.wait()
        return self.tensor


def _pass_on(tensor: Tensor, group: Any) -> _Incoming:
    """Send to the next rank of the ring, receive from the one before."""
    size, rank = group.size(), group.rank()
    received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    operations = [
        dist.P2POp(dist.isend, tensor.contiguous(), group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
    ]
    return _Incoming(received, dist.batch_isend_irecv(operations))


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial softmax averages over different keys as one: weights are their shares of the partition function."""
    total = torch.logaddexp(lse, block_lse)
    # A row that has seen no key yet in either has -inf in both: its share is 0, not NaN.
    shares = [torch.where(part == float("-inf"), 0.0, (part - total).exp())[..., None] for part in (lse, block_lse)]
    return out * shares[0] + block_out * shares[1], total


def _block_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax average [B, H, Q, hd] and its log-sum-exp [B, H, Q] over one block of keys, both in max(float32, dtype).

    Rows that see no key of the block get 0 and -inf.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    unseen = (bias == float("-inf")).all(-1)  # [B or 1, 1, Q]
    if q.device.type == "cpu":
        mask = bias.to(q.dtype)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
        # torch says lse 0 for a row without keys.
        return out.to(wide), lse.to(wide).masked_fill(unseen, float("-inf"))
    scores = _scores(q, k, bias, scale, wide)
    lse = torch.logsumexp(scores, -1)
    weights = (scores - lse.masked_fill(unseen, 0.0)[..., None]).exp()
    return torch.matmul(weights, _for_heads(v, q).to(wide)), lse


def _block_backward(grad, q, k, v, out, lse, bias, scale) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one block's q [B, H, Q, hd], k and v [B, kv, K, hd], given the whole's output and log-sum-exp."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse.to(q.dtype), 0.0, False, attn_mask=bias.to(q.dtype), scale=scale
        )
    wide = lse.dtype
    grad, out = grad.to(wide), out.to(wide)
    weights = (_scores(q, k, bias, scale, wide) - lse[..., None]).exp()  # [B, H, Q, K]
    weight_grad = torch.matmul(grad, _for_heads(v, q).to(wide).transpose(-1, -2))
    score_grad = weights * (weight_grad - (grad * out).sum(-1, keepdim=True)) * scale
    q_grad = torch.matmul(score_grad, _for_heads(k, q).to(wide))
    k_grad = torch.matmul(score_grad.transpose(-1, -2), q.to(wide))
    v_grad = torch.matmul(weights.transpose(-1, -2), grad)
    return q_grad.to(q.dtype), _to_key_heads(k_grad, k), _to_key_heads(v_grad, v)


def _scores(q: Tensor, k: Tensor, bias: Tensor, scale: float, wide: torch.dtype) -> Tensor:
    return torch.matmul(q.to(wide), _for_heads(k, q).to(wide).transpose(-1, -2)) * scale + bias.to(wide)


def _for_heads(kv: Tensor, q: Tensor) -> Tensor:
    """[B, kv, K, hd] → [B, H, K, hd]: each key head for the query heads that read it."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _to_key_heads(grad: Tensor, kv: Tensor) -> Tensor:
    return grad.unflatten(1, (kv.shape[1], -1)).sum(2).to(kv.dtype)
