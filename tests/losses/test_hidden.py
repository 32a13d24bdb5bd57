"""`weighted_logprob_sum` against a dense float64 computation: value, both gradients, and what must stay untouched."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from transformers.trainer_pt_utils import LabelSmoother

from dtrain.losses.head import weighted_sum as token_losses
from dtrain.losses.head.vocabulary import VocabShard
from dtrain.losses.head.weighted_sum import token_loss_sums, weighted_logprob_sum
from tests.cases import run_cases


def dense(hidden, weight, targets, token_weights, index, softcap):
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logits = hidden[index] @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    total = (logprobs * token_weights.double()).sum()
    total.backward()
    return total.detach(), hidden.grad, weight.grad


def relative_error(value, expected):
    return ((value.double() - expected).abs().max() / expected.abs().max()).item()


def inputs(dtype, tokens=23, dim=12, vocab=37, trained=17, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    index = torch.randperm(tokens, generator=generator)[:trained].sort().values
    targets = torch.randint(0, vocab, (trained,), generator=generator)
    token_weights = torch.randn(trained, generator=generator, dtype=torch.float64)
    return hidden, weight, targets, token_weights, index


# Largest error over largest magnitude; bfloat16 and float16 round the gradient of the logits once more.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.trap(
    "a fused loss without the softcap of the logits",
    "apple/ml-cross-entropy #48",
    "another loss than the model has when it writes",
    "value and gradients of dense logits in float64, with a softcap and without",
)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rows_per_tile", [1, 5, 17, 100, None])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_value_and_gradients_equal_dense_float64(dtype, rows_per_tile, softcap):
    given = inputs(dtype)
    hidden, weight = given[:2]
    total = weighted_logprob_sum(*given, rows_per_tile=rows_per_tile, softcap=softcap)
    (3.0 * total).backward()
    expected, hidden_grad, weight_grad = dense(*given, softcap=softcap)
    assert total.dtype == torch.promote_types(dtype, torch.float32)
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    assert relative_error(total.detach(), expected) < TOLERANCES[dtype]
    assert relative_error(hidden.grad, 3 * hidden_grad) < TOLERANCES[dtype]
    assert relative_error(weight.grad, 3 * weight_grad) < TOLERANCES[dtype]


# Names of losses, and label smoothing.
KINDS = [("nll", 0.0), ("dft", 0.0), ("nll", 0.1), ("nll", 0.75)]


def dense_loss(hidden, weight, targets, index, name, smoothing, softcap=None):
    """By torch.nn.functional.cross_entropy on whole logits, which smooths by itself."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logits = hidden[index] @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    losses = functional.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    if name == "dft":
        losses = losses * logits.softmax(-1).gather(1, targets[:, None])[:, 0].detach()
    losses.sum().backward()
    return losses.sum().detach(), (logits.argmax(-1) == targets).sum(), hidden.grad, weight.grad


def likely(given):
    """The inputs, of which about half the targets are the likeliest token."""
    hidden, weight, targets, _, index = given
    best = (hidden.detach()[index].double() @ weight.detach().double().T).argmax(-1)
    return hidden, weight, torch.where(torch.arange(len(targets)) % 2 == 0, best, targets), index


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rows_per_tile", [1, 5, None])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("name, smoothing", KINDS)
def test_losses_of_tokens_equal_dense_float64(dtype, rows_per_tile, softcap, name, smoothing):
    given = likely(inputs(dtype))
    hidden, weight = given[:2]
    options = {"label_smoothing": smoothing, "softcap": softcap, "rows_per_tile": rows_per_tile}
    total, correct = token_loss_sums(*given, getattr(token_losses, name), **options)
    (3.0 * total).backward()
    expected, right, hidden_grad, weight_grad = dense_loss(*given, name, smoothing, softcap)
    assert total.dtype == torch.promote_types(dtype, torch.float32) and not correct.requires_grad
    assert correct.item() == right.item() >= len(given[2]) // 2
    assert relative_error(total.detach(), expected) < TOLERANCES[dtype]
    assert relative_error(hidden.grad, 3 * hidden_grad) < TOLERANCES[dtype]
    assert relative_error(weight.grad, 3 * weight_grad) < TOLERANCES[dtype]


def test_label_smoothing_is_that_of_transformers():
    """Its LabelSmoother divides by the trained tokens; one of its sums is in float32."""
    hidden, weight, targets, index = likely(inputs(torch.float64))
    logits = (hidden[index] @ weight.T)[None]
    expected = LabelSmoother(epsilon=0.1)({"logits": logits}, targets[None])
    total, _ = token_loss_sums(hidden, weight, targets, index, token_losses.nll, label_smoothing=0.1)
    assert relative_error(total.detach() / len(index), expected.detach()) < 1e-7


def test_of_equally_likely_tokens_the_first_counts():
    """As argmax has it: of a head of zeros nothing but token 0 is right."""
    hidden, weight, _, _, index = inputs(torch.float64)
    targets = torch.arange(len(index)) % 3
    _, correct = token_loss_sums(hidden, weight.detach() * 0, targets, index, token_losses.nll)
    assert correct.item() == (targets == 0).sum()


def test_losses_of_tokens_over_uneven_vocabulary_shards():
    given = [tensor.detach() for tensor in likely(inputs(torch.float64))]
    run_cases(sharded_token_loss, 4, {str(kind): (given, [0, 20, 37, 37, 37], *kind) for kind in KINDS})


def sharded_token_loss(rank, given, bounds, name, smoothing):
    """The last two shards are empty. The second time logits are small whole numbers, so that maxima are shared."""
    targets, index = given[2:]
    for hidden, weight in (given[:2], [one.round() for one in given[:2]]):
        expected, right, hidden_grad, weight_grad = dense_loss(hidden, weight, targets, index, name, smoothing)
        hidden = hidden.clone().requires_grad_()
        part = weight[bounds[rank] : bounds[rank + 1]].clone().requires_grad_()
        total, correct = token_loss_sums(
            hidden,
            part,
            targets,
            index,
            getattr(token_losses, name),
            label_smoothing=smoothing,
            shard=VocabShard(bounds[rank], dist.group.WORLD),
            rows_per_tile=5,
        )
        total.backward()
        dist.all_reduce(hidden.grad)
        assert correct.item() == right.item()
        torch.testing.assert_close(total.detach(), expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(hidden.grad, hidden_grad, rtol=0, atol=1e-12)
        torch.testing.assert_close(part.grad, weight_grad[bounds[rank] : bounds[rank + 1]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient_and_no_memory_for_one(frozen, monkeypatch):
    given = inputs(torch.float32)
    expected = dense(*given, softcap=None)[1:]
    given[frozen].requires_grad_(False)
    made = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: made.append(a) or zeros(*a, **k))
    monkeypatch.setattr(torch, "zeros_like", lambda one: made.append((one.shape,)) or one * 0)
    weighted_logprob_sum(*given, rows_per_tile=5).backward()
    assert given[frozen].grad is None and (given[frozen].shape,) not in made
    assert relative_error(given[1 - frozen].grad, expected[1 - frozen]) < 2e-6


def test_untrained_rows_cost_nothing_even_when_they_are_nan():
    hidden, weight, targets, token_weights, index = inputs(torch.float32)
    untrained = torch.ones(len(hidden), dtype=torch.bool)
    untrained[index] = False
    with torch.no_grad():
        hidden[untrained] = float("nan")
    weighted_logprob_sum(hidden, weight, targets, token_weights, index).backward()
    assert (hidden.grad[untrained] == 0).all()
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


@pytest.mark.trap(
    "a micro-batch without a label gives NaN",
    "OpenRLHF/OpenRLHF PR#583",
    "one such micro-batch makes every weight NaN",
    "loss 0, gradients 0",
)
def test_no_targets_gives_zero_and_zero_gradients():
    hidden, weight, *_ = inputs(torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    total = weighted_logprob_sum(hidden, weight, none, torch.empty(0), none)
    total.backward()
    assert total.item() == 0.0
    assert (hidden.grad == 0).all() and (weight.grad == 0).all()


def test_extreme_logits_stay_finite():
    hidden, weight, targets, token_weights, index = inputs(torch.float32)
    total = weighted_logprob_sum(hidden * 1e4, weight, targets, token_weights, index)
    total.backward()
    expected, *_ = dense(hidden.detach() * 1e4, weight, targets, token_weights, index, None)
    assert relative_error(total.detach(), expected) < 2e-6
    assert torch.isfinite(weight.grad).all()


def test_inputs_are_not_modified_and_no_graph_without_grad():
    hidden, weight, targets, token_weights, index = inputs(torch.float32)
    before = [t.detach().clone() for t in (hidden, weight, targets, token_weights, index)]
    weighted_logprob_sum(hidden, weight, targets, token_weights, index, softcap=2.0).backward()
    for tensor, copy in zip((hidden, weight, targets, token_weights, index), before, strict=True):
        assert torch.equal(tensor, copy)
    with torch.no_grad():
        assert weighted_logprob_sum(hidden, weight, targets, token_weights, index).grad_fn is None


def test_second_backward_is_refused():
    hidden, weight, targets, token_weights, index = inputs(torch.float32)
    total = weighted_logprob_sum(hidden, weight, targets, token_weights, index)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        total.backward()


def test_used_twice_in_one_graph_sums_gradients():
    hidden, weight, targets, token_weights, index = inputs(torch.float64)
    one = weighted_logprob_sum(hidden, weight, targets, token_weights, index)
    two = weighted_logprob_sum(hidden, weight, targets, token_weights * 2, index)
    (one + two).backward()
    _, hidden_grad, weight_grad = dense(hidden, weight, targets, token_weights * 3, index, None)
    assert relative_error(hidden.grad, hidden_grad) < 1e-12
    assert relative_error(weight.grad, weight_grad) < 1e-12


def by_tiles_of_its_own_choice(rank, bounds, tokens, told):
    """Relative errors of value, hidden's and weight's gradients of a vocabulary cut at `bounds`."""
    hidden, weight, targets, token_weights, _ = inputs(torch.float64, tokens, 2, bounds[-1], tokens)
    index = torch.arange(tokens)
    part = slice(bounds[rank], bounds[rank + 1])
    mine = weight[part].detach().clone().requires_grad_()
    largest = max(end - start for start, end in pairwise(bounds))
    shard = VocabShard(bounds[rank], dist.group.WORLD, largest if told else None)
    total = weighted_logprob_sum(hidden, mine, targets, token_weights, index, shard=shard)
    total.backward()
    dist.all_reduce(hidden.grad)
    value, hidden_grad, weight_grad = dense(hidden, weight, targets, token_weights, index, None)
    pairs = [(total.detach(), value), (hidden.grad, hidden_grad), (mine.grad, weight_grad[part])]
    return [relative_error(found, right) for found, right in pairs if right.numel()]


def test_uneven_shards_take_the_same_tiles():
    """By its own rows, 44 or 43, a rank would send tiles of 47662 or 48770 tokens; of none, it would have no size."""
    bounds = {50_000: (0, 44, 88, 131), 8_000: (0, 300, 300, 301)}
    cases = {f"{cut}, {told}": (cut, tokens, told) for tokens, cut in bounds.items() for told in (True, False)}
    for name, ranks in run_cases(by_tiles_of_its_own_choice, 3, cases).items():
        assert max(map(max, ranks)) <= 1e-11, name
