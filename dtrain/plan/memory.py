"""Bytes that live at every moment of a step, by storage: what is allocated when, and when it is let go.

`MemoryTimeline` is told of the operations one by one. FSDP grows and empties the storages of gathered parameters
without an operation: those are looked at before and after every other. The timeline is cut into phases (this layer's
forward, that layer's backward, ...); `peaks` gives the largest moment of each.
"""

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Allocation:
    """One storage. part: what it is of, which may be known later than its first byte; None: left out."""

    part: str | None
    size: int = 0


class MemoryTimeline:
    """The live storages, and every change of their sizes in order. part: of what is allocated from now on."""

    def __init__(self, part: str):
        self.part = part
        self._events: list[tuple[Allocation | None, int | Hashable]] = []  # a change in bytes; or None and a phase
        self._live: dict[int, tuple[weakref.ref, Allocation]] = {}
        self._resized: set[int] = set()  # whose size may change without an operation

    def see(self, tensor: Tensor, part: str | None = None) -> Allocation:
        """The storage of `tensor`, counted from now on where it was not before."""
        storage = tensor.untyped_storage()
        allocation = self._allocation(tensor, part or self.part)
        self._resize(allocation, storage.nbytes())
        return allocation

    def leave_out(self, tensor: Tensor) -> None:
        """The storage of `tensor`, which was not seen yet, is counted elsewhere."""
        self._allocation(tensor, None)

    def within_operation(self, tensor: Tensor) -> None:
        """A copy of `tensor` lives as long as the operation that comes."""
        copy, size = Allocation(self.part), tensor.untyped_storage().nbytes()
        self._events += [(copy, size), (copy, -size)]

    def total(self) -> int:
        """Bytes that live now."""
        return sum(allocation.size for _, allocation in self._live.values())

    def after(self, func: torch._ops.OpOverload, tensors: Iterable[Tensor]) -> None:
        """An operation is done; `tensors` are its inputs and outputs."""
        is_gathering = func is torch.ops.fsdp.split_with_sizes_copy.default
        is_room = func is torch.ops.aten.empty.memory_format  # FSDP's for a parameter, in a group of one rank, perhaps
        for tensor in tensors:
            allocation = self.see(tensor)
            if (is_gathering and tensor.dim() == 2) or (is_room and tensor.dim() == 1):
                self._resized.add(tensor.untyped_storage()._cdata)
                if is_gathering:
                    allocation.part = "gathered parameters"

    def poll(self) -> None:
        """Look at the storages whose sizes change by themselves."""
        for key in self._resized:
            reference, allocation = self._live[key]
            if allocation.size:  # what is empty grows just before an operation that fills it
                storage = reference()
                if storage is not None and storage.nbytes() != allocation.size:
                    allocation.part = "gathered parameters"
                    self._resize(allocation, storage.nbytes())

    def begin(self, phase: Hashable) -> None:
        self.poll()
        self._events.append((None, phase))

    def rename(self, part: str, new: str) -> None:
        """What lives now as `part` was `new` from its beginning."""
        for _, allocation in self._live.values():
            if allocation.part == part and allocation.size:
                allocation.part = new

    def peaks(self) -> dict[Hashable, Counter[str]]:
        """The largest moment of each phase: bytes by part. Phases of one name are one."""
        found: dict[Hashable, Counter[str]] = {}
        largest: dict[Hashable, int] = {}
        total, parts, phase = 0, Counter(), None
        for allocation, change in self._events:
            if allocation is None:
                phase = change
            else:
                total += change
                parts[allocation.part] += change
            if phase is not None and total > largest.get(phase, -1):
                largest[phase], found[phase] = total, parts.copy()
        return found

    def _allocation(self, tensor: Tensor, part: str | None) -> Allocation:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            self._live[key] = weakref.ref(storage, lambda _: self._freed(key)), Allocation(part)
        return self._live[key][1]

    def _resize(self, allocation: Allocation, size: int) -> None:
        if size != allocation.size and allocation.part is not None:
            self._events.append((allocation, size - allocation.size))
            allocation.size = size

    def _freed(self, key: int) -> None:
        _, allocation = self._live.pop(key)
        self._resized.discard(key)
        self._resize(allocation, 0)
