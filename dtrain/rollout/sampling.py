"""From logits to the next token: the likeliest, or a draw that depends on seed, prompt and position alone."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def filter_sorted(logits: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Logits [B, V] sorted in descending order, with -inf for what top-k and then top-p leave out.

    top-k keeps ties with the k-th (None, -1, 0: everything). top-p keeps, of what is left and renormalised, the
    likeliest tokens up to the one that reaches p, always at least one (1.0: everything; arXiv:1904.09751, section 3.1).
    """
    if top_k is not None and top_k > 0:
        kth = logits[:, min(top_k, logits.shape[1]) - 1, None]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1.0:
        probabilities = logits.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        left_out = before >= top_p
        left_out[:, 0] = False
        logits = logits.masked_fill(left_out, float("-inf"))
    return logits


def sample(logits: Tensor, uniform: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """The next token of each row, [B] int64, from its logits [B, V] and a uniform number in [0, 1), [B] float64.

    temperature 0 takes the likeliest token (the lowest id among equals). Otherwise logits are divided by it in
    max(float32, their dtype), filtered, and the uniform number is looked up in the distribution function.
    """
    if temperature == 0.0:
        return logits.argmax(-1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    ids = None
    if (top_k is not None and top_k > 0) or top_p < 1.0:
        logits, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        logits = filter_sorted(logits, top_k, top_p)
    distribution = logits.to(torch.float64).softmax(-1).cumsum(-1)
    threshold = uniform[:, None].to(distribution.device) * distribution[:, -1:]
    chosen = torch.searchsorted(distribution, threshold, right=True).clamp(max=logits.shape[1] - 1)
    return (chosen if ids is None else ids.gather(-1, chosen)).squeeze(-1)


def uniforms(seed: int, rows: Sequence[int], count: int) -> Tensor:
    """Uniform numbers in [0, 1), [len(rows), count] float64 on the CPU: row r's depend on (seed, r) alone."""
    numbers = torch.empty((len(rows), count), dtype=torch.float64)
    for index, row in enumerate(rows):
        digest = hashlib.blake2b(f"{seed}:{row}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        torch.rand(count, dtype=torch.float64, generator=generator, out=numbers[index])
    return numbers
