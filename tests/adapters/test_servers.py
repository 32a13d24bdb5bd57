"""A run with an adapter and its servers: merged weights on every mesh, and the adapter alone in files."""

import pytest
import torch

from dtrain import models
from dtrain.adapters import nf4
from dtrain.adapters.config import is_adapter
from dtrain.adapters.lora import adapted_layers
from dtrain.base.batch import collate
from dtrain.checkpoint.dcp.training_state import model_tensors
from dtrain.checkpoint.huggingface.merged import full_weights, merge_in_place
from dtrain.checkpoint.huggingface.write import write_directory
from dtrain.methods.sft import SftMethod
from tests.adapters.test_nf4 import SIZES
from tests.policy.test_policy import rows
from tests.policy.test_weights import policy_of
from tests.stepping import train_step
from tests.tiny import save_weights, tiny_recipe, write_model
from tests.world import run_world

ADAPTERS = {
    "lora": "lora={rank: 4, alpha: 12}",
    "rslora": "lora={rank: 5, rslora: true, rank_pattern: {down_proj: 3}, exclude: [up_proj]}",
    "dora": "lora={rank: 4, alpha: 12, dora: true}",
    "nf4": "lora={rank: 4, alpha: 12, quantize: nf4}",
    "nf4 dora": "lora={rank: 4, alpha: 12, dora: true, quantize: nf4}",
    "saved": "lora={rank: 4, modules_to_save: [lm_head]}",
}
MESHES = {
    "one": (1, []),
    "dp2": (2, []),
    "tp4": (4, ["parallel.tp=4", "parallel.sequence_parallel=false"]),  # more ranks than key heads
    "dp2 tp2": (4, ["parallel.tp=2"]),
    "dp3": (3, ["train.global_batch=3", "train.micro_batch=1"]),  # a rank without rows of A
}
# Meshes and kinds of adapters, not each with each.
CASES = [("one", "dora", "qwen2"), ("tp4", "dora", "qwen2"), ("dp2 tp2", "nf4", "qwen2")]
CASES += [("dp3", "dora", "llama"), ("dp2 tp2", "saved", "llama")]


def recipe_of(root, mesh, adapter, *overrides, family="llama"):
    sizes = ["train.global_batch=4", "train.micro_batch=2", "scheduler.warmup_steps=0"]
    sizes += [*MESHES[mesh][1], ADAPTERS[adapter], *overrides]
    if "nf4" in adapter:  # which float64 does not go with
        base = save_weights(write_model(root / "base", family, tied=False, **SIZES))
        sizes += ["train.dtype=float32", "model.init=pretrained", f"model.path={base}"]
    return tiny_recipe(root, *sizes, family=family, tied=False, name="run")


def trained(rank, recipe, world_size):
    """Two steps, after which neither A nor B is what it began with."""
    policy = policy_of(rank, recipe, world_size)
    for _ in range(2):
        train_step(policy, collate(rows(recipe.train.global_batch)), SftMethod(recipe).loss)
    return policy


def dense(model):
    """The formula, from tensors that torch gathers."""
    held = {name: getattr(one.detach(), "full_tensor", one.detach)() for name, one in model_tensors(model).items()}
    found = {name: tensor for name, tensor in held.items() if not is_adapter(name)}
    for name in [name for name in found if name.endswith(".weight_codes")]:
        codes, scales = found.pop(name), found.pop(name.replace("codes", "scales"))
        found[name.removesuffix("_codes")] = nf4.dequantize(codes, scales, torch.float32)
    for name, layer in adapted_layers(model).items():
        a, b = held[f"{name}.lora_A"].double(), held[f"{name}.lora_B"].double()
        assert b.abs().max() > 0
        whole = found[f"{name}.weight"].double() + layer.wrapper.scale * b @ a
        if layer.wrapper.dora:
            whole *= (held[f"{name}.lora_magnitude"].double() / whole.norm(dim=1)).unsqueeze(1)
        found[f"{name}.weight"] = whole
    return found


def merge_and_compare(rank, recipe, world_size, out):
    policy = trained(rank, recipe, world_size)
    before = {name: tensor.detach().clone() for name, tensor in model_tensors(policy.model).items()}
    expected, info = dense(policy.model), policy.weights.prepare_refit_info()
    distances = {}
    for name, tensor in policy.weights.full_tensors():
        assert (tensor.shape, tensor.dtype) == info[name]
        distances[name] = float((tensor.double() - expected[name]).abs().max())
    assert list(distances) == list(info)
    assert distances.keys() == expected.keys()  # the base's names, all of them and no others
    write_directory(policy.model, out, recipe.model.path, policy.precision.compute)
    after = model_tensors(policy.model)
    assert all(torch.equal(local(after[name]), local(old)) for name, old in before.items())
    assert {name: weight.shape for name, weight in full_weights(policy.model).items()} == {n: info[n][0] for n in info}
    scores = policy.logprobs(collate(rows(4)))
    return max(distances.values()), scores.tolist() if rank == 0 else None


def merge_here(rank, recipe, world_size):
    model = trained(rank, recipe, world_size).model
    expected = dense(model)
    assert merge_in_place(model) and not adapted_layers(model) and not merge_in_place(model)
    found = model_tensors(model)
    assert found.keys() == expected.keys()
    return max(float((found[name].detach().double() - one).abs().max()) for name, one in expected.items())


@pytest.mark.parametrize("adapter, near", [("rslora", 1e-12), ("dora", 1e-12), ("nf4 dora", 1e-6)])
def test_an_adapter_merged_in_place_leaves_a_plain_model(tmp_path, adapter, near):
    assert run_world(merge_here, 1, recipe_of(tmp_path, "one", adapter, family="qwen2"), 1)[0] <= near


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor)


@pytest.mark.parametrize("mesh, adapter, family", CASES)
def test_merged_weights_are_the_formula_and_the_trained_model_on_every_mesh(tmp_path, mesh, adapter, family):
    """Float64: against a dense computation to 1e-12, and as a plain model: the same log-probabilities to 1e-10. Where
    the base is in 4 bits, float32: to 1e-6 and 1e-4."""
    near, same = (1e-6, 1e-4) if "nf4" in adapter else (1e-12, 1e-10)
    recipe, world_size = recipe_of(tmp_path, mesh, adapter, family=family), MESHES[mesh][0]
    found = run_world(merge_and_compare, world_size, recipe, world_size, tmp_path / "merged")
    assert all(distance <= near for distance, _ in found)
    plain = models.from_pretrained(tmp_path / "merged", torch.float64)
    batch = collate(rows(4))
    with torch.no_grad():
        logits = plain(batch["input_ids"]).log_softmax(-1)
    real = batch["labels"] != -100
    assert real.sum() > 20
    wanted = logits.gather(2, batch["labels"].clamp(min=0)[..., None])[..., 0]
    mine = torch.tensor(found[0][1], dtype=torch.float64)
    assert (mine - wanted)[real].abs().max() <= same
