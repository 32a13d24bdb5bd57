"""Weights in 4 bits: bitsandbytes' codes, products with them, and runs that are the same on every mesh."""

import pytest

from tests.test_parity import distance
from tests.test_trainer import run, trajectory
from tests.tiny import save_weights, tiny_recipe, write_model

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
NF4 = ["model.init=pretrained", "lora.quantize=nf4", "lora.rank=4", "checkpoint.every=null", "train.steps=4"]


def base(root, family="qwen3", **changes):
    sizes = SIZES | {"head_dim": 32} | changes
    return save_weights(write_model(root / f"{family}-base", family, **sizes))


def recipe_of(root, name, model, *overrides, dtype="float32"):
    shape = [f"model.path={model}", "train.global_batch=12", f"train.dtype={dtype}"]
    return tiny_recipe(root, *NF4, *shape, *overrides, name=name)


def assert_same(recipe, reference, loss=1e-5, norm=1e-4):
    found, expected = trajectory(recipe), trajectory(reference)
    print(found, expected)
    assert len(found) == len(expected) == 4
    for mine, right in zip(found, expected, strict=True):
        assert distance(mine[0], right[0]) <= loss, (mine, right)
        assert distance(mine[1], right[1]) <= norm, (mine, right)


MESHES = {
    "dp2": (2, 3, []),
    "tp2": (2, 6, ["parallel.tp=2", "parallel.sequence_parallel=false"]),
    "tp2+sp": (2, 6, ["parallel.tp=2"]),
    "cp2": (2, 6, ["parallel.cp=2"]),
    "dp2 tp2": (4, 3, ["parallel.tp=2"]),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_gives_the_trajectory_of_one_process(tmp_path, mesh):
    model = base(tmp_path)
    one = run(recipe_of(tmp_path, "one", model, "train.micro_batch=12"))
    ranks, rows, options = MESHES[mesh]
    many = run(recipe_of(tmp_path, "many", model, f"train.micro_batch={rows}", *options), ranks)
    assert_same(many, one)
