"""Attention under context parallel: what both exchanges share, and the one that gathers keys (`ring` has the other).

Masks come from positions and documents and not from where tokens lie: one small all-gather of those per forward. Where
the host knows the packing of the whole rows there is neither mask nor all-gather.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.attention.kernels import Gathering, Kernel
from dtrain.attention.packing import Call, Packing
from dtrain.attention.varlen import Flash, PackedKernel, Segments, Steps, VarlenKernel, pick
from dtrain.attention.visibility import Visibility
from dtrain.parallel.context.batch import SequenceGather, gather_sequence


class ContextKernel(Kernel):
    """Over the keys of all cp ranks: q [B, S/cp, H, hd], k and v [B, S/cp, kv, hd] in the head-tail layout."""

    is_context_parallel = True

    def __init__(self, inner: Kernel, mesh: DeviceMesh):
        self.inner, self.note = inner, inner.note
        self.group = mesh.get_group()

    def keys(
        self, positions: Tensor, documents: Tensor | None, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """[B or 1, S/cp] and [B, S/cp] -> [B or 1, S] and [B, S] in natural order; one all-gather for both."""
        if documents is None:
            return gather_sequence(positions, self.group), None
        both = torch.stack([positions.expand_as(documents), documents])
        positions, documents = gather_sequence(both, self.group, dim=2).unbind(0)
        return positions, documents

    def begin_gather_of_rows(self, k: Tensor, v: Tensor) -> Gathering:
        """Begin to gather k and v, [B, S/cp, kv, hd] and [B, S/cp, kv, hd_v] -> [B, S, ..]. One all-gather for both."""
        return cast(Gathering, SequenceGather([k, v], self.group, dim=1).wait)


class GatherKernel(ContextKernel):
    """`inner` over gathered keys: one all-gather of keys and values per layer forward and one reduce-scatter of their
    gradients backward."""

    gathers = True

    def __init__(self, inner: Kernel, mesh: DeviceMesh):
        super().__init__(inner, mesh)
        self.name = f"{inner.name} over gathered keys"

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> Any:
        return self.inner.prepare(visibility, dtype, device)

    def begin_gather(self, k: Tensor, v: Tensor, prepared: Any) -> Gathering:
        """[B, S/cp, kv, hd] each -> [B, S, kv, hd]"""
        return self.begin_gather_of_rows(k, v)

    def over(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Override `Kernel.over`; q [B, S/cp, H, hd], k and v [B, S, kv, hd]"""
        return self.inner(q, k, v, prepared, scale, sinks)


class PackedContextKernel(PackedKernel, ContextKernel):
    """`ContextKernel` without the all-gather of positions where the packing is given."""

    def __init__(self, inner: VarlenKernel, mesh: DeviceMesh, masked: ContextKernel):
        ContextKernel.__init__(self, inner, mesh)
        PackedKernel.__init__(self, inner.flash, masked)
        self.rank, self.ranks = self.group.rank(), self.group.size()


class VarlenGatherKernel(PackedContextKernel):
    """Variable-length attention over gathered keys; exchanges as `GatherKernel`'s. Two calls for all rows and
    documents: each rank holds two chunks of a row, and each is over the keys before its end."""

    name = "varlen over gathered keys"
    gathers = True

    def __init__(self, inner: VarlenKernel, mesh: DeviceMesh):
        super().__init__(inner, mesh, GatherKernel(inner.masked, mesh))

    def calls(self, packing: Packing, window: int | None) -> list[list[Call]]:
        return [packing.over_gathered(window, self.rank, self.ranks)]

    def gather(self, k: Tensor, v: Tensor) -> Gathering:
        """[B, S/cp, kv, hd] each -> [B · S, kv, hd]"""
        wait = self.begin_gather_of_rows(k, v)

        def wait_and_flatten() -> tuple[Tensor, Tensor]:
            keys, values = wait()
            return keys.flatten(0, 1), values.flatten(0, 1)

        return wait_and_flatten

    def attend(self, q: Tensor, k: Tensor, v: Tensor, steps: Steps, scale: float, sinks: Tensor | None) -> Tensor:
        return over_keys(self.flash, q, k, v, steps[0], scale, sinks)


def over_keys(
    flash: Flash, q: Tensor, k: Tensor, v: Tensor, calls: list[Segments], scale: float, sinks: Tensor | None
) -> Tensor:
    """A rank's q [B, 2c, H, hd] over the keys and values of whole rows, [B · S, kv, hd] each -> [B, 2c, H, hd]: a call
    for each of its two chunks."""
    outputs = []
    for chunk, segments in zip(q.chunk(2, 1), calls, strict=True):
        keys = pick(k, segments.keys), pick(v, segments.keys)
        out = flash(chunk.flatten(0, 1), *keys, segments, scale, sinks)
        outputs.append(out.unflatten(0, chunk.shape[:2]))
    return torch.cat(outputs, 1)
