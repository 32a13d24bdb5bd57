"""Attention under context parallel: what both exchanges share, and the one that gathers keys (`ring` has the other).

Masks come from positions and documents and not from where tokens lie: one small all-gather of those per forward. Where
the host knows the packing of the whole rows there is neither mask nor all-gather.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.attention.kernels import Kernel, Visibility
from dtrain.attention.packing import Call, Packing
from dtrain.attention.varlen import Flash, Segmented, Segments, VarlenKernel, find_packing, pad_tokens, pick, put
from dtrain.parallel.layout import gather_sequence


class ContextKernel(Kernel):
    """Over the keys of all cp ranks: q [B, S/cp, H, hd], k and v [B, S/cp, kv, hd] in the head-tail layout."""

    def __init__(self, inner: Kernel, mesh: DeviceMesh):
        self.inner, self.note = inner, inner.note
        self.group = mesh.get_group()
        self.abilities = replace(inner.abilities, cache=False, context_parallel=True)

    def keys(
        self, positions: Tensor, documents: Tensor | None, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """[B or 1, S/cp] and [B, S/cp] -> [B or 1, S] and [B, S] in natural order; one all-gather for both."""
        if documents is None:
            return gather_sequence(positions, self.group), None
        both = torch.stack([positions.expand_as(documents), documents])
        positions, documents = gather_sequence(both, self.group, dim=2).unbind(0)
        return positions, documents


class GatherKernel(ContextKernel):
    """`inner` over gathered keys: one all-gather of keys and values per layer forward and one reduce-scatter of their
    gradients backward."""

    def __init__(self, inner: Kernel, mesh: DeviceMesh):
        super().__init__(inner, mesh)
        self.name = f"{inner.name} over gathered keys"

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> Any:
        return self.inner.prepare(visibility, dtype, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float) -> Tensor:
        k, v = gather_sequence(torch.stack([k, v]), self.group, dim=2).unbind(0)  # [B, S, kv, hd]
        return self.inner(q, k, v, prepared, scale)


class PackedContextKernel(ContextKernel):
    """By `inner.flash`, without a mask, and without the all-gather of positions where the packing is given; by `masked`
    what is no packing."""

    takes_packing = True

    def __init__(self, inner: VarlenKernel, mesh: DeviceMesh, masked: ContextKernel):
        super().__init__(inner, mesh)
        self.flash, self.masked = inner.flash, masked

    def keys(
        self, positions: Tensor, documents: Tensor | None, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        return None if packing is not None else super().keys(positions, documents)

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> Any:
        packing = find_packing(visibility)
        if packing is None:
            return self.masked.prepare(visibility, dtype, device)
        rank, size = self.group.rank(), self.group.size()
        steps = self.calls(packing, visibility.window, rank, size)
        placed = iter(put((call for step in steps for call in step), device))
        return Segmented(packing.length // size, [[next(placed) for _ in step] for step in steps])

    def calls(self, packing: Packing, window: int | None, rank: int, size: int) -> list[list[Call]]:
        """What a rank is to compute: of the keys of each exchange."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, steps: list[list[Segments]], scale: float) -> Tensor:
        """As a kernel; q, k and v are of the tokens that the packing has."""
        raise NotImplementedError

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float) -> Tensor:
        if not isinstance(prepared, Segmented):
            return self.masked(q, k, v, prepared, scale)
        length = q.shape[1]
        q, k, v = (part[:, : prepared.tokens] for part in (q, k, v))
        return pad_tokens(self.attend(q, k, v, prepared.steps, scale), length)


class VarlenGatherKernel(PackedContextKernel):
    """Over gathered keys; exchanges as `GatherKernel`'s. Two calls for all rows and documents: each rank holds two
    chunks of a row, and each is over the keys before its end."""

    name = "varlen over gathered keys"

    def __init__(self, inner: VarlenKernel, mesh: DeviceMesh):
        super().__init__(inner, mesh, GatherKernel(inner.masked, mesh))

    def calls(self, packing: Packing, window: int | None, rank: int, size: int) -> list[list[Call]]:
        return [packing.over_gathered(window, rank, size)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, steps: list[list[Segments]], scale: float) -> Tensor:
        k, v = gather_sequence(torch.stack([k, v]), self.group, dim=2).flatten(1, 2).unbind(0)  # [B · S, kv, hd]
        return over_keys(self.flash, q, k, v, steps[0], scale)


def over_keys(flash: Flash, q: Tensor, k: Tensor, v: Tensor, calls: list[Segments], scale: float) -> Tensor:
    """A rank's q [B, 2c, H, hd] over the keys and values of whole rows, [B · S, kv, hd] each -> [B, 2c, H, hd]: a call
    for each of its two chunks."""
    outputs = []
    for chunk, segments in zip(q.chunk(2, 1), calls, strict=True):
        out = flash(chunk.flatten(0, 1), pick(k, segments.keys), pick(v, segments.keys), segments, scale)
        outputs.append(out.unflatten(0, chunk.shape[:2]))
    return torch.cat(outputs, 1)
