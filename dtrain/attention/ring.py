"""Attention in a ring of ranks: keys and values travel, and are never gathered (Liu et al., Ring Attention,
arXiv:2310.01889; the merge is that of FlashAttention, arXiv:2205.14135, section 3.1).

Each rank keeps its queries and sees one rank's keys at a time; partial outputs are merged by their log-sum-exp.
Backward the keys travel again, their gradients with them, and every part uses the output and log-sum-exp of the whole.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.attention.blocks import BlockByBlock, BlockComputation, KeysAndValues, MaskedBlocks, blocks_for
from dtrain.attention.context import ContextKernel, PackedContextKernel
from dtrain.attention.kernels import Kernel
from dtrain.attention.packing import Call, Packing
from dtrain.attention.varlen import Steps, VarlenBlocks, VarlenKernel
from dtrain.attention.visibility import Hidden, Visibility, additive
from dtrain.parallel.context.batch import shard_sequence


class RingKernel(ContextKernel):
    """Ring attention by masks: 0 or -inf for every query and key of an exchange.

    cp−1 exchanges of keys and values forward, cp−1 of them and cp of their gradients, in max(float32, the dtype),
    backward, each with the two neighbours; one small all-gather of positions and documents per forward of the model.
    blocks: what computes attention over one rank's keys (default: by device)."""

    name = "ring"

    def __init__(self, inner: Kernel, mesh: DeviceMesh, blocks: BlockComputation | None = None):
        super().__init__(inner, mesh)
        self.blocks = blocks

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> list[Hidden | None]:
        """Return what this rank's queries see of the keys that each rank of the ring holds, its own first. None:
        nothing, which is read on the host."""
        size, rank = self.group.size(), self.group.rank()
        steps = []
        for distance in range(size):
            positions, documents = (
                None if stream is None else shard_sequence(stream, (rank - distance) % size, size)
                for stream in (visibility.key_positions, visibility.key_documents)
            )
            part = replace(visibility, keys=visibility.keys // size, key_positions=positions, key_documents=documents)
            steps.append(_hidden(part, dtype, device))
        return steps

    def over(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float, sinks: Tensor | None = None) -> Tensor:
        attention = MaskedBlocks(self.blocks or blocks_for(q.device), scale)
        q, k, v = q.transpose(1, 2).contiguous(), k.transpose(1, 2), v.transpose(1, 2)  # [B, heads, S/cp, hd or hd_v]
        return BlockByBlock.apply(q, k, v, prepared, Ring(self.group), attention, sinks).transpose(1, 2)


class VarlenRingKernel(PackedContextKernel):
    """Variable-length attention in the ring, exchanges as `RingKernel`'s. Of each rank's keys at most three calls for
    all rows and documents, or under a window a few more."""

    name = "varlen ring"

    def __init__(self, inner: VarlenKernel, mesh: DeviceMesh):
        super().__init__(inner, mesh, RingKernel(inner.masked, mesh))

    def calls(self, packing: Packing, window: int | None) -> list[list[Call]]:
        return packing.in_ring(window, self.rank, self.ranks)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, steps: Steps, scale: float, sinks: Tensor | None) -> Tensor:
        shape = q.shape[:2]
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))  # [B · S/cp, heads, hd]
        attention = VarlenBlocks(self.flash, scale)
        out = BlockByBlock.apply(q.contiguous(), k, v, steps, Ring(self.group), attention, sinks)
        return out.unflatten(0, shape)


def _hidden(part: Visibility, dtype: torch.dtype, device: torch.device) -> Hidden | None:
    runs = part.runs() if device.type != "cpu" else [slice(0, part.queries)]
    if len(runs) > 1:
        return part if any(bool(part.visible(run, device).any()) for run in runs) else None
    visible = part.visible(runs[0], device)
    return additive(visible, dtype)[:, None] if bool(visible.any()) else None


class _Incoming(NamedTuple):
    received: KeysAndValues
    sent: Tensor  # kept until it has left
    requests: list[dist.Work]

    def wait(self) -> KeysAndValues:
        for request in self.requests:
            request.wait()
        return self.received


class Ring(NamedTuple):
    """Exchange of keys and values with the two neighbours in a ring of ranks, in one message each."""

    group: Any

    def around(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's k and v, then those of each rank before it: while they are used, the next ones travel."""
        message = KeysAndValues.copy_of(k, v)
        for left in reversed(range(self.group.size())):
            incoming = self.pass_on(message) if left else None
            yield message.k, message.v
            if incoming is not None:
                message = incoming.wait()

    def pass_on(self, message: KeysAndValues) -> _Incoming:
        """Send a message to the next rank of the ring, and receive one of the same shapes from the rank before."""
        group, size, rank = self.group, self.group.size(), self.group.rank()
        received = torch.empty_like(message.buffer)
        operations = [
            dist.P2POp(dist.isend, message.buffer, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
        ]
        requests = dist.batch_isend_irecv(operations)
        return _Incoming(KeysAndValues.of_buffer(received, message), message.buffer, requests)
