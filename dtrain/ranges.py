"""What a setting may be, and that in words: the numbers, and what a refusal says. No torch.

The tables of options that stand beside the losses and the rewards are made of these, and so is the recipe's check.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Range = tuple[Callable[[Any], bool], str]
"""Whether a value will do, and what it must be, in the words of a recipe: null is Python's None."""

SMALLEST, LARGEST = 1e-10, 1e10  # of an option's size where it is not 0: float32 computes with it, and with its square


def is_number(value: Any) -> bool:
    """An int or float of a size that can be computed with; true and false are none."""
    return is_finite(value) and (value == 0 or SMALLEST <= abs(value) <= LARGEST)


def is_finite(value: Any) -> bool:
    """An int, however large, or a float that is neither NaN nor infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -float("inf") < value < float("inf")


def sizes_for(value: Any) -> str:
    """What to add to a refusal of `value`: the sizes, where these are the cause."""
    return f", from {SMALLEST:g} to {LARGEST:g} in size" if is_finite(value) and not is_number(value) else ""


NUMBER: Range = (is_number, "a finite number")
POSITIVE: Range = (lambda v: is_number(v) and v > 0, "a finite number above 0")
NOT_NEGATIVE: Range = (lambda v: is_number(v) and v >= 0, "a finite number, at least 0")


def one_of(choices: Sequence[str]) -> Range:
    return (lambda v: v in choices, f"one of {', '.join(choices)}")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `word` is a slip of; None where there is none."""
    return next(iter(difflib.get_close_matches(word, known, n=1)), None)


def hint(word: str, known: Iterable[str], prefix: str = "") -> str:
    """What to add to a refusal of `word`: the near miss, or all that is known."""
    near = nearest(word, known)
    return f"; did you mean {prefix}{near}?" if near else f"; there are {', '.join(known)}"


def shown(value: Any) -> str:
    """A value as a recipe writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
