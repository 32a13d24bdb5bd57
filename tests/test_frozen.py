"""Frozen parameters: the same numbers on every mesh, nothing kept for them, and what is refused."""

import itertools

import pytest
import torch

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.policy.build import select_trained_parameters
from tests.problem_lines import preflight
from tests.running import MESHES, assert_parity, metrics, overrides_of, run, trajectory, weights
from tests.test_parity import recipe_of
from tests.tiny import tiny_recipe, write_model

CASES = {
    "the last layer": ["train.train_only=[model.layers.1.*]"],
    "not the embedding": ["train.freeze=[model.embed_tokens.weight]"],
    "norms and queries": ["train.train_only=['*norm*','*q_proj*']"],
    "the first layer, not its norms": ["train.freeze=[model.layers.1.*,'*norm*','lm_head.*','*embed*']"],
}
# case: (mesh, model); tests/test_every_pair.py has "norms and queries".
ON_MESHES = {
    "the last layer": ("dp3", ("qwen3", "tied", "packed")),
    "not the embedding": ("tp2+sp cp2 ring", ("gemma3", "untied", "padded")),
    "the first layer, not its norms": ("cp2 gather", ("qwen2", "untied", "packed")),
}
STEPS = ["train.steps=3", "scheduler.warmup_steps=0", "checkpoint.every=3"]


def test_meshes_give_the_trajectory_of_one_process(tmp_path):
    for case, (mesh, model) in ON_MESHES.items():
        shape = [*model, *STEPS, *CASES[case]]
        one = run(recipe_of(tmp_path, f"{case}, alone", *shape, "train.micro_batch=12"))
        ranks, options = MESHES[mesh]
        many = run(recipe_of(tmp_path, case, *shape, *overrides_of(ranks, options, "float64")), ranks)
        assert_parity(many, trajectory(one), weights(one))


@pytest.mark.parametrize(
    "more",
    [
        ["train.activation_checkpointing=selective", "parallel.reduce_each=true"],
        ["method=distill"],
    ],
)
def test_other_ways_give_the_same(tmp_path, more):
    case = [*CASES["the last layer"], *STEPS, "train.micro_batch=6"]
    if "method=distill" in more:
        teacher = tiny_recipe(tmp_path, "checkpoint.export=final", "train.steps=2", name="teacher")
        run(teacher)
        more = [*more, f"distill.teacher={teacher.run.directory / 'export'}"]
    one = run(recipe_of(tmp_path, "one", "qwen3", "tied", "packed", *case, *(more if "method=distill" in more else [])))
    two = run(recipe_of(tmp_path, "two", "qwen3", "tied", "packed", *case, *more, "parallel.tp=2"), 2)
    assert_parity(two, trajectory(one), weights(one))


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    case = [*CASES["norms and queries"], "checkpoint.every=4", "train.steps=6"]
    whole = run(tiny_recipe(tmp_path, *case, name="whole"))
    run(tiny_recipe(tmp_path, *case, "train.steps=4", name="cut"))
    with pytest.raises(UserError, match="train.train_only"):
        run(tiny_recipe(tmp_path, "checkpoint.resume=auto", "checkpoint.every=4", name="cut"))
    again = tiny_recipe(tmp_path, *case, f"checkpoint.resume={whole.run.directory}/checkpoints/step-4", name="again")
    run(again, 2)
    assert [row["loss"] for row in metrics(again)] == pytest.approx([r["loss"] for r in metrics(whole)][4:], rel=1e-12)


def test_weights_of_another_run_are_taken_in_the_dtype_of_frozen_ones(tmp_path):
    wide = run(tiny_recipe(tmp_path, "checkpoint.every=2", "train.steps=2", "train.dtype=float32", name="wide"))
    case = ["train.train_only=[model.layers.1.*]", "train.dtype=bfloat16", "checkpoint.every=2", "train.steps=2"]
    half = run(tiny_recipe(tmp_path, *case, f"checkpoint.init_from={wide.run.directory}", name="half"))
    before, after = weights(wide, 2), weights(half, 2)
    for name, value in after.items():
        if name.startswith("model.model.layers.1."):
            assert value.dtype == torch.float32 and (
                name.endswith("norm.weight") or not torch.equal(value, before[name])
            )
        elif name.startswith("model."):
            assert value.dtype == torch.bfloat16 and torch.equal(value, before[name].bfloat16())
    assert {name.split(".")[3] for name in after if name.startswith("optim.model.layers")} == {"1"}


def test_a_frozen_policy_s_reference_is_a_copy_of_what_is_trained(tmp_path):
    from dtrain.parallel.fsdp import Sharding
    from dtrain.policy.reference import Reference

    model = models.build(models.read_config(write_model(tmp_path / "model")), dtype=torch.float64)
    models.init_weights(model, 0)
    select_trained_parameters(model, tiny_recipe(tmp_path, "train.train_only=['*norm*']"), torch.float64)
    reference = Reference(model, Sharding(model), copy_frozen=False)
    assert reference.tensors and all("norm" in name for name in reference.tensors)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    with reference.swapped_in():
        assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())
    assert all(torch.equal(one, before[name] + 1) for name, one in model.named_parameters() if one.requires_grad)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("train.freeze=[model.layer.*]", "train.freeze: model.layer.* matches no parameter of the model"),
        ("train.train_only=['*norm','lm_head.*']", "train.train_only: *norm matches no parameter"),
        ("train.freeze=['*']", "leave no parameter to train"),
    ],
)
def test_patterns_that_mean_nothing_are_refused(tmp_path, case, words):
    with pytest.raises(UserError) as caught:
        run(tiny_recipe(tmp_path, case))
    assert words in str(caught.value)
    early = [problem for problem in preflight(tiny_recipe(tmp_path, case), 1) if words in problem]
    assert bool(early) == ("matches no" in words)


@pytest.mark.parametrize(
    ("family", "pattern", "is_there"),
    [("gpt-oss", "*.sinks", True), ("qwen3.5", "*.A_log", True), ("qwen3", "*.bias", False)],
)
def test_a_pattern_is_checked_against_the_parameters_of_the_model(tmp_path, family, pattern, is_there):
    recipe = tiny_recipe(tmp_path, f"train.freeze=['{pattern}']", family=family)
    assert any("matches no parameter" in problem for problem in preflight(recipe, 1)) != is_there


def test_a_tied_head_is_meant_by_either_name(tmp_path):
    for tied, pattern in itertools.product((True, False), ("lm_head.weight", "model.embed_tokens.weight")):
        config = models.read_config(write_model(tmp_path / f"{tied}", tied=tied))
        model = models.build(config, dtype=torch.float32, device="meta")
        select_trained_parameters(model, tiny_recipe(tmp_path, f"train.freeze=[{pattern}]"), torch.bfloat16)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        frozen = {name for name, one in model.named_parameters(remove_duplicate=False) if not one.requires_grad}
        assert frozen == ({"lm_head.weight", "model.embed_tokens.weight"} if tied else {pattern})
        assert all(one.dtype == (torch.float32 if one.requires_grad else torch.bfloat16) for one in model.parameters())
