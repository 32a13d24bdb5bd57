"""Compiled regions of layers (`memory.compilation`): what the compiler would move and keep, counted on uncompiled code.

Bytes moved. A compiler fuses the operations between two matrix products into kernels. A kernel reads its inputs once,
and writes only results that other kernels need. Within one call of a region, bytes are therefore counted for a tensor

- once when a fused operation reads it, if no other fused operation of the same call has made it: it is an input of the
  region, a tensor saved for the backward, or the result of a product;
- once when it is written, because a product, another call, or code outside the region reads it.

A tensor that only fused operations of one call use is not counted. For example, in `y = silu(x @ w1) * 2` the result of
the product is read once, `silu`'s result is not counted, and y is written once, when something outside reads it. The
backward of a call is a call of its own.

Tensors kept under selective checkpointing. The compiler's partitioner keeps results of products and collectives if the
backward reads them, or if it recomputes other tensors of the backward from them. It does not keep a product that only a
reduction, a rotation or a residual sum reads. Each recomputed tensor is counted as written once.
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
    """Counts the bytes that compiled regions move.

    A call of a region has a number n > 0, its backward has -n. None stands for code outside of all regions.

    Attributes:
        call: The region's call that is running in the forward.
        sources: Sources of the call's storages under selective checkpointing, otherwise None.
    """

    def __init__(self) -> None:
        self.call: int | None = None
        self.sources: Sources | None = None
        # Range of autograd's sequence numbers of each forward, by the number of the call. Call 0 is empty.
        self._begins, self._ends = [0], [0]
        self._unwritten: dict[int, tuple[Allocation, int]] = {}  # results of fused operations, with their call
        self._read: dict[int, Allocation] = {}  # read by the last call and counted
        self._last: int | None = None  # the last call

    def region(self, function: Callable[..., Any], is_selective: bool = False) -> Callable[..., Any]:
        """Return a function whose calls are regions, including its collectives.

        Args:
            function: Function of meta tensors, [B, S, ...].
            is_selective: Whether the region keeps only those tensors for its backward that the compiler would keep
                under selective checkpointing.
        """

        def call(*tensors: Tensor) -> Any:
            number = len(self._begins)
            outer_call, outer_sources = self.call, self.sources
            self._begins.append(torch.autograd._get_sequence_nr())
            self._ends.append(self._begins[-1])
            sources = Sources() if is_selective and torch.is_grad_enabled() else None
            self.call, self.sources = number, sources
            try:
                with nullcontext() if sources is None else saved_tensors_hooks(sources.pack, _unpack):
                    return function(*tensors)
            finally:
                self.call, self.sources = outer_call, outer_sources
                self._ends[number] = torch.autograd._get_sequence_nr()
                if sources is not None:
                    sources.end()

        return call

    def moved(self, inputs: Iterable[Allocation], outputs: Iterable[Allocation], is_product: bool) -> tuple[int, bool]:
        """Count the bytes that an operation moves inside a compiled region.

        Args:
            inputs: Storages that the operation reads.
            outputs: Storages that the operation writes.
            is_product: Whether the operation is a matrix product or attention, which are not fused.

        Returns:
            (bytes to count, whether the operation is outside of all regions). For an operation outside, the caller also
            counts the bytes that the operation itself reads and writes.
        """
        call = self._current_call()
        is_fused = call is not None and not is_product
        num_bytes = 0
        if call != self._last:
            self._last, self._read = call, {}
        for key, allocation in {id(allocation): allocation for allocation in inputs}.items():
            maker = self._unwritten[key][1] if key in self._unwritten else None
            is_within_kernel = maker is not None and maker == call and not is_product
            if maker is not None and not is_within_kernel:
                # The kernel that made the storage has to write it.
                num_bytes += allocation.size
                del self._unwritten[key]
            if is_fused and not is_within_kernel and key not in self._read:
                num_bytes += allocation.size
                self._read[key] = allocation
        if call is not None and not is_product:
            for allocation in outputs:
                self._unwritten[id(allocation)] = (allocation, call)
        return num_bytes, call is None

    def _current_call(self) -> int | None:
        """Return the call that is running: a forward, or a backward, found by the node that autograd executes."""
        # Code that is recomputed in a backward has gradients enabled, and is a forward.
        if self.call is not None or torch.is_grad_enabled():
            return self.call
        node = torch._C._current_autograd_node()
        if node is None:
            # Between two nodes autograd adds gradients up.
            is_backward = in_backward() and self._last is not None and self._last < 0
            return self._last if is_backward else None
        sequence_nr = node._sequence_nr()
        number = bisect_right(self._begins, sequence_nr) - 1
        return -number if sequence_nr < self._ends[number] else None


class _Recomputed:
    """A storage that the backward recomputes, for all saved tensors that are views of it.

    Attributes:
        size: Its bytes.
        kept: Tensors from which it is recomputed. They stay alive as long as this object.
        views: Number of saved tensors that the backward has not read yet.
        bytes: The recomputed storage, while the backward needs it.
    """

    def __init__(self, size: int, kept: list[Tensor]):
        self.size, self.kept = size, kept
        self.views = 0
        self.bytes: Tensor | None = None


class Sources:
    """For each storage of a call, the storages from which it was computed. Storages are numbered in their order."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # number by storage
        self._sources: list[set[int]] = []  # numbers of the sources, by number
        self._kept: dict[int, Tensor] = {}  # storages that may be kept: inputs, parameters and stored results
        self._recomputed: dict[int, _Recomputed] = {}

    def after(self, func: OpOverload, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Record a finished operation that is not a view.

        Args:
            func: The operation.
            tensors: Its inputs, each [...].
            results: Its outputs, each [...].
        """
        inputs = {storage_key(tensor): tensor for tensor in tensors}
        for key, tensor in inputs.items():
            if key not in self._numbers:
                self._add(key, set(), tensor)
        sources = {self._numbers[key] for key in inputs}
        for tensor in results:
            key = storage_key(tensor)
            if key in inputs:  # the operation writes in place
                number = self._numbers[key]
                self._sources[number] |= sources - {number}
            else:
                self._add(key, sources, tensor if func in STORED_COMPILED else None)

    def _add(self, key: int, sources: set[int], kept: Tensor | None) -> None:
        number = len(self._sources)
        self._numbers[key] = number
        self._sources.append(sources)
        if kept is not None:
            self._kept[number] = kept.detach()

    def pack(self, tensor: Tensor) -> Any:
        """Pack a tensor, [...], for autograd: return the tensor itself, or a description of its recomputation."""
        number = self._numbers.get(storage_key(tensor)) if type(tensor) is Tensor else None
        if number is None or number in self._kept:  # None: a parameter
            return tensor
        if number not in self._recomputed:
            self._recomputed[number] = _Recomputed(tensor.untyped_storage().nbytes(), self._origins(number))
        recomputed = self._recomputed[number]
        recomputed.views += 1
        return recomputed, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def end(self) -> None:
        """Release the tensors that the backward does not need."""
        self._kept, self._recomputed = {}, {}

    def _origins(self, number: int) -> list[Tensor]:
        """Return the kept tensors from which a storage is recomputed."""
        pending, seen, origins = [number], {number}, []
        while pending:
            current = pending.pop()
            if current in self._kept:
                origins.append(self._kept[current])
                continue
            pending += self._sources[current] - seen
            seen |= self._sources[current]
        return origins


def _unpack(packed: Any) -> Tensor:
    """Return a saved tensor. A storage that is recomputed is allocated, and released after its last view."""
    if isinstance(packed, Tensor):
        return packed
    recomputed, dtype, shape, stride, offset = packed
    with torch.no_grad():
        if recomputed.bytes is None:
            # `zero_` stands for the kernel that writes it.
            recomputed.bytes = torch.empty(recomputed.size, dtype=torch.uint8, device="meta").zero_()
        tensor = recomputed.bytes.view(dtype).as_strided(shape, stride, offset)
    recomputed.views -= 1
    if recomputed.views == 0:
        recomputed.bytes = None
    return tensor
