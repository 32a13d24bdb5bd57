"""Setup of the optimizer: its name and arguments, and the precision in which weights and moments are stored."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dtrain.base.errors import Problem, UserError
from dtrain.base.ranges import Range, format_value, is_finite
from dtrain.policy.optimizer import (
    OPTIMIZER_NAMES,
    UNSHARDED_ONLY,
    build_optimizer,
    is_torch_optimizer,
    sharded_step_error,
)
from dtrain.policy.options import Precision
from dtrain.recipe.schema import OPTIMIZERS
from dtrain.training.inputs import RunInputs
from dtrain.training.setup.code import unknown_name


def check_keys(inputs: RunInputs) -> list[Problem]:
    """Check the section `optimizer`, and the keys for low-bit weights and moments."""
    problems = unknown_name("optimizer.name", inputs.recipe.optimizer.name, OPTIMIZERS)
    return problems + _check_memory_options(inputs) + _check_muon(inputs)


def _check_memory_options(inputs: RunInputs) -> list[Problem]:
    """Check combinations of low-bit weights, low-bit moments and moments on the host."""
    recipe = inputs.recipe
    name, state = recipe.optimizer.name, recipe.optimizer.state
    masters, dtype = recipe.train.masters, recipe.train.dtype
    chosen = {}  # each setting that saves memory, and the setting without it
    if state != "float32":
        chosen[f"optimizer.state={state}"] = "optimizer.state=float32"
    if masters != "float32":
        chosen[f"train.masters={masters}"] = "train.masters=float32"
    if recipe.parallel.optimizer_offload:
        chosen["parallel.optimizer_offload=true"] = "parallel.optimizer_offload=false"
    if not chosen:
        return []
    named = " and ".join(chosen)
    undo = " and ".join(chosen.values())
    first_key = named.partition("=")[0]
    problems = []
    if recipe.parallel.optimizer_offload and recipe.parallel.cpu_offload:
        text = (
            "parallel.optimizer_offload=true and parallel.cpu_offload=true exclude each other, since the second keeps "
            "the optimizer's state and its step on the host already"
        )
        problems.append(Problem("parallel.optimizer_offload", text, "Set one of them to false"))
    # muon has no low-bit state and no state on the host, but its weights may be bfloat16.
    has_only_bfloat16_masters = list(chosen) == ["train.masters=bfloat16"]
    allowed = ("adamw", "adam", "muon") if has_only_bfloat16_masters else ("adamw", "adam")
    if name not in allowed:
        text = f"{named} needs optimizer.name={' or '.join(allowed)}, and optimizer.name={name}"
        problems.append(Problem(first_key, text, f"Set {undo}"))
    elif name != "muon":
        text = f"optimizer.kwargs.{{}} does not go with {named}, which accepts lr, betas, eps and weight_decay there"
        problems += _check_kwargs(inputs, _ADAM_KWARGS, text, f"Leave it out, or set {undo}")
    if masters == "bfloat16" and dtype not in ("auto", "bfloat16"):
        text = f"train.masters=bfloat16 stores weights in bfloat16, so train.dtype={dtype} would gain nothing"
        problems.append(Problem("train.masters", text, "Set train.dtype=bfloat16, or train.masters=float32"))
    elif state != "float32" and dtype == "float64":
        text = f"train.dtype=float64 is for exact numbers, and optimizer.state={state} rounds moments"
        fix = "Set train.dtype=float32 or bfloat16, or optimizer.state=float32"
        problems.append(Problem("train.dtype", text, fix))
    if masters == "bfloat16" and recipe.parallel.cpu_offload:
        text = (
            "parallel.cpu_offload=true steps on the host, where the stochastic rounding of train.masters=bfloat16 "
            "would dominate the step"
        )
        problems.append(Problem("train.masters", text, "Set parallel.cpu_offload=false, or train.masters=float32"))
    return problems


def _is_below_one(value: Any) -> bool:
    return is_finite(value) and 0 <= value < 1


def _are_betas(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_is_below_one(beta) for beta in value)


def _are_coefficients(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(is_finite(entry) for entry in value)


# Entries of `optimizer.kwargs` that dtrain's low-bit AdamW and Adam accept, with the same ranges as torch's.
_NOT_NEGATIVE: Range = (lambda value: is_finite(value) and value >= 0, "a finite number, at least 0")
_ADAM_KWARGS: dict[str, Range] = {
    "lr": _NOT_NEGATIVE,
    "betas": (_are_betas, "two numbers from 0 up to 1"),
    "eps": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
}
# Those that torch.optim.Muon accepts.
_MUON_KWARGS: dict[str, Range] = {
    "momentum": (_is_below_one, "a number from 0 up to 1"),
    "nesterov": (lambda value: isinstance(value, bool), "true or false"),
    "ns_steps": (lambda value: type(value) is int and 1 <= value < 100, "a whole number from 1 to 99"),
    "ns_coefficients": (_are_coefficients, "three numbers"),
    "adjust_lr_fn": (lambda value: value in ("match_rms_adamw", "original"), "match_rms_adamw or original"),
}


def _check_kwargs(inputs: RunInputs, accepted: Mapping[str, Range], unknown: str, fix: str = "") -> list[Problem]:
    """Check the entries of `optimizer.kwargs`.

    Args:
        inputs: The run's inputs.
        accepted: The ranges of the accepted entries.
        unknown: The text about another entry, with {} for its name.
        fix: The fix for another entry.
    """
    problems = []
    for name, value in inputs.recipe.optimizer.kwargs.items():
        key = f"optimizer.kwargs.{name}"
        if name not in accepted:
            problems.append(Problem(key, unknown.format(name), fix))
            continue
        is_in_range, range_text = accepted[name]
        if not is_in_range(value):
            problems.append(Problem(key, f"{key}={format_value(value)} must be {range_text}"))
    return problems


def notes(inputs: RunInputs) -> list[str]:
    """Return a note if the learning rate is 0, which is useful to check a pipeline.

    Muon has two rates, and `optimizer.kwargs` overrides both.
    """
    section = inputs.recipe.optimizer
    adam_lr = (section.adam_lr or 0.0) if section.name == "muon" else 0.0
    if section.lr != 0 or adam_lr > 0 or "lr" in section.kwargs:
        return []
    return [
        "note: optimizer.lr=0: the run computes losses and gradients and leaves the weights as they are. To train, set "
        "a rate, such as 1e-5 (2e-4 with lora)"
    ]


def _check_muon(inputs: RunInputs) -> list[Problem]:
    """Check `optimizer.kwargs` of muon, and `optimizer.adam_lr` of other optimizers."""
    section = inputs.recipe.optimizer
    if section.name != "muon":
        if section.adam_lr is None:
            return []
        text = f"optimizer.adam_lr is for optimizer.name=muon, and optimizer.name={section.name}"
        return [Problem("optimizer.adam_lr", text, "Set optimizer.lr, or optimizer.adam_lr=null")]
    unknown = f"optimizer.kwargs.{{}} is not one of muon's: {', '.join(_MUON_KWARGS)}"
    return _check_kwargs(inputs, _MUON_KWARGS, unknown)


def build(inputs: RunInputs, model: nn.Module, precision: Precision) -> torch.optim.Optimizer | None:
    """Build the optimizer over `model`, which is on the meta device.

    Returns:
        The optimizer; None if the recipe names one by an import path, since only a run imports that.

    Raises:
        UserError: If the optimizer does not accept its arguments, or if it cannot step sharded parameters.
    """
    section = inputs.recipe.optimizer
    if not (section.name in OPTIMIZER_NAMES or is_torch_optimizer(section.name)):
        return None
    built = build_optimizer(section, model.named_parameters(), inputs.recipe.run.seed)
    # FSDP, whose parameters are sharded tensors, is also used on one rank if the precision is mixed.
    is_mixed = precision.compute not in (torch.float32, torch.float64)
    is_sharded = inputs.world.size > 1 or is_mixed
    if is_sharded and isinstance(built, UNSHARDED_ONLY):
        raise UserError(sharded_step_error(section.name))
    return built
