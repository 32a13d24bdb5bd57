"""The policy losses at the edges: values that a recipe may set, masked and impossible tokens, metrics, dtypes."""

import math
import re

import pytest
import torch

from dtrain.losses.policy.formulas import Documents, RowSequences
from dtrain.losses.policy.options import LOSSES, SHARED
from dtrain.losses.policy.terms import policy_loss, top_entropy_threshold
from dtrain.rl.grpo import loss_problems
from tests.losses.test_policy_loss import EVERYTHING, EXACT, completions, gradients, loss_of, trained
from tests.problem_lines import lines


@pytest.mark.parametrize("name", LOSSES)
def test_masked_places_may_hold_anything(name):
    streams = completions()
    whole = trained(streams)
    loss, metrics = loss_of(name, whole, **EVERYTHING)
    for trash in (math.nan, math.inf, -math.inf, 1e300):
        dirty = {k: v if k == "mask" else v.masked_fill(~streams["mask"], trash) for k, v in streams.items()}
        dirty = trained(dirty)
        again, measured = loss_of(name, dirty, **EVERYTHING)
        assert again.item() == loss.item()
        for one, other in zip(gradients(again, dirty), gradients(loss, whole), strict=True):
            assert torch.equal(one, other)
        assert measured == metrics
        whole = trained(streams)
        loss, metrics = loss_of(name, whole, **EVERYTHING)


@pytest.mark.parametrize("name", LOSSES)
def test_a_mask_without_a_token_gives_zero_and_a_graph(name):
    streams = completions()
    options = {} if name == "gmpo" else {"top_entropy_quantile": 0.5}
    for shape in ((4, 6), (0, 6)):
        empty = {key: value[: shape[0]] for key, value in streams.items()}
        empty = trained(empty | {"mask": torch.zeros(shape)})
        loss, metrics = loss_of(name, empty, **EVERYTHING, **options)
        assert loss.item() == 0.0
        assert not any(one.any() for one in gradients(loss, empty))
        assert not any(value.item() for value in metrics.values())


@pytest.mark.parametrize("name", LOSSES)
def test_a_token_that_cannot_be_drawn_any_more_has_no_gradient_and_no_nan(name):
    streams = completions()
    for stream in ("logps", "old_logps", "ref_logps", "sampling_logps"):
        holed = trained(streams | {stream: streams[stream].index_put((torch.tensor(0), torch.tensor(2)), NEVER)})
        loss, metrics = loss_of(name, holed, **EVERYTHING)
        slope, _ = gradients(loss, holed)
        assert torch.isfinite(loss) and torch.isfinite(slope).all()
        assert all(torch.isfinite(value) for value in metrics.values())
        assert (slope[0, 2] == 0) == (stream in ("logps", "old_logps"))


NEVER = torch.tensor(-torch.inf, dtype=torch.float64)


def test_a_token_that_cannot_be_drawn_counts_as_ratio_zero():
    logps = torch.tensor([[-torch.inf, -1.0]], dtype=torch.float64).requires_grad_()
    old = torch.tensor([[-2.0, -1.0]], dtype=torch.float64)
    loss, metrics = policy_loss("dapo", logps, old, torch.tensor([-1.0]), torch.ones(1, 2), entropies=torch.ones(1, 2))
    assert loss.item() == pytest.approx((0.8 + 1.0) / 2)
    assert (metrics["approx_kl"].item(), metrics["entropy"].item()) == (0.0, 1.0)


def test_the_policys_own_logps_as_the_old_ones_are_constants():
    streams = trained(completions())
    for name in LOSSES:
        losses = [loss_of(name, streams | {"old_logps": old}) for old in (None, streams["logps"])]
        (first, _), (second, _) = (gradients(loss, streams) for loss, _ in losses)
        assert torch.equal(first, second) and first.any(), name


def test_a_nan_at_a_real_token_is_not_hidden():
    streams = completions()
    streams["logps"][0, 1] = math.nan
    loss, _ = loss_of("dapo", streams)
    assert loss.isnan()


def test_an_exploding_ratio_has_a_finite_gradient():
    """exp of the log ratio is infinite; the clip's branch has the value, and the other's slope must not be 0·∞."""
    for dtype in (torch.float32, torch.float64):
        logps = torch.tensor([[-1.0, -1.0]], dtype=dtype).requires_grad_()
        old = torch.tensor([[-9e3, -1.0]], dtype=dtype)
        for name in LOSSES:
            loss, _ = policy_loss(name, logps, old, torch.ones(1), torch.ones(1, 2), ref_logps=old, beta=0.1)
            (slope,) = torch.autograd.grad(loss, logps)
            assert torch.isfinite(slope).all(), name


def test_metrics_are_means_over_the_tokens():
    streams = completions()
    _, metrics = loss_of("dapo", streams, sampling_correction="token_truncate", sampling_clip_max=1.1)
    at = {key: value[streams["mask"]] for key, value in streams.items()}
    ratio, gap = (at["logps"] - at["old_logps"]).exp(), at["old_logps"] - at["sampling_logps"]
    expected = {
        "kl": ((at["ref_logps"] - at["logps"]).exp() - 1 - at["ref_logps"] + at["logps"]).mean(),
        "approx_kl": (ratio - 1 - ratio.log()).mean(),
        "ratio": ratio.mean(),
        "entropy": at["entropies"].mean(),
        "clip_low": ((ratio < 0.8) & (at["advantages"] < 0)).double().mean(),
        "clip_high": ((ratio > 1.28) & (at["advantages"] > 0)).double().mean(),
        "mismatch_kl": (gap.exp() - 1 - gap).mean(),
        "mismatch_abs": gap.abs().mean(),
        "correction": gap.exp().clamp(max=1.1).mean(),
        "oob_frac": (gap.exp() > 1.1).double().mean(),
    }
    assert metrics.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(metrics[key], value, **EXACT)


@pytest.mark.parametrize("size", [1e-6, 1e-5, 1e-3, 1.0])
def test_small_divergences_are_seen_in_float32(size):
    """k3 of log-probabilities in float32 that differ by `size`, against k3 of the same numbers in Python's floats."""
    draw = torch.Generator().manual_seed(0)
    logps = -3 * torch.rand(4, 50, generator=draw)
    sampled, old = (logps + size * torch.randn(4, 50, generator=draw) for _ in range(2))
    mask = torch.ones(4, 50)
    _, metrics = policy_loss("dapo", logps, old, torch.ones(4), mask, sampling_logps=sampled)
    for name, first, second in (("approx_kl", old, logps), ("mismatch_kl", sampled, old)):
        gaps = [b - a for a, b in zip(first.flatten().tolist(), second.flatten().tolist(), strict=True)]
        expected = sum(math.expm1(gap) - gap for gap in gaps) / len(gaps)
        assert expected > 0 and metrics[name].item() == pytest.approx(expected, rel=1e-6)


def test_a_normalizer_takes_the_counts_place():
    streams = completions()
    for name, own in (("dapo", 15), ("grpo", 4), ("dr_grpo", 4 * 6)):
        loss, _ = loss_of(name, streams)
        again, _ = loss_of(name, streams, normalizer=torch.tensor(3.0 * own))
        torch.testing.assert_close(again, loss / 3, **EXACT)


def test_dtypes():
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        streams = completions(dtype=dtype)
        for name in LOSSES:
            loss, metrics = loss_of(name, streams, **EVERYTHING)
            divergences = {metrics.pop(key).dtype for key in ("kl", "approx_kl", "mismatch_kl")}
            assert divergences == {torch.float64}, name
            assert {loss.dtype, *(value.dtype for value in metrics.values())} == {wide}, name


def test_the_entropy_threshold_is_torchs_quantile():
    generator = torch.Generator().manual_seed(5)
    entropies = torch.rand(3, 11, generator=generator, dtype=torch.float64)
    for quantile in (0.0, 0.2, 0.35, 1.0):
        threshold, count = top_entropy_threshold(entropies, quantile)
        torch.testing.assert_close(threshold, torch.quantile(entropies, 1 - quantile), **EXACT)
        assert count == (entropies >= threshold).sum()
    assert top_entropy_threshold(entropies[:0], 0.2)[0] == math.inf


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grop", {}, "'grop' is no policy loss; did you mean grpo?"),
        ("dapo", {"detla": 2.0}, "detla is not read by dapo; did you mean delta?"),
        ("sapo", {"delta": 2.0}, "delta is not read by sapo"),
        ("dapo", {"delta": 0.5}, "delta=0.5 must be a finite number above 1"),
        ("dapo", {"delta": 2.0, "dual_clip": 3.0}, "Set only one of them"),
        ("dapo", {"kl_gradient": "k3"}, "kl_gradient=k3 must be one of importance, direct, reward, k2"),
        ("dapo", {"importance_sampling_level": "word"}, "must be one of token, sequence, sequence_token"),
        ("dapo", {"clip": (0.2,)}, "two numbers"),
        ("dapo", {"beta": -1.0}, "beta=-1.0 must be"),
        ("dapo", {"beta": 0.1}, "beta=0.1 needs ref_logps"),
        ("dapo", {"entropy_coef": 0.1}, "need entropies"),
        ("gmpo", {"top_entropy_quantile": 0.2}, "complete sequences"),
        ("dppo_tv", {"dppo_ratio_cap": 1e18}, "1e+18 must be a finite number above 0, from 1e-10 to 1e+10 in size"),
        ("dapo", {"clip": (0.2, 1e11)}, "below and above 1 the ratio may go, from 1e-10 to 1e+10 in size"),
        ("dapo", {"beta": 1e-20}, "at least 0, from 1e-10 to 1e+10 in size"),
        ("dapo", {"sampling_clip_min": 4.0}, "must be below sampling_clip_max=3.0"),
    ],
)
def test_what_is_refused(name, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        policy_loss(name, torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1), torch.ones(1, 2), **options)
    with pytest.raises(ValueError, match="advantages"):
        policy_loss("dapo", torch.zeros(2, 3), None, torch.zeros(3), torch.ones(2, 3))


def test_what_a_recipe_may_say():
    assert loss_problems("dapo", (0.2, 0.28), 0.0, {"delta": 2.0, "entropy_coef": 0.01}) == []
    found = lines(loss_problems("gsop", (0.2, 0.2), 0.0, {}))
    assert found == ["grpo.loss=gsop is not a policy loss; did you mean gspo?"]
    found = lines(loss_problems("dapo", (0.2, -1), -0.1, {"detla": 2, "delta": 0.5}))
    assert found == [
        "grpo.clip=(0.2, -1) must be two numbers of at least 0: how far below and above 1 the ratio may go",
        "grpo.beta=-0.1 must be a finite number, at least 0",
        "grpo.kwargs.detla is not read by dapo; did you mean grpo.kwargs.delta?",
        "grpo.kwargs.delta=0.5 must be a finite number above 1, or null",
    ]
    assert "caps the ratio itself" in lines(loss_problems("cispo", (0.2, 0.2), 0.0, {}))[0]
    assert loss_problems("cispo", (0.0, 5.0), 0.0, {}) == []
    assert loss_problems("gmpo", (0.4, 0.4), 0.0, {"top_entropy_quantile": 0.2}) != []
    for options in ({"delta": 2.0, "dual_clip": 3.0}, {"sampling_clip_min": 4.0}):
        assert len(loss_problems("dapo", (0.2, 0.2), 0.0, options)) == 1
    assert len(loss_problems("dapo", (0.2, 0.2), 0.0, {"kl_gradient": "direct"})) == 1  # without beta nothing reads it


HOSTILE = (None, math.nan, math.inf, -math.inf, -1, 0, 0.0, 1e-300, 1e-12, 1e-10, 0.5, 1, 1.0, 2, 1e10, 1e12, 1e308)
HOSTILE += (10**400, True, False, "", "1", "nan", "batch", [], [1], {}, "k1", "sequence", "token_truncate")


def one_step(name, **options):
    """Loss, gradients and metrics, as one tensor, of rows of which one is without a token and one without advantage."""
    draw = torch.Generator().manual_seed(2)
    logps = (-3 * torch.rand(4, 6, generator=draw)).requires_grad_()
    others = [(logps.detach() + 0.2 * torch.randn(4, 6, generator=draw)).clamp(max=0) for _ in range(3)]
    entropies = torch.rand(4, 6, generator=draw).requires_grad_()
    mask = torch.arange(6) < torch.tensor([[6], [0], [3], [1]])
    named = dict(zip(("ref_logps", "sampling_logps"), others[1:], strict=True)) | {"entropies": entropies}
    loss, found = policy_loss(name, logps, others[0], torch.tensor([0.0, 1, 2, -3]), mask, **named, **options)
    loss.backward()
    grads = [one.grad.flatten() for one in (logps, entropies) if one.grad is not None]
    return torch.cat([loss.detach()[None], *grads, torch.stack([*found.values()])])


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_recipe_may_say_gives_finite_numbers_and_nothing_else_is_taken(name):
    accepted = 0
    for key in ({**SHARED, **LOSSES[name].options} | {"beta": 0, "clip": 0}).keys():
        for value in HOSTILE:
            given = {"clip": (0.2, 5.0), "beta": 0.1} | {key: (0.2, value) if key == "clip" else value}
            clip, beta = given["clip"], given["beta"]
            options = {key: value} if key in SHARED or key in LOSSES[name].options else {}
            if loss_problems(name, clip, beta, options):
                if not (name == "cispo" and key == "clip") and not (beta in (0, 0.0) and key != "beta"):
                    with pytest.raises(ValueError, match=key):
                        one_step(name, **given)
                continue
            accepted += 1
            assert torch.isfinite(one_step(name, **given)).all(), (key, value)
    assert accepted > 40


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncation_without_bounds_is_the_weight_itself(level):
    free = {"sampling_correction": f"{level}_truncate", "sampling_clip_max": None}
    assert loss_problems("dapo", (0.2, 0.2), 0.0, free) == []
    assert torch.equal(one_step("dapo", **free), one_step("dapo", **free | {"sampling_clip_max": 1e10}))
    lowest = {**free, "sampling_clip_min": 1.0}  # one bound alone
    assert torch.equal(one_step("dapo", **lowest), one_step("dapo", **lowest | {"sampling_clip_max": 1e10}))
    assert not torch.equal(one_step("dapo", **free), one_step("dapo", **lowest))
    zeros, far = torch.zeros(1, 4), torch.full((1, 4), -50.0)
    loss, metrics = policy_loss("dapo", zeros, zeros, torch.zeros(1), torch.ones(1, 4), sampling_logps=far, **free)
    assert loss == 0 and metrics["correction"].isfinite()  # exp(200), of which 0 is left where the advantage is 0


def test_rows_and_documents_are_one_face():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    values = torch.arange(12.0).view(2, 2, 3)
    rows, documents = RowSequences(mask), Documents(torch.tensor([[0, 0, 0], [1, 1, 1]]), 2, mask)
    assert torch.equal(rows.lengths, documents.lengths)
    assert torch.equal(rows.sum(values), documents.sum(values))
    sums = rows.sum(values)
    assert torch.equal(rows.to_tokens(sums), documents.to_tokens(sums))


def test_vespos_weight_is_of_the_sequences_own_tokens():
    """Weights below a bound above 1 are cut to 0, at padding too, which must not enter the product."""
    streams = completions()
    streams["sampling_logps"] = streams["old_logps"] - 0.2
    wider = {key: torch.nn.functional.pad(value, (0, 3)) for key, value in streams.items()}
    options = {"sampling_correction": "token_mask", "sampling_clip_min": 1.05}
    losses = [loss_of("vespo", one, **options)[0] for one in (streams, wider)]
    torch.testing.assert_close(*losses, **EXACT)


def test_sequences_that_have_drifted_off_are_left_out_where_their_advantage_is_negative():
    logps = torch.tensor([[-2.0, -1.0]] * 3, dtype=torch.float64)
    old = logps + torch.tensor([[1.0, -0.4], [1.0, -0.4], [0.1, 0.1]], dtype=torch.float64)  # means 0.3, 0.3, 0.1
    arguments = (logps, old, torch.tensor([1.0, -1.0, -1.0]), torch.ones(3, 2))
    loss, metrics = policy_loss("reinforce", *arguments, off_policy_mask_threshold=0.2)
    assert loss.item() == pytest.approx((3.0 - 3.0) / 6, abs=1e-15)
    assert metrics["off_policy_frac"].item() == pytest.approx(2 / 6)
    loss, _ = policy_loss("reinforce", *arguments, off_policy_mask_threshold=0.35)
    assert loss.item() == pytest.approx((3.0 - 3.0 - 3.0) / 6)
    loss, _ = policy_loss("reinforce", *arguments, off_policy_mask_threshold=0.05)
    assert loss.item() == pytest.approx(3.0 / 6)
