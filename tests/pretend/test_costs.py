"""Mutants of what a step costs: memory that is not needed, a mask where none is, a wait of the host. Each is noticed by
what other tests hold: bytes against the plan, kernels that take no mask, waits of a step."""

from typing import NamedTuple

import pytest

from tests.pretend.mutants import Mutant
from tests.pretend.runs import train_on_card
from tests.pretend.test_long_rows import CLOSE, counted, planned
from tests.pretend.test_memory import CASES, SHAPE
from tests.pretend.worlds import run_pretend
from tests.tiny import tiny_recipe, write_model


class Cost(NamedTuple):
    """of dtrain: `line` of `module` becomes `instead`; what is noticed in the run of a case of test_memory."""

    module: str
    line: str
    instead: str
    case: str = "packed"
    length: int = 1024
    vocab: int = 3001


MEMORY = {
    "a mask where none is needed": Cost("policy.build", "        return kernel\n", "        return SdpaKernel()\n"),
    "distances of int64": Cost(
        "attention.kernels",
        "q_pos, k_pos = self.query_positions.int(), self.key_positions.int()",
        "q_pos, k_pos = self.query_positions, self.key_positions",
        "float32",
        8192,
        301,
    ),
    "the head's gradient twice": Cost(
        "losses.head.weighted_sum",
        "add_product_(self._weight_grad, grad.t(), hidden)",
        "self._weight_grad = self._weight_grad + product(grad.t(), hidden).to(self._weight_grad.dtype)",
    ),
    "keys repeated for their query heads": Cost(
        "attention.varlen",
        "q, k, v = (part.flatten(0, 1) for part in (q, k, v))  # [B · S, heads, hd]\n        return self.flash(",
        "q, k, v = (part.flatten(0, 1) for part in (q, k, v))\n"
        "        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))\n"
        "        return self.flash(",
    ),
    "gathered keys repeated": Cost(
        "attention.context",
        "    outputs = []\n    for chunk, segments in",
        "    k, v = (part.repeat_interleave(q.shape[2] // part.shape[1], 1) for part in (k, v))\n"
        "    outputs = []\n    for chunk, segments in",
        "cp",
    ),
    "the ring's output kept wide": Cost(
        "attention.blocks",
        "ctx.save_for_backward(q, kv, out.to(q.dtype), lse, sinks)",
        "ctx.save_for_backward(q, kv, out.to(q.dtype), lse, sinks)\n        ctx.wide = out",
        "ring",
        8192,
    ),
    "all logits at once": Cost(
        "losses.head.weighted_sum",
        "rows_per_tile or tile_rows_of(weight, shard)",
        "rows_per_tile or len(index)",
        "padded, computed again",
        65536,
    ),
    "activations kept": Cost(
        "policy.build",
        "checkpoint_activations(model, recipe.train.activation_checkpointing)",
        'checkpoint_activations(model, "none")',
        "padded, computed again",
        vocab=301,
    ),
}
WAITS = {
    "a micro-batch that is waited for": Cost(
        "policy.score", "views(here.to(device, non_blocking=True))", "views(here.to(device))"
    ),
    "lengths that are waited for": Cost(
        "attention.varlen", "host.to(device, non_blocking=True).split", "host.to(device).split"
    ),
    "the loss read": Cost("policy.policy", "totals.append(", "loss.item()\n            totals.append("),
    "memory that is not pinned": Cost("attention.varlen", 'pin_memory=device.type == "cuda"', "pin_memory=False"),
}


def of_case(root, name, length, vocab):
    size, keys = CASES[name]
    path = write_model(root / "model", "qwen3", tied=False, **SHAPE | {"vocab_size": vocab})
    fixed = f"model.path={path}", "train.dtype=bfloat16", "train.global_batch=2"
    return tiny_recipe(root, *fixed, "train.micro_batch=1", *keys, f"data.max_length={length}"), size


def mutant_of(cost):
    return Mutant(f"dtrain.{cost.module}", cost.line, cost.instead)


@pytest.mark.parametrize("name", MEMORY)
def test_memory_that_is_not_needed_is_noticed(tmp_path, name):
    recipe, size = of_case(tmp_path, *MEMORY[name][3:])
    plan, found = planned(recipe, size), counted(recipe, size, mutants=[mutant_of(MEMORY[name])])
    print(f"{name}: {found / plan - 1:+.1%}")
    assert found > plan * (1 + CLOSE)


@pytest.mark.parametrize("shape", sorted({cost[3:] for cost in MEMORY.values()}), ids=str)
def test_without_a_mutant_the_plan_is_met(tmp_path, shape):
    recipe, size = of_case(tmp_path, *shape)
    assert abs(counted(recipe, size) / planned(recipe, size) - 1) <= CLOSE


def waits(recipe, **more):
    """Of a run: the host's waits for the card, and copies from memory that is not pinned."""
    (felt,) = run_pretend(train_on_card, 1, recipe, 1, **more)
    return felt.count("sync"), felt.count("pageable")


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_that_is_not_needed_is_noticed(tmp_path, name):
    keys = "train.steps=1", "scheduler.warmup_steps=0", "train.dtype=bfloat16"
    usual = waits(tiny_recipe(tmp_path, *keys, name="usual"))
    mutated = waits(tiny_recipe(tmp_path, *keys, name="mutated"), mutants=[mutant_of(WAITS[name])])
    assert mutated > usual
