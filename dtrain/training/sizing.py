"""Sizes of a run that its recipe leaves to `auto`: decided on rank 0 and shared before anything is built.

Such sizes are, for example, `train.micro_batch` and `train.activation_checkpointing`. They come from the first of these
sources that knows them:

1. an earlier start of this run on the same machine (`previous_sizing`, which reads about.json and config.yaml)
2. on CPUs, the usual values, if a rough upper bound of the memory shows that a small model fits (`small_model_sizing`)
3. the memory plan of `dtrain plan`, which another process computes (`commands.plan.choose`)
4. values that need little memory, if there is no plan
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dtrain import models, recipe as config
from dtrain.base.errors import UserError
from dtrain.base.hardware import DeviceFacts
from dtrain.checkpoint.huggingface.safetensor_files import weight_files
from dtrain.recipe import Recipe
from dtrain.recipe.world import (
    AUTO,
    FASTEST_VALUES,
    Config,
    format_choices,
    get_key,
    num_dp_ranks,
    replace_auto,
    replace_keys,
    unresolved_auto_keys,
)
from dtrain.training.directory import ABOUT
from dtrain.training.inputs import RunInputs, World
from dtrain.training.registry import REWARD_MODEL, TEACHER

if TYPE_CHECKING:
    import torch.distributed as dist

CPU = "cpu"
MACHINE = "machine"
"""Key of about.json: the device, its memory, and the number of devices that the sizes were chosen for."""

# Values that need little memory.
_SMALLEST = {"train.micro_batch": 1, "train.activation_checkpointing": "full", "parallel.reduce_each": True}
# Changes of these keys and sections do not change the memory of a run.
_KEYS_WITHOUT_MEMORY = ("run.", "launch.", "metrics.", "checkpoint.", "eval.", "train.steps", "train.epochs")

# The upper bound of `small_model_sizing`. It is much too large on purpose, because no plan checks the result.
_SAFE_SHARE = 0.25  # share of the memory into which the bound has to fit
_BYTES = 8  # bytes per value, those of float64
_WEIGHT_COPIES = 8  # masters, gradients, two moments, gathered weights and a reference are 6; the rest is reserve
_KEPT_TENSORS = 64  # tensors of a layer's width that a layer stores for the backward; real layers store far fewer


@dataclass(frozen=True)
class Sizing:
    """Values of the keys that a recipe leaves to `auto`.

    Attributes:
        values: The values by key.
        lines: Lines for the terminal that give the reason.
    """

    values: Mapping[str, Any]
    lines: tuple[str, ...]

    @classmethod
    def of(cls, recipe: Config, values: Mapping[str, Any], reason: str) -> "Sizing":
        """Return `values` with one line that gives the reason for all of them."""
        return cls(values, (f"{', '.join(format_choices(recipe, values))} (auto): {reason}",))


class Peak(NamedTuple):
    """The peak memory of a rank, from a plan.

    Attributes:
        words: The peak as text, or the reason why there is none.
        size: Its bytes.
        too_much: Error if the device is too small, with the smallest change that would help.
        choice: Values for the keys of the recipe that are `auto`.
    """

    words: str
    size: int = 0
    too_much: str | None = None
    choice: Sizing | None = None


class BackgroundPlan(Protocol):
    """The plan of a run, which another process computes while the run starts.

    `commands.plan.background.PlannedPeak` implements it.
    """

    def peak(self, wait: float = 0.0) -> Peak | None:
        """Return the peak. None if it is not known within `wait` seconds."""

    def choose(self, memory: int, device: DeviceFacts | None, host: int) -> Peak:
        """Choose values for the keys that are `auto`. Raises UserError if nothing fits."""

    def settle(self, values: Mapping[str, Any]) -> None:
        """Pass values for the keys that are `auto`, if they were chosen without the plan."""

    def peak_if_too_large(self, device: DeviceFacts) -> Peak | None:
        """Return the peak if it does not fit on `device`, otherwise None."""


def previous_sizing(inputs: RunInputs, machine: Mapping[str, Any]) -> Sizing | None:
    """Return the sizes that an earlier start of this run chose.

    Args:
        inputs: The run's inputs.
        machine: The machine now, as `describe_machine` returns it.

    Returns:
        The sizes. None if there was no earlier start, or if the machine or a key that changes the memory is different.
    """
    recipe, run = inputs.original_recipe, inputs.run
    if recipe.checkpoint.resume is None:
        return None
    # The files may be missing, of an older version, or damaged. Then there are no earlier sizes.
    with suppress(OSError, ValueError, KeyError, UserError):
        about = json.loads((run.path / ABOUT).read_text())
        if about[MACHINE] != machine:
            return None
        saved = run.config.read_text(encoding="utf-8")
        values = {}
        for key, old, new in config.diff_recipes(saved, recipe):
            if key in FASTEST_VALUES and new == AUTO:
                values[key] = old
        other_changes = config.diff_recipes(saved, replace_keys(recipe, values))
        has_same_memory = all(key.startswith(_KEYS_WITHOUT_MEMORY) for key, _, _ in other_changes)
        if values.keys() == set(unresolved_auto_keys(recipe)) and has_same_memory:
            return Sizing.of(recipe, values, "as this run chose before, on the same machine")
    return None


def small_model_sizing(inputs: RunInputs, memory: int) -> Sizing | None:
    """Return the usual values if the model is so small that they fit in any case.

    An upper bound of the memory is compared with a quarter of `memory`. For example, the weights of a model with 1 M
    weights count as 8 copies of 8 bytes each, which is 64 MB. The activations of a micro-batch are added.

    Args:
        inputs: The run's inputs. The processes are on CPUs.
        memory: Bytes of memory for each process.

    Returns:
        The sizes. None if the bound does not fit, or if the method has a teacher or a reward model.
    """
    method, model_config = inputs.method, inputs.source.config
    for key, _ in method.other_models():
        if key.endswith((TEACHER, REWARD_MODEL)):
            return None
    model = models.build(model_config, device="meta")
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    if inputs.recipe.model.init == "pretrained":
        # The files also have the weights of a vision tower. At 4 bits, a byte is two weights.
        file_bytes = sum(file.stat().st_size for file in weight_files(inputs.source.path))
        num_weights = max(num_weights, 2 * file_bytes)
    length = method.max_row_length()
    num_tokens = inputs.recipe.train.num_micro_batch_rows * length * method.rows_per_sample()
    # The sum of the output sizes of a layer's weights bounds the values that the layer computes for a token. Attention
    # adds a score for each head and key.
    width = max(sum(weight.shape[0] for weight in layer.parameters()) for layer in model.model.layers)
    per_layer = width + model_config.num_attention_heads * length
    num_kept = num_tokens * (model_config.num_hidden_layers * per_layer + 4 * model_config.vocab_size)
    if _BYTES * (_WEIGHT_COPIES * num_weights + _KEPT_TENSORS * num_kept) > memory * _SAFE_SHARE:
        return None
    values = {key: get_key(inputs.recipe, key) for key in unresolved_auto_keys(inputs.original_recipe)}
    return Sizing.of(inputs.original_recipe, values, "a small model")


def describe_machine(world_size: int, device_name: str, memory: int) -> dict[str, Any]:
    """Return the part of about.json by which `previous_sizing` recognises a machine.

    Args:
        world_size: Number of ranks.
        device_name: Name of the GPU, or `CPU`.
        memory: Bytes of memory of the device.
    """
    return {"device": device_name, "memory": memory, "world_size": world_size}


def sizing_without_plan(recipe: Recipe, machine: Mapping[str, Any], host: int) -> Sizing | None:
    """Return the sizes of a run on CPUs if they are known without a plan; None otherwise.

    Args:
        recipe: The recipe.
        machine: The machine, as `describe_machine` returns it.
        host: Bytes of the host's memory for each rank.
    """
    inputs = RunInputs.of(recipe, World(machine["world_size"]))
    previous = previous_sizing(inputs, machine)
    return previous if previous is not None else small_model_sizing(inputs, host)


def sizing_with_plan(
    recipe: Recipe,
    machine: Mapping[str, Any],
    host: int,
    planned: BackgroundPlan | None,
    device: DeviceFacts | None = None,
    free: int | None = None,
) -> Sizing:
    """Return the sizes of a run: from an earlier start on the same GPUs, or else from the plan, or else small values.

    Args:
        recipe: The recipe.
        machine: The machine, as `describe_machine` returns it.
        host: Bytes of the host's memory for each rank.
        planned: The plan. None if no plan is computed.
        device: The GPU with the least memory. None on CPUs.
        free: Bytes of its memory that are free, if other processes use the GPU too.

    Raises:
        UserError: If nothing fits.
    """
    world_size, is_cpu = machine["world_size"], machine["device"] == CPU
    if not is_cpu:  # on CPUs, `sizing_without_plan` has tried it
        previous = previous_sizing(RunInputs.of(recipe, World(world_size)), machine)
        if previous is not None:
            if planned is not None:
                planned.settle(previous.values)  # the plan is still shown, and continues with these values
            return previous
    reason = "metrics.plan=false" if recipe.metrics.plan is False else "no plan"
    if planned is not None:
        memory = host if is_cpu else free or machine["memory"]
        peak = planned.choose(memory, device, host)
        if peak.choice is not None:
            return peak.choice
        reason = peak.words
    return Sizing.of(recipe, _small_values(recipe, world_size), reason)


def _small_values(recipe: Recipe, world_size: int) -> dict[str, Any]:
    """Return values that need little memory, for the keys that the recipe leaves to `auto`."""
    usual = replace_auto(recipe, num_dp_ranks(recipe, world_size))
    values = {key: get_key(usual, key) for key in unresolved_auto_keys(recipe)}
    if recipe.parallel.cpu_offload:
        return values
    for key, value in _SMALLEST.items():
        if key in values:
            values[key] = value
    if recipe.train.masters != "float32" and "parallel.reduce_each" in values:
        # With reduce_each, the bfloat16 gradients would be rounded after each micro-batch.
        values["parallel.reduce_each"] = False
    return values


def share_sizing(
    recipe: Config, rank: int, attempt: int, store: "dist.Store | None", decide: Callable[[], Sizing]
) -> tuple[Config, tuple[str, ...]]:
    """Decide the sizes on rank 0 and return the recipe with them, and lines for the terminal, on every rank.

    There is no process group yet, so the decision travels as JSON through the store.

    Args:
        recipe: The recipe.
        rank: This rank.
        attempt: Number of this start of the ranks, which makes the key in the store unique.
        store: The store that all ranks have opened. None for a single rank.
        decide: Returns the sizes. Called on rank 0 only.

    Raises:
        UserError: On every rank, if `decide` raises one.
    """
    key = f"sizes of attempt {attempt}"
    if rank == 0:
        try:
            sizing = decide()
            message = json.dumps({"values": dict(sizing.values), "lines": sizing.lines})
        except UserError as error:
            message = json.dumps({"refusal": str(error)})
        if store is not None:
            store.set(key, message)
    else:
        assert store is not None, "several ranks have a store"
        message = store.get(key).decode()
    decision = json.loads(message)
    if "refusal" in decision:
        raise UserError(decision["refusal"])
    return replace_keys(recipe, decision["values"]), tuple(decision["lines"])
