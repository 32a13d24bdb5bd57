"""Which tp sizes a model's heads and vocabulary allow. Imports no torch, so that a recipe can be checked without it."""

import math


def misfits(query_heads: int, key_heads: int, vocabulary: int, tp: int) -> list[str]:
    """What keeps tensor parallel over `tp` ranks from sharing a model out, one line each; empty where nothing does.

    Every rank computes whole query heads, and whole key heads or one that it shares, and holds some of the vocabulary.
    """
    problems = []
    if query_heads % tp:
        problems.append(f"parallel.tp={tp} does not divide the model's {query_heads} query heads")
    if not _shares(key_heads, tp):
        problems.append(f"parallel.tp={tp} and the model's {key_heads} KV heads: neither divides the other")
    if _leaves_one_empty(vocabulary, tp):
        problems.append(f"parallel.tp={tp} leaves a rank none of the model's {vocabulary} tokens")
    fitting = [
        size
        for size in range(1, query_heads + 1)
        if query_heads % size == 0 and _shares(key_heads, size) and not _leaves_one_empty(vocabulary, size)
    ]
    return [f"{problem}; tp may be {', '.join(map(str, fitting))}" for problem in problems]


def _shares(key_heads: int, tp: int) -> bool:
    return key_heads % tp == 0 or tp % key_heads == 0


def _leaves_one_empty(vocabulary: int, tp: int) -> bool:
    """Whether the last of tp shards of ceil(V / tp) rows begins beyond the end."""
    return math.ceil(vocabulary / tp) * (tp - 1) >= vocabulary
