"""Rewards for tests, found by import path. No torch: the rewards' worker imports this file."""


def even(completion_ids):
    """The share of tokens with an even id, rounded so that groups may be alike."""
    return [round(sum(token % 2 == 0 for token in ids) / max(1, len(ids)), 1) for ids in completion_ids]


def wanted(completion_ids, wanted):
    """1 where the prompt's wanted token was drawn."""
    return [float(token in ids) for ids, token in zip(completion_ids, wanted, strict=True)]
