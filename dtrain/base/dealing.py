"""Dealing of work of known costs to places."""

from collections.abc import Sequence


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
