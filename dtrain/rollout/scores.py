"""How likely the tokens of prompts are, each given those before it: one forward of a prompt, nothing drawn."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.models.layers import CausalLM

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
    device = next(model.parameters()).device
    found: dict[int, TokenScores] = {}
    left = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    was_training = model.training
    model.eval()
    while left:
        count = max(1, sum((place + 1) * len(prompts[index]) <= together for place, index in enumerate(left)))
        batch, left = left[:count], left[count:]
        longest = len(prompts[batch[-1]])
        # With a token of its own, as the engine pads: what comes after a token does not reach it.
        rows = [[*prompts[index], *[prompts[index][-1]] * (longest - len(prompts[index]))] for index in batch]
        ids = torch.tensor(rows, device=device)  # [B, S]
        hidden = model.model(ids)  # [B, S, D]
        for index, states, tokens in zip(batch, hidden, ids, strict=True):
            length = len(prompts[index])
            found[index] = _scores(model, states[: length - 1], tokens[1:length])
    model.train(was_training)
    return [found[index] for index in range(len(prompts))]


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
