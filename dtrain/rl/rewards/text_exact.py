"""Reward: the completion is the right answer, word for word."""

from collections.abc import Sequence
from typing import Any

from dtrain.rl.rewards.columns import values_of


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
