"""Numbers that a loss's options may be."""

from typing import Any

SMALLEST, LARGEST = 1e-10, 1e10  # as in config.numbers: float32 computes with it, and with its square


def is_number(value: Any) -> bool:
    """An int or float that is 0 or of a size that can be computed with; True and False are none."""
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and (value == 0 or SMALLEST <= abs(value) <= LARGEST)
