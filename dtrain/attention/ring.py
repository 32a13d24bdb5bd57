"""Attention under context parallel, by a ring: keys and values travel from rank to rank, never gathered.

Each rank keeps its queries and sees one rank's keys at a time; partial outputs are merged by their log-sum-exp (Liu et
al., Ring Attention, arXiv:2310.01889; the merge is that of FlashAttention, arXiv:2205.14135, section 3.1). Backward the
keys travel again, their gradients with them, and every block uses the output and log-sum-exp of the whole.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from dtrain.attention.blocks import Blocks, blocks_for, merge
from dtrain.attention.context import ContextKernel
from dtrain.attention.kernels import Kernel, Visibility, additive
from dtrain.parallel.layout import shard_sequence


class RingKernel(ContextKernel):
    """cp−1 exchanges of keys and values forward, cp−1 of them and cp of their gradients, in max(float32, the dtype),
    backward, each with the two neighbours; one small all-gather of positions and documents per forward of the model.
    blocks: what computes a step (default: by device)."""

    name = "ring"

    def __init__(self, inner: Kernel, mesh: DeviceMesh, blocks: Blocks | None = None):
        super().__init__(inner, mesh)
        self.blocks = blocks

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> list[Tensor | None]:
        """What this rank's queries see of the keys that each rank of the ring holds, its own first: [B or 1, 1, q, k],
        0 or -inf; None: nothing, which is read on the host."""
        size, rank = self.group.size(), self.group.rank()

        def held(stream: Tensor | None, source: int) -> Tensor | None:
            return None if stream is None else shard_sequence(stream, source, size)

        biases: list[Tensor | None] = []
        for distance in range(size):
            source = (rank - distance) % size
            positions, documents = (held(one, source) for one in (visibility.key_positions, visibility.key_documents))
            part = replace(visibility, keys=visibility.keys // size, key_positions=positions, key_documents=documents)
            visible = part.visible(slice(0, visibility.queries), device)
            biases.append(additive(visible, dtype)[:, None] if bool(visible.any()) else None)
        return biases

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: list[Tensor | None], scale: float) -> Tensor:
        return _Ring.apply(q, k, v, prepared, scale, self.group, self.blocks or blocks_for(q.device))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, biases, scale, group, blocks):
        q = q.transpose(1, 2).contiguous()  # [B, H, S/cp, hd]
        kv = torch.stack([k.transpose(1, 2), v.transpose(1, 2)])  # [2, B, kv, S/cp, hd]
        steps = zip(_around(kv, group), biases, strict=True)
        parts = (blocks.forward(q, *held.unbind(0), bias, scale) for held, bias in steps if bias is not None)
        out, lse = reduce(lambda whole, part: merge(*whole, *part), parts)
        ctx.save_for_backward(q, kv, out.to(q.dtype), lse, *biases)
        ctx.scale, ctx.group, ctx.blocks = scale, group, blocks
        return out.to(q.dtype).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, kv, out, lse, *biases = ctx.saved_tensors
        grad = grad.transpose(1, 2).contiguous()  # [B, H, S/cp, hd]
        q_grad = torch.zeros_like(q, dtype=lse.dtype)
        held_grad = torch.zeros_like(kv, dtype=lse.dtype)
        for held, bias in zip(_around(kv, ctx.group), biases, strict=True):
            if bias is not None:
                block_q, *block_kv = ctx.blocks.backward(grad, q, *held.unbind(0), out, lse, bias, ctx.scale)
                q_grad += block_q
                held_grad += torch.stack(block_kv)
            # The gradient follows its keys, and the last exchange brings it home.
            held_grad = _pass_on(held_grad, ctx.group).wait()
        grads = (q_grad, *held_grad.unbind(0))
        return *(part.to(q.dtype).transpose(1, 2) for part in grads), None, None, None, None


def _around(tensor: Tensor, group: Any) -> Iterator[Tensor]:
    """This rank's tensor, then those of the ranks before it: while one is used, the next one travels."""
    for left in reversed(range(group.size())):
        incoming = _pass_on(tensor, group) if left else None
        yield tensor
        if incoming is not None:
            tensor = incoming.wait()


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
