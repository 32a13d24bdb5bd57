"""Checkpoints that bitsandbytes has quantized in part: codes stay codes, the other layers stay plain, by what the files
hold. Their numbers are those of the dense weights that the files mean, with `lora.quantize=nf4` and without."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from dtrain import models
from dtrain.adapters.nf4 import dequantize, has_nf4_weight
from dtrain.checkpoint.huggingface.export import export
from dtrain.checkpoint.huggingface.quantized import convert_to_4_bits
from tests.adapters.test_nf4 import base, stored_as_bitsandbytes
from tests.running import distance, run_all, run_directory, trajectory
from tests.tiny import tiny_recipe

PLAIN = ["model.layers.0.self_attn.q_proj", *(f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1))]
WIDTH = 96  # inputs of down_proj: no multiple of 64
ANOTHER_NAME = {"llm_int8_skip_modules": ["lm_head", "language_model.model.layers.0.self_attn.q_proj"]}
LORA = ["model.init=pretrained", "lora.rank=4", "train.dtype=float64", "train.global_batch=12", "train.steps=3"]
LORA += ["scheduler.warmup_steps=0", "checkpoint.every=3"]


def partial(root, config=ANOTHER_NAME):
    """Return a checkpoint in which the layers PLAIN are floats, and a model of the dense weights that it means."""
    floats = base(root, intermediate_size=WIDTH)
    original = load_file(floats / "model.safetensors")

    def unquantize(tensors):
        for name in [name for name in tensors if name.partition(".weight")[0] in PLAIN]:
            del tensors[name]
        tensors.update({f"{name}.weight": original[f"{name}.weight"] for name in PLAIN})

    directory, meant = stored_as_bitsandbytes(floats, root / "bnb", False, unquantize, config)
    dense = base(root / "dense", intermediate_size=WIDTH)
    coded = {f"{name}.weight": dequantize(*parts, torch.float32) for name, parts in meant.items() if name not in PLAIN}
    save_file(original | coded, dense / "model.safetensors")
    return directory, dense


def test_layers_are_in_4_bits_where_the_files_hold_codes(tmp_path):
    directory, dense = partial(tmp_path)
    model, right = models.from_pretrained(directory), models.from_pretrained(dense)
    layers = [name for name, _ in model.named_modules() if name.endswith("_proj")]
    assert [name for name in layers if not has_nf4_weight(model.get_submodule(name))] == PLAIN
    ids = torch.arange(12)[None]
    assert torch.equal(model(ids), right(ids))


def test_without_files_the_config_says_which(tmp_path):
    directory, _ = partial(tmp_path, {"llm_int8_skip_modules": ["model.layers.1.mlp", "layers.0.self_attn.q_proj"]})
    (directory / "model.safetensors").unlink()
    model = models.build(models.read_config(directory), device="meta")
    coded = convert_to_4_bits(model, directory, torch.float32, nf4=True)
    skipped = {
        "model.layers.0.self_attn.q_proj",
        *(f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")),
    }
    layers = {name for name, _ in model.named_modules() if name.endswith("_proj")}
    assert layers - set(coded) == skipped


@pytest.mark.processes
def test_runs_give_the_numbers_of_the_dense_weights(tmp_path):
    directory, dense = partial(tmp_path)

    def recipe(name, model, *overrides):
        return tiny_recipe(tmp_path, *LORA, f"model.path={model}", *overrides, name=name)

    plain, stored, nf4 = run_all(
        [
            recipe("plain", dense, "train.micro_batch=12"),
            recipe("stored", directory, "train.micro_batch=12"),
            recipe("nf4", directory, "train.micro_batch=12", "lora.quantize=nf4"),
        ]
    )
    (mesh,) = run_all([recipe("mesh", directory, "train.micro_batch=6", "parallel.tp=2")], 2)
    right = trajectory(plain)
    assert right[0][1] > 0 and right[-1][0] < right[0][0]
    for run_, tolerance in ((stored, 1e-12), (nf4, 1e-12), (mesh, 1e-9)):
        for mine, expected in zip(trajectory(run_), right, strict=True):
            assert max(map(distance, mine[:2], expected[:2])) <= tolerance
    exported = {}
    for recipe_ in (plain, stored, mesh):
        export(run_directory(recipe_), tmp_path / f"{recipe_.run.name}-out", "float64")
        exported[recipe_.run.name] = load_file(tmp_path / f"{recipe_.run.name}-out" / "model.safetensors")
    for name, tensor in exported["plain"].items():
        for other in ("stored", "mesh"):
            assert (exported[other][name] - tensor).abs().max() <= 1e-9 * tensor.abs().max(), (other, name)
