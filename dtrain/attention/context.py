"""Attention under context parallel, by gathering: every rank computes its queries over all keys.

One all-gather of keys and values per layer forward and one reduce-scatter of their gradients backward; one small
all-gather of positions and documents per forward, since masks come from those and not from where tokens lie.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.attention.kernels import Kernel, Visibility
from dtrain.parallel.layout import gather_sequence


class ContextKernel(Kernel):
    """Over the keys of all cp ranks: q [B, S/cp, H, hd], k and v [B, S/cp, kv, hd] in the head-tail layout."""

    def __init__(self, inner: Kernel, mesh: DeviceMesh):
        self.inner = inner
        self.group = mesh.get_group()
        self.abilities = replace(inner.abilities, cache=False, context_parallel=True)

    def keys(self, positions: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[B or 1, S/cp] and [B, S/cp] -> [B or 1, S] and [B, S] in natural order; one all-gather for both."""
        if documents is None:
            return gather_sequence(positions, self.group), None
        both = torch.stack([positions.expand_as(documents), documents])
        positions, documents = gather_sequence(both, self.group, dim=2).unbind(0)
        return positions, documents


class GatherKernel(ContextKernel):
    """`inner` over gathered keys."""

    def __init__(self, inner: Kernel, mesh: DeviceMesh):
        super().__init__(inner, mesh)
        self.name = f"{inner.name} over gathered keys"

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> Any:
        return self.inner.prepare(visibility, dtype, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float) -> Tensor:
        k, v = gather_sequence(torch.stack([k, v]), self.group, dim=2).unbind(0)  # [B, S, kv, hd]
        return self.inner(q, k, v, prepared, scale)
