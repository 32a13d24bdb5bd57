"""Log-probabilities under a filter from hidden states, against whole logits in float64; a cut vocabulary too."""

import pytest
import torch

from dtrain.losses import TrainingSamplingParams
from dtrain.losses.head.filtered import filtered_logprobs_from_hidden_states
from dtrain.losses.head.vocabulary import VocabShard
from tests.cases import run_cases

VOCAB, SIZE = 23, 8


def inputs(dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 300, SIZE, dtype=torch.float64, generator=draw).to(dtype)
    weight = torch.randn(VOCAB, SIZE, dtype=torch.float64, generator=draw).to(dtype)
    targets = torch.randint(0, VOCAB, (2, 300), generator=draw)
    targets[torch.rand(targets.shape, generator=draw) < 0.3] = -100
    return hidden, weight, targets


def dense(hidden, weight, targets, sampling, softcap):
    """Sorts whole rows, keeps what the words say, renormalises."""
    logits = hidden.double() @ weight.double().t()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / sampling.temperature
    if sampling.top_k:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k, -1).values[..., -1:], -torch.inf)
    if sampling.top_p < 1:
        ordered, ids = logits.sort(-1, descending=True)
        p = ordered.softmax(-1)
        drop = (p.cumsum(-1) - p) >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, ids, drop), -torch.inf)
    found = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return torch.where(targets == -100, 0, found)


def check(values, grads, hidden, weight, targets, sampling, softcap, rtol):
    h, w = (one.double().clone().requires_grad_() for one in (hidden, weight))
    expected = dense(h, w, targets, sampling, softcap)
    assert torch.equal(values.isinf(), expected.isinf())
    known = ~expected.isinf()
    assert (values[known] - expected[known]).abs().max() <= rtol * expected[known].abs().max()
    (torch.where(known, expected, 0).sin().sum()).backward()
    for grad, one in zip(grads, (h.grad, w.grad), strict=True):
        assert (grad - one).abs().max() <= rtol * one.abs().max()


CASES = [
    (TrainingSamplingParams(top_k=5, temperature=0.7), None),
    (TrainingSamplingParams(top_p=0.8, temperature=1.3), 4.0),
    (TrainingSamplingParams(top_k=9, top_p=0.9), None),
]


@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("sampling, softcap", CASES)
def test_values_and_gradients(sampling, softcap, dtype, rtol):
    hidden, weight, targets = inputs(dtype)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    index = (targets.flatten() != -100).nonzero().squeeze(1)
    values = filtered_logprobs_from_hidden_states(h, w, targets, sampling, softcap=softcap, index=index)
    torch.where(values.isinf(), 0, values).sin().sum().backward()
    check(values.detach(), (h.grad, w.grad), hidden, weight, targets, sampling, softcap, rtol)


def on_rank(rank, sampling, softcap):
    hidden, weight, targets = inputs()
    start, end = ((0, 12), (12, 23))[rank]
    h, w = hidden.clone().requires_grad_(), weight[start:end].clone().requires_grad_()
    index = (targets.flatten() != -100).nonzero().squeeze(1)
    shard = VocabShard(start, torch.distributed.group.WORLD, 12)
    values = filtered_logprobs_from_hidden_states(h, w, targets, sampling, softcap=softcap, shard=shard, index=index)
    torch.where(values.isinf(), 0, values).sin().sum().backward()
    torch.distributed.all_reduce(h.grad)
    return values.detach().numpy(), h.grad.numpy(), w.grad.numpy()


def test_a_vocabulary_cut_unevenly():
    cases = {f"{sampling}, {softcap}": (sampling, softcap) for sampling, softcap in CASES}
    hidden, weight, targets = inputs()
    for name, ranks in run_cases(on_rank, 2, cases).items():
        whole = torch.cat([torch.from_numpy(one[2]) for one in ranks])
        for values, grad, _ in ranks:
            grads = torch.from_numpy(grad), whole
            check(torch.from_numpy(values), grads, hidden, weight, targets, *cases[name], 1e-12)


def test_nothing_labelled_still_gives_gradients():
    hidden, weight, targets = inputs()
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    empty = torch.empty(0, dtype=torch.int64)
    values = filtered_logprobs_from_hidden_states(h, w, targets.fill_(-100), CASES[0][0], index=empty)
    values.sum().backward()
    assert not values.any() and not h.grad.any() and not w.grad.any()
