"""Reward: the completion ends in the right answer."""

from collections.abc import Sequence
from typing import Any

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
