"""Reward: completions that repeat themselves lose."""

from collections.abc import Sequence
from itertools import islice


def repetition_penalty(
    completion_ids: Sequence[Sequence[int]], *, ngram_size: int = 3, max_penalty: float = -1.0
) -> list[float | None]:
    """Return max_penalty times the share of n-grams of tokens that stood in the completion before; 0 where it is
    shorter than an n-gram (Yeo et al., arXiv:2502.03373, appendix C.2, as TRL 1.16 has it).

    >>> repetition_penalty([[1, 2, 3, 4], [5, 5, 5, 5, 5], [7]], ngram_size=2)
    [0.0, -0.75, 0.0]
    """
    penalties: list[float | None] = []
    for ids in completion_ids:
        ngrams = list(zip(*(islice(ids, start, None) for start in range(ngram_size)), strict=False))
        repeated = len(ngrams) - len(set(ngrams))
        penalties.append(max_penalty * repeated / len(ngrams) if repeated else 0.0)
    return penalties
