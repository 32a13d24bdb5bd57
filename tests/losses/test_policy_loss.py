"""Policy losses against the papers' formulas written out here token by token, against numbers that TRL's own
`_compute_loss` gave (trl_policy.json: loss and its gradient, float64, version there), in every layout, and at any split
of the batch.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.autograd import gradcheck

from dtrain.losses.policy.options import LOSSES
from dtrain.losses.policy.terms import policy_loss

TRL = json.loads(Path(__file__).with_name("trl_policy.json").read_text())
EXACT = {"rtol": 1e-12, "atol": 1e-14}
CLIP = {"cispo": (0.2, 1.3), "gmpo": (0.1, 0.2), "dppo_tv": (0.03, 0.04), "dppo_kl": (0.002, 0.003)} | dict.fromkeys(
    ("gspo", "gspo_token", "luspo"), (0.05, 0.06)
)
EVERYTHING = {  # options that meet in one loss
    "kl_estimator": "k2",
    "old_kl_coef": 0.03,
    "entropy_coef": 0.02,
    "off_policy_mask_threshold": 0.02,
    "sampling_correction": "token_truncate",
    "sampling_clip_max": 1.2,
}
OWN = {  # of a loss, beside these
    "gspo": {"sampling_correction": "sequence_mask"},
    "sapo": {"sampling_correction": "seq_mask_tis", "sampling_clip_max": 1.05},
    "cispo": {"cispo_lower_clip": True},
}


def completions(lengths=(6, 3, 5, 1), width=6, seed=0, dtype=torch.float64):
    """Streams of completions of these lengths, [B, width]: logps, old, ref, sampling, entropies, advantages, mask."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), width)

    def near(scale):
        return (old + scale * torch.randn(shape, generator=generator, dtype=torch.float64)).clamp(max=-1e-3)

    old = -3 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.05
    streams = {
        "logps": near(0.4),
        "old_logps": old,
        "ref_logps": near(0.3),
        "sampling_logps": near(0.2),
        "entropies": 2 * torch.rand(shape, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(shape, generator=generator, dtype=torch.float64),
    }
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return {name: one.to(dtype) for name, one in streams.items()} | {"mask": mask}


def trained(streams):
    return {**streams, **{name: streams[name].clone().requires_grad_() for name in ("logps", "entropies")}}


def loss_of(name, streams, **options):
    options = {"clip": CLIP.get(name, (0.2, 0.28)), "beta": 0.05, **options}
    return policy_loss(name, **streams, **options)


def gradients(loss, streams):
    return torch.autograd.grad(loss, [streams["logps"], streams["entropies"]], materialize_grads=True)


@pytest.mark.parametrize(
    "case", TRL["cases"], ids=lambda case: "-".join([case["name"], *map(str, case["options"].values())])
)
def test_trls_own_numbers(case):
    streams = {
        name: torch.tensor(TRL[name], dtype=torch.float64)
        for name in ("logps", "old_logps", "ref_logps", "sampling_logps", "entropies", "advantages")
    }
    options = {key: case[key] for key in ("beta", "max_completion_length", "clip") if key in case}
    if case.get("old") is False:
        streams["old_logps"] = None
    if "token_advantages" in case:
        streams["advantages"] = torch.tensor(TRL["token_advantages"], dtype=torch.float64)
    if "sampling_correction" not in case["options"]:
        streams["sampling_logps"] = None
    streams = trained(streams)
    loss, _ = policy_loss(case["name"], **streams, mask=torch.tensor(TRL["mask"]), **options, **case["options"])
    logps, entropies = gradients(loss, streams)
    torch.testing.assert_close(loss, torch.tensor(case["loss"], dtype=torch.float64), **EXACT)
    torch.testing.assert_close(logps, torch.tensor(case["grad"], dtype=torch.float64), **EXACT)
    if "entropy_grad" in case:
        torch.testing.assert_close(entropies, torch.tensor(case["entropy_grad"], dtype=torch.float64), **EXACT)


def clip(value, low, high):
    return max(low, min(high, value))


# loss of one token from x (log π), o (log π_old), A, the clip, m (mean log ratio of the sequence), s (its sum)
def _clipped(x, o, A, low, high, m, s, ratio=None):
    r = math.exp(x - o) if ratio is None else ratio
    return -min(r * A, clip(r, 1 - low, 1 + high) * A)


def _dppo_kl(x, o, A, low, high, m, s):
    p, q = math.exp(o), math.exp(x)
    kl = p * (o - x) + (1 - p) * math.log((1 - p) / (1 - q))
    far = (A > 0 and q > p and kl > high) or (A < 0 and q < p and kl > low)
    return 0.0 if far else -q / p * A


def _dppo_tv(x, o, A, low, high, m, s):
    gap = math.exp(x) - math.exp(o)
    return 0.0 if (A > 0 and gap > high) or (A < 0 and -gap > low) else -math.exp(x - o) * A


def _sapo(x, o, A, low, high, m, s):
    t = 1.0 if A > 0 else 1.05
    return -4 / t / (1 + math.exp(-t * (math.exp(x - o) - 1))) * A


def _vespo(x, o, A, low, high, m, s):
    k, rate = (2.0, 3.0) if A >= 0 else (3.0, 2.0)
    return -(math.exp(s) ** k) * math.exp(rate * (1 - math.exp(s))) * A * x


PAPERS = {
    **dict.fromkeys(("grpo", "bnpo", "dr_grpo", "dapo"), _clipped),
    **dict.fromkeys(
        ("gspo", "gspo_token", "luspo"),
        lambda x, o, A, low, high, m, s: _clipped(x, o, A, low, high, m, s, ratio=math.exp(m)),
    ),
    "cispo": lambda x, o, A, low, high, m, s: -min(math.exp(x - o), high) * A * x,
    "sapo": _sapo,
    "vespo": _vespo,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    "reinforce": lambda x, o, A, low, high, m, s: -A * x,
}


def dense(name, streams, lengths, length):
    """The loss written out in Python numbers."""
    rows = []
    for row, count in enumerate(lengths):
        x, o, A = (streams[key][row, :count].tolist() for key in ("logps", "old_logps", "advantages"))
        low, high = CLIP.get(name, (0.2, 0.28))
        log_ratios = [new - old for new, old in zip(x, o, strict=True)]
        mean = sum(log_ratios) / count
        if name == "gmpo":
            cut = [min(v, high) if a > 0 else max(v, -low) for v, a in zip(log_ratios, A, strict=True)]
            rows.append([-a * math.exp(sum(cut) / count) for a in A])
        else:
            terms = zip(x, o, A, strict=True)
            rows.append([PAPERS[name](*one, low, high, mean, sum(log_ratios)) for one in terms])
    if name in ("bnpo", "dapo", "cispo", "vespo", "dppo_tv", "dppo_kl", "reinforce"):
        return sum(map(sum, rows)) / sum(lengths)
    if name == "dr_grpo":
        return sum(map(sum, rows)) / (len(lengths) * length)
    if name == "luspo":
        return sum(map(sum, rows)) / len(lengths)
    return sum(sum(row) / len(row) for row in rows) / len(lengths)


@pytest.mark.trap(
    "a loss of sequences multiplied by their tokens",
    "huggingface/trl #3823",
    "long completions weigh more than GSPO says",
    "each loss is its paper's formula, written out",
)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_papers_formula(name):
    lengths = (6, 3, 5, 1)
    streams = completions(lengths, seed=5)
    arguments = {key: streams[key] for key in ("logps", "old_logps", "advantages", "mask")}
    loss, _ = policy_loss(name, **arguments, clip=CLIP.get(name, (0.2, 0.28)), max_completion_length=9)
    assert loss.item() == pytest.approx(dense(name, streams, lengths, 9), rel=1e-12)


def test_every_branch_of_the_losses_is_met_by_these_tensors():
    for name in ("dapo", "dppo_tv", "dppo_kl", "gmpo", "gspo", "luspo"):
        _, metrics = loss_of(name, completions(seed=5))
        assert metrics["clip_low"] > 0 and metrics["clip_high"] > 0, name


def test_dual_clip_and_delta_bound_what_a_negative_advantage_costs():
    def row(*values):
        return torch.tensor([values], dtype=torch.float64)

    logps = row(1.4, 1.4, 0.1, -1.4) - 3
    arguments = (logps.requires_grad_(), row(-3, -3, -3, -3), row(-2, 2, -2, -2), torch.ones(1, 4))
    ratios = [math.exp(x) for x in (1.4, 1.4, 0.1, -1.4)]
    expected = [3 * 2, -1.2 * 2, ratios[2] * 2, 0.8 * 2]
    for options in ({"dual_clip": 3.0}, {"delta": 3.0}):
        loss, _ = policy_loss("dapo", *arguments, **options)
        assert loss.item() == pytest.approx(sum(expected) / 4, rel=1e-12)
        (slope,) = torch.autograd.grad(loss, logps)
        torch.testing.assert_close(slope, row(0, 0, ratios[2] * 2 / 4, 0), **EXACT)


def test_cispo_bounds_the_weight_below_where_it_is_asked_to():
    streams = trained(completions(seed=5))
    at = {key: streams[key] for key in ("logps", "old_logps", "advantages", "mask")}
    loss, metrics = policy_loss("cispo", **at, clip=(0.2, 1.3), cispo_lower_clip=True)
    ratio = (streams["logps"] - streams["old_logps"]).detach().exp()
    slope = torch.where(streams["mask"], -ratio.clamp(0.8, 1.3) * streams["advantages"] / 15, 0.0)
    low = ((ratio < 0.8) & streams["mask"]).sum().item()
    assert low > 0 and metrics["clip_low"].item() == pytest.approx(low / 15, rel=1e-12)
    torch.testing.assert_close(loss, (slope * streams["logps"]).sum(), **EXACT)
    torch.testing.assert_close(gradients(loss, streams)[0], slope, **EXACT)


def test_seq_mask_tis_keeps_a_tokens_weight_where_its_sequences_geometric_mean_is_within_the_bounds():
    streams = completions()
    at = {key: streams[key] for key in ("old_logps", "sampling_logps", "advantages", "mask")}
    bounds = {"sampling_clip_min": 0.985, "sampling_clip_max": 1.012}
    loss, metrics = policy_loss(
        "reinforce", streams["logps"], **at, sampling_correction="seq_mask_tis", **bounds, clip=(0, 0)
    )
    total, left_out = 0.0, 0
    for x, o, s, A, m in zip(streams["logps"], *(at[key] for key in at), strict=True):
        log_weights = (o - s)[m]
        kept = 0.985 <= log_weights.mean().exp() <= 1.012
        left_out += 0 if kept else len(log_weights)
        total -= kept * (log_weights.exp() * A[m] * x[m]).sum() / 15
    assert 0 < left_out < 15 and metrics["oob_frac"].item() == pytest.approx(left_out / 15, rel=1e-12)
    torch.testing.assert_close(loss, total, **EXACT)


def test_dppo_caps_the_ratio_and_keeps_the_gradient():
    logps = torch.tensor([[-4.0]], dtype=torch.float64).requires_grad_()
    loss, _ = policy_loss("dppo_tv", logps, logps.detach() - 3, -torch.ones(1), torch.ones(1, 1), dppo_ratio_cap=5.0)
    (slope,) = torch.autograd.grad(loss, logps)
    assert (loss.item(), slope.item()) == pytest.approx((5.0, 5.0))


SMOOTH = [  # name and options without a stopped gradient
    *((name, {}) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "luspo", "sapo", "gmpo", "reinforce")),
    ("dapo", {"kl_gradient": "direct", "kl_estimator": "k3", "old_kl_coef": 0.1, "entropy_coef": 0.3}),
    ("dapo", {"kl_gradient": "direct", "kl_estimator": "k2", "top_entropy_quantile": 0.5}),
    ("grpo", {"kl_gradient": "direct", "kl_estimator": "k1", "sampling_correction": "sequence_truncate"}),
    ("dapo", {"importance_sampling_level": "sequence"}),
]


@pytest.mark.parametrize(("name", "options"), SMOOTH, ids=str)
def test_gradients_are_those_of_finite_differences(name, options):
    streams = completions(seed=5)
    fixed = {key: value for key, value in streams.items() if key not in ("logps", "entropies")}
    if options.get("top_entropy_quantile"):  # which tokens are in has no derivative
        options = {**options, "entropy_threshold": 1.0, "entropy_tokens": 7}

    def function(logps, entropies):
        return loss_of(name, {"logps": logps, "entropies": entropies, **fixed}, **options)[0]

    inputs = [streams["logps"].clone().requires_grad_(), streams["entropies"].clone().requires_grad_()]
    assert gradcheck(function, inputs, eps=1e-6, atol=1e-8, rtol=1e-6)


def test_the_gradient_of_the_kl_term_is_the_one_asked_for():
    """Each token's slope, from the formulas of `policy_kl`; the loss without advantage is the KL term."""
    streams = completions((5, 5), 5, seed=7)
    x, o, ref = (streams[key] for key in ("logps", "old_logps", "ref_logps"))
    d, r = x - ref, (x - o).exp()
    k = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}
    slope = {"k1": torch.ones_like(d), "k2": d, "k3": 1 - (-d).exp()}
    expected = {
        "direct": lambda one: slope[one],
        "importance": lambda one: r * (slope[one] + k[one]),
        "reward": lambda one: r * k[one],
        "k2": lambda one: d,
    }
    for gradient, formula in expected.items():
        for one in k:
            logps = x.clone().requires_grad_()
            loss, metrics = policy_loss(
                "dapo", logps, o, torch.zeros(2), torch.ones(2, 5), ref_logps=ref, beta=0.5,
                kl_estimator=one, kl_gradient=gradient,
            )  # fmt: skip
            value = r * k[one] if gradient == "importance" else k[one]
            torch.testing.assert_close(loss, 0.5 * value.mean(), **EXACT)
            (got,) = torch.autograd.grad(loss, logps)
            torch.testing.assert_close(got, 0.5 * formula(one) / 10, **EXACT)
            torch.testing.assert_close(metrics["kl"], k["k3"].mean(), **EXACT)


@pytest.mark.trap(
    "the gradient of the KL estimator k3 taken for that of the KL",
    "OpenRLHF/OpenRLHF PR#1309",
    "it descends the forward KL",
    "grpo.kl_gradient says which; the expected gradients equal autograd of the KL",
)
def test_expected_kl_gradients_are_the_reverse_kls_where_it_is_claimed():
    """Over a whole vocabulary: Σ π_old(v) · slope(v) · ∇log π(v) against the derivative of KL(π ‖ π_ref)."""
    generator = torch.Generator().manual_seed(2)
    logits, ref, old = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    ref, old = ref.log_softmax(0), old.log_softmax(0)
    logits.requires_grad_()
    logps = logits.log_softmax(0)
    (true,) = torch.autograd.grad((logps.exp() * (logps - ref)).sum(), logits, retain_graph=True)

    def expected(estimator, gradient, drawn_from):
        leaf = logps.detach().clone().requires_grad_()
        loss, _ = policy_loss(
            "reinforce", leaf[:, None], drawn_from[:, None], torch.zeros(6), torch.ones(6, 1), ref_logps=ref[:, None],
            beta=1.0, kl_estimator=estimator, kl_gradient=gradient, normalizer=1.0,
        )  # fmt: skip
        (slope,) = torch.autograd.grad(loss, leaf)
        (got,) = torch.autograd.grad((drawn_from.exp() * slope * logps).sum(), logits, retain_graph=True)
        return got

    on_policy = logps.detach()
    right = [("k1", "importance"), ("k3", "importance"), ("k1", "reward")]
    for way in right:
        torch.testing.assert_close(expected(*way, old), true, **EXACT)
    for way in (*right, ("k3", "k2"), ("k1", "k2"), ("k2", "direct")):
        torch.testing.assert_close(expected(*way, on_policy), true, **EXACT)
    assert (expected("k3", "direct", on_policy) - true).abs().max() > 0.01  # the forward KL's
    assert expected("k1", "direct", on_policy).abs().max() < 1e-12
