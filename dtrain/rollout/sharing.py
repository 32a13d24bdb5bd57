"""Which rank answers which requests: as even as can be, and the samples of one prompt together where that is even."""

from collections.abc import Sequence

from dtrain.rollout.request import Request

# What reading a token of a prompt costs beside drawing one: it is read among many in one product, and once per group.
_READING = 0.25
# How far above the mean the largest share may be before groups are cut for the sake of evenness.
_SLACK = 1.1


def share_out(requests: Sequence[Request], places: int) -> list[list[int]]:
    """The indices of `requests` for each of `places` ranks, ascending; the same on every rank that asks.

    The work of a request is taken from its max_new_tokens, for nobody knows where it will stop. The largest piece goes
    to the rank with the least so far (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969); pieces are whole
    groups of equal prompts, or their halves, quarters and so on until the shares are even.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(tuple(request.prompt), []).append(index)
    largest = max(map(len, groups.values()), default=1)
    best: tuple[float, list[list[int]]] | None = None
    parts = 1
    while True:
        pieces = [piece for members in groups.values() for piece in _cut(members, parts)]
        load, shares = _deal(requests, pieces, places)
        if best is None or load < best[0]:
            best = load, shares
        mean = sum(_work(requests, piece) for piece in groups.values()) / places
        if best[0] <= _SLACK * mean or parts >= largest:
            return best[1]
        parts *= 2


def _deal(requests: Sequence[Request], pieces: list[list[int]], places: int) -> tuple[float, list[list[int]]]:
    """The load of the busiest place, and every place's requests."""
    loads = [0.0] * places
    shares: list[list[int]] = [[] for _ in range(places)]
    for work, piece in sorted(((_work(requests, piece), piece) for piece in pieces), key=lambda pair: -pair[0]):
        place = loads.index(min(loads))
        loads[place] += work
        shares[place] += piece
    return max(loads), [sorted(share) for share in shares]


def _work(requests: Sequence[Request], piece: list[int]) -> float:
    drawing = sum(requests[index].sampling.max_new_tokens for index in piece)
    return drawing + _READING * len(requests[piece[0]].prompt)


def _cut(members: list[int], parts: int) -> list[list[int]]:
    size = -(-len(members) // parts)
    return [members[start : start + size] for start in range(0, len(members), size)]
