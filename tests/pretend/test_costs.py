"""Mutants of what a step costs: memory that is not needed, a mask where none is, a wait of the host. Each is noticed by
what other tests hold: bytes against the plan, kernels that take no mask, waits of a step."""

from typing import NamedTuple

import pytest

from tests.pretend.card import Card
from tests.pretend.mutants import Mutant
from tests.pretend.runs import train_on_card
from tests.pretend.test_long_rows import CLOSE, counted, hollow_peaks, planned
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
    "gathered keys repeated": Cost(
        "attention.context",
        "    outputs = []\n    for chunk, segments in",
        "    k, v = (part.repeat_interleave(q.shape[2] // part.shape[1], 1) for part in (k, v))\n"
        "    outputs = []\n    for chunk, segments in",
        "cp",
    ),
    "the ring's output kept wide": Cost(
        "attention.blocks",
        "ctx.save_for_backward(q, k, v, out.to(q.dtype), lse, sinks)",
        "ctx.save_for_backward(q, k, v, out.to(q.dtype), lse, sinks)\n        ctx.wide = out",
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
}
WAITS = {
    "a micro-batch that is waited for": Cost(
        "policy.score", "views_of(pinned.to(device, non_blocking=True))", "views_of(pinned.to(device))"
    ),
    "memory that is not pinned": Cost("attention.segments", 'pin_memory=device.type == "cuda"', "pin_memory=False"),
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


@pytest.mark.parametrize("size", [1, 2])
def test_without_a_mutant_the_plan_is_met(tmp_path, size):
    shapes = [shape for shape in sorted({cost[3:] for cost in MEMORY.values()}) if CASES[shape[0]][0] == size]
    recipes = [of_case(tmp_path / str(number), *shape)[0] for number, shape in enumerate(shapes)]
    (found,) = run_pretend(hollow_peaks, 1, recipes, size, card=Card(hollow=True))
    off = {shape: peak / planned(one, size) - 1 for shape, one, peak in zip(shapes, recipes, found, strict=True)}
    assert all(abs(share) <= CLOSE for share in off.values()), off


def waits(recipe, **more):
    """Return a run's waits of the host for the card, and its copies from memory that is not pinned."""
    (felt,) = run_pretend(train_on_card, 1, recipe, 1, **more)
    return felt.count("sync"), felt.count("pageable")


def test_a_wait_that_is_not_needed_is_noticed(tmp_path):
    keys = "train.steps=1", "scheduler.warmup_steps=0", "train.dtype=bfloat16"
    usual = waits(tiny_recipe(tmp_path, *keys, name="usual"))
    for name, cost in WAITS.items():
        assert waits(tiny_recipe(tmp_path, *keys, name=name), mutants=[mutant_of(cost)]) > usual, name
