"""Attention for one group of heads at a time, to reduce the memory of gathered and copied keys.

A group is a key head with its query heads. For example, 8 query heads and 2 key heads: first query heads 0 to 3 with
key head 0, then query heads 4 to 7 with key head 1. Gathered keys of one head at a time take half the memory.

Gathered keys are not saved for the backward, which gathers them again and computes the attention again. Kernels that do
not gather (a ring, or full rows) compute nothing again.

Reference:
    UPipe, arXiv:2602.21196.
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
    """Calls another kernel for one key head at a time. n key heads need n times as many messages, of 1/n size.

    Args:
        inner: The kernel.
    """

    def __init__(self, inner: Kernel):
        self.inner, self.note, self.group = inner, inner.note, inner.group
        self.name = f"{inner.name} by groups of heads"
        self.is_context_parallel, self.takes_packing = inner.is_context_parallel, inner.takes_packing

    def keys(
        self, positions: Tensor, documents: Tensor | None, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return the keys of `inner`."""
        return self.inner.keys(positions, documents, packing)

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> Any:
        return self.inner.prepare(visibility, dtype, device)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Override `Kernel.__call__`. If `inner` gathers, the backward gathers and computes each group again."""
        attend = partial(self.inner, prepared=prepared, scale=scale)
        if self.inner.gathers:
            attend = partial(
                checkpoint, attend, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
            )
        return _by_group(attend, q, k, v, sinks)

    def begin_gather(self, k: Tensor, v: Tensor, prepared: Any) -> Gathering:
        """Gather all heads at once, because several layers read them."""
        return self.inner.begin_gather(k, v, prepared)

    def over(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float, sinks: Tensor | None = None) -> Tensor:
        return _by_group(partial(self.inner.over, prepared=prepared, scale=scale), q, k, v, sinks)


def _by_group(attend: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Call `attend` for each key head with its query heads, and concatenate the outputs to [B, Q, H, hd_v].

    Args:
        attend: Computes attention of some heads.
        q: [B, Q, H, hd].
        k: [B, K, kv, hd].
        v: [B, K, kv, hd_v].
        sinks: [H], or None.
    """
    num_groups = k.shape[-2]
    queries_per_key = q.shape[2] // num_groups
    sinks_of_groups = [None] * num_groups if sinks is None else sinks.split(queries_per_key)
    groups = zip(q.split(queries_per_key, 2), k.split(1, -2), v.split(1, -2), sinks_of_groups, strict=True)
    outputs = []
    for group_q, group_k, group_v, group_sinks in groups:
        outputs.append(attend(group_q, group_k, group_v, sinks=group_sinks))
    return outputs[0] if num_groups == 1 else torch.cat(outputs, 2)
