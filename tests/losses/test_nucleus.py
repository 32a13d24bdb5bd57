"""Top-p by a search over the values, as a GPU has it, against sorted rows; and what a filtered head holds there."""

import pytest
import torch

from dtrain.base.top_p import find_top_p_threshold, top_p_mask
from dtrain.commands.plan.planned_device import MetaKernels, PlannedDevice
from dtrain.losses import TrainingSamplingParams
from dtrain.losses.head.filtered import filtered_logprobs_from_hidden_states
from tests.losses.test_head_memory import Made

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHARES = [1e-9, 0.1037, 0.4813, 0.9021, 0.99871, 1 - 1e-9]  # no sum of equal shares meets one


def rows(dtype, vocab, seed=0):
    """Flat and peaked ones, many equal values, one token of all the probability, all alike, some left out."""
    draw = torch.Generator().manual_seed(seed)
    scales = torch.tensor([0.0, 0.1, 1.0, 3.0, 10.0, 100.0])
    logits = torch.randn(6, vocab, dtype=torch.float64, generator=draw) * scales[:, None]
    coarse = (2 * logits).round() / 2
    masked = logits.masked_fill(torch.rand(6, vocab, generator=draw) < 0.4, -torch.inf)
    one = torch.full((1, vocab), -torch.inf, dtype=torch.float64)
    one[0, vocab // 2] = -3.0
    return torch.cat([logits, coarse, masked, one, -logits.abs()]).to(dtype)


def by_sorting(logits, p, top_p):
    """Rows sorted stably, likeliest first, and the tokens before which less than top_p has come, one by one."""
    kept = torch.zeros(logits.shape, dtype=torch.bool)
    for row, (values, chances) in enumerate(zip(logits.double().tolist(), p.double().tolist(), strict=True)):
        before = 0.0
        for rank, token in enumerate(sorted(range(len(values)), key=lambda one: (-values[one], one))):
            if rank and before >= top_p:
                break
            kept[row, token] = True
            before += chances[token]
    return kept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [3, 300])
@pytest.mark.slow
def test_what_is_kept_is_what_a_sort_keeps(dtype, vocab):
    logits = rows(dtype, vocab)
    p = logits.softmax(-1, dtype=torch.promote_types(dtype, torch.float32))
    for top_p in SHARES:
        for row in range(len(logits)):
            one = slice(row, row + 1)
            expected = by_sorting(logits[one], p[one], top_p)
            assert torch.equal(top_p_mask(logits[one], top_p), expected), (row, top_p)
        assert torch.equal(top_p_mask(logits, top_p), torch.cat([top_p_mask(r[None], top_p) for r in logits]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_at_the_end_of_their_range(dtype):
    """Trial values reach the NaNs beyond −inf."""
    least, half = torch.finfo(dtype).min, torch.tensor([-9000, -9100, -9200, -9400]).to(dtype)
    assert top_p_mask(half[None], 0.5).tolist() == [[True, False, False, False]]
    for value in (least, -10000.0):
        for top_p, count in ((0.45, 4), (0.55, 5), (0.9, 8)):
            assert int(top_p_mask(torch.full((1, 8), value, dtype=dtype), top_p).sum()) == count
    for nothing in (-torch.inf, torch.nan):
        assert not top_p_mask(torch.full((1, 8), nothing, dtype=dtype), 0.5).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_draws_threshold_is_that_of_sorted_probabilities(dtype, step, monkeypatch):
    """The same threshold, bit for bit, gives the same tokens: `filter_probabilities` compares with nothing else."""
    monkeypatch.setattr("dtrain.base.top_p._BITS_PER_PASS", step)
    monkeypatch.setattr("dtrain.base.top_p._BITS_PER_PASS_SMALL", step)
    p = rows(dtype, 1000).softmax(-1)
    for top_p in SHARES:
        share = top_p * p.sum(-1, keepdim=True, dtype=torch.float64)
        ordered = p.double().sort(-1, descending=True).values
        count = (ordered.cumsum(-1) - ordered < share).sum(-1, keepdim=True).clamp(min=1)
        assert torch.equal(find_top_p_threshold(p, p, share).double(), ordered.gather(1, count - 1))


def test_rows_that_are_not_numbers_and_a_share_of_nothing():
    logits = torch.tensor([[1.0, float("nan"), 2.0], [1.0, 2.0, 2.0]])
    assert top_p_mask(logits, 0.0)[1].tolist() == [False, True, False]
    assert find_top_p_threshold(logits, logits, torch.full((2, 1), 0.5, dtype=torch.float64)).shape == (2, 1)


def test_a_gpu_holds_no_copy_of_the_head_in_float32():
    tokens, vocab, size = 5000, 3000, 64
    hidden = torch.empty(tokens, size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(vocab, size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    ids = torch.zeros(tokens, dtype=torch.int64, device="meta")
    sampling = TrainingSamplingParams(top_k=50, top_p=0.9)
    with PlannedDevice(torch.device("cuda", 0)), MetaKernels(), Made((vocab, size), torch.float32) as made:
        index = torch.arange(tokens, device="meta")
        filtered_logprobs_from_hidden_states(hidden, weight, ids, sampling, index=index).sum().backward()
    assert made.count == 1, "the sum of the weight's gradient, over three chunks"
