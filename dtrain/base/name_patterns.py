"""Regular expressions for names that others wrote, matched in bounded time. No torch.

Python's `re` tries one way after the other, and `(a+)+!` has it try 2^n of them. Here all ways are followed at once
(Thompson's construction): at most states × characters steps. Python's own parser reads the expression, so that it means
what it means in `re`; what needs one way to be remembered, such as a backreference, is refused.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from re import _constants, _parser  # type: ignore[attr-defined] # public until 3.11, as sre_constants and sre_parse
from typing import Any

STATES = 10_000  # of an expression, its counted repeats written out
LOOKAROUNDS = 5  # one within the other
_END = 0  # the state at which an expression, or one within it, has matched
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
            _compiled(pattern)
        except ValueError as error:
            return str(error)
    return wrong


@lru_cache(maxsize=1 << 16)
def fullmatch(pattern: str, text: str) -> bool:
    """Return whether `re.fullmatch` of the two matches. `pattern` has no `pattern_error`; `text` has no line break."""
    if not _UNSAFE & {*pattern}:
        return re.fullmatch(pattern, text) is not None
    entry, states = _compiled(pattern)
    return len(text) in _Match(states, text).ends(entry, 0)


def endmatch(pattern: str, name: str) -> bool:
    """Return whether `pattern` matches all of a dotted name, or an end of it behind a dot."""
    if not _UNSAFE & {*pattern}:
        return re.fullmatch(rf"(.*\.)?({pattern})", name) is not None
    return fullmatch(of_end(pattern), name)


def of_end(pattern: str) -> str:
    """Return the expression for whole names that `endmatch` matches."""
    return rf"(.*\.)?({pattern})"


class _State:
    """State of the automaton: a character's `test` leads to `after`; without a test all of `after` are reached at
    once, `check` permitting."""

    __slots__ = ("after", "check", "test")

    def __init__(self, after: tuple[int, ...], test: Any = None, check: Any = None):
        self.after, self.test, self.check = after, test, check


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> tuple[int, list[_State]]:
    """Return the first state and all states of an expression that Python can read. Raises ValueError."""
    tree = _parser.parse(pattern)
    builder = _Builder()
    _refuse_ascii(tree.state.flags)
    try:
        entry = builder.sequence(tree, _END, bool(tree.state.flags & re.IGNORECASE))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return entry, builder.states


class _Builder:
    """States of an expression, made from its end to its beginning."""

    def __init__(self) -> None:
        self.states = [_State(())]
        self.lookarounds = 0

    def sequence(self, tree: Any, after: int, ignore_case: bool) -> int:
        """Return the state from which `tree` leads to `after`."""
        for op, value in reversed(list(tree)):
            after = self._item(op, value, after, ignore_case)
        return after

    def _add(self, *after: int, test: Any = None, check: Any = None) -> int:
        if len(self.states) == STATES:
            raise ValueError(f"it has more than {STATES:,} parts, repeats written out")
        self.states.append(_State(after, test, check))
        return len(self.states) - 1

    def _item(self, op: Any, value: Any, after: int, ignore_case: bool) -> int:
        if op in (_constants.LITERAL, _constants.NOT_LITERAL, _constants.IN):
            parts = value if op is _constants.IN else [(_constants.LITERAL, value)]
            is_negated = op is _constants.NOT_LITERAL or parts[0][0] is _constants.NEGATE
            return self._add(after, test=_character(parts, is_negated, ignore_case))
        if op is _constants.ANY:
            return self._add(after, test=lambda c: True)
        if op is _constants.BRANCH:
            return self._add(*[self.sequence(branch, after, ignore_case) for branch in value[1]])
        if op is _constants.SUBPATTERN:
            _, added, removed, tree = value
            _refuse_ascii(added)
            ignored = (ignore_case or bool(added & re.IGNORECASE)) and not removed & re.IGNORECASE
            return self.sequence(tree, after, ignored)
        if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            least, most, tree = value
            return self._repeat(least, most, tree, after, ignore_case)
        if op is _constants.AT:
            return self._add(after, check=_place(value))
        if op in (_constants.ASSERT, _constants.ASSERT_NOT):
            direction, tree = value
            return self._add(after, check=self._lookaround(direction, tree, op is _constants.ASSERT, ignore_case))
        if op is _constants.FAILURE:
            return self._add()
        raise ValueError(f"{_REFUSED.get(op, op)} is not supported in expressions for names")

    def _repeat(self, least: int, most: Any, tree: Any, after: int, ignore_case: bool) -> int:
        if most is _constants.MAXREPEAT:
            entry = self._add(after)
            body = self.sequence(tree, entry, ignore_case)
            self.states[entry].after = (body, after)
        else:
            entry = after
            for _ in range(most - least):
                entry = self._add(self.sequence(tree, entry, ignore_case), after)
        for _ in range(least):
            before, entry = entry, self.sequence(tree, entry, ignore_case)
            if entry == before:  # nothing, any number of times
                break
        return entry

    def _lookaround(self, direction: int, tree: Any, is_wanted: bool, ignore_case: bool) -> Callable[..., bool]:
        self.lookarounds += 1
        if self.lookarounds > LOOKAROUNDS:
            raise ValueError(f"it has more than {LOOKAROUNDS} lookaheads, one within the other")
        entry, width = self.sequence(tree, _END, ignore_case), tree.getwidth()[0]
        self.lookarounds -= 1

        def check(match: "_Match", at: int) -> bool:
            if direction > 0:
                return bool(match.ends(entry, at)) == is_wanted
            return (at >= width and at in match.ends(entry, at - width)) == is_wanted

        return check


class _Match:
    """Text to match, with a cache of the ends of each expression from each place."""

    def __init__(self, states: list[_State], text: str):
        self.states, self.text = states, text
        self._ends: dict[tuple[int, int], set[int]] = {}

    def ends(self, entry: int, start: int) -> set[int]:
        """Return the places at which a match that begins at `start` in the state `entry` may end."""
        if (entry, start) not in self._ends:
            self._ends[entry, start] = ends = set()
            active: Iterable[int] = (entry,)
            for at in range(start, len(self.text) + 1):
                reached = self._reached(active, at)
                if _END in reached:
                    ends.add(at)
                if at == len(self.text):
                    break
                character = self.text[at]
                states = [self.states[number] for number in reached]
                active = {state.after[0] for state in states if state.test is not None and state.test(character)}
                if not active:
                    break
        return self._ends[entry, start]

    def _reached(self, active: Iterable[int], at: int) -> set[int]:
        """Return the states `active`, and those that follow without a character."""
        reached, left = set(active), list(active)
        while left:
            state = self.states[left.pop()]
            if state.test is None and (state.check is None or state.check(self, at)):
                new = [number for number in state.after if number not in reached]
                reached.update(new)
                left += new
        return reached

    def is_word(self, at: int) -> bool:
        return 0 <= at < len(self.text) and _CATEGORIES[_constants.CATEGORY_WORD](self.text[at])


def _refuse_ascii(flags: int) -> None:
    if flags & re.ASCII:
        raise ValueError("the flag a is not supported in expressions for names")


def _character(parts: list[tuple[Any, Any]], is_negated: bool, ignore_case: bool) -> Callable[[str], bool]:
    """Return the test of a literal or of a class."""
    literals = {chr(value) for op, value in parts if op is _constants.LITERAL}
    ranges = [value for op, value in parts if op is _constants.RANGE]
    categories = [_CATEGORIES[value] for op, value in parts if op is _constants.CATEGORY]

    def holds(c: str) -> bool:
        return c in literals or any(a <= ord(c) <= b for a, b in ranges) or any(is_in(c) for is_in in categories)

    if ignore_case:
        return lambda c: (holds(c.lower()[:1]) or holds(c.upper()[:1])) != is_negated
    return lambda c: holds(c) != is_negated


def _place(code: Any) -> Callable[[_Match, int], bool]:
    """Return the check of ^, $, \\A, \\Z, \\b or \\B."""
    if code in (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING):
        return lambda match, at: at == 0
    if code in (_constants.AT_END, _constants.AT_END_STRING):
        return lambda match, at: at == len(match.text)
    is_boundary = code is _constants.AT_BOUNDARY
    return lambda match, at: (match.is_word(at - 1) != match.is_word(at)) == is_boundary


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
