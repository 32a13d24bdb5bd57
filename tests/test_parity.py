"""One recipe, any mesh, the same numbers: 10 steps of SFT on every mesh against one process.

Loss and gradient norm of every step and the weights after the last, relative: float64 to 1e-9, float32 to 1e-5 in loss
and 1e-4 in the norm. tests/test_every_pair.py has every pair of options, in runs of fewer steps.
"""

import itertools
import random

import pytest
import torch

from tests.running import MESHES, assert_parity, distance, metrics, overrides_of, run, trajectory, weights
from tests.tiny import FAMILIES, tiny_recipe

MODELS = list(itertools.product(FAMILIES, ("tied", "untied"), ("packed", "padded")))


def recipe_of(root, name, family, tied, packing, *overrides):
    shape = ["train.global_batch=12", "checkpoint.every=10", f"data.packing={str(packing == 'packed').lower()}"]
    return tiny_recipe(root, *shape, *overrides, family=family, tied=tied == "tied", name=name)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """(directory, trajectory, weights) of a model's run in one process, each computed once."""
    root, done = tmp_path_factory.mktemp("parity"), {}

    def reference(model, dtype="float64"):
        if (model, dtype) not in done:
            name = "-".join(["one", *model, dtype])
            recipe = run(recipe_of(root, name, *model, "train.micro_batch=12", f"train.dtype={dtype}"))
            done[model, dtype] = trajectory(recipe), weights(recipe)
        return root, *done[model, dtype]

    return reference


def sampled(cases, models):
    """(mesh, case, model): every mesh, case and model in turn."""
    for index, mesh in enumerate(MESHES):
        case, model = list(cases)[index % len(cases)], models[index % len(models)]
        yield pytest.param(mesh, case, model, id=f"{mesh}: {case}, {model[0]}")


def cases():
    """(mesh, model): every mesh, each with a model of its own."""
    models = random.Random(0).sample(MODELS, len(MODELS))
    for mesh, model in zip(MESHES, models, strict=False):
        yield pytest.param(mesh, model, id=f"{mesh}: {' '.join(model)}")


@pytest.mark.parametrize(("mesh", "model"), list(cases()))
def test_float64_agrees_to_1e_9(one_process, mesh, model):
    root, expected, expected_weights = one_process(model)
    ranks, options = MESHES[mesh]
    overrides = overrides_of(ranks, options, "float64")
    recipe = run(recipe_of(root, "-".join([mesh.replace(" ", "_"), *model]), *model, *overrides), ranks)
    assert_parity(recipe, expected, expected_weights)


FLOAT32 = [("tp2+sp cp2", 0), ("dp2 tp2", 5), ("cp2 ring", 10), ("dp_replicate2", 15), ("dp2 tp2+sp cp2", 13)]


@pytest.mark.parametrize(("mesh", "model"), FLOAT32)
def test_float32_agrees_to_1e_5_in_loss_and_1e_4_in_the_norm(one_process, mesh, model):
    model = MODELS[model]
    root, expected, expected_weights = one_process(model, "float32")
    ranks, options = MESHES[mesh]
    overrides = overrides_of(ranks, options, "float32")
    recipe = run(recipe_of(root, "-".join(["f32", mesh.replace(" ", "_"), *model]), *model, *overrides), ranks)
    assert_parity(recipe, expected, expected_weights, loss=1e-5, norm=1e-4, weight=1e-3)


VARIANTS = {
    "whole layers computed again": ("dp2 tp2", ["train.activation_checkpointing=full"]),
    "layers computed again, keys gathered": ("tp2+sp cp2", ["train.activation_checkpointing=full"]),
    "layers computed again, keys in a ring": ("cp2 ring", ["train.activation_checkpointing=full"]),
    "MLPs computed again": ("tp2+sp", ["train.activation_checkpointing=mlp"]),
    "all but products computed again": ("tp2+sp cp2", ["train.activation_checkpointing=selective"]),
    "weights given back": ("dp2 tp2", ["parallel.reshard_after_forward=true"]),
    "weights kept": ("dp2 cp2", ["parallel.reshard_after_forward=false"]),
    "offload where there is nothing to offload": ("dp2", ["parallel.cpu_offload=true"]),
    "no accumulation": ("dp2 tp2", ["train.micro_batch=6"]),
    "one row at a time": ("tp2+sp cp2", ["train.micro_batch=1"]),
    "a plan by its path": ("tp2+sp", ["parallel.custom_plan=dtrain.models.common.decoder.DECODER_PLAN"]),
    "a table of one's own": (
        "dp2 tp2",
        ["parallel.custom_plan={model.layers.*.mlp: block, model.layers.*.mlp.*_proj: colwise, "
         "model.layers.*.mlp.down_proj: rowwise}"],
    ),
    "a length that no rank's share divides": ("cp4 ring", ["data.max_length=29"]),
    "DFT, at such a length": ("tp2+sp cp2", ["data.max_length=29", "sft.loss=dft"]),
    "label smoothing, at such a length": ("dp2 tp2+sp cp2", ["data.max_length=29", "sft.label_smoothing=0.2"]),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_options_of_a_mesh_change_no_number(one_process, tmp_path, variant):
    mesh, options = VARIANTS[variant]
    model = ("llama", "tied", "padded" if "length" not in variant else "packed")
    root, expected, expected_weights = one_process(model)
    if "length" in variant:
        one = run(recipe_of(tmp_path, "one", *model, "train.micro_batch=12", *options))
        expected, expected_weights = trajectory(one), weights(one)
        root = tmp_path
    ranks, mesh_options = MESHES[mesh]
    overrides = [*overrides_of(ranks, mesh_options, "float64"), *options]
    recipe = run(recipe_of(root, variant.replace(" ", "_"), *model, *overrides), ranks)
    assert_parity(recipe, expected, expected_weights)


RESUMES = [("tp2+sp", "dp2 cp2"), ("dp3 tp2", "cp2 ring"), ("dp2 tp2+sp cp2", "dp3"), ("one", "tp4+sp"), ("cp3", "one")]


@pytest.mark.parametrize(("before", "after"), RESUMES)
def test_a_run_goes_on_on_another_mesh(one_process, before, after):
    model = ("gemma3", "tied", "packed")
    root, expected, expected_weights = one_process(model)
    name = f"{before}-then-{after}".replace(" ", "_")
    for mesh, last in ((before, 4), (after, 10)):
        ranks, options = MESHES.get(mesh, (1, []))
        shape = [*overrides_of(ranks, options, "float64"), "checkpoint.every=2", f"train.steps={last}"]
        run(
            recipe_of(root, name, *model, *shape, "scheduler.name=constant", "checkpoint.allow_changes=[data]"),
            ranks,
        )
    whole = run(recipe_of(root, f"{name}-whole", *model, "train.micro_batch=12", "scheduler.name=constant"))
    recipe = recipe_of(root, name, *model)
    assert [row["step"] for row in metrics(recipe) if "loss" in row] == list(range(1, 11))
    assert_parity(recipe, trajectory(whole), weights(whole))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mesh", ["tp2+sp", "cp2 ring", "tp2+sp cp2"])
def test_mixed_precision_follows_float32(one_process, mesh, dtype):
    model = ("llama", "untied", "packed")
    root, expected, _ = one_process(model, "float32")
    ranks, options = MESHES[mesh]
    overrides = overrides_of(ranks, options, dtype)
    recipe = run(recipe_of(root, f"{mesh}-{dtype}".replace(" ", "_"), *model, *overrides), ranks)
    for mine, right in list(zip(trajectory(recipe), expected, strict=True))[:5]:
        assert distance(mine[0], right[0]) <= 0.02
        assert distance(mine[1], right[1]) <= 0.1


def test_the_export_of_a_mesh_is_that_of_one_process(tmp_path):
    from safetensors.torch import load_file

    model, exports = ("qwen2", "tied", "packed"), []
    for name, ranks, options in (("one", 1, []), ("mesh", 4, ["parallel.tp=2"])):
        overrides = overrides_of(ranks, options, "float64")
        recipe = recipe_of(tmp_path, name, *model, *overrides, "checkpoint.export=final")
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
    for name, ranks, options in (("one", 1, []), ("mesh", 8, ["parallel.tp=2", "parallel.cp=2"])):
        shape = [f"data.val.path={tmp_path / 'val.jsonl'}", "train.validate_every=4"]
        overrides = [*overrides_of(ranks, options, "float64"), *shape]
        recipe = run(recipe_of(tmp_path, name, "qwen3", "tied", "padded", *overrides), ranks)
        values.append([(row["step"], row["val_loss"]) for row in metrics(recipe) if "val_loss" in row])
    assert [step for step, _ in values[0]] == [4, 8, 10] == [step for step, _ in values[1]]
    for (_, mine), (_, right) in zip(values[1], values[0], strict=True):
        assert distance(mine, right) <= 1e-9
