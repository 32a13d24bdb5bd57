"""One recipe, any mesh, the same numbers: SFT against one process, over ten steps and in lower precision.

Loss and gradient norm of every step and the weights after the last, relative: float64 to 1e-9, float32 to 1e-5 in loss
and 1e-4 in the norm. tests/test_every_pair.py has every pair of options, in runs of two steps.
"""

import pytest
import torch

from tests.running import MESHES, assert_parity, distance, metrics, overrides_of, run, run_all, trajectory, weights
from tests.tiny import tiny_recipe


def recipe_of(root, name, family, tied, packing, *overrides):
    shape = [
        "train.global_batch=12",
        "checkpoint.every=${train.steps}",
        "scheduler.warmup_steps=0",
        f"data.packing={str(packing == 'packed').lower()}",
    ]
    return tiny_recipe(root, *shape, *overrides, family=family, tied=tied == "tied", name=name)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """(directory, trajectory, weights) of a model's run in one process, each computed once."""
    root, done = tmp_path_factory.mktemp("parity"), {}

    def reference(model, steps, dtype="float64"):
        if (model, steps, dtype) not in done:
            name = "-".join(["one", *model, str(steps), dtype])
            shape = ("train.micro_batch=12", f"train.steps={steps}", f"train.dtype={dtype}")
            recipe = run(recipe_of(root, name, *model, *shape))
            done[model, steps, dtype] = trajectory(recipe), weights(recipe)
        return root, *done[model, steps, dtype]

    return reference


def test_ten_steps_in_float64_agree_to_1e_9(one_process):
    mesh, model = "cp4 ring", ("llama", "tied", "packed")
    root, expected, expected_weights = one_process(model, 10)
    ranks, options = MESHES[mesh]
    overrides = overrides_of(ranks, options, "float64")
    recipe = run(recipe_of(root, mesh.replace(" ", "_"), *model, *overrides), ranks)
    assert_parity(recipe, expected, expected_weights)


def test_ten_steps_in_float32_agree_to_1e_5_in_loss_and_1e_4_in_the_norm(one_process):
    mesh, model = "tp2+sp cp2", ("llama", "untied", "packed")
    root, expected, expected_weights = one_process(model, 10, "float32")
    ranks, options = MESHES[mesh]
    overrides = overrides_of(ranks, options, "float32")
    recipe = run(recipe_of(root, "-".join(["f32", mesh.replace(" ", "_"), *model]), *model, *overrides), ranks)
    assert_parity(recipe, expected, expected_weights, loss=1e-5, norm=1e-4, weight=1e-3)


VARIANTS = {
    "offload where there is nothing to offload": ["parallel.cpu_offload=true"],
    "a plan by its path": ["parallel.custom_plan=dtrain.models.common.decoder.DECODER_PLAN"],
    "a table of one's own": [
        "parallel.custom_plan={model.layers.*.mlp: block, model.layers.*.mlp.*_proj: colwise, "
        "model.layers.*.mlp.down_proj: rowwise}"
    ],
}


def test_options_of_a_mesh_change_no_number(one_process):
    model = ("llama", "tied", "padded")
    root, expected, expected_weights = one_process(model, 2)
    ranks, mesh = MESHES["dp2 tp2"]
    overrides = [*overrides_of(ranks, mesh, "float64"), "train.steps=2"]
    recipes = [recipe_of(root, name, *model, *overrides, *options) for name, options in VARIANTS.items()]
    for recipe in run_all(recipes, ranks):
        assert_parity(recipe, expected, expected_weights)


@pytest.mark.parametrize(("mesh", "dtype"), [("cp2 ring", "float16"), ("tp2+sp cp2", "bfloat16")])
def test_mixed_precision_follows_float32(one_process, mesh, dtype):
    model = ("llama", "untied", "packed")
    root, expected, _ = one_process(model, 5, "float32")
    ranks, options = MESHES[mesh]
    overrides = [*overrides_of(ranks, options, dtype), "train.steps=5"]
    recipe = run(recipe_of(root, f"{mesh}-{dtype}".replace(" ", "_"), *model, *overrides), ranks)
    for mine, right in zip(trajectory(recipe), expected, strict=True):
        assert distance(mine[0], right[0]) <= 0.02
        assert distance(mine[1], right[1]) <= 0.1


def test_the_export_of_a_mesh_is_that_of_one_process(tmp_path):
    from safetensors.torch import load_file

    model, exports = ("qwen2", "tied", "packed"), []
    for name, ranks, options in (("one", 1, []), ("mesh", 4, ["parallel.tp=2"])):
        overrides = overrides_of(ranks, options, "float64")
        recipe = recipe_of(tmp_path, name, *model, *overrides, "train.steps=2", "checkpoint.export=final")
        run(recipe, ranks)
        exports.append(load_file(tmp_path / "runs" / name / "export" / "model.safetensors"))
    one, mesh = exports
    assert set(one) == set(mesh)
    for name, right in one.items():
        assert right.dtype == torch.float64
        assert (mesh[name] - right).abs().max() <= 1e-9 * right.abs().max(), name


def test_validation_is_the_same_on_a_mesh(tmp_path):
    from tests.tiny import write_rows

    write_rows(tmp_path / "val.jsonl", count=13, seed=3)
    values = []
    for name, ranks, options in (("one", 1, []), ("mesh", 4, ["parallel.tp=2", "parallel.cp=2"])):
        shape = [f"data.val.path={tmp_path / 'val.jsonl'}", "train.validate_every=2", "train.steps=3"]
        overrides = [*overrides_of(ranks, options, "float64"), *shape]
        recipe = run(recipe_of(tmp_path, name, "qwen3", "tied", "padded", *overrides), ranks)
        values.append([(row["step"], row["val_loss"]) for row in metrics(recipe) if "val_loss" in row])
    assert [step for step, _ in values[0]] == [2, 3] == [step for step, _ in values[1]]
    for (_, mine), (_, right) in zip(values[1], values[0], strict=True):
        assert distance(mine, right) <= 1e-9
