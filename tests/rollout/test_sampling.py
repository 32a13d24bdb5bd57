"""Sampling: transformers' filters, the distribution that is drawn from, and draws that do not depend on the batch."""

import pytest
import torch
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from dtrain.rollout.sampling import filter_sorted, sample, uniforms


def logits_of(rows=5, vocab=50, seed=0):
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("top_k", [None, 1, 3, 50, 90])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-9])
def test_filters_are_transformers(top_k, top_p):
    logits = logits_of()
    expected = logits
    if top_k is not None:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(None, expected)
    ordered, ids = logits.sort(-1, descending=True)
    found = torch.empty_like(logits).scatter_(-1, ids, filter_sorted(ordered, top_k, top_p))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("off", [None, 0, -1])
def test_top_k_off_and_ties_with_the_kth_stay(off):
    ordered = torch.tensor([[4.0, 3.0, 3.0, 3.0, 1.0]])
    assert torch.equal(filter_sorted(ordered, off, 1.0), ordered)
    assert filter_sorted(ordered, 2, 1.0).isfinite().tolist() == [[True, True, True, True, False]]


def test_top_p_keeps_the_token_that_crosses():
    ordered = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log()
    for top_p, kept in ((0.4, 1), (0.5000001, 2), (0.79, 2), (0.81, 3), (0.99, 4)):
        assert filter_sorted(ordered, None, top_p).isfinite().sum() == kept


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, None, 1.0), (0.7, None, 1.0), (1.3, 4, 1.0), (1.0, 6, 0.8)]
)
def test_draws_have_the_distribution(temperature, top_k, top_p):
    logits = logits_of(1, 8)
    count = 40_000
    uniform = uniforms(0, [0], count)[0]
    drawn = sample(logits.expand(count, -1), uniform, temperature, top_k, top_p)
    expected = logits / temperature
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(None, expected)
    shares = drawn.bincount(minlength=8) / count
    probabilities = expected.softmax(-1)[0]
    assert (shares - probabilities).abs().max() < 4 * 0.5 / count**0.5
    assert not shares[probabilities == 0].any()


def test_greedy_takes_the_likeliest():
    logits = logits_of()
    assert torch.equal(sample(logits, torch.zeros(5), 0.0, None, 1.0), logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_uniform_number_stays_in_the_vocabulary(dtype):
    logits = torch.full((1, 1000), -1.0, dtype=dtype)
    uniform = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert 0 <= sample(logits, uniform, 1.0, None, 1.0).item() < 1000


def test_a_token_of_no_probability_is_never_drawn_at_the_edge():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]])
    for uniform in (0.0, 0.5, 1 - 2**-53):
        assert sample(logits, torch.tensor([uniform], dtype=torch.float64), 1.0, None, 1.0).item() == 1


def test_uniforms_depend_on_seed_and_row_alone():
    numbers = uniforms(7, [3, 5, 4], 10)
    assert torch.equal(numbers[1], uniforms(7, [5], 10)[0])
    assert torch.equal(numbers[1, :4], uniforms(7, [5], 4)[0])
    assert not torch.equal(numbers[0], numbers[1]) and not torch.equal(numbers, uniforms(8, [3, 5, 4], 10))
    assert numbers.min() >= 0 and numbers.max() < 1
