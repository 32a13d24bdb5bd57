"""Reward: the completion ends in a number close to the right one."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from dtrain.rl.rewards.math_answers import answer_in, read
from dtrain.rl.rewards.math_exact import right_answers


def numeric(
    completions: Sequence[str],
    *,
    column: str = "answer",
    absolute: float = 0.0,
    relative: float = 1e-6,
    **columns: Sequence[Any],
) -> list[float | None]:
    """Return 1.0 where |number − right| ≤ max(absolute, relative · |right|), else 0.0; None where the data has no
    number.

    Both numbers are found as in `math_exact`; a percent sign is left out.

    >>> numeric(["about 3.1416", "\\\\boxed{3.15}", "none"], relative=1e-3, answer=[3.14159265, 3.14159265, 3])
    [1.0, 0.0, 0.0]
    """
    scores: list[float | None] = []
    for text, right in zip(completions, right_answers("numeric", column, columns), strict=True):
        if right is None or right.value is None:
            scores.append(None)
            continue
        number = read(answer_in(text) or "").value
        allowed = max(Fraction(absolute), Fraction(relative) * abs(right.value))
        scores.append(float(number is not None and abs(number - right.value) <= allowed))
    return scores
