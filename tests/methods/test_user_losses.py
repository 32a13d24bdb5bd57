"""Losses of users by import path: the numbers of dtrain's own losses with the same formula, on one process and on two.

The oracle of a user's loss is the built-in loss that has the same formula, and for a loss that dtrain does not have
the same run on one process. Relative tolerance 1e-9 in float64.
"""

import pytest
import torch

from dtrain.base.errors import RecipeError, UserError
from dtrain.base.plugins import plugins
from dtrain.launch import validate
from dtrain.losses import preference_loss
from tests.losses.user_losses import same_as_sigmoid
from tests.running import assert_same, metrics, run
from tests.tiny import tiny_dpo, tiny_grpo, tiny_recipe

PATH = "tests.losses.user_losses"
STEPS = "train.steps=3"
# A recipe of the method, the user's loss, and the same loss of dtrain.
SAME = {
    "sft": (tiny_recipe, [f"sft.loss={PATH}:same_as_nll"], []),
    "dpo": (tiny_dpo, [f"dpo.loss={PATH}:same_as_sigmoid"], []),
    "dpo without a reference": (
        tiny_dpo,
        [f"dpo.loss={PATH}.same_as_simpo", "dpo.kwargs={offset: 0.3}"],
        ["dpo.loss=simpo", "dpo.kwargs={simpo_gamma: 0.3}"],
    ),
    "grpo": (tiny_grpo, [f"grpo.loss={PATH}:same_as_reinforce"], ["grpo.loss=reinforce"]),
    "grpo with a clip": (
        tiny_grpo,
        [f"grpo.loss={PATH}:same_as_clipped", "grpo.kwargs={width: 0.1}"],
        ["grpo.loss=bnpo", "grpo.clip=[0.1, 0.1]"],
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_a_loss_by_import_path_has_the_numbers_of_the_same_loss_by_name(name, tmp_path):
    make, user_keys, own_keys = SAME[name]
    user = run(make(tmp_path, STEPS, *user_keys, name="user"))
    assert_same(user, run(make(tmp_path, STEPS, *own_keys, name="own")), 1e-9)
    assert_same(run(make(tmp_path, STEPS, *user_keys, name="two"), 2), user, 1e-9)


def test_a_loss_that_dtrain_does_not_have_trains_alike_on_two_ranks(tmp_path):
    keys = STEPS, f"sft.loss={PATH}:focal"
    one = run(tiny_recipe(tmp_path, *keys, "sft.kwargs={gamma: 3.0}", name="one"))
    assert_same(run(tiny_recipe(tmp_path, *keys, "sft.kwargs={gamma: 3.0}", "parallel.tp=2", name="tp"), 2), one, 1e-9)
    other = run(tiny_recipe(tmp_path, *keys, name="other"))
    assert metrics(other)[0]["loss"] != pytest.approx(metrics(one)[0]["loss"])


@pytest.mark.parametrize(
    ("make", "keys", "message"),
    [
        (tiny_recipe, ["sft.loss=focall"], "sft.loss=focall is not a loss of tokens"),
        (tiny_recipe, [f"sft.loss={PATH}:focall"], r"sft\.loss.* has no focall\. Did you mean .*:focal\?"),
        (tiny_recipe, ["sft.loss=no_such_module:focal"], r"sft\.loss=no_such_module:focal"),
        (tiny_recipe, [f"sft.loss={PATH}:focal", "sft.kwargs={gama: 1.0}"], r"sft\.kwargs\.gama is not read"),
        (tiny_recipe, [f"sft.loss={PATH}:needs_more"], "its parameter strength has no default"),
        (tiny_recipe, [f"sft.loss={PATH}:no_arguments"], "no_arguments takes no positional argument"),
        (tiny_dpo, [f"dpo.loss={PATH}:no_arguments"], "Its first one gets the pairs"),
        (tiny_recipe, [f"sft.loss={PATH}:NOT_A_LOSS"], "is a int. It must be a function, or a TokenLoss"),
        (tiny_recipe, [f"sft.loss={PATH}:focal", "sft.label_smoothing=0.1"], "has no meaning for sft.loss"),
        (tiny_dpo, [f"dpo.loss=[sigmoid, {PATH}:same_as_sigmod]"], "has no same_as_sigmod"),
        (tiny_dpo, [f"dpo.loss={PATH}:same_as_simpo", "dpo.kwargs={ofset: 1}"], r"dpo\.kwargs\.ofset is not read"),
        (tiny_grpo, [f"grpo.loss={PATH}:same_as_clippd"], "has no same_as_clippd"),
        (tiny_grpo, [f"grpo.loss={PATH}:same_as_clipped", "grpo.kwargs={with: 1}"], r"grpo\.kwargs\.with is not read"),
    ],
)
def test_a_loss_that_cannot_be_used_is_a_problem_of_the_recipe(make, keys, message, tmp_path):
    with pytest.raises(RecipeError, match=message) as error:
        validate(make(tmp_path, *keys))
    assert len(error.value.problems) == 1


def test_a_loss_that_a_package_registers_has_a_name(tmp_path, monkeypatch):
    info = tmp_path / "packages" / "focal-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: focal\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dtrain.plugins]\nsft.loss.focal = {PATH}:focal\n")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    plugins.cache_clear()
    named = run(tiny_recipe(tmp_path, STEPS, "sft.loss=focal", "sft.kwargs={gamma: 3.0}", name="named"), 2)
    keys = STEPS, f"sft.loss={PATH}:focal", "sft.kwargs={gamma: 3.0}"
    assert_same(named, run(tiny_recipe(tmp_path, *keys, name="path")), 1e-9)
    with pytest.raises(RecipeError, match="sft.loss=focl"):
        validate(tiny_recipe(tmp_path, "sft.loss=focl"))
    plugins.cache_clear()


@pytest.mark.parametrize(
    ("make", "key", "loss", "returned"),
    [
        (tiny_recipe, "sft.loss", "mean_of_tokens", r"\[\]"),
        (tiny_recipe, "sft.loss", "returns_nothing", "NoneType"),
        (tiny_grpo, "grpo.loss", "sum_of_ratios", r"\[\]"),
        (tiny_grpo, "grpo.loss", "returns_nothing", "NoneType"),
    ],
)
def test_a_loss_without_a_value_per_token_does_not_train(make, key, loss, returned, tmp_path):
    with pytest.raises(UserError, match=f"{loss} must return one value per token.* returned {returned}"):
        run(make(tmp_path, STEPS, f"{key}={PATH}:{loss}"))


def test_a_loss_without_a_value_per_pair_does_not_train(tmp_path):
    recipe = tiny_dpo(tmp_path, f"dpo.loss={PATH}:mean_of_pairs")
    with pytest.raises(UserError, match=r"mean_of_pairs must return one value per pair, \[\d\] .* returned \[\]"):
        run(recipe)


def test_losses_by_import_path_work_from_python():
    logps = [torch.tensor([value]) for value in (-10.0, -12.0, -11.0, -10.0)]
    expected = preference_loss("sigmoid", *logps, beta=0.1)
    assert preference_loss(f"{PATH}:{same_as_sigmoid.__name__}", *logps, beta=0.1) == pytest.approx(expected)
