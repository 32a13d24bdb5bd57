"""Sizes that a recipe leaves to `auto`, decided on rank 0 and shared with all ranks before anything is built."""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dtrain.base.errors import UserError
from dtrain.base.host_memory import host_memory
from dtrain.launch.place import RankPlace
from dtrain.recipe.automatic import Config, changed, open_keys, value_of, without_auto
from dtrain.recipe.world import dp_of
from dtrain.run.spec import RunSpec, World

if TYPE_CHECKING:
    import torch.distributed as dist

    from dtrain.run.sizing import Sizing

CPU = "cpu"

PLAN_SECONDS = 120.0  # that a run on GPUs waits for its plan, before it reads weights
_LEAST = {"train.micro_batch": 1, "train.activation_checkpointing": "full", "parallel.reduce_each": True}


def sized(
    recipe: Config,
    place: RankPlace,
    store: "dist.Store | None",
    decide: Callable[[], "Sizing"],
) -> tuple[Config, tuple[str, ...]]:
    """Return `recipe` with the values that `decide` gives on rank 0, and lines for the terminal. store: where the ranks
    of several meet. Raises UserError on every rank where `decide` does."""
    key, answer = f"sizes of attempt {place.attempt}", "null"
    if place.rank == 0:
        try:
            sizing = decide()
            answer = json.dumps({"values": dict(sizing.values), "lines": sizing.lines})
        except UserError as error:
            answer = json.dumps({"refusal": str(error)})
        if store is not None:
            store.set(key, answer)
    else:
        assert store is not None, "several ranks meet in a store"
        answer = store.get(key).decode()
    decided = json.loads(answer)
    if "refusal" in decided:
        raise UserError(decided["refusal"])
    return changed(recipe, decided["values"]), tuple(decided["lines"])


def machine_of(world_size: int, device_name: str, memory: int) -> dict[str, Any]:
    """Return what a choice of sizes depends on beside the recipe, as about.json keeps it."""
    return {"device": device_name, "memory": memory, "world_size": world_size}


def sizing_of_cpu(recipe: Any, place: RankPlace, machine: Mapping[str, Any]) -> "Sizing | None":
    """Return the sizes of a run on CPUs that needs no plan for them, or None."""
    from dtrain.run.sizing import sizing_before, usual_sizing

    spec = RunSpec(recipe, World(place.world_size))
    return sizing_before(spec, machine) or usual_sizing(spec, host_memory(place.local_world_size))


def sizing_by_plan(
    recipe: Any, place: RankPlace, machine: Mapping[str, Any], planned: Any, device: Any = None, free: int | None = None
) -> "Sizing":
    """Return the sizes of a run: on GPUs those that it chose before on such a machine, else by its plan.

    planned: the plan beside the run, None where there can be none. device: the GPU with the least memory, None on CPUs;
    free: its bytes, where others use it too. Raises UserError where nothing fits.
    """
    from dtrain.run.sizing import Sizing, sizing_before

    is_cpu = machine["device"] == CPU
    before = None if is_cpu else sizing_before(RunSpec(recipe, World(place.world_size)), machine)
    if before is not None:
        if planned is not None:
            planned.settle(before.values)
        return before
    why = "no plan" if recipe.metrics.plan is not False else "metrics.plan=false"
    if planned is not None:
        host = host_memory(place.local_world_size)
        peak = planned.choose(host if is_cpu else free or machine["memory"], device, host, PLAN_SECONDS)
        if peak.choice is not None:
            return Sizing(peak.choice.values, peak.choice.lines)
        why = peak.words
    return Sizing.of(_without_plan(recipe, place.world_size), why)


def _without_plan(recipe: Any, world_size: int) -> dict[str, Any]:
    """Return values that take little memory, where no plan can choose them."""
    usual = without_auto(recipe, dp_of(recipe, world_size))
    values = {key: value_of(usual, key) for key in open_keys(recipe)}
    if recipe.parallel.cpu_offload:
        return values
    values |= {key: value for key, value in _LEAST.items() if key in values}
    if recipe.train.masters != "float32" and "parallel.reduce_each" in values:
        values["parallel.reduce_each"] = False  # it would round their sums otherwise
    return values
