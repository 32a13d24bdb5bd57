"""Oracles for the tests of losses: the whole vocabulary on one rank, float64, plain torch; and the cuts under test."""

import random

import torch
import torch.distributed as dist

from dtrain.parallel.placement import chunk_bounds

GRADIENT_TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}  # one rounding to the dtype


def logits_tolerance(dtype, *, gradient):
    return _tolerance(dtype, 5e-6, gradient)


def hidden_tolerance(dtype, *, gradient):
    return _tolerance(dtype, 2e-5, gradient)


def _tolerance(dtype, float32, gradient):
    return 1e-12 if dtype == torch.float64 else max(float32, GRADIENT_TOLERANCE.get(dtype, 0) if gradient else 0)


def error(value, expected):
    """Largest error over largest magnitude; inf where one is not finite and the other is something else."""
    value, expected = value.detach().double(), expected.detach().double()
    if value.shape != expected.shape:
        return float("inf")
    finite = expected.isfinite()
    if not torch.equal(value[~finite], expected[~finite]) or not value[finite].isfinite().all():
        return float("inf")
    if not finite.any():
        return 0.0
    scale = expected[finite].abs().max().item() or 1.0
    return (value[finite] - expected[finite]).abs().max().item() / scale


def cut(vocab, tp, rank, kind):
    """This rank's ids [start, end): as torch.chunk cuts, or into random uneven parts, some empty."""
    if kind == "chunk":
        return chunk_bounds(vocab, tp, rank)
    ends = sorted(random.Random(vocab * 10 + tp).choices(range(vocab + 1), k=tp - 1))
    bounds = [0, *ends, vocab]
    return bounds[rank], bounds[rank + 1]


def random_logits(shape, dtype, seed, holes=False, scale=3.0):
    """Logits of `shape` [.., V]; with holes a tenth is −inf, never a whole row."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
    if holes:
        logits[torch.rand(shape, generator=generator) < 0.3] = -float("inf")
        logits[..., seed % shape[-1]] = 0.5
    return logits


def random_targets(shape, vocab, seed):
    """Ids [B, S, ..]: at both ends of the vocabulary, outside it, and everywhere; the last row all masked."""
    generator = torch.Generator().manual_seed(seed + 1)
    targets = torch.randint(0, vocab, shape, generator=generator)
    outside = torch.rand(shape, generator=generator) < 0.2
    odd = torch.tensor([-100, -1, vocab, vocab + 7])[torch.randint(0, 4, shape, generator=generator)]
    targets = torch.where(outside, odd, targets)
    flat = targets.view(-1)
    flat[: min(2, len(flat))] = torch.tensor([0, vocab - 1])[: min(2, len(flat))]
    if shape[0] > 1:
        targets[-1] = -100
    return targets


def logprob_at(logits, ids):
    """log softmax(logits)[ids], ids [.., k]; 0 where an id is not one of the vocabulary's."""
    valid = (ids >= 0) & (ids < logits.shape[-1])
    return torch.where(valid, logits.log_softmax(-1).gather(-1, torch.where(valid, ids, 0)), 0)


def neg_entropy(logits):
    logp = logits.log_softmax(-1)
    return torch.where(logp == -float("inf"), 0, logp.exp() * logp.masked_fill(logp == -float("inf"), 0)).sum(-1)


def everyone():
    """The group of every rank; None in a world of one, so that both are tested."""
    return None if dist.get_world_size() == 1 else dist.group.WORLD


def grad_of(function, *inputs, upstream):
    """The value of function(*inputs) in float64 and its gradients under `upstream`."""
    inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]
    value = function(*inputs)
    value.backward(upstream.double())
    return value.detach(), *[tensor.grad for tensor in inputs]
