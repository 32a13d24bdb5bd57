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

from dtrain.attention.blocks import Blocks, blocks_for, merge
from dtrain.attention.context import gather_keys
from dtrain.attention.kernels import Kernel, Visibility, additive
from dtrain.parallel.layout import shard_sequence


class RingStep(NamedTuple):
    """What this rank's queries see of the keys that one rank holds: bias [B or 1, 1, q, k], 0 or -inf; None:
    nothing."""

    bias: Tensor | None


class RingKernel:
    """q [B, S/cp, H, hd], k and v [B, S/cp, kv, hd] in the head-tail layout. cp−1 exchanges of keys and values forward,
    cp−1 of them and cp of their gradients, in max(float32, the dtype), backward, each with the two neighbours; one
    small all-gather of positions and documents per forward of the model. blocks: what computes a step (default: by
    device)."""

    def __init__(self, inner: Kernel, mesh: DeviceMesh, blocks: Blocks | None = None):
        self.group = mesh.get_group()
        self.blocks = blocks
        self.name, self.note = "ring", ""
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
        return _Ring.apply(q, k, v, prepared, scale, self.group, self.blocks or blocks_for(q.device))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, steps, scale, group, blocks):
        q = q.transpose(1, 2).contiguous()  # [B, H, S/cp, hd]
        kv = torch.stack([k.transpose(1, 2), v.transpose(1, 2)])  # [2, B, kv, S/cp, hd]
        out = lse = None
        held = kv
        for index, step in enumerate(steps):
            incoming = _pass_on(held, group) if index + 1 < len(steps) else None
            if step.bias is not None:
                block = blocks.forward(q, *held.unbind(0), step.bias, scale)
                out, lse = block if out is None else merge(out, lse, *block)
            if incoming is not None:
                held = incoming.wait()
        ctx.save_for_backward(q, kv, out.to(q.dtype), lse, *(step.bias for step in steps))
        ctx.scale, ctx.group, ctx.blocks = scale, group, blocks
        return out.to(q.dtype).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, kv, out, lse, *biases = ctx.saved_tensors
        grad = grad.transpose(1, 2).contiguous()  # [B, H, S/cp, hd]
        q_grad = torch.zeros_like(q, dtype=lse.dtype)
        held, held_grad = kv, torch.zeros_like(kv, dtype=lse.dtype)
        for index, bias in enumerate(biases):
            incoming = _pass_on(held, ctx.group) if index + 1 < len(biases) else None
            if bias is not None:
                block_q, *block_kv = ctx.blocks.backward(grad, q, *held.unbind(0), out, lse, bias, ctx.scale)
                q_grad += block_q
                held_grad += torch.stack(block_kv)
            # The gradient follows its keys, and the last exchange brings it home.
            held_grad = _pass_on(held_grad, ctx.group).wait()
            if incoming is not None:
                held = incoming.wait()
        grads = (q_grad, *held_grad.unbind(0))
        return *(part.to(q.dtype).transpose(1, 2) for part in grads), None, None, None, None


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
