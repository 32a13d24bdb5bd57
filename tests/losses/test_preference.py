"""Preference losses against the papers' formulas written out here, against numbers that TRL's own code gave
(trl_preference.json: value and gradients of the mean loss, float64, versions there), and at any split of the batch.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.autograd import gradcheck

from dtrain.losses import preference_loss
from dtrain.losses.preference.losses import (
    combined_preference_loss,
    preference_rewards,
    preference_weights,
    running_mean,
)
from dtrain.losses.preference.options import LOSSES

TRL = json.loads(Path(__file__).with_name("trl_preference.json").read_text())
BETA = 0.3
SMOOTHED = [name for name, loss in LOSSES.items() if "label_smoothing" in loss.options]
DEFAULTS = {name: {"label_smoothing": 0.1} if name in SMOOTHED else {} for name in LOSSES}
DEFAULTS["bco_pair"] = {"bco_shift": "batch"}


def pairs(count=7, seed=0, dtype=torch.float64):
    """Log-probabilities of chosen, rejected, reference's chosen and rejected, and the lengths' keywords."""
    generator = torch.Generator().manual_seed(seed)
    logps = -20 * torch.rand(4, count, generator=generator, dtype=torch.float64) - 0.5
    lengths = torch.randint(1, 30, (2, count), generator=generator)
    return [*logps.to(dtype)], {"chosen_lengths": lengths[0], "rejected_lengths": lengths[1]}


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def differences(first, second):
    return [a - b for a, b in zip(first, second, strict=True)]


def spread(p, q):
    """KL of two distributions over two."""
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def sigma(x):
    return 1 / (1 + math.exp(-x))


def smoothed(x, e):
    return -(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x)


def odds(p):
    return p / (1 - p)


# loss of one pair from c, r (log ratios), n, k (lengths), w, v (the policy's log-probabilities), e (label smoothing)
PAPERS = {
    "sigmoid": lambda c, r, n, k, w, v, e: smoothed(BETA * (c - r), e),
    "hinge": lambda c, r, n, k, w, v, e: max(0.0, 1 - BETA * (c - r)),
    "ipo": lambda c, r, n, k, w, v, e: (c / n - r / k - 1 / (2 * BETA)) ** 2,
    "ipo_sum": lambda c, r, n, k, w, v, e: (c - r - 1 / (2 * BETA)) ** 2,
    "robust": lambda c, r, n, k, w, v, e: (
        ((1 - e) * -log_sigmoid(BETA * (c - r)) - e * -log_sigmoid(BETA * (r - c))) / (1 - 2 * e)
    ),
    "exo_pair": lambda c, r, n, k, w, v, e: spread((sigma(BETA * (c - r)), sigma(BETA * (r - c))), (1 - e, e)),
    "nca_pair": lambda c, r, n, k, w, v, e: (
        -log_sigmoid(BETA * c) - 0.5 * (log_sigmoid(-BETA * c) + log_sigmoid(-BETA * r))
    ),
    "sppo_hard": lambda c, r, n, k, w, v, e: (c - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda c, r, n, k, w, v, e: 1 - sigma(BETA * c) + sigma(BETA * r),
    "apo_down": lambda c, r, n, k, w, v, e: sigma(BETA * c) + 1 - sigma(BETA * (c - r)),
    "discopop": lambda c, r, n, k, w, v, e: (
        (1 - sigma(BETA * (c - r) / 0.05)) * -log_sigmoid(BETA * (c - r))
        + sigma(BETA * (c - r) / 0.05) * math.exp(-BETA * (c - r))
    ),
    "sigmoid_norm": lambda c, r, n, k, w, v, e: -log_sigmoid(BETA * (c / n - r / k)),
    "simpo": lambda c, r, n, k, w, v, e: smoothed(BETA / n * w - BETA / k * v - 0.5, e),
    "orpo": lambda c, r, n, k, w, v, e: -BETA * log_sigmoid(math.log(odds(math.exp(w / n)) / odds(math.exp(v / k)))),
}


@pytest.mark.parametrize(
    ("name", "smoothing"),
    [(name, 1e-3 if name == "exo_pair" else 0.0) for name in PAPERS]
    + [(name, 0.2) for name in PAPERS if name in SMOOTHED],
)
def test_a_loss_is_its_papers_formula(name, smoothing):
    logps, lengths = pairs()
    losses = preference_loss(name, *logps, beta=BETA, label_smoothing=smoothing, **lengths)
    w, v, ref_w, ref_v = (one.tolist() for one in logps)
    expected = [
        PAPERS[name](w[i] - ref_w[i], v[i] - ref_v[i], *sizes, w[i], v[i], smoothing)
        for i, sizes in enumerate(zip(*(one.tolist() for one in lengths.values()), strict=True))
    ]
    torch.testing.assert_close(losses, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired", "aot_pair"])
def test_aot_compares_the_kth_smallest_with_the_kth_smallest(name):
    logps, _ = pairs()
    w, v, ref_w, ref_v = (one.tolist() for one in logps)
    if name == "aot":
        left, right = differences(w, v), differences(ref_w, ref_v)
    else:
        left, right = differences(w, ref_w), differences(v, ref_v)
    partner = dict(zip(sorted(left), sorted(right), strict=True))
    expected = [smoothed(BETA * (value - partner[value]), 0.2) for value in left]
    losses = preference_loss(name, *logps, beta=BETA, label_smoothing=0.2)
    torch.testing.assert_close(losses, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_bco_shifts_rewards_by_nothing_a_number_or_the_batchs_mean():
    logps, _ = pairs()
    rewards = BETA * (logps[0] - logps[2]), BETA * (logps[1] - logps[3])
    mean = torch.cat(rewards).mean().item()
    for options, shift in (({}, 0.0), ({"bco_shift": 0.7}, 0.7), ({"bco_shift": "batch"}, mean)):
        losses = preference_loss("bco_pair", *logps, beta=BETA, **options)
        by_pair = zip(*(one.tolist() for one in rewards), strict=True)
        expected = [-log_sigmoid(c - shift) - log_sigmoid(shift - r) for c, r in by_pair]
        torch.testing.assert_close(losses, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    shift, count = 0.0, 0
    for value in (torch.tensor(3.0), torch.tensor(5.0), torch.tensor(-2.0)):
        shift, count = running_mean(shift, count, value)
    assert (shift.item(), count) == (pytest.approx(2.0), 3)


@pytest.mark.parametrize("case", TRL["cases"], ids=lambda case: f"{case['trl']}-{case['name']}-{case['options']}")
def test_trls_own_numbers(case):
    logps = [torch.tensor(TRL[name]).double() for name in ("chosen", "rejected", "ref_chosen", "ref_rejected")]
    lengths = {name: torch.tensor(TRL[name]) for name in ("chosen_lengths", "rejected_lengths")}
    ours = preference_weights(case["name"], *logps, beta=TRL["beta"], **lengths, **case["options"])
    got = torch.cat([ours.losses.mean()[None], ours.chosen, ours.rejected])
    expected = torch.tensor([case["loss"], *case["chosen"], *case["rejected"]], dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


SCORES = {
    "forward_kl": lambda t, a: 1 - 1 / t,
    "js_divergence": lambda t, a: math.log(2 * t / (1 + t)),
    "alpha_divergence": lambda t, a: (t ** (a - 1) - 1) / (a - 1),
}


@pytest.mark.parametrize("divergence", SCORES)
@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.f_divergence])
def test_a_divergence_puts_its_score_in_the_log_ratios_place(name, divergence):
    """With scores as log-probabilities and no reference, the plain loss is the divergence's loss."""
    logps, lengths = pairs()
    alpha = {"f_alpha_divergence_coef": 0.7} if divergence == "alpha_divergence" else {}
    options = {"beta": BETA, **lengths, **DEFAULTS[name]}
    scores = [
        torch.tensor([SCORES[divergence](math.exp(x), 0.7) for x in (one - ref).tolist()], dtype=torch.float64)
        for one, ref in ((logps[0], logps[2]), (logps[1], logps[3]))
    ]
    expected = preference_loss(name, *scores, None, None, **options)
    torch.testing.assert_close(preference_loss(name, *logps, f_divergence=divergence, **alpha, **options), expected)


def test_alphas_limits_are_the_other_divergences():
    logps, _ = pairs()

    def at(alpha):
        return preference_loss(
            "sigmoid", *logps, beta=BETA, f_divergence="alpha_divergence", f_alpha_divergence_coef=alpha
        )

    torch.testing.assert_close(at(0.0), preference_loss("sigmoid", *logps, beta=BETA, f_divergence="forward_kl"))
    torch.testing.assert_close(at(1.0), preference_loss("sigmoid", *logps, beta=BETA))
    torch.testing.assert_close(at(1 + 1e-5), at(1.0), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "bco_pair"])  # its shift has no gradient
def test_gradients_are_those_of_finite_differences(name):
    logps, lengths = pairs(5)
    options = {"beta": BETA, **lengths, **DEFAULTS[name]}
    policy = [one.requires_grad_() for one in logps[:2]]
    assert gradcheck(lambda c, r: preference_loss(name, c, r, *logps[2:], **options), policy)


MIXES = [*((name,) for name in LOSSES), ("sigmoid", "aot", "ipo"), ("orpo", "bco_pair")]


@pytest.mark.parametrize("names", MIXES, ids=" + ".join)
def test_weights_of_the_global_batch_give_the_gradient_at_any_split(names):
    """A model's gradient, summed part by part with the weights, is autograd's through the mean over the whole batch."""
    (_, _, *reference), lengths = pairs(8, seed=1)
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(2, 8, 5, generator=generator, dtype=torch.float64)
    parameter = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()

    def logps(rows=slice(None)):
        return [-(one[rows] @ parameter).square() - 0.1 for one in inputs]

    options = {"beta": BETA, "loss_weights": [0.5, 2.0, 1.25][: len(names)], **lengths}
    options |= {key: value for name in names for key, value in DEFAULTS[name].items()}
    losses = combined_preference_loss(names, *logps(), *reference, **options)
    (expected,) = torch.autograd.grad(losses.mean(), parameter)
    weights = preference_weights(names, *logps(), *reference, **options)
    torch.testing.assert_close(weights.losses, losses.detach())
    for split in ([8], [4, 4], [1, 2, 5]):
        total, start = torch.zeros_like(parameter), 0
        for size in split:
            rows = slice(start, start + size)
            chosen, rejected = logps(rows)
            part = (weights.chosen[rows] * chosen + weights.rejected[rows] * rejected).sum()
            total = total + torch.autograd.grad(part, parameter)[0]
            start += size
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if not loss.whole_batch])
def test_other_losses_do_not_look_at_other_pairs(name):
    logps, lengths = pairs()
    options = {"beta": BETA, **DEFAULTS[name]}
    whole = preference_loss(name, *logps, **options, **lengths)
    alone = []
    for i in range(len(whole)):
        own_lengths = {key: length[i : i + 1] for key, length in lengths.items()}
        alone.append(preference_loss(name, *(one[i : i + 1] for one in logps), **options, **own_lengths))
    torch.testing.assert_close(torch.cat(alone), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_counts_in_float32_and_float32_is_near_float64(name, dtype):
    logps, lengths = pairs(dtype=dtype)
    losses = preference_loss(name, *logps, beta=BETA, **lengths, **DEFAULTS[name])
    assert losses.dtype == torch.float32
    wide = preference_loss(name, *(one.double() for one in logps), beta=BETA, **lengths, **DEFAULTS[name])
    torch.testing.assert_close(losses.double(), wide, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [1e3, 1e30, math.inf])
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("ipo", "ipo_sum", "sppo_hard", "robust")])
def test_a_rejected_completion_that_is_impossible_gives_no_nan(name, gap, dtype):
    """Loss and gradient are finite where the limit is; without label smoothing, except for exo_pair."""
    smoothing = {"label_smoothing": 0.1} if name == "exo_pair" else {}
    lengths = {"chosen_lengths": torch.tensor([2, 3]), "rejected_lengths": torch.tensor([4, 1])}
    chosen, rejected = torch.tensor([[-1.5, -2.5], [-gap, -3.0]], dtype=dtype).unbind()
    reference = [torch.tensor([-2.0, -2.0], dtype=dtype), torch.tensor([-3.0, -2.0], dtype=dtype)]
    result = preference_weights(name, chosen, rejected, *reference, beta=BETA, **lengths, **smoothing)
    for tensor in result:
        assert tensor.isfinite().all(), (name, result)


@pytest.mark.parametrize("name", ["exo_pair", "discopop"])
def test_margins_of_any_size_give_no_nan(name):
    margins = torch.tensor([-1e30, -1e4, -90.0, 90.0, 1e4, 1e30])
    zeros = torch.zeros_like(margins)
    result = preference_weights(name, margins, zeros, zeros, zeros, beta=1.0, **DEFAULTS[name])
    assert all(not tensor.isnan().any() for tensor in result)
    assert result.losses.isfinite().all()


@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_scores_of_far_ratios_stay_finite(divergence):
    far = torch.tensor([-500.0, 500.0])
    result = preference_weights(
        "sigmoid", far, far.flip(0), torch.zeros(2), torch.zeros(2), beta=BETA, f_divergence=divergence
    )
    assert all(tensor.isfinite().all() for tensor in result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orpos_odds_near_certainty(dtype):
    """1 − p as small as 1e-12 keeps its digits: loss = log(1 + odds(rejected)/odds(chosen)); finite slopes at p = 1."""
    gaps = torch.tensor([0.0, 1e-12, 1e-7, 1e-3], dtype=dtype)
    chosen, rejected = -gaps, torch.full_like(gaps, -0.5)
    ones = torch.ones_like(gaps)
    result = preference_weights(
        "orpo", chosen, rejected, None, None, beta=1.0, chosen_lengths=ones, rejected_lengths=ones
    )
    odd = math.exp(-0.5) / -math.expm1(-0.5)
    inverse = [-math.expm1(-gap) / math.exp(-gap) for gap in gaps.tolist()]  # 1 ÷ the chosen ones' odds
    expected = torch.tensor([math.log1p(odd * one) for one in inverse], dtype=dtype)
    slopes = [-odd / (1 + odd * one) * (1 + one) for one in inverse]
    torch.testing.assert_close(result.losses, expected, rtol=1e-5 if dtype == torch.float32 else 1e-10, atol=1e-25)
    torch.testing.assert_close(result.chosen * 4, torch.tensor(slopes, dtype=dtype), rtol=1e-5, atol=0)


def test_no_reference_is_a_reference_of_zeros_and_reference_free_losses_read_none():
    logps, lengths = pairs()
    zeros = torch.zeros_like(logps[0])
    for name, loss in LOSSES.items():
        options = {"beta": BETA, **lengths, **DEFAULTS[name]}
        without = preference_loss(name, *logps[:2], None, None, **options)
        torch.testing.assert_close(without, preference_loss(name, *logps[:2], zeros, zeros, **options))
        changed = not torch.equal(without, preference_loss(name, *logps, **options))
        assert changed == loss.needs_reference


def test_rewards():
    chosen, rejected = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-2.0, -2.0, -1.0])
    rewards = preference_rewards(chosen, rejected, chosen - 1, rejected - 1, beta=0.5)
    torch.testing.assert_close(rewards.chosen, torch.full((3,), 0.5))
    torch.testing.assert_close(rewards.margin, torch.zeros(3))
    plain = preference_rewards(chosen.requires_grad_(), rejected, None, None, beta=0.5)
    assert plain.margin.tolist() == [0.5, 0.0, -1.0] and plain.accuracy.tolist() == [1.0, 0.0, 0.0]
    assert not plain.margin.requires_grad
