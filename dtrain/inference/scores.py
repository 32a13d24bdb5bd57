"""How likely the tokens of prompts are, each given those before it, and what a classifier gives for texts: one forward,
nothing drawn."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.models.common.decoder import CausalLM

LOGITS_AT_ONCE = 1 << 26  # elements, in float32


@dataclass(frozen=True)
class TokenScores:
    """Of the tokens after the first of a prompt of n, each [n − 1]: log p of the token given those before it, the
    likeliest token in its place, and log p of that one."""

    logprobs: list[float]
    likeliest: list[int]
    highest: list[float]


@torch.no_grad()
def score_prompts(model: CausalLM, prompts: Sequence[Sequence[int]], together: int) -> list[TokenScores]:
    """The scores of each prompt, in order, in max(float32, the model's dtype). model: whole on its device. together:
    tokens of one forward, beyond a single prompt. No collective."""
    found: dict[int, TokenScores] = {}
    with _at_rest(model):
        for batch, ids in _batches(prompts, together, next(model.parameters()).device):
            hidden = model.model(ids)  # [B, S, D]
            for index, states, tokens in zip(batch, hidden, ids, strict=True):
                length = len(prompts[index])
                found[index] = _scores(model, states[: length - 1], tokens[1:length])
    return [found[index] for index in range(len(prompts))]


@torch.no_grad()
def rate(model: CausalLM, rows: Sequence[Sequence[int]], together: int) -> Tensor:
    """A classifier's outputs [n, labels] for each row of ids, in max(float32, the model's dtype), on the CPU: read at
    the last token that is not the config's pad_token_id, at the first where all are. Arguments as of
    `score_prompts`."""
    weight, pad = next(model.parameters()), model.config.pad_token_id
    found = torch.zeros(len(rows), model.config.labels or 0, dtype=torch.promote_types(weight.dtype, torch.float32))
    with _at_rest(model):
        for batch, ids in _batches(rows, together, weight.device):
            ends = [max((i for i, one in enumerate(rows[row]) if one != pad), default=0) for row in batch]
            states = model.model(ids)[torch.arange(len(batch), device=ids.device), torch.tensor(ends)]  # [B, D]
            found[batch] = model.logits(states).to(found)
    return found


@contextmanager
def _at_rest(model: CausalLM) -> Iterator[None]:
    """The model inside is not in training."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _batches(rows: Sequence[Sequence[int]], together: int, device: torch.device) -> Iterator[tuple[list[int], Tensor]]:
    """Rows of like length, as their numbers and ids [B, S], each filled up with its last token: what comes after a
    token does not reach it."""
    left = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    while left:
        count = max(1, sum((place + 1) * len(rows[index]) <= together for place, index in enumerate(left)))
        batch, left = left[:count], left[count:]
        longest = len(rows[batch[-1]])
        filled = [[*rows[index], *[rows[index][-1]] * (longest - len(rows[index]))] for index in batch]
        yield batch, torch.tensor(filled, device=device)


def _scores(model: CausalLM, hidden: Tensor, tokens: Tensor) -> TokenScores:
    """Of tokens [n], each predicted by its row of hidden [n, D]."""
    parts: list[tuple[Tensor, ...]] = []
    rows = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    for states, wanted in zip(hidden.split(rows), tokens.split(rows), strict=True):
        logits = model.logits(states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # [rows, V]
        total = logits.logsumexp(-1)
        most = logits.max(-1)
        parts.append((logits.gather(1, wanted[:, None])[:, 0] - total, most.indices, most.values - total))
    return TokenScores(*(torch.cat(part).tolist() for part in zip(*parts, strict=True)))
