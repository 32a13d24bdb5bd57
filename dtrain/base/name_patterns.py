"""Regular expressions for names that others wrote, matched in bounded time. No torch.

Python's `re` tries one way after the other, and `(a+)+!` has it try 2^n of them. Here a part of an expression gives all
places at which it may end, each once, so that the time grows with a power of the name's length. Python's own parser
reads the expression, so that it means what it means in `re`; what needs one way to be remembered, such as a
backreference, is refused.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from re import _constants, _parser  # type: ignore[attr-defined] # public until 3.11, as sre_constants and sre_parse
from typing import Any

NESTED = 100  # parts of an expression, one within the other
_UNSAFE = frozenset("*+?{|(")  # without one of these an expression has a single way
_REFUSED = {
    _constants.GROUPREF: "a backreference",
    _constants.GROUPREF_EXISTS: "a conditional group",
    _constants.ATOMIC_GROUP: "an atomic group",
    _constants.POSSESSIVE_REPEAT: "a possessive repeat",
}
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    _constants.CATEGORY_DIGIT: str.isdecimal,
    _constants.CATEGORY_SPACE: str.isspace,
    _constants.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    _constants.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    _constants.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    _constants.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
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
    tree = _parsed(pattern)
    return len(text) in _Match(text).ends(tree, 0, bool(tree.state.flags & re.IGNORECASE))


def endmatch(pattern: str, name: str) -> bool:
    """Return whether `pattern` matches all of a dotted name, or an end of it behind a dot."""
    if not _UNSAFE & {*pattern}:
        return re.fullmatch(rf"(.*\.)?({pattern})", name) is not None
    return fullmatch(of_end(pattern), name)


def of_end(pattern: str) -> str:
    """Return the expression for whole names that `endmatch` matches."""
    return rf"(.*\.)?({pattern})"


@lru_cache(maxsize=1024)
def _parsed(pattern: str) -> Any:
    """Return Python's tree of an expression that it can read. Raises ValueError for what is not matched here."""
    tree = _parser.parse(pattern)
    _refuse(tree, 0)
    return tree


def _refuse(tree: Any, depth: int) -> None:
    if depth > NESTED:
        raise ValueError("it is nested too deep")
    for op, value in tree:
        if op in _REFUSED:
            raise ValueError(f"{_REFUSED[op]} is not supported in expressions for names")
        inner = value[1] if op is _constants.BRANCH else value if isinstance(value, tuple) else ()
        for part in inner:
            if isinstance(part, _parser.SubPattern):
                _refuse(part, depth + 1)


class _Match:
    """Text to match, with a cache of the places at which each part of an expression ends."""

    def __init__(self, text: str):
        self.text = text
        self._ends: dict[tuple[int, int], set[int]] = {}  # by the part and the place at which it begins
        self._characters: dict[tuple[Any, int, bool], set[int]] = {}  # by the item: the places of those that it takes

    def ends(self, tree: Any, start: int, ignore_case: bool) -> set[int]:
        """Return the places at which a match of `tree` that begins at `start` may end."""
        if (id(tree), start) not in self._ends:
            places = {start}
            for op, value in tree:
                places = self._behind(op, value, places, ignore_case)
            self._ends[id(tree), start] = places
        return self._ends[id(tree), start]

    def _all_ends(self, tree: Any, places: Iterable[int], ignore_case: bool) -> set[int]:
        return set().union(*(self.ends(tree, place, ignore_case) for place in places))

    def _behind(self, op: Any, value: Any, places: set[int], ignore_case: bool) -> set[int]:
        """Return the places behind one item of an expression that begins at any of `places`."""
        if op is _constants.BRANCH:
            return set().union(*(self._all_ends(branch, places, ignore_case) for branch in value[1]))
        if op is _constants.SUBPATTERN:
            _, added, removed, tree = value
            ignored = (ignore_case or bool(added & re.IGNORECASE)) and not removed & re.IGNORECASE
            return self._all_ends(tree, places, ignored)
        if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            least, most, tree = value
            return self._repeated(least, most, tree, places, ignore_case)
        if op is _constants.AT:
            return {place for place in places if self._is_at(value, place)}
        if op in (_constants.ASSERT, _constants.ASSERT_NOT):
            is_wanted, (direction, tree) = op is _constants.ASSERT, value
            return {place for place in places if self._holds(direction, tree, place, ignore_case) == is_wanted}
        if op is _constants.FAILURE:
            return set()
        key = op, id(value), ignore_case
        if key not in self._characters:
            fits = (_is_one(c, op, value, ignore_case) for c in self.text)
            self._characters[key] = {place for place, is_one in enumerate(fits) if is_one}
        return {place + 1 for place in places & self._characters[key]}

    def _repeated(self, least: int, most: int, tree: Any, places: set[int], ignore_case: bool) -> set[int]:
        for _ in range(least):
            before, places = places, self._all_ends(tree, places, ignore_case)
            if places == before:  # by any further one too
                break
        reached = new = places
        for _ in range(most - least):
            new = self._all_ends(tree, new, ignore_case) - reached
            if not new:
                break
            reached = reached | new
        return reached

    def _holds(self, direction: int, tree: Any, place: int, ignore_case: bool) -> bool:
        """Return whether a look ahead (1) or behind (-1) from `place` finds `tree`."""
        if direction > 0:
            return bool(self.ends(tree, place, ignore_case))
        start = place - tree.getwidth()[0]
        return start >= 0 and place in self.ends(tree, start, ignore_case)

    def _is_at(self, code: Any, place: int) -> bool:
        """Return whether ^, $, \\A, \\Z, \\b or \\B holds at `place`."""
        if code in (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING):
            return place == 0
        if code in (_constants.AT_END, _constants.AT_END_STRING):
            return place == len(self.text)
        is_boundary = self._is_word(place - 1) != self._is_word(place)
        return is_boundary == (code is _constants.AT_BOUNDARY)

    def _is_word(self, place: int) -> bool:
        return 0 <= place < len(self.text) and _CATEGORIES[_constants.CATEGORY_WORD](self.text[place])


def _is_one(c: str, op: Any, value: Any, ignore_case: bool) -> bool:
    """Return whether a character is the literal, or one of the class, or the dot."""
    if op is _constants.ANY:
        return True
    parts = value if op is _constants.IN else [(_constants.LITERAL, value)]
    is_negated = op is _constants.NOT_LITERAL or parts[0][0] is _constants.NEGATE
    forms = (c.lower()[:1], c.upper()[:1]) if ignore_case else (c,)
    return any(_is_part(form, *part) for form in forms for part in parts) != is_negated


def _is_part(c: str, op: Any, value: Any) -> bool:
    if op is _constants.LITERAL:
        return ord(c) == value
    if op is _constants.RANGE:
        return value[0] <= ord(c) <= value[1]
    return op is _constants.CATEGORY and _CATEGORIES[value](c)


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
