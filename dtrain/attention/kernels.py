"""What attention means, the kernels that compute it, what each can do, and the choice made when a model is built.

A query at position p of document d sees the key at position j of document e when

    e == d  and  0 <= p - j < window          (no window: 0 <= p - j)

Positions restart with each document and padding is a document of its own (-1). A query always sees itself, so no row is
without a key and padding never gives NaN. Letters: B rows, Q queries, K keys.

A kernel turns a `Visibility` into its own form once per forward (`prepare`), and is then called by every layer of that
kind with q [B, Q, H, hd], k and v [B, K, kv, hd]; H is a multiple of kv, both are this rank's heads. It gives
[B, Q, H, hd] in q's dtype; the softmax is computed in max(float32, the dtype).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import scaled_dot_product_attention

from dtrain.errors import UserError


@dataclass(frozen=True)
class Visibility:
    """What the layers of one kind see in one forward.

    Without positions, query i and key i are the same token (Q == K) and every row is one document.
    query_positions [B, Q], key_positions [B or 1, K], query_documents [B, Q], key_documents [B, K]: int64 or None;
    positions come in pairs, documents too and only with positions. window: keys seen, the query's own included.
    """

    queries: int
    keys: int
    window: int | None = None
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Causal by index, the same in every row; a window may still apply."""
        return self.query_positions is None

    @property
    def is_causal(self) -> bool:
        """Nothing but causal: no position, no document, and no window that would hide a key."""
        return self.is_plain and (self.window is None or self.window >= self.keys)

    def visible(self, queries: slice, device: torch.device) -> Tensor:
        """[B or 1, q, K] bool: which keys the queries of a slice see."""
        if self.query_positions is None or self.key_positions is None:
            distance = torch.arange(self.queries, device=device)[queries, None] - torch.arange(self.keys, device=device)
            distance = distance[None]
        else:
            distance = self.query_positions[:, queries, None] - self.key_positions[:, None, :]
        seen = distance >= 0
        if self.window is not None:
            seen &= distance < self.window
        if self.query_documents is not None and self.key_documents is not None:
            seen &= self.query_documents[:, queries, None] == self.key_documents[:, None, :]
        return seen


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """[...]: 0 where a key is `visible` [...], -inf where not: made once per forward, where a bool mask is converted by
    every layer."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


@dataclass(frozen=True)
class Abilities:
    """What a kernel computes; a model or recipe that needs more is refused before any work."""

    devices: frozenset[str] | None  # None: every device that torch has
    window: bool
    documents: bool
    cache: bool
    backward: bool
    context_parallel: bool


class Kernel:
    """note: why it was chosen, where another was wanted."""

    name: str
    abilities: Abilities
    note = ""

    def keys(self, positions: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Positions [B or 1, S] and documents [B, S] of all keys, from this rank's [B or 1, S/cp] and [B, S/cp]; once
        per forward."""
        return positions, documents

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> Any:
        raise NotImplementedError

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float) -> Tensor:
        raise NotImplementedError


class Span(NamedTuple):
    """A run of queries, the run of keys that holds all they see, and what is hidden in between.

    bias [B or 1, 1, q, k] is 0 or -inf; None: causal by index where `causal`, else nothing is hidden.
    """

    queries: slice
    keys: slice
    bias: Tensor | None
    causal: bool


class SdpaKernel(Kernel):
    """torch's scaled_dot_product_attention, on every device.

    On a GPU one call, by torch's causal kernel where nothing else hides keys. On a CPU one call per run of queries,
    over no more keys than those can see: torch's CPU kernel multiplies all of up to 512 keys and hides half of them
    afterwards (a third of the time at 512 tokens, and most of it where rows are packed with short documents).
    """

    name = "sdpa"
    abilities = Abilities(devices=None, window=True, documents=True, cache=True, backward=True, context_parallel=False)

    def __init__(self, note: str = ""):
        self.note = note

    def prepare(self, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> list[Span]:
        everything = slice(0, visibility.queries), slice(0, visibility.keys)
        size = 64 if visibility.keys < 1024 else 128
        if device.type != "cpu" or visibility.queries <= size:
            if visibility.is_causal:
                return [Span(*everything, bias=None, causal=True)]
            return [Span(*everything, additive(visibility.visible(everything[0], device), dtype)[:, None], False)]
        runs = [slice(start, min(start + size, visibility.queries)) for start in range(0, visibility.queries, size)]
        if visibility.is_plain:
            return _plain_blocks(visibility, runs, dtype, device)
        return [self._seen_block(visibility, run, dtype, device) for run in runs]

    def _seen_block(self, visibility: Visibility, run: slice, dtype: torch.dtype, device: torch.device) -> Span:
        """The block of one run of queries, its keys cut to those that some row sees."""
        visible = visibility.visible(run, device)  # [B, q, K]
        keys = self.seen_keys(visible, visibility, run)
        return Span(run, keys, additive(visible[:, :, keys], dtype)[:, None], False)

    def seen_keys(self, visible: Tensor, visibility: Visibility, run: slice) -> slice:
        """The run of keys that holds all that `visible` [B, q, K] of the queries in `run` shows; read on the host, on a
        CPU only."""
        if visible.is_meta or isinstance(visible, FakeTensor):  # shapes alone: no values to cut by
            return slice(0, visibility.keys)
        seen = visible.any(0).any(0).nonzero()
        return slice(int(seen[0]), int(seen[-1]) + 1)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: list[Span], scale: float) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, heads, length, hd]
        gqa = q.shape[1] != k.shape[1]
        outputs = [
            scaled_dot_product_attention(
                q[:, :, block.queries],
                k[:, :, block.keys],
                v[:, :, block.keys],
                attn_mask=block.bias,
                is_causal=block.causal,
                scale=scale,
                enable_gqa=gqa,
            ).transpose(1, 2)
            for block in prepared
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _plain_blocks(visibility: Visibility, runs: list[slice], dtype: torch.dtype, device: torch.device) -> list[Span]:
    """Blocks of causal rows by index. What is hidden depends on the distance alone, so all share one bias."""
    size, keys = runs[0].stop, visibility.keys
    last = Visibility(keys, keys, visibility.window).visible(slice(keys - size, keys), device)  # [1, size, K]
    bias = additive(last, dtype)[:, None]
    blocks = []
    for run in runs:
        first = 0 if visibility.window is None else max(0, run.start - visibility.window + 1)
        count, seen = run.stop - run.start, run.stop - first
        blocks.append(Span(run, slice(first, run.stop), bias[:, :, size - count :, keys - seen :], False))
    return blocks


KERNELS: dict[str, Kernel] = {"sdpa": SdpaKernel()}


def choose_kernel(name: str, **needs: bool | str) -> Kernel:
    """The kernel `name`, if it can do all that is needed.

    needs: `device` (a type such as "cpu"), and window, documents, cache, backward, context_parallel (bool).
    Raises UserError that names what is missing, the recipe's key and the kernels that can.
    """
    if name not in KERNELS:
        raise UserError(f"there is no attention kernel {name!r}; there are: {', '.join(KERNELS)}")
    missing = _missing(KERNELS[name].abilities, needs)
    if missing:
        able = [other for other, kernel in KERNELS.items() if not _missing(kernel.abilities, needs)]
        fix = f"use {' or '.join(able)}" if able else "no kernel here can: set " + "; ".join(_FIXES[m] for m in missing)
        raise UserError(f"attention kernel {name!r} does not do {', '.join(missing)}; {fix}")
    return KERNELS[name]


_FIXES = {
    "device": "launch.device=cpu",
    "window": "model.path to a model without a sliding window",
    "documents": "data.packing=false",
    "cache": "grpo.engine=http",
    "backward": "a kernel that trains",
    "context_parallel": "parallel.cp=1",
}


def _missing(abilities: Abilities, needs: dict[str, bool | str]) -> list[str]:
    unmet = [need for need, wanted in needs.items() if need != "device" and wanted and not getattr(abilities, need)]
    if abilities.devices is not None and needs.get("device") not in (None, *abilities.devices):
        unmet.append("device")
    return unmet
