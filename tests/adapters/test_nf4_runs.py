"""Runs with the base in 4 bits: the numbers of one process on every mesh, and those of the weights that codes mean."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from dtrain.adapters.nf4 import dequantize
from tests.adapters.test_nf4 import NF4, base, stored_as_bitsandbytes
from tests.methods.test_dpo_runs import recipe_of as dpo_recipe
from tests.running import distance, run, run_all, trajectory
from tests.tiny import tiny_grpo, tiny_recipe

# (ranks, rows of a micro-batch, family, overrides of the mesh, overrides); one process takes all 12 rows at once.
CASES = {
    "dp3": (3, 2, "qwen2", [], []),
    "tp4+sp, fewer KV heads": (4, 6, "llama", ["parallel.tp=4"], ["lora.dora=true"]),
    "tp2 cp2": (
        4,
        6,
        "gemma3",
        ["parallel.tp=2", "parallel.sequence_parallel=false", "parallel.cp=2"],
        ["lora.dora=true"],
    ),
}
STEPS = 3  # the third sees what both matrices have moved
SHORT = [f"train.steps={STEPS}", "scheduler.warmup_steps=0", "checkpoint.every=null"]


def recipe_of(root, name, model, *overrides):
    return tiny_recipe(root, *NF4, f"model.path={model}", "train.global_batch=12", *SHORT, *overrides, name=name)


def wide(root, family):
    """A model whose 256 inputs, and 256 of o_proj's, are blocks enough for four ranks."""
    return base(root, family, hidden_size=256, num_attention_heads=4, head_dim=64)


def assert_same(recipe, reference, loss, norm):
    found, expected = trajectory(recipe), trajectory(reference)
    assert len(found) == len(expected) == STEPS
    for mine, right in zip(found, expected, strict=True):
        assert mine[2:] == right[2:]
        assert distance(mine[0], right[0]) <= loss, (mine, right)
        assert distance(mine[1], right[1]) <= norm, (mine, right)


@pytest.mark.parametrize("ranks", [3, 4])
def test_meshes_give_the_trajectory_of_one_process(tmp_path, ranks):
    alone, on_mesh = [], []
    for mesh, (size, rows, family, options, more) in CASES.items():
        if size == ranks:
            model, more = wide(tmp_path / family, family), [*more, "train.dtype=float64"]
            alone.append(recipe_of(tmp_path, f"{mesh}, alone", model, "train.micro_batch=12", *more))
            on_mesh.append(recipe_of(tmp_path, mesh, model, f"train.micro_batch={rows}", *options, *more))
    run_all(alone)
    for many, one in zip(run_all(on_mesh, ranks), alone, strict=True):
        assert_same(many, one, loss=1e-9, norm=1e-9)


def test_ranks_without_a_row_of_a_weight(tmp_path):
    """Keys of one head of two dimensions: two rows over three ranks."""
    sizes = {"hidden_size": 64, "num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 2}
    model, more = base(tmp_path, "qwen3", **sizes), ["lora.dora=true", "train.dtype=float64"]
    one = run(recipe_of(tmp_path, "one", model, "train.micro_batch=12", *more))
    many = run(recipe_of(tmp_path, "many", model, "train.micro_batch=2", *more), 3)
    assert_same(many, one, loss=1e-9, norm=1e-9)


def test_float32_agrees_to_1e_5_in_loss_and_1e_4_in_the_norm(tmp_path):
    model = wide(tmp_path, "qwen3")
    one = run(recipe_of(tmp_path, "one", model, "train.micro_batch=12", "train.dtype=float32"))
    mesh = ["train.micro_batch=6", "parallel.tp=2", "train.dtype=float32"]
    many = run(recipe_of(tmp_path, "many", model, *mesh), 2)
    assert_same(many, one, loss=1e-5, norm=1e-4)


def test_bfloat16_under_fsdp_is_that_of_one_rank(tmp_path):
    """In micro-batches of one packed row: products of other rows, or of other lengths, are rounded otherwise."""
    model, more = base(tmp_path), ["lora.dora=true", "train.dtype=bfloat16", "data.packing=true"]
    more += ["train.global_batch=4", "train.micro_batch=1"]
    one = run(recipe_of(tmp_path, "one", model, *more))
    two = run(recipe_of(tmp_path, "two", model, *more), 2)
    assert_same(two, one, loss=1e-6, norm=1e-6)


@pytest.mark.parametrize(
    "more",
    [
        ["train.activation_checkpointing=selective"],
        ["parallel.reshard_after_forward=true", "train.micro_batch=3"],
    ],
)
def test_other_ways_give_the_same(tmp_path, more):
    model = wide(tmp_path, "qwen3")
    plain = ["lora.dora=true", "train.dtype=float64", "train.micro_batch=6"]
    one = run(recipe_of(tmp_path, "one", model, *plain))
    two = run(recipe_of(tmp_path, "two", model, *plain, *more), 2 if "micro_batch" in more[-1] else 1)
    assert_same(two, one, loss=1e-9, norm=1e-9)


def test_dpo_is_that_of_one_process(tmp_path):
    """The reference is the base in 4 bits, without the adapter."""
    options = [f"model.path={base(tmp_path)}", *NF4, *SHORT, "train.dtype=float64"]
    one = run(dpo_recipe(tmp_path, *options, "train.micro_batch=4", name="one"))
    many = run(dpo_recipe(tmp_path, *options, "train.micro_batch=2", "parallel.tp=2", name="many"), 2)
    assert_same(many, one, loss=1e-9, norm=1e-9)


def test_grpo_draws_and_trains_as_one_process(tmp_path):
    options = [f"model.path={base(tmp_path)}", *NF4, *SHORT, "train.dtype=float64"]
    options += ["grpo.beta=0.1", "train.micro_batch=4", "optimizer.lr=0.05"]
    one = run(tiny_grpo(tmp_path, *options, name="one"))
    many = run(tiny_grpo(tmp_path, *options, "parallel.tp=2", name="many"), 2)
    assert_same(many, one, loss=1e-9, norm=1e-9)


@pytest.mark.parametrize("double", [False, True])
def test_a_checkpoint_of_bitsandbytes_trains_as_its_weights_do(tmp_path, double):
    """Its codes are no codes of the floats that it means: these have other absmax once they are rounded anew."""
    directory, meant = stored_as_bitsandbytes(base(tmp_path), tmp_path / "bnb", double)
    options = ["train.dtype=float64", "train.micro_batch=6"]
    recipe = run(recipe_of(tmp_path, "bnb", directory, *options))
    dense = with_weights(tmp_path, {name: dequantize(*one, torch.float32) for name, one in meant.items()})
    plain = run(recipe_of(tmp_path, "plain", dense, *options, "lora.quantize=none"))
    assert_same(recipe, plain, loss=1e-12, norm=1e-12)


def with_weights(root, weights):
    """The `base` model with other weights of its linear layers."""
    tensors = load_file(base(root) / "model.safetensors")
    directory = base(root / "other")
    save_file(tensors | {f"{name}.weight": one for name, one in weights.items()}, directory / "model.safetensors")
    return directory
