"""Reward: right answers earn more the shorter they are, wrong ones lose less the longer they are."""

import math
from collections.abc import Sequence
from typing import Any

from dtrain.rl.rewards.math_exact import are_right


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
    values: list[float | None] = []
    for right, ids in zip(are_right("cosine_length", completions, column, columns), completion_ids, strict=True):
        first, last = (max_value_correct, min_value_correct) if right else (min_value_wrong, max_value_wrong)
        share = (1 + math.cos(math.pi * min(len(ids) / max_tokens, 1.0))) / 2
        values.append(None if right is None else last + (first - last) * share)
    return values
