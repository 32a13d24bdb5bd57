"""Checkpoints and exports of a model with its vision tower: they resume exactly, and transformers has the same logits.

What a run left frozen is written as the model's files have it; whether it trained the tower, its steps say.
"""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from dtrain import recipe as config
from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.checkpoint.huggingface.export import export
from dtrain.methods.sft import SftMethod
from dtrain.models.common.config import is_in_vision_tower
from dtrain.models.read_config import read_config
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.policy import Policy
from dtrain.training import load_recipe
from tests.models.test_vision_models import CASES, IMAGE, images_of, make, token_rows
from tests.models.vision.oracle import WideIslands
from tests.policy.test_images import batch_of, recipe_of
from tests.stepping import train_step
from tests.world import run_world

STEPS = 2
PARTS = {
    "all": ["train.vision=all"],
    "projector": ["train.vision=projector"],
    "frozen": ["train.vision=frozen"],
    "adapter": ["lora={rank: 2, target: '.*(q_proj|qkv|linear_fc.)', modules_to_save: [merger.norm]}"],
}


def policy_of(rank, recipe, world_size=1, **sizes):
    runtime = Runtime(rank=rank, world_size=world_size)
    policy = Policy(recipe, read_config(recipe.model.path, vision=True), build_mesh(runtime, **sizes), runtime)
    policy.init_optimizer(STEPS)
    return policy


def train(policy, name):
    batch, images = batch_of(CASES[name], policy.model.config)
    train_step(policy, batch | {"images": images}, SftMethod(load_recipe({})).loss)


def rows_of(name, model_config):
    """Token ids, pixels and the grids of all images of a case."""
    grids = [grid for some in CASES[name].grids for grid in some]
    patches = sum(height * width for _, height, width in grids)
    generator = torch.Generator().manual_seed(1)
    return (
        token_rows(CASES[name]),
        torch.rand(patches, model_config.vision.values_per_patch, generator=generator).double(),
        grids,
    )


def saved_run(rank, recipe, name, resumes=False):
    """Train two steps, each saved in the directory of the run, and export; the model's logits then. resumes: train the
    second step again."""
    policy, run = policy_of(rank, recipe), recipe.run.directory
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config.to_yaml(recipe))
    store = CheckpointStore(run / "checkpoints")
    for step in range(1, STEPS + 1):
        train(policy, name)
        store.save(
            step,
            policy.checkpoint.tensors(),
            policy.checkpoint.state(),
            write_extra_files=policy.checkpoint.adapter_writer,
        )
    policy.checkpoint.export(run / "export", recipe.model.directory)
    if resumes:
        resumed_run(rank, recipe, name, 1, {})
    ids, pixels, _ = rows_of(name, policy.model.config)
    with torch.no_grad():
        return policy.model.eval()(ids, images=images_of(CASES[name], ids, pixels, policy.model.config))


def resumed_run(rank, recipe, name, world_size, sizes):
    """Train the second step again, from the save of the first."""
    policy, store = policy_of(rank, recipe, world_size, **sizes), CheckpointStore(recipe.run.directory / "checkpoints")
    policy.checkpoint.load(store, 1, store.read_state(1), extra_tensors={})
    train(policy, name)
    CheckpointStore(recipe.run.directory / f"again-{world_size}").save(STEPS, policy.checkpoint.tensors(), {})


def transformers_logits(directory, name):
    """The logits of transformers' model in `directory` in float64; keys that do not fit are an error."""
    loaded, report = transformers.AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float64, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    wide = make(name)[1]
    wide.load_state_dict(loaded.state_dict())
    ids, pixels, grids = rows_of(name, read_config(directory, vision=True))
    with WideIslands(), torch.no_grad():
        types = {CASES[name].types: (ids == IMAGE).int()}
        return wide(input_ids=ids, **types, **CASES[name].inputs(pixels, grids)).logits


def stored(directory):
    store = CheckpointStore(directory, None)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in store.tensor_specs(STEPS).items()}
    store.open_step(STEPS)(tensors)
    return tensors


@pytest.mark.parametrize(
    ("name", "part"),
    [("qwen3-vl", "all"), ("gemma3", "projector"), ("gemma4", "frozen"), ("qwen3-vl", "adapter")],
)
def test_a_run_with_a_tower_resumes_exactly_and_exports(tmp_path, name, part):
    recipe = recipe_of(tmp_path, name, *PARTS[part])
    run, base = recipe.run.directory, recipe.model.directory
    (logits,) = run_world(saved_run, 1, recipe, name, True)
    whole, again = stored(run / "checkpoints"), stored(run / "again-1")
    assert whole.keys() == again.keys() and all(torch.equal(again[key], value) for key, value in whole.items())
    of_tower = {key for key in whole if key.startswith("model.") and is_in_vision_tower(key.removeprefix("model."))}
    assert bool(of_tower) == (part != "frozen")
    if part == "projector":
        assert all(".multi_modal_projector." in key for key in of_tower)

    export(run, tmp_path / "out", "float64" if part == "adapter" else None)  # merged weights are the base's float32
    before = load_file(base / "model.safetensors")
    directories = [tmp_path / "out", *([run / "export"] if part != "adapter" else [])]
    for directory in directories:
        written = load_file(directory / "model.safetensors")
        assert written.keys() == before.keys()
        frozen = [key for key in before if is_frozen(key, part)]
        assert frozen or part == "all"
        assert all(torch.equal(written[key], before[key]) and written[key].dtype == before[key].dtype for key in frozen)
        assert any(not torch.equal(written[key], before[key].double()) for key in before)
        assert (transformers_logits(directory, name) - logits).abs().max() < 1e-9 * logits.abs().max()


def is_frozen(key, part):
    """Whether a tensor of the files is one of the tower that no step changed."""
    if part == "frozen":
        return "vis" in key
    if part == "projector":
        return "vision_tower" in key
    return part == "adapter" and "visual" in key and not any(at in key for at in ("qkv", "linear_fc", "merger.norm"))


def test_a_save_resumes_under_tensor_parallel(tmp_path):
    recipe = recipe_of(tmp_path, "qwen3-vl", *PARTS["projector"])
    run_world(saved_run, 1, recipe, "qwen3-vl")
    cut = recipe_of(tmp_path, "qwen3-vl", *PARTS["projector"], "parallel.tp=2")
    run_world(resumed_run, 2, cut, "qwen3-vl", 2, {"tp": 2})
    whole, again = stored(recipe.run.directory / "checkpoints"), stored(recipe.run.directory / "again-2")
    assert whole.keys() == again.keys()
    for key, value in whole.items():
        torch.testing.assert_close(again[key], value, rtol=1e-9, atol=1e-11)
