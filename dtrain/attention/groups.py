"""Attention by groups of heads, one key head with its query heads after another, so that what a kernel gathers, copies
or works on is there for one group at a time (UPipe, arXiv:2602.21196).

What a cp rank gathers of a group's keys is not kept for the backward: a group's attention is computed again there, its
all-gather included. A ring, and a kernel of whole rows, gather nothing and compute nothing again.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dtrain.attention.kernels import Gathering, Kernel
from dtrain.attention.packing import Packing
from dtrain.attention.visibility import Visibility


class GroupedKernel(Kernel):
    """`inner` for one key head at a time. Messages are as many times more, and as many times smaller."""

    def __init__(self, inner: Kernel):
        self.inner, self.note, self.group = inner, inner.note, inner.group
        self.name = f"{inner.name} by groups of heads"
        self.is_context_parallel, self.takes_packing = inner.is_context_parallel, inner.takes_packing

    def keys(
        self, positions: Tensor, documents: Tensor | None, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Override `Kernel.keys`: those of `inner`."""
        return self.inner.keys(positions, documents, packing)

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> Any:
        return self.inner.prepare(visibility, dtype, device)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Override `Kernel.__call__`: q [B, Q, H, hd], k and v [B, K, kv, hd] -> [B, Q, H, hd]"""
        attend = partial(self.inner, prepared=prepared, scale=scale)
        if self.inner.gathers:
            attend = partial(
                checkpoint, attend, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
            )
        return _by_group(attend, q, k, v, sinks)

    def begin_gather(self, k: Tensor, v: Tensor, prepared: Any) -> Gathering:
        """Override `Kernel.begin_gather`: of all heads, for several layers read them."""
        return self.inner.begin_gather(k, v, prepared)

    def over(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float, sinks: Tensor | None = None) -> Tensor:
        return _by_group(partial(self.inner.over, prepared=prepared, scale=scale), q, k, v, sinks)


def _by_group(attend: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """The attention [B, Q, H, hd] that `attend` gives of each key head, joined; k and v [.., kv, hd]."""
    groups = k.shape[-2]
    queries = q.shape[2] // groups
    each = zip(
        q.split(queries, 2),
        k.split(1, -2),
        v.split(1, -2),
        [None] * groups if sinks is None else sinks.split(queries),
        strict=True,
    )
    outputs = [attend(*parts[:3], sinks=parts[3]) for parts in each]
    return outputs[0] if groups == 1 else torch.cat(outputs, 2)
