"""Rewards of right answers: the completion ends in the data's answer, or is it."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from dtrain.base.errors import UserError
from dtrain.rl.rewards.columns import values_of
from dtrain.rl.rewards.math_answers import MathAnswer, answer_in, equal, marked_answer, read


def math_exact(completions: Sequence[str], *, column: str = "answer", **columns: Sequence[Any]) -> list[float | None]:
    """Return 1.0 where the completion's answer equals the data's, in exact rational arithmetic or as text, else 0.0.

    The completion's answer is its last \\boxed{..}, else what follows its last "####", else its last "answer is", else
    its last number. The data's is the value of `column`, a number or a text, of which the same marks are read (GSM8K's
    "... #### 42"); a row without one has no reward.

    >>> math_exact(["So it is \\\\boxed{\\\\frac{3}{6}}.", "That makes $1,000.", "no idea"], answer=["0.5", 1000, "7"])
    [1.0, 1.0, 0.0]
    >>> math_exact(["#### 25%"], column="gold", gold=["some words #### 1/4"])
    [1.0]
    """
    return are_right("math_exact", completions, column, columns)


def are_right(
    reward: str, completions: Sequence[str], column: str, columns: dict[str, Sequence[Any]]
) -> list[float | None]:
    """Return the values of `math_exact`, for the reward named `reward`. Raises UserError for a column that the data
    does not have."""
    return [
        None if right is None else float((answer := answer_in(text)) is not None and equal(read(answer), right))
        for text, right in zip(completions, right_answers(reward, column, columns), strict=True)
    ]


def right_answers(reward: str, column: str, columns: dict[str, Sequence[Any]]) -> list[MathAnswer | None]:
    """Return the data's answers; None where a row has none. Raises UserError for a column that the data does not
    have."""
    values = values_of(reward, column, columns)
    return [None if value is None or value == "" else _of_data(value) for value in values]


def _of_data(value: Any) -> MathAnswer:
    if not isinstance(value, str):
        return read(str(value))
    marked = marked_answer(value)
    return read(value if marked is None else marked)


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


def cosine_length(
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
    column: str = "answer",
    **columns: Sequence[Any],
) -> list[float | None]:
    """Return half a cosine over the length, from no token to max_tokens and beyond: from max_value_correct down to
    min_value_correct where `math_exact` gives 1, else from min_value_wrong up to max_value_wrong (Yeo et al.,
    arXiv:2502.03373, section 4.2; names and defaults are TRL 1.16's). A row without an answer has no reward.

    >>> cosine_length(["#### 4", "#### 5", "#### 4"], [[0] * 5, [0] * 5, [0] * 30], max_tokens=10, answer=[4, 4, 4])
    [0.75, -0.75, 0.5]
    """
    if max_tokens < 1:
        raise UserError(f"cosine_length: max_tokens={max_tokens} must be a whole number, at least 1")
    values: list[float | None] = []
    for right, ids in zip(are_right("cosine_length", completions, column, columns), completion_ids, strict=True):
        first, last = (max_value_correct, min_value_correct) if right else (min_value_wrong, max_value_wrong)
        share = (1 + math.cos(math.pi * min(len(ids) / max_tokens, 1.0))) / 2
        values.append(None if right is None else last + (first - last) * share)
    return values


def text_exact(
    completions: Sequence[str], *, column: str = "answer", ignore_case: bool = False, **columns: Sequence[Any]
) -> list[float | None]:
    """Return 1.0 where the completion equals the value of `column`, white space between words taken alike and at the
    ends left out, else 0.0; a row without one has no reward.

    >>> text_exact([" Paris\\n", "paris", "It is Paris"], answer=["Paris", "Paris", "Paris"])
    [1.0, 0.0, 0.0]
    >>> text_exact(["yes"], column="label", ignore_case=True, label=["Yes"])
    [1.0]
    """

    def words(text: str) -> list[str]:
        return (text.casefold() if ignore_case else text).split()

    return [
        None if right is None or right == "" else float(words(text) == words(str(right)))
        for text, right in zip(completions, values_of("text_exact", column, columns), strict=True)
    ]
