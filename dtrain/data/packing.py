"""Best-fit-decreasing bin packing: which samples share a row."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices into `lengths`, every index in one bin, no bin above `capacity`.

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
