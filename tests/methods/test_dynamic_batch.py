"""Micro-batches by tokens (`train.dynamic_batch`): the numbers are those of one process with fixed ones."""

import pytest

from dtrain.base.errors import Stopped
from dtrain.parallel.runtime import Runtime, StopFlag
from dtrain.run.trainer import train
from tests.methods import test_distill, test_dpo_runs, test_kto, test_on_policy, test_reward
from tests.running import assert_same, interrupt, metrics, run
from tests.tiny import tiny_grpo, tiny_recipe, write_rows

SFT = ("train.steps=null", "train.epochs=2", "train.global_batch=6")  # 2 · 31 rows: the last batch has 2
VAL = ("data.val.path=${data.train.path}", "train.validate_every=2")
MESHES = {
    "dp2": (2, ()),
    "dp3": (3, ()),
    "cp2 tp2": (4, ("parallel.cp=2", "parallel.tp=2")),
    "hsdp": (4, ("parallel.dp_replicate=2", "parallel.dp_shard=2")),
}


def recipe_of(root, kind, *overrides, name):
    dpo = ("data.max_length=24", "dpo.sft_weight=0.1", "train.steps=4", "train.global_batch=12")
    kinds = {
        "sft": (tiny_recipe, (*SFT, *VAL)),
        "dpo": (test_dpo_runs.recipe_of, (*dpo, *VAL)),
        "dpo over the batch": (test_dpo_runs.recipe_of, (*dpo, "dpo.loss=[sigmoid,aot]")),
        "kto": (test_kto.recipe_of, VAL),
        "pairs": (lambda *given, name: test_reward.recipe_at(given[0], "pairs", *given[1:], name=name), VAL),
        "on-policy": (test_on_policy.recipe_at, ("train.steps=4", *VAL)),
        "grpo": (tiny_grpo, ("train.steps=3", "grpo.prompts_per_step=6")),
        "dropout": (tiny_recipe, ("train.steps=3", "lora={rank: 2, dropout: 0.3}")),
        "distill": (test_distill.recipe_at, ("train.steps=4", *VAL)),
    }
    make, fixed = kinds[kind]
    if kind == "sft" and not (root / "rows.jsonl").exists():
        write_rows(root / "rows.jsonl", count=31)
    return make(root, *fixed, "data.packing=false", "train.micro_batch=1", *overrides, name=name)


def assert_all(found, expected):
    """Compare every row of metrics.jsonl, but times and what the process holds.

    Until the first step with a rate above 0, policy and reference are one model: a pair's margin is rounding noise, and
    so is the share of margins above 0.
    """
    pairs = zip(metrics(found), metrics(expected), strict=True)
    for mine, other in pairs:
        noise = abs(other.get("rewards_margin", 1.0)) < 1e-9
        same = [name for name in other if not name.endswith(("_time", "per_sec", "mfu", "gib"))]
        same = [name for name in same if not (noise and name == "accuracy")]
        assert [mine[name] for name in same] == pytest.approx([other[name] for name in same], rel=1e-9, abs=1e-12)
    assert_same(found, expected, rtol=1e-9)


@pytest.mark.parametrize(
    "kind, mesh",
    [
        *(("sft", mesh) for mesh in ("dp3", "cp2 tp2", "hsdp")),
        *(("dpo", "hsdp"), ("dpo over the batch", "dp3"), ("dpo with dpo.precompute=true", "dp2")),
        *(("kto", "dp3"), ("kto", "hsdp"), ("pairs", "dp2"), ("distill", "hsdp")),
        *(("on-policy", "dp2"), ("grpo", "dp2"), ("dropout", "dp3")),
    ],
)
def test_every_method_has_the_numbers_of_fixed_micro_batches(tmp_path, kind, mesh):
    ranks, shape = MESHES[mesh]
    batch = ("train.global_batch=12",)
    kind, *precomputed = kind.split(" with ")  # by the run with dynamic batches, too
    one = run(recipe_of(tmp_path, kind, *batch, name="one"))
    shape = ("train.dynamic_batch=true", *shape, *precomputed)
    ours = run(recipe_of(tmp_path, kind, *batch, *shape, name="ours"), ranks)
    assert_all(ours, one)


def test_fewer_micro_batches_and_a_resume_on_another_mesh(tmp_path, capfd):
    asked, tokens = "train.dynamic_batch=true", "micro-batches: rows of like length, up to 32 tokens with their padding"
    passes, recipes = [], [recipe_of(tmp_path, "sft", name="one"), recipe_of(tmp_path, "sft", asked, name="dynamic")]
    for recipe in recipes:
        train(recipe, Runtime(stop=(stop := StopFlag())))
        passes.append(stop.progress)
    assert tokens in capfd.readouterr().err and passes[1] < 0.8 * passes[0]
    with pytest.raises((Stopped, AssertionError), match="stopped after step"):
        interrupt(recipe_of(tmp_path, "sft", asked, "checkpoint.every=3", name="resumed"), 2, 4)
    resumed = run(recipe_of(tmp_path, "sft", asked, "checkpoint.every=3", name="resumed"), 3)
    for other in (recipes[1], resumed):
        assert_all(other, recipes[0])
