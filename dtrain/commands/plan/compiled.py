"""Compiled regions of layers (`memory.compilation`), computed as written: what the compiler moves and keeps.

Bytes moved. A compiler joins the operations between two products to kernels that read what they are given and write
what others need. So a tensor of a region is counted once where such an operation reads it and no other of the same call
has made it: an input, a saved tensor, the result of a product; and once where it is read by a product, by another call
or outside. What only such operations of one call see is not counted. The backward of a call is a call of its own.

Kept under selective checkpointing. Of the results of products and collectives the compiler's partitioner keeps those
that the backward reads, and those from which it computes again what else it reads; so it keeps no product that a
reduction adds up, and none that only a rotation or a residual sum takes. What is computed again is written once.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dtrain.base.torch_functions import in_backward, storage_key
from dtrain.commands.plan.memory import Allocation, OpOverload
from dtrain.memory.activation_checkpointing import STORED_COMPILED


class CompiledRegions:
    """Counter of the bytes of regions. Calls have numbers, that of a forward n, of its backward −n; None is outside.
    sources: of the region that is under way, where it keeps what the compiler keeps."""

    def __init__(self) -> None:
        self.call: int | None = None
        self.sources: Sources | None = None
        self._begins, self._ends = [0], [0]  # of a forward's nodes in autograd's sequence, by the number of the call
        self._made: dict[int, tuple[Allocation, int]] = {}  # what was made and not counted, and in which call
        self._read: dict[int, Allocation] = {}  # counted in the call that was last
        self._last: int | None = None

    def region(self, function: Callable[..., Any], is_selective: bool = False) -> Callable[..., Any]:
        """Return `function`, of tensors [B, S, ..] without values, as a region: each call of it is one, its collectives
        included. is_selective: it keeps for its backward what the compiler keeps."""

        def call(*tensors: Tensor) -> Any:
            number, outer = len(self._begins), (self.call, self.sources)
            self._begins.append(torch.autograd._get_sequence_nr())
            self._ends.append(self._begins[-1])
            sources = Sources() if is_selective and torch.is_grad_enabled() else None
            self.call, self.sources = number, sources
            try:
                with nullcontext() if sources is None else saved_tensors_hooks(sources.pack, _unpack):
                    return function(*tensors)
            finally:
                self.call, self.sources = outer
                self._ends[number] = torch.autograd._get_sequence_nr()
                if sources is not None:
                    sources.end()

        return call

    def moved(self, inputs: Iterable[Allocation], outputs: Iterable[Allocation], is_product: bool) -> tuple[int, bool]:
        """Return the bytes to count for an operation, and whether it is outside: then it has its own beside them."""
        call, bytes_moved = self._current(), 0
        if call != self._last:
            self._last, self._read = call, {}
        for allocation in {id(each): each for each in inputs}.values():
            _, maker = self._made.get(id(allocation), (None, None))
            is_within = maker is not None and maker == call and not is_product
            if maker is not None and not is_within:  # it is written
                bytes_moved += allocation.size
                del self._made[id(allocation)]
            if call is not None and not is_product and not is_within and id(allocation) not in self._read:
                bytes_moved += allocation.size
                self._read[id(allocation)] = allocation
        if call is not None and not is_product:
            self._made |= {id(each): (each, call) for each in outputs}
        return bytes_moved, call is None

    def _current(self) -> int | None:
        """Return the call that is under way: a forward, or a backward by the node that autograd works on."""
        node = torch._C._current_autograd_node()
        if self.call is not None or torch.is_grad_enabled():  # of what is computed again in a backward, too
            return self.call
        if node is None:  # autograd adds gradients up between two nodes
            return self._last if in_backward() and self._last is not None and self._last < 0 else None
        place = bisect_right(self._begins, node._sequence_nr()) - 1
        return -place if node._sequence_nr() < self._ends[place] else None


class _Again:
    """Storage that the backward computes again, for as many tensors as are views of it. kept: what it is computed
    from."""

    def __init__(self, size: int, kept: list[Tensor]):
        self.size, self.kept = size, kept
        self.views = 0
        self.bytes: Tensor | None = None


class Sources:
    """The storages from which each one of a call was computed. Storages have numbers, in their order."""

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
                self._add(key, sources, tensor if func in STORED_COMPILED else None)

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
        """Let go of what the backward does not need."""
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
