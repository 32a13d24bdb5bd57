"""Ranges of settings, and the words of messages about them: numbers, near misses, plurals. No torch.

A `Range` is a check of a value, and a phrase that says what the value must be. The types of recipe keys, and the tables
of options of losses and rewards, are made of ranges.
"""

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

Range = tuple[Callable[[Any], bool], str]
"""A check of a value, and a phrase that says what it must be, in the words of a recipe: null is Python's None."""

MAX_REWARD = 1e30  # in size: sums of many, and of their squares, stay far from what a float cannot hold
MIN_MAGNITUDE, MAX_MAGNITUDE = (
    1e-10,
    1e10,
)  # of an option's size where it is not 0: float32 computes with it, and with its square


def is_number(value: Any) -> bool:
    """Return whether `value` is an int or float of a size that can be computed with; true and false are none."""
    return is_finite(value) and (value == 0 or MIN_MAGNITUDE <= abs(value) <= MAX_MAGNITUDE)


def is_finite(value: Any) -> bool:
    """Return whether `value` is an int, however large, or a float that is neither NaN nor infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -float("inf") < value < float("inf")


def magnitude_hint(value: Any) -> str:
    """Return the end of a refusal of `value`: the sizes allowed, where these are the cause, else nothing."""
    return f", from {MIN_MAGNITUDE:g} to {MAX_MAGNITUDE:g} in size" if is_finite(value) and not is_number(value) else ""


NUMBER: Range = (is_number, "a finite number")
POSITIVE: Range = (lambda v: is_number(v) and v > 0, "a finite number above 0")
NOT_NEGATIVE: Range = (lambda v: is_number(v) and v >= 0, "a finite number, at least 0")

AUTO: Range = (lambda v: v in ("auto", True, False), "auto, true or false")
COUNT: Range = (lambda v: v == "auto" or (type(v) is int and v >= 1), "a whole number, at least 1, or auto")
DIVISOR: Range = (lambda v: is_number(v) and v > 0, "a finite number, more than 0, 1e-10 to 1e10")
FRACTION: Range = (lambda v: 0 <= v <= 1, "from 0 to 1")
SIZE: Range = (lambda v: 0 <= v < math.inf, "a finite number, at least 0")
STOP: Range = (all, "texts that are not empty")
TIME: Range = (lambda v: 0 < v < math.inf, "a finite number, more than 0")
TOP_K: Range = (lambda v: 1 <= v < 2**31, "at least 1, below 2**31, or null for all")
UP_TO_1: Range = (lambda v: 0 < v <= 1, "more than 0, up to 1")
WEIGHT: Range = (lambda v: is_number(v) and v >= 0, "a finite number, at least 0, up to 1e10")


def one_of(choices: Sequence[str]) -> Range:
    return (lambda v: v in choices, f"one of {', '.join(choices)}")


def at_least(least: int, more: str = "") -> Range:
    return (lambda v: v >= least, f"at least {least}{more}")


def find_out_of_range(section: Any, prefix: str = "") -> list[tuple[str, Any, str]]:
    """Return (dotted key, value, what it must be) of each value of `section`, and of sections inside it, that a `Range`
    in its field's type refuses. None is not looked at: the type says where it is allowed."""
    wrong = []
    for name, name_hint in get_type_hints(type(section), include_extras=True).items():
        key, value = f"{prefix}{name}", getattr(section, name)
        ranges = getattr(name_hint, "__metadata__", ()) if value is not None else ()
        wrong += [(key, value, phrase) for holds, phrase in ranges if not holds(value)]
        inner = {key: value}
        if isinstance(value, list):
            inner = {f"{key}[{index}]": entry for index, entry in enumerate(value)}
        elif isinstance(value, dict):
            inner = {f"{key}.{entry_name}": entry for entry_name, entry in value.items()}
        for place, entry in inner.items():
            wrong += find_out_of_range(entry, f"{place}.") if is_dataclass(entry) else []
    return wrong


def closest_name(word: str, known: Collection[str]) -> str | None:
    """Return the name in `known` that `word` is a typo of, or None.

    Case, - and _ do not count. A word that is no typo but begins one of the names, or is a part of one, is that name if
    it is the only one: `warmup` is `warmup_steps`.
    """
    wanted = _normalized(word[:64])
    by_plain = {_normalized(name): name for name in known}
    # 0.75: one letter of four. A lower share finds hardly more typos, and more hints that are wrong.
    close = difflib.get_close_matches(wanted, by_plain, n=1, cutoff=0.75)
    if close:
        return by_plain[close[0]]
    if len(wanted) < 4:
        return None
    begun = [name for name in known if _normalized(name).startswith(wanted) or wanted in name.lower().split("_")]
    return begun[0] if len(begun) == 1 else None


def directory_hint(path: str) -> str:
    """Return the end of a message that there is no directory `path`: one of a near name, or all that stand beside."""
    parent = Path(path).parent
    entries = parent.iterdir() if parent.is_dir() else []
    names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if near := closest_name(Path(path).name, names):
        return f"; did you mean {parent / near}?"
    more = ", ..." if len(names) > 5 else ""
    return f"; {parent} has {', '.join(names[:5])}{more}" if names and parent != Path() else ""


def _normalized(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")


def name_hint(word: str, known: Collection[str], prefix: str = "", otherwise: str | None = None) -> str:
    """Return the end of a refusal of `word`: the near miss; else `otherwise`, by default all names in `known`."""
    if near := closest_name(word, known):
        return f"; did you mean {prefix}{near}?"
    return f"; there are {', '.join(known)}" if otherwise is None else otherwise


def format_value(value: Any) -> str:
    """Return a value as a recipe writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def plural(count: float, noun: str) -> str:
    """Return `noun`, an English word, as it stands behind `count`: "row" of 1, "rows" of 0 or 2, "processes" of 3."""
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def join_with_or(options: Iterable[str]) -> str:
    """Join options for a message.

    Example:
        >>> join_with_or(["1", "2", "4"])
        '1, 2 or 4'
    """
    *first, last = options
    return f"{', '.join(first)} or {last}" if first else last
