"""Experts in 4 bits: the numbers of the dense weights that the codes mean, on every mesh, in files and in exports."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from dtrain import models
from dtrain.base.errors import Stopped
from dtrain.checkpoint.huggingface import quantized
from dtrain.checkpoint.huggingface.export import export
from dtrain.checkpoint.huggingface.merged import whole_weights
from dtrain.checkpoint.huggingface.read import read_weights
from dtrain.models.common.moe import ExpertLinear, grouped
from dtrain.models.common.nf4 import CODES, SCALES, NF4Stack, dequantize, quantize
from dtrain.models.common.quantization_config import held_by_nf4
from tests.adapters.test_nf4 import dense as dense_of
from tests.running import assert_same, assert_same_rows, interrupt, run, run_all, run_directory, trajectory
from tests.tiny import save_weights, tiny_recipe, write_model

# Sizes of whole blocks; 128 where tp cuts inputs.
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
SPARSE = {"num_experts": 4, "moe_intermediate_size": 128}
OWN = {
    "qwen3-moe": SPARSE | {"num_hidden_layers": 2},
    "qwen3.5-moe": SPARSE | {"linear_value_head_dim": 16, "shared_expert_intermediate_size": 128},
    "gpt-oss": {"num_local_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "gemma4-moe": SPARSE | {"global_head_dim": 32},
}
FAMILIES = [*OWN]
ADAPTED = "lora={rank: 4, alpha: 12, target: [all-linear, experts]}"
GATES = (".gate.weight", ".router.weight", ".router.proj.weight", ".shared_expert_gate.weight")


def rounded(matrices):
    """[.., out, in] -> the same shape: the weights that the codes mean, float32."""
    return dequantize(*quantize(matrices), torch.float32)


def dense_weights(directory, family):
    """The tensors of the files of `directory`, those that 4 bits hold rounded, each as the file lays it out."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(GATES) or "norm" in name or "embed" in name or "lm_head" in name or "bias" in name:
            continue
        is_turned = family == "gpt-oss" and ".experts." in name  # [E, in, out]
        if is_turned:
            tensors[name] = rounded(tensor.mT.contiguous()).mT.contiguous()
        elif tensor.dim() >= 2 and "conv1d" not in name:
            tensors[name] = rounded(tensor)
    return tensors


def models_of(root, family, **changes):
    """A model's directory with weights, and that of the dense weights that its codes mean."""
    changes = SHAPE | OWN[family] | changes
    base = save_weights(write_model(root / f"{family}-base", family, tied=False, **changes))
    dense = write_model(root / f"{family}-dense", family, tied=False, **changes)
    save_file(dense_weights(base, family), dense / "model.safetensors")
    return base, dense


def recipe_of(root, name, model, family, *more, rows=12):
    adapter = "lora={rank: 4, alpha: 12}" if family == "gpt-oss" else ADAPTED
    shape = [f"model.path={model}", "model.init=pretrained", adapter, "train.global_batch=12", "train.steps=2"]
    shape += [f"train.micro_batch={rows}", "scheduler.warmup_steps=0", "checkpoint.every=2", "optimizer.lr=0.03"]
    return tiny_recipe(root, *shape, *more, name=name)


NF4 = "lora.quantize=nf4"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_runs_give_the_numbers_of_the_dense_weights(tmp_path, family):
    """Losses, gradients and what is exported, merged; a base in 4 bits takes 9/16 of a byte a weight."""
    base, dense = models_of(tmp_path, family)
    right = run(recipe_of(tmp_path, "dense", dense, family))
    ours = run(recipe_of(tmp_path, "nf4", base, family, NF4))
    assert_same(ours, right, 1e-12)
    for recipe in (ours, right):
        export(run_directory(recipe), tmp_path / f"{recipe.run.name}-out", "float64")
    merged = load_file(tmp_path / "nf4-out" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "dense-out" / "model.safetensors").items():
        assert (merged[name] - tensor).abs().max() <= 1e-9 * tensor.abs().max(), name


# (family, ranks, rows of a micro-batch, overrides, changes of the model)
MESHES = {
    "dp2": ("qwen3.5-moe", 2, 6, [], {}),
    "ep2": ("gpt-oss", 2, 6, ["parallel.ep=2"], {}),
    "tp2": ("qwen3-moe", 2, 6, ["parallel.tp=2"], {}),
    "tp2 of stacks": ("gemma4-moe", 2, 6, ["parallel.tp=2", "parallel.sequence_parallel=false"], {}),
    "ep2 tp2": ("mixtral", 4, 6, ["parallel.ep=2", "parallel.tp=2"], {}),
    "ep2, columns of one expert": (
        "qwen3-moe",
        4,
        3,
        ["parallel.ep=2"],
        {"num_experts": 2, "num_experts_per_tok": 2, "hidden_size": 128},
    ),
}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 4])
def test_meshes_train_as_one_process(tmp_path, ranks):
    alone, together = [], []
    for mesh, (family, size, rows, options, changes) in MESHES.items():
        if size == ranks:
            base, _ = models_of(tmp_path / mesh, family, **changes)
            alone.append(recipe_of(tmp_path, f"{mesh}, alone", base, family, NF4))
            together.append(recipe_of(tmp_path, mesh, base, family, NF4, *options, rows=rows))
    run_all(alone)
    for many, one in zip(run_all(together, ranks), alone, strict=True):
        assert_same(many, one, 1e-9)
