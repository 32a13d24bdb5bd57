"""Rows of 32k to 128k tokens: the bytes that a step of the real trainer holds, counted on a hollow card.

A hollow card hands out memory that nobody touches, so that one process stands for a rank of many, of a model of any
size. That it counts what a card that computes does is shown at a tiny size.
"""

import torch.distributed as dist

from dtrain.commands.plan.plan import resolve_plan
from dtrain.commands.plan.step import plan_step
from tests.pretend.card import GIB, Card
from tests.pretend.test_memory import CASES, SHAPE, peak_of_a_step
from tests.pretend.worlds import run_pretend
from tests.tiny import tiny_recipe, write_model

CLOSE = 0.01
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def hollow_peak(rank, recipe, size):
    """`peak_of_a_step` of rank 0 of `size`, of which no other is there: a collective leaves memory as it is."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend "fake")

    if not dist.is_initialized():
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    return peak_of_a_step(0, recipe, size)


def hollow_peaks(rank, recipes, size):
    return [hollow_peak(rank, recipe, size) for recipe in recipes]


def counted(recipe, size, **more):
    (found,) = run_pretend(hollow_peak, 1, recipe, size, card=Card(hollow=True), **more)
    return found


def planned(recipe, size):
    return plan_step(resolve_plan(recipe, size, "cuda")).peak


def test_a_hollow_card_counts_what_one_that_computes_does(tmp_path):
    size, keys = CASES["ring"]
    path = write_model(tmp_path / "model", "qwen3", tied=False, **SHAPE)
    shape = f"model.path={path}", "train.dtype=bfloat16", "train.global_batch=2", "train.micro_batch=1"
    recipe = tiny_recipe(tmp_path, *shape, *keys, "train.activation_checkpointing=full")
    assert counted(recipe, size) == run_pretend(peak_of_a_step, size, recipe, size)[0]


def of_8b(root, exchange, length, *more, **changes):
    path = write_model(root / "model", "llama", tied=False, **LLAMA_8B | changes)
    shape = f"model.path={path}", "train.dtype=bfloat16", "train.global_batch=1", "train.micro_batch=1"
    keys = "train.activation_checkpointing=full", "parallel.cp=8", f"parallel.cp_rotate={exchange}"
    return tiny_recipe(root, *shape, *keys, f"data.max_length={length}", *more)


def test_nothing_grows_with_queries_times_keys(tmp_path):
    exchange = "allgather"
    few = {"num_hidden_layers": 2, "vocab_size": 1024}  # so that activations hold most
    recipes = [of_8b(tmp_path, exchange, length, **few) for length in (32768, 65536, 131072)]
    (found,) = run_pretend(hollow_peaks, 1, recipes, 8, card=Card(hollow=True))
    print(exchange, *(f"{one / GIB:.2f} GiB" for one in found))
    assert found[2] - found[1] <= 2.02 * (found[1] - found[0])


def test_tiles_and_activations_on_the_host_hold_what_is_planned(tmp_path):
    """Two tiles a row, of each rank."""
    shape = {"num_hidden_layers": 3, "vocab_size": 1024, "intermediate_size": 28672}
    keys = "train.tile=all", "train.activation_offload=true"
    recipes = [of_8b(tmp_path, "allgather", 65536, *more, **shape) for more in ((), keys)]
    (found,) = run_pretend(hollow_peaks, 1, recipes, 8, card=Card(hollow=True))
    plan = planned(recipes[1], 8)
    print(f"{found[0] / GIB:.2f} GiB, in tiles {found[1] / GIB:.2f} GiB, {plan / found[1] - 1:+.2%}")
    assert found[1] < found[0]
    assert abs(plan / found[1] - 1) <= CLOSE


def test_llama_8b_holds_what_is_planned_and_fits_in_40_gib(tmp_path):
    exchange, length = "ring", 131072
    recipe = of_8b(tmp_path, exchange, length)
    plan, found = planned(recipe, 8), counted(recipe, 8, timeout=300.0)
    print(f"{exchange} {length}: planned {plan / GIB:.2f} GiB, counted {found / GIB:.2f} GiB, {plan / found - 1:+.2%}")
    assert found <= 40 * GIB
    assert abs(plan / found - 1) <= CLOSE
