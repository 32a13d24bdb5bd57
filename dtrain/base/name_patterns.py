"""Regular expressions for names that others wrote, matched in bounded time. No torch.

Python's `re` tries one way after the other, and `(a+)+!` has it try 2^n of them. Here a part of an expression gives all
places at which it may end, each once, so that the time grows with a power of the name's length. Python's own parser
reads the expression and its matcher takes each single item, so that these mean what they mean in `re`; what needs one
way to be remembered, such as a backreference, is refused.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from re import _compiler, _constants, _parser  # type: ignore[attr-defined] # until 3.11 sre_compile and so on
from typing import Any

NESTED = 100  # parts of an expression, one within the other
_UNSAFE = frozenset("*+?{|(")  # without one of these an expression has a single way
_REFUSED = {
    _constants.GROUPREF: "a backreference",
    _constants.GROUPREF_EXISTS: "a conditional group",
    _constants.ATOMIC_GROUP: "an atomic group",
    _constants.POSSESSIVE_REPEAT: "a possessive repeat",
}


def python_error(pattern: str) -> str | None:
    """Return why Python's `re` does not read `pattern`; None where it does."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:
        return str(error)
    except RecursionError:
        return "it is nested too deep"
    return None


def pattern_error(pattern: str) -> str | None:
    """Return why `fullmatch` does not take `pattern`; None where it does."""
    wrong = python_error(pattern)
    if wrong is None:
        try:
            _parsed(pattern)
        except ValueError as error:
            return str(error)
    return wrong


@lru_cache(maxsize=1 << 16)
def fullmatch(pattern: str, text: str) -> bool:
    """Return whether `re.fullmatch` of the two matches. `pattern` has no `pattern_error`; `text` has no line break."""
    if not _UNSAFE & {*pattern}:
        return re.fullmatch(pattern, text) is not None
    tree, items = _parsed(pattern)
    return len(text) in _Match(items, text).ends(tree, 0, tree.state.flags)


def endmatch(pattern: str, name: str) -> bool:
    """Return whether `pattern` matches all of a dotted name, or an end of it behind a dot."""
    if not _UNSAFE & {*pattern}:
        return re.fullmatch(rf"(.*\.)?({pattern})", name) is not None
    return fullmatch(of_end(pattern), name)


def of_end(pattern: str) -> str:
    """Return the expression for whole names that `endmatch` matches."""
    return rf"(.*\.)?({pattern})"


Items = dict[tuple[Any, int, int], re.Pattern[str]]
"""Expressions of single items (a character, a class, an anchor), by an item's kind, the id of its value, and flags."""


@lru_cache(maxsize=1024)
def _parsed(pattern: str) -> tuple[Any, Items]:
    """Return Python's tree of an expression that it can read, and its single items. Raises ValueError for what is not
    matched here."""
    tree, items = _parser.parse(pattern), Items()
    _compile_items(tree, tree.state.flags, items, 0)
    return tree, items


def _compile_items(tree: Any, flags: int, items: Items, depth: int) -> None:
    if depth > NESTED:
        raise ValueError("it is nested too deep")
    for op, value in tree:
        if op in _REFUSED:
            raise ValueError(f"{_REFUSED[op]} is not supported in expressions for names")
        values = value[1] if op is _constants.BRANCH else value if isinstance(value, tuple) else ()
        if parts := [part for part in values if isinstance(part, _parser.SubPattern)]:
            for part in parts:
                _compile_items(part, _flags_within(op, value, flags), items, depth + 1)
        else:
            state = _parser.State()
            state.flags = flags
            items[op, id(value), flags] = _compiler.compile(_parser.SubPattern(state, [(op, value)]))


def _flags_within(op: Any, value: Any, flags: int) -> int:
    """Return the flags that hold in a part: a group may have its own."""
    if op is not _constants.SUBPATTERN:
        return flags
    _, added, removed, _ = value
    replaced = _parser.TYPE_FLAGS if added & _parser.TYPE_FLAGS else 0  # ASCII in place of Unicode, say
    return (flags & ~replaced | added) & ~removed


class _Match:
    """Text to match, with a cache of the places at which each part of an expression ends."""

    def __init__(self, items: Items, text: str):
        self.items, self.text = items, text
        self._ends: dict[tuple[int, int], set[int]] = {}  # by the part and the place at which it begins

    def ends(self, tree: Any, start: int, flags: int) -> set[int]:
        """Return the places at which a match of `tree` that begins at `start` may end."""
        if (id(tree), start) not in self._ends:
            places = {start}
            for op, value in tree:
                if not places:
                    break
                places = self._behind(op, value, places, flags)
            self._ends[id(tree), start] = places
        return self._ends[id(tree), start]

    def _all_ends(self, tree: Any, places: set[int], flags: int) -> set[int]:
        return set().union(*(self.ends(tree, place, flags) for place in places))

    def _behind(self, op: Any, value: Any, places: set[int], flags: int) -> set[int]:
        """Return the places behind one item of an expression that begins at any of `places`."""
        if op is _constants.BRANCH:
            return set().union(*(self._all_ends(branch, places, flags) for branch in value[1]))
        if op is _constants.SUBPATTERN:
            return self._all_ends(value[3], places, _flags_within(op, value, flags))
        if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            least, most, tree = value
            return self._repeated(least, most, tree, places, flags)
        if op in (_constants.ASSERT, _constants.ASSERT_NOT):
            is_wanted, (direction, tree) = op is _constants.ASSERT, value
            return {place for place in places if self._holds(direction, tree, place, flags) == is_wanted}
        match = self.items[op, id(value), flags].match
        return {found.end() for place in places if (found := match(self.text, place)) is not None}

    def _repeated(self, least: int, most: int, tree: Any, places: set[int], flags: int) -> set[int]:
        for _ in range(least):
            before, places = places, self._all_ends(tree, places, flags)
            if places == before:  # by any further one too
                break
        reached, new = {*places}, places
        for _ in range(most - least):
            new = self._all_ends(tree, new, flags) - reached
            if not new:
                break
            reached |= new
        return reached

    def _holds(self, direction: int, tree: Any, place: int, flags: int) -> bool:
        """Return whether a look ahead (1) or behind (-1) from `place` finds `tree`."""
        if direction > 0:
            return bool(self.ends(tree, place, flags))
        start = place - tree.getwidth()[0]
        return start >= 0 and place in self.ends(tree, start, flags)


def matched(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Return whether any of a parameter's `names` matches any of `patterns`."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def unmatched(patterns_by_key: Mapping[str, Iterable[str]], names: Collection[str]) -> list[str]:
    """Return a line for each pattern that matches none of the parameter `names`, with the recipe's key it stands in."""
    return [
        f"{key}: {pattern} matches no parameter of the model; they have names such as {next(iter(names))}, and * "
        "stands for any part"
        for key, patterns in patterns_by_key.items()
        for pattern in patterns
        if not matched(names, [pattern])
    ]
