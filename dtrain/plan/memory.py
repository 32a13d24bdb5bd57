"""Bytes that live at every moment of a step, by storage: what is allocated when, and when it is let go.

`Storages` is told of the operations one by one. FSDP grows and empties the storages of gathered parameters without an
operation: those are looked at before and after every other.

A timeline is cut at marks (this layer's forward, that layer's backward, ...). `Timeline.peaks` gives the largest sum of
each piece, and what it is made of.
"""

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

# What a storage is of; the order in which reports show them.
PARTS = (
    "parameters",
    "gradients",
    "rows",
    "reference",
    "teacher",
    "gathered parameters",
    "activations",
    "loss",
    "temporaries",
)


@dataclass
class Allocation:
    """One storage. `part` is its final one, which may be known later than its first byte; None: left out."""

    part: str | None
    size: int = 0


@dataclass
class Piece:
    """The largest moment between two marks: bytes by part."""

    peak: int = 0
    parts: Counter = field(default_factory=Counter)


class Storages:
    """The live storages, and every change of their sizes in order. `part`: of what is allocated from now on."""

    def __init__(self, part: str):
        self.part = part
        self.changes: list[tuple[Allocation, int]] = []
        self.marks: list[tuple[int, Hashable]] = []
        self._live: dict[int, tuple[weakref.ref, Allocation]] = {}
        self._resized: set[int] = set()  # whose size may change without an operation

    def see(self, tensor: Tensor, part: str | None = None) -> Allocation:
        """The storage of `tensor`, counted from now on where it was not before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            allocation = Allocation(part or self.part)
            self._live[key] = weakref.ref(storage, lambda _, key=key: self._gone(key)), allocation
        allocation = self._live[key][1]
        self._resize(allocation, storage.nbytes())
        return allocation

    def leave_out(self, tensor: Tensor) -> None:
        """The storage of `tensor`, which was not seen yet, is counted elsewhere."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._live[key] = weakref.ref(storage, lambda _: self._gone(key)), Allocation(None)

    def within_operation(self, tensor: Tensor) -> None:
        """A copy of `tensor` lives as long as the operation that comes."""
        copy, size = Allocation(self.part), tensor.untyped_storage().nbytes()
        self.changes += [(copy, size), (copy, -size)]

    def total(self) -> int:
        """Bytes that live now."""
        return sum(allocation.size for _, allocation in self._live.values() if allocation.part is not None)

    def saw(self, func: torch._ops.OpOverload, tensors: Iterable[Tensor]) -> None:
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

    def mark(self, label: Hashable) -> None:
        """A new piece of the timeline begins here."""
        self.poll()
        self.marks.append((len(self.changes), label))

    def rename(self, part: str, new: str) -> None:
        """What lives now as `part` was `new` from its beginning."""
        for _, allocation in self._live.values():
            if allocation.part == part and allocation.size:
                allocation.part = new

    def pieces(self) -> dict[Hashable, Piece]:
        """The peak of each piece of the timeline, by its mark."""
        found: dict[Hashable, Piece] = {}
        parts: Counter = Counter()
        total, at = 0, 0
        bounds = [*self.marks[1:], (len(self.changes), None)]
        for (start, label), (end, _) in zip(self.marks, bounds, strict=True):
            for allocation, change in self.changes[at:start]:
                total += change
                parts[allocation.part] += change
            piece = Piece(total, parts.copy())
            for allocation, change in self.changes[start:end]:
                total += change
                parts[allocation.part] += change
                if total > piece.peak:
                    piece = Piece(total, parts.copy())
            at = end
            known = found.get(label)
            if known is None or piece.peak > known.peak:
                found[label] = piece
        return found

    def _resize(self, allocation: Allocation, size: int) -> None:
        if size != allocation.size and allocation.part is not None:
            self.changes.append((allocation, size - allocation.size))
            allocation.size = size

    def _gone(self, key: int) -> None:
        _, allocation = self._live.pop(key)
        self._resized.discard(key)
        self._resize(allocation, 0)
