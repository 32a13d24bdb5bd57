"""Plans of adapters: their bytes against those of real steps, what a plan tells of them, and the sizes that are
promised."""

import json
from dataclasses import replace

import pytest
import torch

from dtrain.adapters import nf4
from dtrain.commands.plan import report
from dtrain.commands.plan.hardware import GPUS, USABLE_MEMORY
from dtrain.commands.plan.plan import make_plan, resolve_plan
from dtrain.commands.plan.search import search
from dtrain.commands.plan.step import plan_step
from dtrain.training import load_recipe
from tests.plan.test_peak import SHAPE, assert_planned
from tests.test_recipes import LLAMA_3_1_8B
from tests.tiny import save_weights, tiny_recipe, write_model

GIB = 2**30
MIXED = "train.dtype=bfloat16"
NF4 = ["lora.quantize=nf4", "model.init=pretrained"]
CASES = {
    "dora, dropout, dp2": (2, ["lora.dora=true", "lora.dropout=0.1", MIXED]),
    "dpo, against the adapter off": (1, ["method=dpo", "lora={}", MIXED]),
    "nf4, computed again": (1, [*NF4, MIXED, "train.activation_checkpointing=full"]),
    "nf4, dora, tp2": (2, [*NF4, MIXED, "lora.dora=true", "parallel.tp=2"]),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return save_weights(write_model(directory, "qwen3", tied=False, **{**SHAPE, "intermediate_size": 768}))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    sizes = SHAPE | {"num_hidden_layers": 2, "moe_intermediate_size": 128, "num_experts": 4, "mlp_only_layers": []}
    return save_weights(write_model(tmp_path_factory.mktemp("sparse"), "qwen3-moe", tied=False, **sizes))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_planned_peak_is_that_of_a_real_step(tmp_path, model, sparse, ranks):
    settings = [f"model.path={model}", "data.max_length=64", "launch.device=cpu"]
    settings += ["train.global_batch=2", "train.micro_batch=1"]
    recipes = {name: tiny_recipe(tmp_path, *settings, *more) for name, (size, more) in CASES.items() if size == ranks}
    if ranks == 1:  # tokens of several ranks go to experts as they are, and not evenly
        of_experts = ["lora={rank: 4}", *NF4, MIXED, f"model.path={sparse}"]
        recipes["nf4 of experts"] = tiny_recipe(tmp_path, *settings, *of_experts)
    nf4.dequantize(*nf4.quantize(torch.ones(1, 64)), torch.float32)  # what is kept of it is not what a plan takes
    assert_planned(recipes, ranks)


def test_few_layers_tell_what_all_of_them_would(tmp_path):
    path = write_model(tmp_path / "model", "qwen3", num_hidden_layers=6)
    for options in (["lora.target=[q_proj,down_proj]", "lora.modules_to_save=[norm]"], ["lora.exclude=.*layers.5.*"]):
        recipe = tiny_recipe(tmp_path, f"model.path={path}", MIXED, "train.global_batch=2", *options)
        few = plan_step(resolve_plan(recipe, 1, "cuda"))
        assert few == plan_step(resolve_plan(recipe, 1, "cuda"), whole=True)
        assert (
            0 < few.trained_parameters < few.parameters
            and few.gradients == few.trained_parameters
            and few.optimizer_state > 2 * few.trained_parameters
        )


def test_a_plan_tells_what_of_the_model_is_trained(tmp_path):
    plan = make_plan(tiny_recipe(tmp_path, "lora.rank=4", MIXED), 1, GPUS["h100"])
    sizes = {"q_proj": 96, "k_proj": 64, "v_proj": 64, "o_proj": 96, "mlp": 3 * 80}  # [out] + [in]
    assert plan.trained_parameters == 4 * 2 * sum(sizes.values()) == plan.step.trained_parameters // 4
    told = report.as_json(plan)
    assert (told["trained_parameters"], told["memory"]["trained_parameters"]) == (plan.trained_parameters, 4 * 4480)
    frozen = plan.total_parameters - plan.trained_parameters
    assert told["memory"]["parameters"] == 2 * frozen + 4 * plan.trained_parameters
    assert "4,480 of them trained, in an adapter)" in report.text(plan)
    assert f"{report.gib(2 * frozen)} of frozen weights, {report.gib(4 * 4480)} of trained ones" in report.text(plan)
    frozen = make_plan(tiny_recipe(tmp_path, "train.train_only=[model.norm.weight]"), 1, GPUS["h100"])
    assert "parameters, 32 of them trained)" in report.text(frozen)
    assert "of them trained" not in report.text(make_plan(tiny_recipe(tmp_path), 1, GPUS["h100"]))


def test_a_search_counts_frozen_bytes_as_they_are(tmp_path):
    path = write_model(tmp_path / "model", "llama", hidden_size=128, intermediate_size=256)
    recipe = tiny_recipe(tmp_path, f"model.path={path}", MIXED, "lora.quantize=nf4", "model.init=pretrained")
    plan = make_plan(recipe, 1, GPUS["h100"])
    assert plan.step.trained_parameters == 4 * plan.trained_parameters
    held = plan.step.parameters + plan.step.gradients + plan.step.optimizer_state
    found = search(replace(plan, budget=held), max_traces=1)
    assert found.counts["shards alone exceed the budget"] == 0
    found = search(replace(plan, budget=held - 1024), max_traces=1)
    assert found.counts["shards alone exceed the budget"] > 0 and not found.best


# Llama 3.1 8B, rank 16 on every linear layer, rows of 4,096 packed tokens: the GPU's memory in GiB, and the peak.
PROMISED = {"none": (20, 17.54), "nf4": (10, 8.20)}


@pytest.mark.parametrize("quantize", PROMISED)
def test_an_adapter_of_8b_fits_a_small_gpu(tmp_path, quantize):
    memory, peak = PROMISED[quantize]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    words = [f"model.path={tmp_path}", "lora={}", f"lora.quantize={quantize}", "train.micro_batch=1"]
    words += ["train.global_batch=2", "data.max_length=4096", "train.activation_checkpointing=full"]
    recipe = load_recipe("sft", words)
    plan = make_plan(recipe, 1, replace(GPUS["h100"], memory_gib=memory))
    assert plan.trained_parameters == 41_943_040 and plan.spec.sizes.accumulation == 2
    assert plan.fits and plan.budget == int(memory * USABLE_MEMORY * GIB)
    assert plan.step.peak / GIB == pytest.approx(peak, abs=0.01)
