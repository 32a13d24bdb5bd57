"""`dtrain plan` as its user meets it, and the step of many layers that a few of them tell."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtrain import models
from dtrain.base.errors import RecipeError
from dtrain.commands.cli import main
from dtrain.commands.plan import report
from dtrain.commands.plan.hardware import GPUS
from dtrain.commands.plan.plan import choose_starting_mesh, make_plan, problems, resolve_plan, with_mesh
from dtrain.commands.plan.search import search
from dtrain.commands.plan.step import plan_step
from dtrain.training import recipe_and_problems
from tests.test_recipes import LLAMA_3_1_8B, QWEN3_8B
from tests.tiny import tiny_grpo, tiny_recipe, write_model

ROOT = Path(__file__).parents[2]
# Nothing is left to choose.
FIXED = (
    "train.micro_batch=1",
    "train.activation_checkpointing=full",
    "train.activation_offload=false",
    "train.tile=none",
    "parallel.reduce_each=true",
    "parallel.optimizer_offload=false",
)
LLAMA_3_1_70B = {
    **LLAMA_3_1_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
WHOLE = {
    "cuda, tp2 cp2 dp2, computed again": (
        "qwen3",
        {},
        "cuda",
        8,
        ["parallel.tp=2", "parallel.cp=2", "train.activation_checkpointing=full"],
    ),
    "cuda, gemma3's pattern": (
        "gemma3",
        {"num_hidden_layers": 10, "layer_types": ["sliding_attention", "full_attention"] * 5},
        "cuda",
        2,
        ["train.global_batch=2"],
    ),
    "cuda, the first layers frozen": (
        "qwen3",
        {},
        "cuda",
        2,
        ["train.freeze=['model.layers.[0-3].*','model.embed*']", "train.global_batch=2"],
    ),
    "cuda, linear attention": (
        "qwen3.5",
        {"num_hidden_layers": 10, "layer_types": ["linear_attention", "full_attention"] * 5},
        "cuda",
        2,
        ["lora={rank: 2}", "train.global_batch=2"],
    ),
    "cuda, dense layers before sparse ones": (
        "deepseek-v3",
        {"num_hidden_layers": 12, "first_k_dense_replace": 3, "intermediate_size": 400},
        "cuda",
        2,
        ["parallel.ep=2", "train.global_batch=2"],
    ),
    "cuda, an adapter of dense and of sparse layers": (
        "deepseek-v3",
        {"num_hidden_layers": 12, "first_k_dense_replace": 3, "intermediate_size": 400},
        "cuda",
        2,
        ["lora={rank: 2}", "train.global_batch=2"],
    ),
    "cuda, sparse layers between dense ones": (
        "qwen3-moe",
        {"num_hidden_layers": 12, "decoder_sparse_step": 2, "mlp_only_layers": [], "intermediate_size": 400},
        "cuda",
        2,
        ["train.global_batch=2"],
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_few_layers_tell_what_all_of_them_would(tmp_path, name):
    family, changes, device, ranks, options = WHOLE[name]
    path = write_model(tmp_path / "model", family, **{"num_hidden_layers": 6, **changes})
    settings = [f"model.path={path}", "train.dtype=auto", "train.global_batch=4", "train.micro_batch=1"]
    recipe = tiny_recipe(tmp_path, *settings, *options)
    few = plan_step(resolve_plan(recipe, ranks, device))
    assert few == plan_step(resolve_plan(recipe, ranks, device), whole=True)
    assert few.peak == sum(few.parts.values())


def model_of(tmp_path, shape):
    """A directory that holds config.json alone."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(shape))
    return f"model.path={directory}"


def test_json_is_all_that_is_printed_and_config_json_all_that_is_read(tmp_path, capfd):
    words = ["parallel.tp=8", "parallel.dp_replicate=4", "train.global_batch=128", "data.max_length=8192"]
    model = model_of(tmp_path, LLAMA_3_1_70B)
    assert main(["plan", "sft", model, *words, *FIXED, "--world-size", "1024", "--json", "--step-time", "4"]) == 0
    told = capfd.readouterr()
    plan = json.loads(told.out)
    assert told.err == ""
    elements = 70_553_706_496
    assert plan["total_parameters"] == elements and plan["sizes"]["dp_shard"] == 32 and plan["dtype"] == "bfloat16"
    # Readers of the JSON know these keys, whatever the attributes of `Sizes` are called.
    keys = "world_size dp_replicate dp_shard cp tp global_batch micro_batch accumulation ep is_open"
    assert sorted(plan["sizes"]) == sorted(keys.split())
    norms = (2 * 80 + 1) * 8192  # whole on every tp rank
    assert plan["memory"]["parameters"] == 4 * ((elements - norms) // 8 + norms) // 32
    assert plan["memory"]["optimizer_state"] == pytest.approx(2 * plan["memory"]["parameters"], rel=1e-5)
    assert plan["memory"]["peak"] == sum(plan["memory"]["peak_parts"].values()) and plan["memory"]["fits"]
    assert plan["save_bytes"] == pytest.approx(3 * 4 * elements, rel=1e-3)  # weights and two moments, each in float32
    flops = plan["flops_per_token"] * plan["tokens"]
    assert plan["tokens"] == 128 * 8192 and plan["mfu"] == pytest.approx(flops / 4 / 1024 / 989e12)
    lanes = {(lane["dimension"], lane["kind"]): lane for lane in plan["traffic"] if lane["dimension"] != "all"}
    assert lanes["fsdp", "all-gather"]["count"] == 80 + 3 + 79  # README's table
    assert lanes["fsdp", "reduce-scatter"]["count"] == lanes["dp_replicate", "all-reduce"]["count"] == 80 + 3
    assert plan["estimate"]["is_estimate"] and plan["estimate"]["step_time"] > flops / 1024 / 989e12


NO_OTHER_MEANS = ["train.tile=none", "train.activation_offload=false", "parallel.optimizer_offload=false"]


def test_what_does_not_fit_says_by_how_much_and_what_would(tmp_path, capfd):
    recipe = ["sft", model_of(tmp_path, QWEN3_8B), "train.global_batch=2", *FIXED]
    assert main(["plan", *recipe, "--world-size", "2", "--memory", "60"]) == 1
    told = capfd.readouterr()
    assert "TOO MUCH of the budget" in told.out and "gradients" in told.out and "estimate" in told.out.lower()
    assert "this does not fit: the peak is" in told.err and "more than the budget of 60.00 GiB" in told.err
    change = told.err.split("the smallest change that fits is ")[1].split(", with a peak")[0]
    keys, _, ranks = change.partition("--world-size")
    assert main(["plan", *recipe, *keys.split(), "--memory", "60", "--world-size", ranks.strip() or "2"]) == 0


def test_a_recipe_that_cannot_run_there_is_refused_as_validate_does(tmp_path, capfd):
    model = model_of(tmp_path, QWEN3_8B)
    assert main(["plan", "sft", model, "parallel.tp=6", "--world-size", "8"]) == 1
    told = capfd.readouterr()
    assert told.out == "" and "tp=6" in told.err and "query heads" in told.err
    assert main(["plan", "sft", model, "parallel.cpu_offload=true", "--world-size", "8"]) == 1
    assert "with parallel.cpu_offload=false" in capfd.readouterr().err
    assert main(["plan", "sft", "model.path=/nowhere", "--world-size", "2"]) == 1
    assert "there is no directory '/nowhere'" in capfd.readouterr().err
    assert main(["plan", "sft", model, "data.max_lenght=4", "parallel.tp=2", "--world-size", "4"]) == 1
    assert "has a problem:\n  - data.max_lenght" in capfd.readouterr().err  # and asks for no weights, nor other sizes
    with pytest.raises(SystemExit):
        main(["plan", "sft", "--gpu", "abacus"])
    with pytest.raises(SystemExit):
        main(["plan", "sft", "--memory", "0"])


def test_search_ranks_what_fits_and_says_what_became_of_the_rest(tmp_path):
    recipe = tiny_recipe(tmp_path, "train.dtype=auto", "train.global_batch=4", "train.micro_batch=1", family="llama")
    plan = make_plan(recipe, 4, GPUS["h100"])
    found = search(plan, best=3, max_traces=3)
    times = [one.time.total for one in found.best]
    assert len(times) == 3 and times == sorted(times)
    for one in found.best:
        sizes = one.sizes
        assert sizes.dp_replicate * sizes.dp_shard * sizes.cp * sizes.tp == 4
        assert sizes.dp * sizes.micro_batch * sizes.accumulation == 4 and one.step.peak <= plan.budget
        assert one.step.peak == make_plan(with_mesh(recipe, sizes), 4, GPUS["h100"]).step.peak
    assert found.counts["fit"] == 3 and found.counts["slower by the rough time, not traced"] > 0
    smallest = min(one.step.peak for one in found.best)
    assert not search(replace(plan, budget=smallest // 8), max_traces=2).best


def test_a_search_needs_no_mesh_that_fits_to_begin_with(tmp_path):
    recipe = tiny_recipe(tmp_path, "train.global_batch=2", "train.micro_batch=2", "parallel.tp=4", family="llama")
    with pytest.raises(RecipeError, match="train.global_batch=2"):
        make_plan(recipe, 8, GPUS["h100"])
    found = choose_starting_mesh(recipe, 8, 8)
    assert not problems(found, 8) and found.train.global_batch == 2
    wrong = tiny_recipe(tmp_path, "optimizer.lr=-1", "parallel.tp=3")
    assert choose_starting_mesh(wrong, 8, 8) is wrong


def test_the_models_beside_the_policy_are_looked_at(tmp_path):
    other = write_model(tmp_path / "other", "llama")
    recipe = tiny_recipe(tmp_path, "method=dpo", f"dpo.reference={other}")
    with pytest.raises(RecipeError, match="dpo.reference=.*other is another kind of model than model.path"):
        make_plan(recipe, 1, GPUS["h100"])
    with pytest.raises(RecipeError, match="grpo.reference=/nowhere: there is no such directory"):
        make_plan(tiny_grpo(tmp_path, "grpo.beta=0.1", "grpo.reference=/nowhere"), 1, GPUS["h100"])
    same = write_model(tmp_path / "same")  # without weights, which a plan does not read
    assert make_plan(tiny_recipe(tmp_path, "method=dpo", f"dpo.reference={same}"), 1, GPUS["h100"]).fits


def test_a_second_trace_does_not_wait_for_the_parents_threads(tmp_path):
    """A process with several threads that forks: what does not fit is traced more than once."""
    write_model(tmp_path / "model")
    words = [f"model.path={tmp_path}/model", "data.max_length=64", "train.micro_batch=1", *NO_OTHER_MEANS]
    words += ["train.activation_checkpointing=full", "parallel.reduce_each=false"]
    needed = make_plan(recipe_and_problems("sft", words)[0], 2, GPUS["h100"]).step.peak
    told = subprocess.run(
        [
            sys.executable,
            "-m",
            "dtrain",
            "plan",
            "sft",
            *words,
            "--world-size",
            "2",
            "--memory",
            f"{needed / 2**30 * 0.99}",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "4", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert told.returncode == 1 and "this does not fit" in told.stderr


def test_the_tensor_parallel_plan_is_printed(tmp_path):
    recipe = tiny_recipe(tmp_path, "parallel.tp=2", family="qwen3")
    plan = make_plan(recipe, 2, GPUS["h100"])
    assert report.as_json(plan)["tensor_parallel_plan"] == dict(
        models.build(plan.spec.model_config, device="meta").plan
    )
    lines = [line.split() for line in report.text(plan).splitlines()]
    assert ["model.layers.*.self_attn.q_proj", "colwise"] in lines and ["lm_head", "vocab_head"] in lines
    assert ["Tensor", "parallel", "over", "2", "ranks", "with", "sequence", "parallel"] in lines
    assert "Tensor parallel" not in report.text(make_plan(tiny_recipe(tmp_path), 2, GPUS["h100"]))


# Tokens/s of a GPU that torchtitan has published of its runs (docs/performance.md, benchmarks/), 8,192 tokens a row.
PUBLISHED = {
    "70B on 64 A100": (LLAMA_3_1_70B, "a100", None, 64, "micro_batch=1", "full", 331, 0.05),
    "8B on 8 H100, compiled": (LLAMA_3_1_8B, "h100", 2.4e12, 8, "micro_batch=2", "selective", 6667, 0.1),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_estimate_is_near_what_others_have_measured(tmp_path, name):
    config, gpu, bandwidth, ranks, micro, checkpointing, measured, rtol = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = [f"model.path={tmp_path}", "data.max_length=8192", "data.packing=false", "train.dtype=bfloat16"]
    settings += [f"train.activation_checkpointing={checkpointing}", f"train.{micro}"]
    recipe = tiny_recipe(tmp_path, *settings, f"train.global_batch={ranks * int(micro[-1])}")
    hardware = GPUS[gpu] if bandwidth is None else replace(GPUS[gpu], bandwidth=bandwidth)
    plan = make_plan(recipe, ranks, hardware)
    assert plan.tokens / plan.time.total / ranks == pytest.approx(measured, rel=rtol)


@pytest.mark.parametrize("method", ["grpo", "distill"])
def test_packed_rows_are_planned_with_the_kernel_that_they_take(tmp_path, method):
    """Two documents of a row cost half of its scores under varlen, and hold no mask; a CPU and float32 have none."""
    make = tiny_grpo if method == "grpo" else tiny_recipe
    words = [f"method={method}", "train.dtype=bfloat16", "data.max_length=64", "parallel.tp=2", "train.global_batch=8"]
    words += [f"distill.teacher={write_model(tmp_path / 'teacher')}"] if method == "distill" else []
    plans = {
        kind: make_plan(make(tmp_path, *words, f"model.attention={kind}", family="gemma3"), 4, GPUS["h100"])
        for kind in ("sdpa", "varlen", "auto")
    }
    flops = {kind: plan.step.flops[torch.bfloat16] for kind, plan in plans.items()}
    assert flops["auto"] == flops["varlen"] < flops["sdpa"]
    assert plans["auto"].step == plans["varlen"].step
    assert plans["auto"].step.traffic == plans["sdpa"].step.traffic
