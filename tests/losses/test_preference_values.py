"""The preference losses at the edges: values that a recipe may set, and those that are refused."""

import math

import pytest
import torch

from dtrain.losses import preference_loss
from dtrain.losses.preference.losses import combined_preference_loss, length_desensitised_weights, preference_weights
from dtrain.losses.preference.options import DIVERGENCES, KWARGS, LOSSES
from dtrain.methods.dpo import loss_problems
from tests.losses.test_preference import BETA, DEFAULTS, pairs

REFUSED = [
    ("sigmiod", {}, "did you mean sigmoid"),
    ("nothing_like_it", {}, "there are sigmoid"),
    ("sigmoid", {"beta": 0.0}, "beta=0.0"),
    ("sigmoid", {"beta": math.inf}, "beta=inf"),
    ("robust", {"label_smoothing": 0.5}, "label_smoothing=0.5"),
    ("sigmoid", {"label_smoothing": -0.1}, "label_smoothing=-0.1"),
    ("exo_pair", {}, "label_smoothing=0"),
    ("hinge", {"label_smoothing": 0.1}, "label_smoothing is not read by hinge"),
    ("sigmoid", {"discopop_tau": 0.1}, "discopop_tau is not read by sigmoid"),
    ("discopop", {"discopop_tau": 0.0}, "discopop_tau=0.0"),
    ("discopop", {"discopop_tua": 0.1}, "Did you mean discopop_tau"),
    ("simpo", {"simpo_gamma": -1.0}, "simpo_gamma=-1.0"),
    ("bco_pair", {"bco_shift": "running"}, "bco_shift=running"),
    ("nca_pair", {"f_divergence": "js_divergence"}, "f_divergence is not read by nca_pair"),
    ("sigmoid", {"f_divergence": "kl"}, "f_divergence=kl"),
    ("sigmoid", {"f_alpha_divergence_coef": 0.5}, "only with f_divergence=alpha_divergence"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_what_has_no_meaning_is_refused_by_name_and_by_the_recipes_check_too(name, options, message):
    logps, lengths = pairs()
    with pytest.raises(ValueError, match=message):
        preference_loss(name, *logps, **{"beta": BETA, **options}, **lengths)
    assert config_problems(name, options)


def test_a_number_may_be_a_tensor_that_the_loss_reads():
    logps, lengths = pairs()
    options = {"beta": torch.tensor(BETA), **lengths}
    for name, option in (("bco_pair", "bco_shift"), ("exo_pair", "label_smoothing")):
        values = [preference_loss(name, *logps, **options, **{option: value}) for value in (0.3, torch.tensor(0.3))]
        torch.testing.assert_close(*values)
    with pytest.raises(ValueError, match="bco_shift is not read by sigmoid"):
        preference_loss("sigmoid", *logps, bco_shift=torch.tensor(0.3), **options)


def test_tensors_that_do_not_fit_are_refused():
    logps, lengths = pairs()
    with pytest.raises(ValueError, match="ipo is a loss per token"):
        preference_loss("ipo", *logps, beta=BETA)
    with pytest.raises(ValueError, match="ref_rejected_logps is missing"):
        preference_loss("sigmoid", *logps[:3], None, beta=BETA)
    with pytest.raises(ValueError, match="f_divergence=js_divergence needs a reference to diverge from"):
        preference_loss("sigmoid", *logps[:2], None, None, beta=BETA, f_divergence="js_divergence")
    with pytest.raises(ValueError, match=r"\(7,\), \(1,\)"):
        preference_loss("sigmoid", logps[0], logps[1][:1], *logps[2:], beta=BETA)
    with pytest.raises(ValueError, match=r"\(7, 1\)"):
        preference_loss("sigmoid", *(one[:, None] for one in logps), beta=BETA)


def test_combinations_that_have_no_meaning_are_refused():
    logps, lengths = pairs()
    options = {"beta": BETA, **lengths}
    with pytest.raises(ValueError, match="1 weights for 2 losses"):
        combined_preference_loss(["sigmoid", "hinge"], *logps, loss_weights=[1.0], **options)
    with pytest.raises(ValueError, match="discopop_tau is not read by sigmoid . hinge"):
        combined_preference_loss(["sigmoid", "hinge"], *logps, discopop_tau=0.1, **options)
    with pytest.raises(ValueError, match="f_divergence=forward_kl has no meaning for nca_pair"):
        combined_preference_loss(["sigmoid", "nca_pair"], *logps, f_divergence="forward_kl", **options)
    assert config_problems(["sigmoid", "nca_pair"], {"f_divergence": "forward_kl"})
    assert config_problems(["sigmoid", "hinge"], {"discopop_tau": 0.1})
    assert config_problems(["sigmoid", "hinge"], {}, [1.0])


def config_problems(names, options, weights=None, has_reference=True):
    ours = dict(options)
    fields = {key: ours.pop(key) for key in ("beta", "label_smoothing", "f_divergence") if key in ours}
    return loss_problems(names, weights, has_reference=has_reference, **{"beta": BETA, **fields}, options=ours)


def test_what_a_recipe_may_say():
    for name in LOSSES:
        assert not config_problems(name, DEFAULTS[name])
    assert not config_problems(["sigmoid", "sft"], {"label_smoothing": 0.1}, [1.0, 0.5])
    assert config_problems("sigmoid", {"f_divergence": "js_divergence"}, has_reference=False)


HOSTILE = (None, math.nan, math.inf, -math.inf, -1, 0, 0.0, 1e-300, 1e-12, 1e-10, 0.25, 0.5, 1, 1.0, 2, 1e10, 1e12)
HOSTILE += (1e308, 10**400, True, False, "", "1", "nan", "batch", [], [1], {}, *DIVERGENCES)


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_recipe_may_say_gives_finite_numbers_and_nothing_else_is_taken(name):
    draw = torch.Generator().manual_seed(3)
    logps = [-torch.rand(5, generator=draw) for _ in range(4)]
    lengths = {"chosen_lengths": torch.tensor([1, 3, 7, 0, 9]), "rejected_lengths": torch.tensor([2, 1, 0, 8, 9])}
    accepted = 0
    for key in ("beta", "label_smoothing", "f_divergence", *sorted(KWARGS)):
        for value in HOSTILE:
            fixed = {"f_divergence": "alpha_divergence"} if key == "f_alpha_divergence_coef" else {}
            given = {"beta": 0.1} | ({"label_smoothing": 0.1} if name == "exo_pair" else {}) | fixed | {key: value}
            if config_problems(name, given):
                with pytest.raises(ValueError):
                    preference_loss(name, *logps, **lengths, **given)
                continue
            accepted += 1
            if key == "f_alpha_divergence_coef" and abs(value) > 2:
                continue  # t to the power of that is beyond any dtype
            found = preference_weights(name, *logps, **lengths, **given)
            assert all(torch.isfinite(one).all() for one in found), (key, value)
    assert accepted > 5


def dense_weights(chosen, rejected, alpha):
    """Lengths of a pair's completions -> the weights of their tokens, as lists."""
    shared = min(chosen, rejected)
    return [[1.0 if position < shared else alpha for position in range(length)] for length in (chosen, rejected)]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_length_desensitised_weights_of_padded_and_packed_rows(alpha):
    lengths = [(3, 5), (4, 4), (6, 1), (2, 7)]
    documents = []  # (labels, weights) per document: a prompt of one or two positions, the completion, sometimes an end
    for index, pair in enumerate(lengths):
        for weights in dense_weights(*pair, alpha):
            prompt, end = 1 + index % 2, index % 3
            labels = [-100] * prompt + [7] * len(weights) + [-100] * end
            documents.append((labels, [0.0] * prompt + weights + [0.0] * end))
    for layout in ([[i] for i in range(8)], [[0, 1, 2, 3], [4, 5], [6, 7]], [list(range(8))]):
        longest = max(sum(len(documents[i][0]) for i in row) for row in layout) + 2
        ids, labels, expected = [], [], []
        for row in layout:
            padding = longest - sum(len(documents[i][0]) for i in row)
            ids.append([i for i in row for _ in documents[i][0]] + [-1] * padding)
            labels.append([label for i in row for label in documents[i][0]] + [-100] * padding)
            expected.append([weight for i in row for weight in documents[i][1]] + [0.0] * padding)
        weights = length_desensitised_weights(torch.tensor(ids), torch.tensor(labels), alpha)
        assert weights.dtype == torch.float64
        assert weights.tolist() == expected


def test_length_desensitised_weights_refuse_what_is_no_pair_or_no_share():
    ids = torch.tensor([[0, 0, 1, 2]])
    with pytest.raises(ValueError, match="3 documents"):
        length_desensitised_weights(ids, ids, 0.5)
    with pytest.raises(ValueError, match="ld_alpha=1.5"):
        length_desensitised_weights(ids, ids, 1.5)
    empty = torch.empty((0, 1), dtype=torch.int64)
    assert length_desensitised_weights(empty, empty, 0.5).shape == (0, 1)
