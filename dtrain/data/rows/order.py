"""The order in which an epoch visits its samples, a function of (seed, epoch, position) that needs no memory; which
samples share a row, and which items go to which rank.

A permutation of [0, n) is a Feistel network over the next power of four, walked until it lands inside ("cycle
walking"; Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). Its round function is SplitMix64's mixer.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.base.randomness import key, mix

ROUNDS = 8


def permute(positions: Tensor, size: int, permutation: int) -> Tensor:
    """Map `positions` by the permutation of 0 ... size - 1 with that key. Both int64 [n], each below `size`."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1

    def once(values: Tensor) -> Tensor:
        left, right = values >> half, values & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (mix(right + key(permutation, number)) & mask)
        return (left << half) | right

    result = once(positions)
    outside = result >= size
    while bool(outside.any()):
        result[outside] = once(result[outside])
        outside = result >= size
    return result


@dataclass(frozen=True)
class Share:
    """A source's samples, `first` and `count` of them, and the times that each appears in an epoch."""

    first: int
    count: int
    weight: float = 1.0

    @property
    def copies(self) -> int:
        return int(self.weight)

    @property
    def extra(self) -> int:
        """Number of samples that appear once more."""
        return round((self.weight - self.copies) * self.count)

    @property
    def total(self) -> int:
        return self.copies * self.count + self.extra


class Order:
    """The samples of one epoch.

    A source of weight w gives every sample ⌊w⌋ times, and round((w − ⌊w⌋) · count) of them once more: the next so many
    of one order drawn from the seed, around and around, so that after any number of epochs no sample is more than one
    visit ahead of another. Shuffled, all of these are permuted together; else they come source by source.
    """

    def __init__(self, shares: Sequence[Share], *, seed: int, epoch: int, shuffle: bool):
        self.shares, self.seed, self.epoch, self.shuffle = tuple(shares), seed, epoch, shuffle
        self.total = sum(share.total for share in self.shares)

    def samples(self, start: int, stop: int) -> Tensor:
        """Return the sample at each position in [start, stop), int64 [stop - start], fewer where the epoch ends."""
        positions = torch.arange(start, min(stop, self.total))
        if self.shuffle:
            positions = permute(positions, self.total, key("order", self.seed, self.epoch))
        result = torch.empty_like(positions)
        base = 0
        for number, share in enumerate(self.shares):
            inside = (positions >= base) & (positions < base + share.total)
            local = positions[inside] - base
            chosen = local >= share.copies * share.count
            sample = local % max(1, share.count)
            if bool(chosen.any()):
                drawn = local[chosen] - share.copies * share.count
                drawn = (drawn + self.epoch * share.extra) % share.count
                sample[chosen] = permute(drawn, share.count, key("choice", self.seed, number))
            result[inside] = share.first + sample
            base += share.total
        return result


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit-decreasing bin packing: bins of indices into `lengths`, every index in one bin, no bin above `capacity`.

    The longest first, each into the fullest bin that still has room for it (of equals, the first opened), else into
    a new one. Within a bin the indices ascend; the bins stand in the order of their first index.

    Raises ValueError for a length above `capacity`.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (room left, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"a sample of {length} tokens does not fit into a row of {capacity}")
        place = bisect_left(room, (length, -1))
        if place < len(room):
            left, number = room.pop(place)
            bins[number].append(index)
        else:
            left, number = capacity, len(bins)
            bins.append([index])
        insort(room, (left - length, number))
    for members in bins:
        members.sort()
    return sorted(bins)


def deal(costs: Sequence[float], places: int, most: int | None = None) -> list[list[int]]:
    """Deal indices to places, each place's ascending: the dearest first, each to the place with the least so far.

    most: items that a place takes at most (None: any number). At most 4/3 of the best (R. L. Graham, Bounds on
    multiprocessing timing anomalies, SIAM Journal on Applied Mathematics 17, 1969).
    """
    shares: list[list[int]] = [[] for _ in range(places)]
    loads = [0.0] * places
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        free = [place for place in range(places) if most is None or len(shares[place]) < most]
        place = min(free, key=lambda place: (loads[place], place))
        loads[place] += costs[index]
        shares[place].append(index)
    return [sorted(share) for share in shares]
