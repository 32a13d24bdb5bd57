"""Compiled parts of layers under selective checkpointing, as a plan has them: computed as written, and keeping what the
compiler keeps.

Of the results of products and collectives the compiler's partitioner keeps those that the backward reads, and those
from which it computes again what else it reads; so it keeps no product that a reduction adds up, and none that only a
rotation or a residual sum takes. What is computed again is written once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dtrain.commands.plan.fused import FusedBytes
from dtrain.commands.plan.memory import OpOverload
from dtrain.parallel.activation_offload import storage_key
from dtrain.parallel.selective import KEPT_COMPILED


class PlannedRegion:
    """`function` of a layer, of tensors [B, S, ..] without values."""

    def __init__(self, function: Callable[..., Any], fused: FusedBytes):
        self.function, self.fused = function, fused

    def __call__(self, *tensors: Tensor) -> Any:
        """`function(*tensors)`, its collectives included."""
        if not torch.is_grad_enabled():
            return self.function(*tensors)
        seen = _Operations()
        with self.fused.watched_by(seen.after), saved_tensors_hooks(seen.pack, _unpack):
            outputs = self.function(*tensors)
        seen.end()
        return outputs


class _Again:
    """Storage that the backward computes again, for as many tensors as are views of it. kept: what it is computed
    from."""

    def __init__(self, size: int, kept: list[Tensor]):
        self.size, self.kept = size, kept
        self.views = 0
        self.bytes: Tensor | None = None


class _Operations:
    """Knows from which storages each one was computed. Storages have numbers, in their order."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # by storage
        self._sources: list[set[int]] = []
        self._kept: dict[int, Tensor] = {}  # what may be kept: inputs, parameters and results
        self._again: dict[int, _Again] = {}

    def after(self, func: OpOverload, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Take a finished operation, no view, of `tensors` and with `results`, each [..]."""
        inputs = {storage_key(tensor): tensor for tensor in tensors}
        for key, tensor in inputs.items():
            if key not in self._numbers:
                self._add(key, set(), tensor)
        sources = {self._numbers[key] for key in inputs}
        for tensor in results:
            key = storage_key(tensor)
            if key in inputs:  # written in place
                self._sources[self._numbers[key]] |= sources - {self._numbers[key]}
            else:
                self._add(key, sources, tensor if func in KEPT_COMPILED else None)

    def _add(self, key: int, sources: set[int], kept: Tensor | None) -> None:
        number = self._numbers[key] = len(self._sources)
        self._sources.append(sources)
        if kept is not None:
            self._kept[number] = kept.detach()

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps of `tensor` [..]: itself, or what `_unpack` takes."""
        number = self._numbers.get(storage_key(tensor)) if type(tensor) is Tensor else None
        if number is None or number in self._kept:  # None: a parameter
            return tensor
        if number not in self._again:
            self._again[number] = _Again(tensor.untyped_storage().nbytes(), self._origins(number))
        again = self._again[number]
        again.views += 1
        return again, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def end(self) -> None:
        """Let go of what the backward needs not."""
        self._kept, self._again = {}, {}

    def _origins(self, number: int) -> list[Tensor]:
        """Return what is kept from which a storage is computed."""
        open_numbers, seen, origins = [number], {number}, []
        while open_numbers:
            if (at := open_numbers.pop()) in self._kept:
                origins.append(self._kept[at])
                continue
            open_numbers += self._sources[at] - seen
            seen |= self._sources[at]
        return origins


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    again, dtype, shape, stride, offset = packed
    with torch.no_grad():
        if again.bytes is None:
            again.bytes = torch.empty(again.size, dtype=torch.uint8, device="meta").zero_()
        tensor = again.bytes.view(dtype).as_strided(shape, stride, offset)
    again.views -= 1
    if again.views == 0:
        again.bytes = None
    return tensor
