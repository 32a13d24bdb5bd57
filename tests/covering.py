"""Covering arrays: few cases in which every pair of values of any two axes meets."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def covering(
    axes: Mapping[str, Sequence[Any]],
    *,
    allows: Callable[[Case], bool] = lambda case: True,
    cost: Callable[[Case], float] = lambda case: 1.0,
    first: Iterable[Case] = (),
    tries: int = 40,
    seed: int = 0,
) -> list[Case]:
    """Return cases, a value of each axis, in which every pair of values of two axes stands that a case can hold.

    allows: whether a case can be run; cost: what a run of it takes; first: cases that are part of the array, such as
    triples that once broke. The array is a function of the arguments alone. Greedy, after AETG (Cohen et al., IEEE TSE
    23(7), 1997): of `tries` drawn cases around an uncovered pair, the one that covers the most for its cost.
    """
    draw, names = random.Random(seed), list(axes)
    open_pairs = {
        frozenset(((a, x), (b, y)))
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(axes[a], axes[b])
    }
    cases: list[Case] = []

    def take(case: Case) -> None:
        cases.append(case)
        open_pairs.difference_update(_pairs(case))

    first = list(first)
    for case in first:
        take(case)
    for pair in sorted(open_pairs, key=lambda pair: sorted(map(str, pair))):
        if pair not in open_pairs:
            continue
        drawn = [_filled(dict(pair), axes, open_pairs, allows, draw) for _ in range(tries)]
        able = [case for case in drawn if case is not None]
        if able:  # else no case holds the pair
            take(max(able, key=lambda case: len(open_pairs & _pairs(case)) / cost(case)))
    return first + _without_redundant(cases[len(first) :], first, cost)


def _without_redundant(cases: list[Case], first: list[Case], cost: Callable[[Case], float]) -> list[Case]:
    """Leave out cases all of whose pairs stand in the others too, the most expensive ones first.

    A greedy array has such cases: a later case may cover every pair for which an earlier one was taken.
    """
    times_covered = Counter(pair for case in [*first, *cases] for pair in _pairs(case))
    kept = list(cases)
    for case in sorted(cases, key=cost, reverse=True):
        pairs = _pairs(case)
        if all(times_covered[pair] > 1 for pair in pairs):
            kept.remove(case)
            times_covered.subtract(pairs)
    return kept


def each_value(cases: Sequence[Case], cost: Callable[[Case], float] = lambda case: 1.0) -> list[Case]:
    """Return some of `cases` in which every value of every axis stands that stands in all of them.

    Greedy: of the cases that are left, the one with the most new values for its cost.
    """
    open_values = {value for case in cases for value in case.items()}
    left, chosen = list(cases), []
    while open_values:
        best = max(left, key=lambda case: len(open_values & set(case.items())) / cost(case))
        left.remove(best)
        chosen.append(best)
        open_values.difference_update(best.items())
    return chosen


def named(case: Case) -> str:
    """Return the name of a case in pytest's list."""
    return ", ".join(f"{axis} {value}" if len(str(value)) < 6 else str(value) for axis, value in case.items())


def worlds(
    cases: Sequence[Case], ranks_of: Callable[[Case], int], at_most: int = 6
) -> Iterator[tuple[str, list[Case]]]:
    """Yield the cases in groups that need the same number of ranks, `at_most` in a group, each with its name."""
    by_ranks: dict[int, list[Case]] = {}
    for case in cases:
        by_ranks.setdefault(ranks_of(case), []).append(case)
    for ranks, group in sorted(by_ranks.items()):
        for number, start in enumerate(range(0, len(group), at_most), 1):
            yield f"{ranks} ranks, {number}", group[start : start + at_most]


def _pairs(case: Case) -> set[frozenset]:
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}


def _filled(
    case: Case, axes: Mapping[str, Sequence[Any]], open_pairs: set[frozenset], allows: Callable[[Case], bool], draw: Any
) -> Case | None:
    """Return `case` with a value of every axis, each the one that covers the most with those before it."""
    rest = [name for name in axes if name not in case]
    draw.shuffle(rest)
    for name in rest:
        values = draw.sample(list(axes[name]), len(axes[name]))
        able = [value for value in values if allows({**case, name: value})]
        if not able:
            return None
        case[name] = max(able, key=lambda v: sum(frozenset(((name, v), old)) in open_pairs for old in case.items()))
    return {name: case[name] for name in axes} if allows(case) else None
