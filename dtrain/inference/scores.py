"""Log-probabilities of the tokens of prompts, each given those before it, and a classifier's outputs for texts: one
forward, nothing drawn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.inference.engine import at_rest
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.micro_batch import AdapterContext, MicroBatchContext

LOGITS_AT_ONCE = 1 << 26  # elements, in float32


@dataclass(frozen=True)
class TokenScores:
    """Scores of the tokens after the first of a prompt of n, each [n − 1]: log p of the token given those before it,
    the likeliest token in its place, and log p of that one."""

    logprobs: list[float]
    likeliest: list[int]
    highest: list[float]


@torch.no_grad()
def score_prompts(
    model: CausalLM, prompts: Sequence[Sequence[int]], together: int, adapters: AdapterContext | None = None
) -> list[TokenScores]:
    """Return the scores of each prompt, in order, in max(float32, the model's dtype). model: whole on its device.
    together: tokens of one forward, beyond a single prompt. adapters: whether those of the model take part. No
    collective."""
    scores: dict[int, TokenScores] = {}
    with at_rest(model):
        for batch, ids in _batches(prompts, together, next(model.parameters()).device):
            hidden = model.model(ids, MicroBatchContext(adapters=adapters))  # [B, S, D]
            for index, states, tokens in zip(batch, hidden, ids, strict=True):
                length = len(prompts[index])
                scores[index] = _scores(model, states[: length - 1], tokens[1:length])
    return [scores[index] for index in range(len(prompts))]


@torch.no_grad()
def rate(model: CausalLM, rows: Sequence[Sequence[int]], together: int) -> Tensor:
    """Return a classifier's outputs [n, labels] for each row of ids, in max(float32, the model's dtype), on the CPU:
    read at the last token that is not the config's pad_token_id, at the first where all are. Arguments as of
    `score_prompts`."""
    weight, pad = next(model.parameters()), model.config.pad_token_id
    outputs = torch.zeros(len(rows), model.config.labels or 0, dtype=torch.promote_types(weight.dtype, torch.float32))
    with at_rest(model):
        for batch, ids in _batches(rows, together, weight.device):
            ends = [max((i for i, token in enumerate(rows[row]) if token != pad), default=0) for row in batch]
            states = model.model(ids, MicroBatchContext())[
                torch.arange(len(batch), device=ids.device), torch.tensor(ends)
            ]  # [B, D]
            outputs[batch] = model.logits(states).to(outputs)
    return outputs


def _batches(rows: Sequence[Sequence[int]], together: int, device: torch.device) -> Iterator[tuple[list[int], Tensor]]:
    """Yield rows of like length, as their numbers and ids [B, S], each filled up with its last token: what comes after
    a token does not reach it."""
    left = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    while left:
        count = max(1, sum(size * len(rows[index]) <= together for size, index in enumerate(left, 1)))
        batch, left = left[:count], left[count:]
        longest = len(rows[batch[-1]])
        filled = [[*rows[index], *[rows[index][-1]] * (longest - len(rows[index]))] for index in batch]
        yield batch, torch.tensor(filled, device=device)


def _scores(model: CausalLM, hidden: Tensor, tokens: Tensor) -> TokenScores:
    """Return the scores of tokens [n], each predicted by its row of hidden [n, D]."""
    parts: list[tuple[Tensor, ...]] = []
    rows = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    for states, wanted in zip(hidden.split(rows), tokens.split(rows), strict=True):
        logits = model.logits(states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # [rows, V]
        total = logits.logsumexp(-1)
        most = logits.max(-1)
        parts.append((logits.gather(1, wanted[:, None])[:, 0] - total, most.indices, most.values - total))
    return TokenScores(*(torch.cat(part).tolist() for part in zip(*parts, strict=True)))
