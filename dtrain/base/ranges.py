"""Ranges of settings, and helpers for messages about them: similar names, plurals, lists of options. No torch.

A `Range` is a check of a value and a phrase that says what the value must be. The types of recipe keys, and the tables
of options of losses and rewards, contain ranges. For example, `rank: Annotated[int, at_least(1)]` is reported as
"lora.rank=0 must be at least 1".
"""

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from dtrain.base.errors import Problem

Range = tuple[Callable[[Any], bool], str]
"""A check of a value that is not None, and a phrase for messages that describes the allowed values."""

MAX_REWARD = 1e30  # in magnitude. Sums of many rewards, and of their squares, stay far below the largest float.
# Magnitudes of an option that is not 0. float32 can represent the option and its square.
MIN_MAGNITUDE, MAX_MAGNITUDE = 1e-10, 1e10


def is_number(value: Any) -> bool:
    """Check whether a value is an int or float whose magnitude float32 can compute with. true and false are no numbers.

    Example:
        >>> is_number(0.5), is_number(1e-30), is_number(True)
        (True, False, False)
    """
    return is_finite(value) and (value == 0 or MIN_MAGNITUDE <= abs(value) <= MAX_MAGNITUDE)


def is_finite(value: Any) -> bool:
    """Check whether a value is an int, however large, or a float that is neither NaN nor infinite."""
    is_numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return is_numeric and -math.inf < value < math.inf


def magnitude_hint(value: Any) -> str:
    """Return the end of a message about a refused value: the allowed magnitudes if they are the cause, else ""."""
    if is_finite(value) and not is_number(value):
        return f", from {MIN_MAGNITUDE:g} to {MAX_MAGNITUDE:g} in size"
    return ""


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
    """Return the range of a value that is one of some choices."""
    return (lambda v: v in choices, f"one of {', '.join(choices)}")


def at_least(minimum: int, more: str = "") -> Range:
    """Return the range of a value with a minimum.

    Args:
        minimum: The smallest value.
        more: The end of the phrase, such as ", or null for all".
    """
    return (lambda v: v >= minimum, f"at least {minimum}{more}")


class OutOfRange(NamedTuple):
    """A value that its range refuses.

    Attributes:
        key: The dotted key.
        value: The value.
        expected: What the value must be.
    """

    key: str
    value: Any
    expected: str

    def to_problem(self) -> Problem:
        """Return the problem that the value is."""
        return Problem(self.key, f"{self.key}={format_value(self.value)} must be {self.expected}")


def find_out_of_range(section: Any, prefix: str = "") -> list[OutOfRange]:
    """Find the values of a section, and of sections inside it, that are out of the range in their field's type.

    None is not checked: the type says whether a key may be null.

    Args:
        section: A dataclass.
        prefix: The section's key with a dot. Empty at the top level.
    """
    found = []
    for name, hint in get_type_hints(type(section), include_extras=True).items():
        key, value = f"{prefix}{name}", getattr(section, name)
        if value is not None:
            for is_valid, expected in getattr(hint, "__metadata__", ()):
                if not is_valid(value):
                    found.append(OutOfRange(key, value, expected))
        if isinstance(value, list):
            inner = {f"{key}[{index}]": entry for index, entry in enumerate(value)}
        elif isinstance(value, dict):
            inner = {f"{key}.{entry_name}": entry for entry_name, entry in value.items()}
        else:
            inner = {key: value}
        for inner_key, entry in inner.items():
            if is_dataclass(entry):
                found += find_out_of_range(entry, f"{inner_key}.")
    return found


def closest_name(word: str, names: Collection[str]) -> str | None:
    """Return the known name that a mistyped word probably means.

    Case, - and _ are ignored. A similar spelling is tried first. If no name is similar, a word that begins exactly one
    name, or is one of its parts between underscores, means this name.

    Args:
        word: The word, of which the first 64 characters are compared.
        names: The known names.

    Returns:
        The name. None if no name is similar, or if the word is a part of several names.

    Example:
        >>> closest_name("leraning_rate", ["learning_rate", "warmup_steps"])
        'learning_rate'
        >>> closest_name("warmup", ["learning_rate", "warmup_steps"])
        'warmup_steps'
    """
    normalized_word = _normalize(word[:64])
    normalized_names = {_normalize(name): name for name in names}
    # 0.75 allows one wrong letter of four. A lower cutoff finds hardly more typos, and suggests more wrong names.
    close = difflib.get_close_matches(normalized_word, normalized_names, n=1, cutoff=0.75)
    if close:
        return normalized_names[close[0]]
    if len(normalized_word) < 4:
        return None
    # No similar name: is the word the beginning of exactly one name, or one of its words between underscores?
    containing = []
    for name in names:
        if _normalize(name).startswith(normalized_word) or normalized_word in name.lower().split("_"):
            containing.append(name)
    return containing[0] if len(containing) == 1 else None


def directory_hint(path: str) -> str:
    """Return the end of a message about a missing directory: a similar directory of its parent, or five of them."""
    parent = Path(path).parent
    entries = parent.iterdir() if parent.is_dir() else []
    names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    near = closest_name(Path(path).name, names)
    if near:
        return f"; did you mean {parent / near}?"
    if not names or parent == Path():
        return ""
    more = ", ..." if len(names) > 5 else ""
    return f"; {parent} has {', '.join(names[:5])}{more}"


def _normalize(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")


def name_hint(word: str, names: Collection[str], prefix: str = "", otherwise: str | None = None) -> str:
    """Return the end of a message about an unknown name.

    Args:
        word: The unknown name.
        names: The known names.
        prefix: Text in front of a similar name, such as the section of a key.
        otherwise: The result if no name is similar. None: a list of all known names.

    Example:
        >>> name_hint("cosin", ["constant", "cosine"])
        '; did you mean cosine?'
    """
    near = closest_name(word, names)
    if near:
        return f"; did you mean {prefix}{near}?"
    if otherwise is not None:
        return otherwise
    return f"; there are {', '.join(names)}"


def format_value(value: Any) -> str:
    """Return a value as it is written in a recipe.

    Example:
        >>> format_value(None), format_value(True), format_value(0.5)
        ('null', 'true', '0.5')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def plural(count: float, noun: str) -> str:
    """Return an English noun in the number that fits `count`.

    Example:
        >>> plural(1, "row"), plural(0, "row"), plural(2, "process")
        ('row', 'rows', 'processes')
    """
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
