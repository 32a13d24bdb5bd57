"""Experts in 4 bits: the numbers of the dense weights that the codes mean, on every mesh, in files and in exports."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from dtrain import models
from dtrain.adapters.nf4 import CODES, SCALES, NF4Stack, dequantize, nf4_layer_shapes, quantize
from dtrain.checkpoint.huggingface import quantized
from dtrain.checkpoint.huggingface.export import export
from dtrain.checkpoint.huggingface.read import read_weights
from dtrain.models.common.moe import ExpertLinear, grouped_product
from tests.adapters.test_nf4 import dense as dense_of
from tests.running import assert_same, assert_same_rows, run, run_all, run_directory, trajectory
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
    "deepseek-v3": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 128,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
    },
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


def product_of(stack, x, counts):
    """The product, and its gradient by x, of a loss that weighs what comes out."""
    x = x.clone().requires_grad_()
    out = stack(x, counts)
    out.backward(torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos())
    return out.detach(), x.grad


def test_a_product_and_its_gradient_are_those_of_the_dense_matrices():
    """One expert has no row. Nothing that is as large as the matrices is kept between forward and backward."""
    draw = torch.Generator().manual_seed(0)
    codes, scales = quantize(torch.randn(3, 64, 128, generator=draw))
    x = torch.randn(7, 128, generator=draw, dtype=torch.float64)
    counts, dense = torch.tensor([4, 0, 3]), torch.stack([*map(dense_of, codes, scales)])
    held, kept = NF4Stack(torch.float64, dense.shape), []
    parts = {CODES: codes, SCALES: scales}
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        found = product_of(lambda x, counts: held.grouped_product(x, counts, parts.__getitem__), x, counts)
    for mine, right in zip(
        found, product_of(lambda x, counts: grouped_product(x, dense, counts), x, counts), strict=True
    ):
        assert (mine - right).abs().max() <= 1e-6 * right.abs().max()  # scales times levels are rounded in float32
    assert {one.dtype for one in kept} == {torch.uint8, torch.int32, torch.int64}


@pytest.mark.parametrize("family", FAMILIES)
def test_stacks_are_rounded_tile_by_tile_and_held_in_9_16_of_a_byte(tmp_path, family, monkeypatch):
    base, dense = models_of(tmp_path, family)
    model = models.build(models.read_config(base), device="meta")
    quantized.convert_to_4_bits(model, base, torch.float32, nf4=True)
    model.to_empty(device="cpu")
    monkeypatch.setattr(quantized, "_TILE", {"mixtral": 3 * 64 * 128, "qwen3.5-moe": 2 * 64 * 128}.get(family, 700))
    read_weights(model, base)
    right = models.from_pretrained(dense)
    stacks = [layer for layer in model.modules() if isinstance(layer, ExpertLinear)]
    assert stacks and all(isinstance(layer.weight_storage, NF4Stack) for layer in stacks)
    for layer in stacks:
        bytes_held = sum(one.numel() * one.itemsize for one in (layer.weight_codes, layer.weight_scales))
        assert bytes_held == layer.weight_storage.shape.numel() * 9 // 16 and "weight" not in dict(
            layer.named_parameters()
        )
    for (name, mine), (_, theirs) in zip(model.named_modules(), right.named_modules(), strict=True):
        if hasattr(mine, "weight_codes"):
            assert torch.equal(mine.dense_weight(), theirs.weight), name
    coded = {model.config.file_module(name) for name, layer in model.named_modules() if hasattr(layer, "weight_codes")}
    assert coded == set(nf4_layer_shapes(model.config))
    assert not [name for name in coded if name.endswith(("router.proj", "mlp.gate", "shared_expert_gate"))]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_runs_give_the_numbers_of_the_dense_weights(tmp_path, family):
    """Losses, gradients, and what is exported, merged and alone."""
    base, dense = models_of(tmp_path, family)
    right = run(recipe_of(tmp_path, "dense", dense, family))
    ours = run(recipe_of(tmp_path, "nf4", base, family, NF4))
    assert_same(ours, right, 1e-12)
    files = {"merged": "model.safetensors", "adapter": "adapter_model.safetensors"}
    # PEFT would drop the adapter of a dense layer, so dtrain refuses to write it alone.
    if family in ("qwen3-moe", "deepseek-v3"):
        del files["adapter"]
    for form, file in files.items():
        for recipe in (ours, right):
            out = tmp_path / f"{recipe.run.name}-{form}"
            export(run_directory(recipe), out, "float64" if form == "merged" else None, form=form)
        found = load_file(tmp_path / f"nf4-{form}" / file)
        expected = load_file(tmp_path / f"dense-{form}" / file)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name] - tensor).abs().max() <= 1e-9 * tensor.abs().max(), name


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
        {"num_experts": 2, "num_experts_per_tok": 2, "hidden_size": 192},
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


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_goes_on_with_other_ranks(tmp_path):
    base, _ = models_of(tmp_path, "qwen3-moe")
    one = run(recipe_of(tmp_path, "one", base, "qwen3-moe", NF4, "checkpoint.every=1"))
    step = f"checkpoint.resume={run_directory(one) / 'checkpoints/step-1'}"
    two = run(recipe_of(tmp_path, "two", base, "qwen3-moe", NF4, "parallel.ep=2", step, rows=6), 2)
    assert_same_rows(trajectory(two), trajectory(one)[1:], 1e-9, 1e-9, "two")
