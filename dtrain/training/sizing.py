"""Sizes of a run that its recipe leaves to `auto`, decided on rank 0 and shared before anything is built.

They are what the run chose before on such a machine, else of a small model on CPUs the usual ones, else what the plan
beside the run chooses (`commands.plan.choose`), else such as take little memory.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtrain import models
from dtrain import recipe as config
from dtrain.base.errors import UserError
from dtrain.checkpoint.huggingface.safetensor_files import weight_files
from dtrain.recipe.world import (
    AUTO,
    USUAL,
    Config,
    as_choices,
    dp_of,
    open_keys,
    replace_keys,
    value_of_key,
    without_auto,
)
from dtrain.training.directory import ABOUT
from dtrain.training.inputs import RunInputs, World
from dtrain.training.registry import REWARD_MODEL, TEACHER

if TYPE_CHECKING:
    import torch.distributed as dist

CPU = "cpu"
_LEAST = {"train.micro_batch": 1, "train.activation_checkpointing": "full", "parallel.reduce_each": True}
MACHINE = "machine"
"""Key of about.json: kind, memory and number of the devices that sizes were chosen for."""
_SURE = 0.25  # of the memory, within which a closed form needs no plan
_FREE_KEYS = ("run.", "launch.", "metrics.", "checkpoint.", "eval.", "train.steps", "train.epochs")  # cost no memory
_COPIES = 8  # of the weights in float64: masters, gradients, moments, gathered, a reference
_TENSORS = 64  # of a token's width in float64 that a layer keeps, generously


@dataclass(frozen=True)
class Sizing:
    """Values of the keys that a recipe leaves open, and lines that say why."""

    values: Mapping[str, Any]
    lines: tuple[str, ...]

    @classmethod
    def of(cls, recipe: Config, values: Mapping[str, Any], why: str) -> "Sizing":
        """Return `values` for what `recipe` leaves open, with one line that gives the reason for all."""
        return cls(values, (f"{', '.join(as_choices(recipe, values))} (auto): {why}",))


def previous_sizing(inputs: RunInputs, machine: Mapping[str, Any]) -> Sizing | None:
    """Return what this run chose before on such a machine, for a recipe whose memory is the same; None where it did
    not."""
    recipe, run = inputs.original_recipe, inputs.run
    with suppress(OSError, ValueError, KeyError, UserError):
        if recipe.checkpoint.resume is None or json.loads((run.path / ABOUT).read_text())[MACHINE] != machine:
            return None
        saved = run.config.read_text(encoding="utf-8")
        values = {key: old for key, old, new in config.diff(saved, recipe) if key in USUAL and new == AUTO}
        differing = [key for key, _, _ in config.diff(saved, replace_keys(recipe, values))]
        if values.keys() == {*open_keys(recipe)} and all(key.startswith(_FREE_KEYS) for key in differing):
            return Sizing.of(recipe, values, "as this run chose before, on the same machine")
    return None


def small_model_sizing(inputs: RunInputs, memory: int) -> Sizing | None:
    """Return the usual values for processes of a CPU with `memory` bytes each, where a closed form that is far too
    large shows that they fit; None where it takes a plan."""
    method, shape = inputs.method, inputs.source.config
    if any(key.endswith((TEACHER, REWARD_MODEL)) for key, _ in method.other_models()):
        return None
    model = models.build(shape, device="meta")
    weights = sum(parameter.numel() for parameter in model.parameters())
    if inputs.recipe.model.init == "pretrained":  # with a tower, whose weights may be in 4 bits
        weights = max(weights, 2 * sum(file.stat().st_size for file in weight_files(inputs.source.path)))
    length = method.max_row_length()
    tokens = inputs.recipe.train.micro * length * method.rows_per_sample()
    width = max(sum(weight.shape[0] for weight in layer.parameters()) for layer in model.model.layers)
    heads = shape.num_attention_heads
    kept = tokens * (shape.num_hidden_layers * (width + heads * length) + 4 * shape.vocab_size)
    if 8 * (_COPIES * weights + _TENSORS * kept) > memory * _SURE:
        return None
    values = {key: value_of_key(inputs.recipe, key) for key in open_keys(inputs.original_recipe)}
    return Sizing.of(inputs.original_recipe, values, "a small model")


def describe_machine(world_size: int, device_name: str, memory: int) -> dict[str, Any]:
    """Return what a choice of sizes depends on beside the recipe, as about.json keeps it."""
    return {"device": device_name, "memory": memory, "world_size": world_size}


def sizing_without_plan(recipe: Any, machine: Mapping[str, Any], host: int) -> Sizing | None:
    """Return the sizes of a run on CPUs that needs no plan for them, or None. host: bytes of its memory for a rank."""
    inputs = RunInputs.of(recipe, World(machine["world_size"]))
    return previous_sizing(inputs, machine) or small_model_sizing(inputs, host)


def sizing_with_plan(
    recipe: Any, machine: Mapping[str, Any], host: int, planned: Any, device: Any = None, free: int | None = None
) -> Sizing:
    """Return the sizes of a run: on GPUs those that it chose before on such a machine, else by its plan.

    planned: the plan beside the run, None where there can be none. host: bytes of the host's memory for a rank. device:
    the GPU with the least memory, None on CPUs; free: its bytes, where others use it too. Raises UserError where
    nothing fits.
    """
    world_size, is_cpu = machine["world_size"], machine["device"] == CPU
    before = None if is_cpu else previous_sizing(RunInputs.of(recipe, World(world_size)), machine)
    if before is not None:
        if planned is not None:
            planned.settle(before.values)
        return before
    why = "no plan" if recipe.metrics.plan is not False else "metrics.plan=false"
    if planned is not None:
        peak = planned.choose(host if is_cpu else free or machine["memory"], device, host)
        if peak.choice is not None:
            return peak.choice
        why = peak.words
    return Sizing.of(recipe, _without_plan(recipe, world_size), why)


def _without_plan(recipe: Any, world_size: int) -> dict[str, Any]:
    """Return values that take little memory, where no plan can choose them."""
    usual = without_auto(recipe, dp_of(recipe, world_size))
    values = {key: value_of_key(usual, key) for key in open_keys(recipe)}
    if recipe.parallel.cpu_offload:
        return values
    values |= {key: value for key, value in _LEAST.items() if key in values}
    if recipe.train.masters != "float32" and "parallel.reduce_each" in values:
        values["parallel.reduce_each"] = False  # it would round their sums otherwise
    return values


def share_sizing(
    recipe: Config, rank: int, attempt: int, store: "dist.Store | None", decide: Callable[[], Sizing]
) -> tuple[Config, tuple[str, ...]]:
    """Return `recipe` with the values that `decide` gives on rank 0, and lines for the terminal. store: where the ranks
    meet; None for a single rank. Raises UserError on every rank where `decide` does."""
    key, answer = f"sizes of attempt {attempt}", "null"
    if rank == 0:
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
    return replace_keys(recipe, decided["values"]), tuple(decided["lines"])
