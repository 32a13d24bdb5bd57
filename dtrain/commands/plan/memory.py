"""Bytes that live at every moment of a step, by storage: what is allocated when, and when it is let go.

`MemoryTimeline` gets the operations one by one. FSDP grows and empties the storages of gathered parameters
without an operation: those are looked at before and after every other. The timeline is cut into phases (this layer's
forward, that layer's backward, ...); `peaks` gives the largest moment of each.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from dtrain.base.torch_functions import storage_key

NOT_COUNTED = ""  # the part of what is counted elsewhere


class Phase(NamedTuple):
    """A stretch of a step: of which pass through the model, and of which layer."""

    name: str
    number: int | None = None
    layer: int | None = None


@dataclass
class Allocation:
    """A storage. part: what it belongs to, which may be known later than its first byte."""

    part: str
    size: int = 0


class MemoryTimeline:
    """The live storages, and every change of their sizes in order. part: of what is allocated from now on."""

    def __init__(self, part: str):
        self.part = part
        self._events: list[tuple[Allocation, int] | Phase] = []  # changes in bytes, and where phases begin
        self._live: dict[int, tuple[weakref.ref, Allocation]] = {}
        self._resized: dict[int, tuple[weakref.ref, Allocation]] = {}  # whose size may change without an operation
        self._filled: dict[int, tuple[weakref.ref, Allocation]] = {}  # those of them that are not empty

    def see(self, tensor: Tensor, part: str | None = None) -> Allocation:
        """Return the storage of `tensor` [...], which is counted from now on."""
        key = storage_key(tensor)
        if key in self._live and key not in self._resized:
            return self._live[key][1]
        storage = tensor.untyped_storage()
        if key not in self._live:
            allocation = Allocation(self.part if part is None else part)
            self._live[key] = weakref.ref(storage, lambda _: self._freed(key)), allocation
        allocation = self._live[key][1]
        self._resize(allocation, storage.nbytes())
        if key in self._resized and allocation.size:
            self._filled[key] = self._resized[key]
        return allocation

    def add_workspace(self, size: int) -> None:
        """Count `size` bytes that live as long as an operation: before its outputs are seen, or beside them."""
        workspace = Allocation(self.part)
        self._events += [(workspace, size), (workspace, -size)]

    def mark(self) -> int:
        """Return the number of changes so far."""
        return len(self._events)

    def peak_since(self, mark: int) -> int:
        """Return the most bytes that were there since `mark` beside those before it."""
        return max(accumulate((event[1] for event in self._events[mark:] if not isinstance(event, Phase)), initial=0))

    def total(self) -> int:
        """Return the bytes that live now."""
        return sum(allocation.size for _, allocation in self._live.values())

    def after(self, func: OpOverload, tensors: Iterable[Tensor]) -> None:
        """Count a finished operation; `tensors`, each [...], are its inputs and outputs."""
        is_gathering = func is torch.ops.fsdp.split_with_sizes_copy.default
        # Perhaps FSDP's, for a parameter in a group of one rank.
        is_fsdp_buffer = func is torch.ops.aten.empty.memory_format
        for tensor in tensors:
            allocation = self.see(tensor)
            if (is_gathering and tensor.dim() == 2) or (is_fsdp_buffer and tensor.dim() == 1):
                key = storage_key(tensor)
                self._resized[key] = self._live[key]
                if allocation.size:  # not of what is left out
                    self._filled[key] = self._live[key]
                if is_gathering:
                    allocation.part = "gathered parameters"

    def poll(self) -> None:
        """Check the storages whose sizes change without an operation."""
        looked_at = [
            (key, storage, allocation)
            for key, (reference, allocation) in self._filled.items()
            if (storage := reference()) is None or storage.nbytes() != allocation.size or not allocation.size
        ]
        for key, storage, allocation in looked_at:
            if storage is not None and storage.nbytes() != allocation.size:
                allocation.part = "gathered parameters"
                self._resize(allocation, storage.nbytes())
            if not allocation.size:  # it grows just before an operation that fills it
                del self._filled[key]

    def begin(self, phase: Phase) -> None:
        self.poll()
        self._events.append(phase)

    def rename(self, part: str, new: str) -> None:
        """Count the live storages of `part` as `new`, from their allocation on."""
        for _, allocation in self._live.values():
            if allocation.part == part and allocation.size:
                allocation.part = new

    def peaks(self) -> dict[Phase, Counter[str]]:
        """Return the largest moment of each phase: bytes by part. Equal phases are one."""
        peaks: dict[Phase, Counter[str]] = {}
        largest: dict[Phase, int] = {}
        total, parts, phase = 0, Counter[str](), None
        for event in self._events:
            if isinstance(event, Phase):
                phase = event
            else:
                allocation, change = event
                total += change
                parts[allocation.part] += change
            if phase is not None and total > largest.get(phase, -1):
                largest[phase], peaks[phase] = total, parts.copy()
        return peaks

    def _resize(self, allocation: Allocation, size: int) -> None:
        if size != allocation.size and allocation.part != NOT_COUNTED:
            self._events.append((allocation, size - allocation.size))
            allocation.size = size

    def _freed(self, key: int) -> None:
        _, allocation = self._live.pop(key)
        self._resized.pop(key, None)
        self._filled.pop(key, None)
        self._resize(allocation, 0)
