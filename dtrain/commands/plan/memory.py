"""Timeline of a step's memory: every allocation and every release of a storage, in order.

`MemoryTimeline` sees the operations one by one. FSDP grows and empties the storages of gathered parameters without an
operation, so these are checked before and after every other operation. The timeline is divided into phases (the forward
of a layer, the backward of a layer, ...), and `peaks` returns the largest moment of each.
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

NOT_COUNTED = ""  # part of storages that are counted elsewhere


class Phase(NamedTuple):
    """A stretch of a step.

    Attributes:
        name: Kind of phase, such as "forward".
        number: Index of the pass through the model. None outside a pass.
        layer: Index of the layer, if it is the phase of one.
    """

    name: str
    number: int | None = None
    layer: int | None = None


@dataclass
class Allocation:
    """A storage.

    Attributes:
        part: What it belongs to, such as "activations". This may become known only after it was allocated.
        size: Its bytes.
    """

    part: str
    size: int = 0


class MemoryTimeline:
    """The live storages, and every change of their sizes in order.

    Args:
        part: Part of new storages.

    Attributes:
        part: Part of new storages from now on.
    """

    def __init__(self, part: str):
        self.part = part
        self._events: list[tuple[Allocation, int] | Phase] = []  # changes in bytes, and beginnings of phases
        # Storages by key. The weak references tell when a storage is released.
        self._live: dict[int, tuple[weakref.ref, Allocation]] = {}
        # The storages of `_live` that FSDP may resize without an operation, and those of them that are not empty.
        self._resized: dict[int, tuple[weakref.ref, Allocation]] = {}
        self._filled: dict[int, tuple[weakref.ref, Allocation]] = {}

    def see(self, tensor: Tensor, part: str | None = None) -> Allocation:
        """Count the storage of a tensor from now on, if it is not counted already.

        Args:
            tensor: The tensor, [...].
            part: Part of a new storage. None: `self.part`.
        """
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
        """Count `size` bytes that an operation uses while it runs."""
        workspace = Allocation(self.part)
        self._events += [(workspace, size), (workspace, -size)]

    def mark(self) -> int:
        """Return the number of changes so far, for `peak_since`."""
        return len(self._events)

    def peak_since(self, mark: int) -> int:
        """Return the largest number of bytes since `mark`, in addition to those that were live then."""
        changes = [event[1] for event in self._events[mark:] if not isinstance(event, Phase)]
        return max(accumulate(changes, initial=0))

    def total(self) -> int:
        """Return the bytes that are live now."""
        return sum(allocation.size for _, allocation in self._live.values())

    def after(self, func: OpOverload, tensors: Iterable[Tensor]) -> None:
        """Count a finished operation.

        Args:
            func: The operation.
            tensors: Its inputs and outputs, each [...].
        """
        is_gathering = func is torch.ops.fsdp.split_with_sizes_copy.default
        # For a parameter in a group of one rank, FSDP allocates a one-dimensional buffer with `empty`. Other buffers of
        # this kind are checked too, which does no harm.
        may_be_fsdp_buffer = func is torch.ops.aten.empty.memory_format
        for tensor in tensors:
            allocation = self.see(tensor)
            if (is_gathering and tensor.dim() == 2) or (may_be_fsdp_buffer and tensor.dim() == 1):
                key = storage_key(tensor)
                self._resized[key] = self._live[key]
                if allocation.size:  # storages that are not counted have none
                    self._filled[key] = self._live[key]
                if is_gathering:
                    allocation.part = "gathered parameters"

    def poll(self) -> None:
        """Count the changes of storages that FSDP grows or empties without an operation."""
        changed = []
        for key, (reference, allocation) in self._filled.items():
            storage = reference()
            if storage is None or storage.nbytes() != allocation.size or not allocation.size:
                changed.append((key, storage, allocation))
        for key, storage, allocation in changed:
            if storage is not None and storage.nbytes() != allocation.size:
                allocation.part = "gathered parameters"
                self._resize(allocation, storage.nbytes())
            if not allocation.size:  # FSDP fills it again just before an operation, which `see` notices
                del self._filled[key]

    def begin(self, phase: Phase) -> None:
        """Begin a phase."""
        self.poll()
        self._events.append(phase)

    def rename(self, part: str, new: str) -> None:
        """Count the live storages of `part` as `new`, from their allocation on."""
        for _, allocation in self._live.values():
            if allocation.part == part and allocation.size:
                allocation.part = new

    def peaks(self) -> dict[Phase, Counter[str]]:
        """Return the bytes by part at the peak of each phase. Equal phases, such as repeated ones, count as one."""
        peaks: dict[Phase, Counter[str]] = {}
        largest_totals: dict[Phase, int] = {}
        phase: Phase | None = None
        total = 0
        parts: Counter[str] = Counter()
        for event in self._events:
            if isinstance(event, Phase):
                phase = event
            else:
                allocation, change = event
                total += change
                parts[allocation.part] += change
            if phase is not None and total > largest_totals.get(phase, -1):
                largest_totals[phase] = total
                peaks[phase] = parts.copy()
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
