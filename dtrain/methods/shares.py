"""Which rank trains on which completions: shares of like cost, the same answer on every rank."""

from collections.abc import Sequence


def share_out(costs: Sequence[float], ranks: int, most: int | None = None) -> list[list[int]]:
    """The indices of each rank, ascending: the dearest first, each to the rank with the least so far.

    most: items that a rank takes at most (None: any number). Graham's rule, at most 4/3 of the best (SIAM Journal on
    Applied Mathematics 17, 1969).
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        free = [rank for rank in range(ranks) if most is None or len(shares[rank]) < most]
        rank = min(free, key=lambda rank: (loads[rank], rank))
        shares[rank].append(index)
        loads[rank] += costs[index]
    return [sorted(share) for share in shares]
