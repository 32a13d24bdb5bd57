"""A checkpoint is resumed by the method that wrote it, in the form that wrote it. Anything else is a new run."""

import math

import pytest

from dtrain.base.errors import RecipeError, UserError
from dtrain.launch.start import validate
from tests.methods import test_distill, test_kto, test_on_policy, test_reward
from tests.methods.test_dpo_runs import recipe_of as dpo, rows_of
from tests.running import run
from tests.tiny import tiny_grpo, tiny_recipe

OTHERS = {
    "dpo": dpo,
    "kto": test_kto.recipe_of,
    "grpo": tiny_grpo,
    "distill": test_on_policy.recipe_at,
    "reward": lambda root, *overrides, **more: test_reward.recipe_at(root, "pairs", *overrides, **more),
}
ALLOWED = "checkpoint.allow_changes=[data,model,optimizer,train]"


def assert_refused(recipe, words):
    """Both the run and `dtrain validate` refuse it."""
    for act in (run, validate):
        with pytest.raises((UserError, RecipeError), match=words):
            act(recipe)


@pytest.fixture(scope="module")
def supervised(tmp_path_factory):
    root = tmp_path_factory.mktemp("supervised")
    return run(tiny_recipe(root, "train.steps=4", "checkpoint.every=4", "optimizer.lr=0.1", name="sft"))


@pytest.mark.parametrize("method", OTHERS)
def test_another_method_is_never_a_resume(tmp_path, supervised, method):
    saved = f"{supervised.run.directory}/checkpoints/step-4"
    wrong = OTHERS[method](tmp_path, f"checkpoint.resume={saved}", ALLOWED, name="other")
    wrong.checkpoint.allow_changes.append("method")
    assert_refused(wrong, rf"saved with method=sft, and the recipe has method={method}.*checkpoint\.init_from={saved}")
    assert not list(wrong.run.directory.glob("checkpoints/step-*"))


def test_what_the_refusal_names_starts_from_the_saved_weights(tmp_path, supervised):
    """The reference is then the model after SFT, so the first loss of DPO is ln 2."""
    start = f"checkpoint.init_from={supervised.run.directory}/checkpoints/step-4"
    started = run(dpo(tmp_path, start, "dpo.sft_weight=0", "train.steps=4", "checkpoint.every=null", name="new"))
    assert rows_of(started)[0]["loss"] == pytest.approx(math.log(2), rel=1e-12)


@pytest.mark.parametrize("before, after", [("data", "student"), ("student", "data")])
def test_whose_completions_distillation_trains_on_cannot_change(tmp_path, before, after):
    forms = {"data": test_distill.recipe_at, "student": test_on_policy.recipe_at}
    shape = ("checkpoint.every=2", "train.global_batch=8")
    run(forms[before](tmp_path, *shape, "train.steps=2"))
    changed = forms[after](tmp_path, *shape, "train.steps=4", ALLOWED)
    assert_refused(changed, f"distill.samples={after}: the checkpoint was saved with distill.samples={before}")


@pytest.mark.parametrize("before, after", [("null", 2), (2, "null")])
def test_whether_a_preference_method_s_reference_moves_cannot_change(tmp_path, before, after):
    run(dpo(tmp_path, "train.steps=2", "checkpoint.every=2", f"dpo.sync_every={before}"))
    changed = dpo(tmp_path, "train.steps=4", f"dpo.sync_every={after}")
    assert_refused(changed, f"dpo.sync_every={after}: the checkpoint holds .*begin another run with these weights")
