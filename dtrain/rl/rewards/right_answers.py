"""Rewards that compare a completion with the data's answer: `math_exact`, `numeric`, `cosine_length`, `text_exact`.

An answer in the data is a text, a number, a truth value, or a list of accepted answers. An object is refused, because
only the user knows which of its values is the answer: `column` can name it, such as `reward_model.ground_truth`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from dtrain.base.errors import UserError
from dtrain.rl.rewards.columns import answer_type_problem, values_of
from dtrain.rl.rewards.math_answers import (
    MathAnswer,
    answers_equal,
    extract_answer,
    extract_marked_answer,
    parse_answer,
)

_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
Answer = str | int | float
"""An accepted answer; truth values are among the integers."""


def math_exact(completions: Sequence[str], *, column: str = "answer", **columns: Sequence[Any]) -> list[float | None]:
    """Reward answers that equal the data's, in exact rational arithmetic or as text.

    The completion's answer is its last \\boxed{..}, else the text after its last "####", else the text after its last
    "answer is", else its last number. A text in the data is read in the same way, such as GSM8K's "... #### 42".

    Args:
        completions: Completions of the policy.
        column: The column with the answer, or with a list of accepted answers.
        columns: All columns of the data, by name.

    Returns:
        1.0 or 0.0 for each completion. None for rows without an answer.

    Example:
        >>> texts = ["So it is \\\\boxed{\\\\frac{3}{6}}.", "That makes $1,000.", "no idea"]
        >>> math_exact(texts, answer=["0.5", 1000, "7"])
        [1.0, 1.0, 0.0]
        >>> math_exact(["#### 2", "#### 3"], answer=[["two", 2], ["two", 2]])
        [1.0, 0.0]
        >>> math_exact(["#### 25%"], column="gold", gold=["some words #### 1/4"])
        [1.0]
    """
    return score_math_answers("math_exact", completions, column, columns)


def score_math_answers(
    reward: str, completions: Sequence[str], column: str, columns: dict[str, Sequence[Any]]
) -> list[float | None]:
    """Return the values of `math_exact` for the reward named `reward`. Raises UserError as `accepted_answers` does."""
    scores: list[float | None] = []
    for text, accepted in zip(completions, accepted_answers(reward, column, columns), strict=True):
        if not accepted:
            scores.append(None)
            continue
        written = extract_answer(text)
        is_right = False
        if written is not None:
            answer = parse_answer(written)
            is_right = any(answers_equal(answer, _as_math(right)) for right in accepted)
        scores.append(float(is_right))
    return scores


def accepted_answers(reward: str, column: str, columns: Mapping[str, Sequence[Any]]) -> list[list[Answer]]:
    """Return the accepted answers of each row. The list of a row without an answer is empty.

    Raises:
        UserError: If the data has no such column, or if a value is no answer, such as an object.
    """
    rows = []
    for value in values_of(reward, column, columns):
        problem = answer_type_problem(reward, column, value)
        if problem is not None:
            raise UserError(problem)
        items = value if isinstance(value, list | tuple) else [value]
        rows.append([item for item in items if not _is_missing(item)])
    return rows


def _is_missing(value: Any) -> bool:
    """Return whether a value means that there is no answer. Tables contain NaN for a missing number."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _as_math(value: Answer) -> MathAnswer:
    """Return an answer of the data in the form that `answers_equal` compares."""
    if not isinstance(value, str):
        return parse_answer(str(value))
    marked = extract_marked_answer(value)
    return parse_answer(value if marked is None else marked)


def numeric(
    completions: Sequence[str],
    *,
    column: str = "answer",
    absolute: float = 0.0,
    relative: float = 1e-6,
    **columns: Sequence[Any],
) -> list[float | None]:
    """Reward numbers with |number − right| ≤ max(absolute, relative · |right|).

    The numbers are found as in `math_exact`, without a percent sign.

    Args:
        completions: Completions of the policy.
        column: The column with the right number, or with a list of accepted numbers.
        absolute: The largest absolute error.
        relative: The largest error relative to the right number.
        columns: All columns of the data, by name.

    Returns:
        1.0 or 0.0 for each completion. None for rows without a number.

    Example:
        >>> numeric(["about 3.1416", "\\\\boxed{3.15}", "none"], relative=1e-3, answer=[3.14159265, 3.14159265, 3])
        [1.0, 0.0, 0.0]
    """
    scores: list[float | None] = []
    for text, accepted in zip(completions, accepted_answers("numeric", column, columns), strict=True):
        values = [_as_math(answer).value for answer in accepted]
        right_numbers = [value for value in values if value is not None]
        if not right_numbers:
            scores.append(None)
            continue
        number = parse_answer(extract_answer(text) or "").value
        is_right = False
        if number is not None:
            is_right = any(_is_near(number, right, absolute, relative) for right in right_numbers)
        scores.append(float(is_right))
    return scores


def _is_near(number: Fraction, right: Fraction, absolute: float, relative: float) -> bool:
    return abs(number - right) <= max(Fraction(absolute), Fraction(relative) * abs(right))


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
    """Reward right answers the more the shorter they are, and wrong answers the more the longer they are.

    The reward follows half a cosine over the number of tokens n, and is constant from max_tokens on:

        value(n) = last + (first − last) · (1 + cos(π · min(n / max_tokens, 1))) / 2

    A right answer (by `math_exact`) goes from max_value_correct down to min_value_correct. A wrong answer goes from
    min_value_wrong up to max_value_wrong. Names and defaults are those of TRL 1.16. Rows without an answer get None.

    Reference:
        Yeo et al., Demystifying Long Chain-of-Thought Reasoning in LLMs, arXiv:2502.03373, section 4.2.

    Example:
        >>> cosine_length(["#### 4", "#### 5", "#### 4"], [[0] * 5, [0] * 5, [0] * 30], max_tokens=10, answer=[4, 4, 4])
        [0.75, -0.75, 0.5]
    """
    if max_tokens < 1:
        raise UserError(f"cosine_length: max_tokens={max_tokens} must be a whole number, at least 1")
    values: list[float | None] = []
    for is_right, ids in zip(
        score_math_answers("cosine_length", completions, column, columns), completion_ids, strict=True
    ):
        if is_right is None:
            values.append(None)
            continue
        if is_right:
            first, last = max_value_correct, min_value_correct
        else:
            first, last = min_value_wrong, max_value_wrong
        length = min(len(ids) / max_tokens, 1.0)
        weight_of_first = (1 + math.cos(math.pi * length)) / 2
        values.append(last + (first - last) * weight_of_first)
    return values


def text_exact(
    completions: Sequence[str], *, column: str = "answer", ignore_case: bool = False, **columns: Sequence[Any]
) -> list[float | None]:
    """Reward completions that are exactly the data's answer.

    White space at the ends is ignored, and all white space between words is the same. A number in the data equals every
    notation of it (4, 4.0, 1,000), and a truth value equals true and True.

    Args:
        completions: Completions of the policy.
        column: The column with the answer, or with a list of accepted answers.
        ignore_case: Whether upper and lower case are the same.
        columns: All columns of the data, by name.

    Returns:
        1.0 or 0.0 for each completion. None for rows without an answer.

    Example:
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
        text = text.casefold()
        expected = expected.casefold()
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
