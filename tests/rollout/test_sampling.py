"""Sampling: filters against a dense oracle and transformers, the distribution that is drawn from, and draws that do not
depend on the batch."""

import pytest
import torch
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dtrain.inference import sampling
from dtrain.inference.request import Request, SamplingParams
from dtrain.inference.sampling import Sampler, request_key, sample_from_cdf

CPU = torch.device("cpu")
SETTINGS = [
    SamplingParams(9, 1.0),
    SamplingParams(9, 0.0),
    SamplingParams(9, 0.7, top_k=5),
    SamplingParams(9, 1.0, top_p=0.8),
    SamplingParams(9, 1.6, min_p=0.1),
    SamplingParams(9, 1.2, top_k=20, top_p=0.9, min_p=0.05),
    SamplingParams(9, 0.0, top_k=1, top_p=0.1, min_p=1.0),
    SamplingParams(9, 1.0, top_k=-1, top_p=1.0, min_p=0.0),
    SamplingParams(9, 2.0, top_k=500),
    SamplingParams(9, 1.0, top_p=1e-9),
]


def logits_of(rows, vocab, seed=0, dtype=torch.float64):
    return (3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def dense(logits, settings):
    """log-probabilities [V] of one row, -inf where left out, token by token and in float64."""
    if settings.temperature == 0:
        return logits.double().log_softmax(-1)
    scores = logits.double() / settings.temperature
    if settings.top_k is not None and settings.top_k > 0:
        least = sorted(scores.tolist())[-min(settings.top_k, len(scores))]
        scores = torch.where(scores >= least, scores, float("-inf"))
    if settings.top_p < 1:
        probabilities = scores.softmax(-1).tolist()
        kept, total = set(), 0.0
        for token in sorted(range(len(scores)), key=lambda token: -probabilities[token]):
            kept.add(token)
            total += probabilities[token]
            if total >= settings.top_p:
                break
        scores = torch.where(torch.tensor([token in kept for token in range(len(scores))]), scores, float("-inf"))
    probabilities = scores.softmax(-1)
    scores = torch.where(probabilities >= settings.min_p * probabilities.max(), scores, float("-inf"))
    return scores.log_softmax(-1)


@pytest.mark.parametrize("vocab", [97, 128, 1500])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_draws_and_logprobs_are_those_of_a_dense_oracle(vocab, dtype, tolerance):
    """Each row's draw is where its number falls in the distribution function of the dense oracle's probabilities."""
    logits = logits_of(len(SETTINGS), vocab, dtype=dtype)
    keys = [request_key(Request([1], one, 0, row)) for row, one in enumerate(SETTINGS)]
    for position in range(20):
        at = torch.full((len(SETTINGS),), position)
        tokens, logprobs = Sampler(SETTINGS, keys, CPU).sample(logits, at)
        numbers = sampling.random_uniform(at, torch.tensor(keys))
        for row, settings in enumerate(SETTINGS):
            expected = dense(logits[row], settings)
            token = int(tokens[row])
            assert abs(float(logprobs[row]) - float(expected[token])) < tolerance
            if settings.temperature == 0:
                assert token == int(logits[row].argmax())
            else:
                upper = expected.exp().cumsum(-1)[token]
                lower = upper - expected.exp()[token]
                assert lower - 1e-6 <= numbers[row] <= upper + 1e-6


def test_rows_do_not_depend_on_what_stands_beside_them(monkeypatch):
    logits = logits_of(len(SETTINGS), 300, dtype=torch.float32)
    keys, at = list(range(len(SETTINGS))), torch.arange(len(SETTINGS))
    together = Sampler(SETTINGS, keys, CPU).sample(logits, at)
    monkeypatch.setattr(sampling, "_ELEMENTS_PER_CHUNK", {"cpu": 700})
    monkeypatch.setattr(sampling, "_TOP_P_CANDIDATES", 4)
    cut = Sampler(SETTINGS, keys, CPU).sample(logits, at)
    for row in range(len(SETTINGS)):
        alone = Sampler(SETTINGS[row : row + 1], keys[row : row + 1], CPU).sample(
            logits[row : row + 1], at[row : row + 1]
        )
        for found in (together, cut):
            assert torch.equal(alone[0], found[0][row : row + 1]) and torch.equal(alone[1], found[1][row : row + 1])


@pytest.mark.parametrize("top_k", [None, 1, 3, 50, 90])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-9])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_filters_are_transformers(top_k, top_p, min_p):
    logits = logits_of(5, 50)
    expected = logits
    if top_k is not None:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p > 0.0:
        expected = MinPLogitsWarper(min_p)(None, expected)
    found = sampling.filter_probabilities(
        logits.softmax(-1),
        None if top_k is None else torch.full((5,), top_k),
        torch.full((5, 1), top_p),
        torch.full((5, 1), min_p),
        top_k or 0,
    )
    assert torch.equal(found > 0, expected.isfinite())


def test_equals_of_the_last_one_kept_stay():
    equal = torch.tensor([[0.4, 0.2, 0.2, 0.2]])
    assert (sampling.filter_probabilities(equal, top_k=torch.tensor([2]), max_top_k=2) > 0).all()
    assert (sampling.filter_probabilities(equal, top_p=torch.tensor([[0.5]])) > 0).all()


@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[2], SETTINGS[3], SETTINGS[4]])
def test_draws_have_the_distribution(settings):
    logits, count = logits_of(1, 8), 40_000
    tokens, _ = Sampler([settings] * count, [7] * count, CPU).sample(logits.expand(count, -1), torch.arange(count))
    shares = tokens.bincount(minlength=8) / count
    probabilities = dense(logits[0], settings).exp()
    assert (shares - probabilities).abs().max() < 4 * 0.5 / count**0.5  # four standard deviations at the most
    assert not shares[probabilities == 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [2**-54, 0.5, 1 - 2**-53])
def test_a_token_of_no_probability_is_never_drawn_at_an_edge(dtype, number):
    logits = torch.full((1, 1000), float("-inf"), dtype=dtype)
    logits[0, [3, 700]] = 1.0
    token = sample_from_cdf(logits.float().softmax(-1), torch.tensor([number], dtype=torch.float64))
    assert int(token) in (3, 700)


def test_numbers_depend_on_seed_prompt_sample_and_position():
    one = SamplingParams(5)
    keys = {
        request_key(Request([1], one, seed, prompt, sample))
        for seed, prompt, sample in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0)]
    }
    assert len(keys) == 6
    assert request_key(Request([1, 2], SamplingParams(9, 0.3))) == request_key(Request([4], one))
    numbers = sampling.random_uniform(torch.arange(100_000), 5)
    assert 0 < numbers.min() and numbers.max() < 1 and abs(numbers.mean() - 0.5) < 0.005


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-38, 1e-50, 1e-320, 5e-324])
def test_temperatures_near_0_take_the_likeliest_and_leave_the_neighbours_bits(dtype, temperature):
    logits = (1e4 * logits_of(len(SETTINGS) + 2, 97)).to(dtype)
    cold = [SamplingParams(9, temperature), SamplingParams(9, temperature, top_k=7, top_p=0.5, min_p=0.1)]
    keys = [request_key(Request([1], one, 0, row)) for row, one in enumerate(SETTINGS)]
    at = torch.zeros(len(SETTINGS) + 2, dtype=torch.int64)
    tokens, logprobs = Sampler([*SETTINGS, *cold], [*keys, 1, 2], CPU).sample(logits, at)
    assert tokens[-2:].tolist() == logits[-2:].argmax(-1).tolist() and logprobs[-2:].tolist() == [0.0, 0.0]
    alone = Sampler(SETTINGS, keys, CPU).sample(logits[:-2], at[:-2])
    assert tokens[:-2].equal(alone[0]) and logprobs[:-2].equal(alone[1])
