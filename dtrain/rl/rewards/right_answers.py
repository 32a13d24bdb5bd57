"""Rewards of right answers: the completion ends in the data's answer, or is it.

The data's answer is a text, a number or a truth value, or a list of these, of which any is right. An object is refused:
`column` can name the value in it that is meant, such as `reward_model.ground_truth`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from dtrain.base.errors import UserError
from dtrain.rl.rewards.columns import not_an_answer, values_of
from dtrain.rl.rewards.math_answers import MathAnswer, answer_in, equal, marked_answer, read

_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
Answer = str | int | float
"""An accepted answer; truth values are among the integers."""


def math_exact(completions: Sequence[str], *, column: str = "answer", **columns: Sequence[Any]) -> list[float | None]:
    """Return 1.0 where the completion's answer equals the data's, in exact rational arithmetic or as text, else 0.0.

    The completion's answer is its last \\boxed{..}, else what follows its last "####", else its last "answer is", else
    its last number. The data's is the value of `column`, a number, a text of which the same marks are read (GSM8K's
    "... #### 42"), or a list of accepted answers; a row without one has no reward.

    >>> math_exact(["So it is \\\\boxed{\\\\frac{3}{6}}.", "That makes $1,000.", "no idea"], answer=["0.5", 1000, "7"])
    [1.0, 1.0, 0.0]
    >>> math_exact(["#### 2", "#### 3"], answer=[["two", 2], ["two", 2]])
    [1.0, 0.0]
    >>> math_exact(["#### 25%"], column="gold", gold=["some words #### 1/4"])
    [1.0]
    """
    return are_right("math_exact", completions, column, columns)


def are_right(
    reward: str, completions: Sequence[str], column: str, columns: dict[str, Sequence[Any]]
) -> list[float | None]:
    """Return the values of `math_exact`, for the reward named `reward`.

    Raises:
        UserError: As `accepted_answers`.
    """
    scores: list[float | None] = []
    for text, accepted in zip(completions, accepted_answers(reward, column, columns), strict=True):
        if not accepted:
            scores.append(None)
            continue
        written = answer_in(text)
        answer = None if written is None else read(written)
        is_right = answer is not None and any(equal(answer, _as_math(right)) for right in accepted)
        scores.append(float(is_right))
    return scores


def accepted_answers(reward: str, column: str, columns: Mapping[str, Sequence[Any]]) -> list[list[Answer]]:
    """Return the accepted answers of each row, of which any is right. A row without an answer has none.

    Raises:
        UserError: For a column that the data does not have, and for a value that is no answer, such as an object.
    """
    rows = []
    for value in values_of(reward, column, columns):
        problem = not_an_answer(reward, column, value)
        if problem is not None:
            raise UserError(problem)
        items = value if isinstance(value, list | tuple) else [value]
        rows.append([item for item in items if not _is_missing(item)])
    return rows


def _is_missing(value: Any) -> bool:
    """Return whether a value stands for no answer. Tables write a missing number as NaN."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _as_math(value: Answer) -> MathAnswer:
    """Return an answer of the data in the form that is compared."""
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

    Both numbers are found as in `math_exact`; a percent sign is left out. Any number of a list may be the right one.

    >>> numeric(["about 3.1416", "\\\\boxed{3.15}", "none"], relative=1e-3, answer=[3.14159265, 3.14159265, 3])
    [1.0, 0.0, 0.0]
    """
    scores: list[float | None] = []
    for text, accepted in zip(completions, accepted_answers("numeric", column, columns), strict=True):
        values = [_as_math(answer).value for answer in accepted]
        numbers = [value for value in values if value is not None]
        if not numbers:
            scores.append(None)
            continue
        given = read(answer_in(text) or "").value
        is_right = False
        for right in numbers:
            allowed = max(Fraction(absolute), Fraction(relative) * abs(right))
            is_right = is_right or (given is not None and abs(given - right) <= allowed)
        scores.append(float(is_right))
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
    """Return 1.0 where the completion equals the value of `column`, else 0.0; a row without one has no reward.

    White space at the ends does not count, and any white space between words is the same. Any text of a list may be the
    right one. A number of the data is equal to each way to write it (4, 4.0, 1,000), a truth value to true and True.

    >>> text_exact([" Paris\\n", "paris", "It is Paris"], answer=["Paris", "Paris", ["paris", "Paris"]])
    [1.0, 0.0, 0.0]
    >>> text_exact(["yes"], column="label", ignore_case=True, label=["Yes"])
    [1.0]
    >>> text_exact(["4", "NYC", "true"], answer=[4.0, ["New York", "NYC"], True])
    [1.0, 1.0, 1.0]
    """
    scores: list[float | None] = []
    for text, accepted in zip(completions, accepted_answers("text_exact", column, columns), strict=True):
        is_right = any(_is_text(text, right, ignore_case) for right in accepted)
        scores.append(float(is_right) if accepted else None)
    return scores


def _is_text(text: str, right: Answer, ignore_case: bool) -> bool:
    """Return whether a completion is the answer `right` and nothing else."""
    expected = str(right)
    if ignore_case or isinstance(right, bool):
        text, expected = text.casefold(), expected.casefold()
    if text.split() == expected.split():
        return True
    if isinstance(right, str | bool):
        return False
    number = text.strip()
    if _THOUSANDS.fullmatch(number):
        number = number.replace(",", "")
    try:
        return Decimal(number) == Decimal(expected)
    except InvalidOperation:  # the text is no number
        return False
