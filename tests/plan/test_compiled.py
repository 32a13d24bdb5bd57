"""Plans of compiled layers under selective checkpointing: what they keep, compute again and send."""

import json
from dataclasses import replace

import pytest
import torch

from dtrain.commands.plan.hardware import GPUS, estimate_step
from dtrain.commands.plan.plan import make_plan
from tests.plan.test_command import LLAMA_3_1_8B
from tests.tiny import tiny_recipe

LENGTH, LAYERS = 8192, 2  # of the large model, and of the tiny one


def step_of(recipe, ranks):
    return make_plan(recipe, ranks, GPUS["h100"]).step


@pytest.mark.slow
@pytest.mark.processes
def test_compiled_layers_keep_what_the_backward_reads_alone(tmp_path):
    """The layer's input, rotated queries and keys, values, what attention and its projection give, gate and up; not the
    result of the MLP, which is added up, nor queries and keys before they are rotated."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    shape = f"model.path={tmp_path}", f"data.max_length={LENGTH}", "train.dtype=bfloat16", "train.micro_batch=1"
    shape = *shape, "train.global_batch=8", "train.compile=true"
    none, selective = (
        step_of(tiny_recipe(tmp_path, *shape, f"train.activation_checkpointing={kind}"), 8)
        for kind in ("none", "selective")
    )
    hidden, heads, inner, layers = 4096, 1024, 14336, 32
    kept = 2 * layers * LENGTH * (4 * hidden + 2 * heads + 2 * inner)
    assert selective.activations == pytest.approx(kept, rel=0.015)  # beside them the ids, the logsumexp, one input
    assert selective.activations < 0.6 * none.activations
    assert selective.flops == none.flops


@pytest.mark.slow
@pytest.mark.processes
def test_compiled_layers_send_nothing_again(tmp_path):
    """Layers as written gather twice more, and scatter no more."""
    sent = {}
    for kind, is_compiled in [("none", "true"), ("selective", "true"), ("selective", "false"), ("full", "true")]:
        keys = f"train.activation_checkpointing={kind}", f"train.compile={is_compiled}", "train.micro_batch=4"
        step = step_of(tiny_recipe(tmp_path, "parallel.tp=2", "train.global_batch=4", *keys), 2)
        counts = {key.kind: count for key, (count, _) in step.traffic.items() if key.dimension == "tp"}
        sent[kind, is_compiled] = [counts["all-gather"], counts["reduce-scatter"]]
    gathers, scatters = sent["none", "true"]
    assert sent == {
        ("none", "true"): [gathers, scatters],
        ("selective", "true"): [gathers, scatters],
        ("selective", "false"): [gathers + 2 * LAYERS, scatters],
        ("full", "true"): [gathers + 2 * LAYERS, scatters + LAYERS],
    }


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("is_compiled", "kind", "times"),
    [("true", "full", 2), ("false", "full", 2), ("false", "none", 1), ("true", "none", 0)],
)
def test_gathered_keys_travel_behind_the_products_of_queries(tmp_path, is_compiled, kind, times):
    keys = f"train.compile={is_compiled}", f"train.activation_checkpointing={kind}", "parallel.cp=2"
    shape = "train.micro_batch=4", "train.global_batch=4", "train.dtype=bfloat16"
    plan = make_plan(tiny_recipe(tmp_path, *keys, *shape), 2, GPUS["h100"])
    tokens, hidden, heads = 4 * 32 // 2, 32, 64
    product = 2 * tokens * hidden * heads * LAYERS
    behind = {key.kind: flops for (key, _), flops in plan.step.overlapped_flops.items()}
    assert behind == ({"all-gather": times * product, "reduce-scatter": 2 * product} if times else {})
    alone = estimate_step(replace(plan.step, overlapped_flops={}), plan.spec.sizes, plan.hardware)
    moved = sum(behind.values()) / (plan.hardware.arithmetic[torch.bfloat16] * plan.hardware.reach)
    assert plan.time.hidden - alone.hidden == pytest.approx(moved, rel=1e-9)
    assert alone.exposed - plan.time.exposed == pytest.approx(moved, rel=1e-9)
