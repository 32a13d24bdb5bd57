"""Reward: completions that are too long lose."""

from collections.abc import Sequence


def length_penalty(
    completion_ids: Sequence[Sequence[int]], *, target_tokens: int, max_tokens: int
) -> list[float | None]:
    """Return 0 up to target_tokens, from there linearly down to −1 at max_tokens and beyond; stop tokens count, and
    in an environment all turns that the model drew.

    >>> length_penalty([[0] * 10, [0] * 15, [0] * 40], target_tokens=10, max_tokens=20)
    [0.0, -0.5, -1.0]
    """
    span = max_tokens - target_tokens
    return [-min(max(len(ids) - target_tokens, 0) / span, 1.0) + 0.0 for ids in completion_ids]
