"""Numbers that options of losses and rewards may be. No torch."""

from typing import Any

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
