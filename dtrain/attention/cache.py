"""Where the keys and values of running sequences lie: on shelves of slots of one size, a prompt's apart from its rows'.

The samples of one prompt share its slot; what a row adds lies in a slot of its own, on a larger shelf as it grows, so
that at most half of a slot is empty. The slots of a shelf that are in use are its first ones: attention reads them as
one tensor, without an index. Layers with a sliding window keep no more than a later token can see.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SMALLEST_SLOT = 32


def slot_size(length: int) -> int:
    """The capacity of the smallest slot for `length` positions: a power of two."""
    return max(SMALLEST_SLOT, 1 << (length - 1).bit_length())


@dataclass(eq=False)
class Place:
    """Where one sequence lies: `length` positions of it are in slot `slot` of `shelf`. owner: whoever asked for it."""

    shelf: "Shelf"
    slot: int
    length: int = 0
    owner: Any = None


class Shelf:
    """Slots of one capacity: per layer keys and values [slots, kv, n, hd], n the capacity or what the layer keeps.

    kept: the most positions that each layer keeps, None for all. Memory comes with the first write to a layer, in the
    dtype and on the device of what is written, and grows with the slots in use.
    """

    def __init__(self, capacity: int, kept: Sequence[int | None]):
        self.capacity = capacity
        self.places: list[Place] = []  # by slot
        self._sizes = [capacity if most is None else min(capacity, most) for most in kept]
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * len(kept)

    def take(self) -> Place:
        place = Place(self, len(self.places))
        self.places.append(place)
        return place

    def size(self, layer: int) -> int:
        """How many positions a slot has in this layer."""
        return self._sizes[layer]

    def layer(self, index: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, with room for every slot in use; like: [..., kv, hd] of what is to be written."""
        held = self._layers[index]
        used = len(self.places)
        if held is None or held[0].shape[0] < used:
            # Zeros, not whatever the memory holds: a NaN that is hidden would still be one after the product.
            slots = used if held is None else max(used, held[0].shape[0] * 3 // 2)
            shape = (slots, like.shape[-2], self._sizes[index], like.shape[-1])
            fresh = like.new_zeros(shape), like.new_zeros(shape)
            if held is not None:
                for new, old in zip(fresh, held, strict=True):
                    new[: old.shape[0]] = old
            held = self._layers[index] = fresh
        return held

    def release(self, gone: Sequence[Place]) -> None:
        """Empty the slots of `gone`; the last ones in use move into the holes. Free slots are zeros, as new ones."""
        leaving = {place.slot for place in gone}
        left = len(self.places) - len(leaving)
        holes = sorted(slot for slot in leaving if slot < left)
        movers = [slot for slot in range(left, len(self.places)) if slot not in leaving]
        for hole, mover in zip(holes, movers, strict=True):
            self.places[hole] = self.places[mover]
            self.places[hole].slot = hole
        del self.places[left:]
        self._copy(self, movers, holes)
        for tensor in (tensor for held in self._layers if held is not None for tensor in held):
            tensor[left : left + len(leaving)] = 0

    def receive(self, places: Sequence[Place]) -> None:
        """Take over sequences from smaller slots of one other shelf, which keeps none of them."""
        source = places[0].shelf
        first = len(self.places)
        self.places += places
        slots = [place.slot for place in places]
        for layer, held in enumerate(source._layers):
            if held is not None:
                self.layer(layer, held[0][:, :, 0])
        source._copy(self, slots, list(range(first, len(self.places))))
        source.release([Place(source, slot) for slot in slots])
        for slot, place in enumerate(places, first):
            place.shelf, place.slot = self, slot

    def _copy(self, target: "Shelf", sources: list[int], targets: list[int]) -> None:
        if not sources:
            return
        for held, into in zip(self._layers, target._layers, strict=True):
            if held is None or into is None:
                continue
            device = held[0].device
            whence, whither = (torch.tensor(slots, device=device) for slots in (sources, targets))
            for old, new in zip(held, into, strict=True):
                new[whither, :, : old.shape[2]] = old[whence]


class KeyValues:
    """The shelves of one engine, for a model whose layers have these windows (None: a layer that sees everything)."""

    def __init__(self, windows: Sequence[int | None]):
        self.windows = tuple(windows)
        self.prompts: dict[int, Shelf] = {}  # by capacity
        self.rows: dict[int, Shelf] = {}
        # The first token after a prompt sees window - 1 of it; one slot stays, so that no tensor is empty.
        self._prompt_keeps = [None if window is None else max(window - 1, 1) for window in windows]

    def new_prompt(self, length: int) -> Place:
        place = _shelf(self.prompts, slot_size(length), self._prompt_keeps).take()
        place.length = length
        return place

    def new_row(self, owner: Any = None) -> Place:
        place = _shelf(self.rows, SMALLEST_SLOT, self.windows).take()
        place.owner = owner
        return place

    def grow(self) -> bool:
        """Move rows whose slot is full to a larger one; whether there were any."""
        moved = False
        for capacity, shelf in sorted(self.rows.items(), reverse=True):
            if full := [place for place in shelf.places if place.length == capacity]:
                _shelf(self.rows, 2 * capacity, self.windows).receive(full)
                moved = True
        return moved

    def release(self, places: Sequence[Place]) -> None:
        for shelf in {place.shelf: None for place in places}:
            shelf.release([place for place in places if place.shelf is shelf])

    def rows_in_order(self) -> list[Place]:
        """Every row, shelf by shelf and slot by slot: the order in which `decode.Decode` wants them."""
        return [place for _, shelf in sorted(self.rows.items()) for place in shelf.places]


def _shelf(shelves: dict[int, Shelf], capacity: int, kept: Sequence[int | None]) -> Shelf:
    return shelves.setdefault(capacity, Shelf(capacity, kept))
