"""Stage optimizer: the optimizer and its arguments, and the bits of weights and moments."""

from collections.abc import Mapping
from functools import partial

import torch

from dtrain.base.errors import UserError
from dtrain.base.ranges import Range, is_finite, shown
from dtrain.policy.optimizer import NAMES, UNSHARDED_ONLY, build_optimizer, cannot_step_shards, is_torchs
from dtrain.recipe.schema import OPTIMIZERS
from dtrain.training.host import Host
from dtrain.training.setup.code import unknown_name
from dtrain.training.spec import RunSpec


def check_keys(spec: RunSpec) -> list[str]:
    """Check the section `optimizer`, and the keys around it that say in what bits weights and moments are held."""
    name = unknown_name("optimizer.name", spec.recipe.optimizer.name, OPTIMIZERS)
    return [*name, *_few_bits(spec), *_muon(spec)]


def _few_bits(spec: RunSpec) -> list[str]:
    """Return conflicts of weights and moments of fewer bits than float32, or of moments on the host."""
    recipe = spec.recipe
    state, masters, dtype = recipe.optimizer.state, recipe.train.masters, recipe.train.dtype
    settings = {
        f"optimizer.state={state}": state != "float32",
        f"train.masters={masters}": masters != "float32",
        "parallel.optimizer_offload=true": recipe.parallel.optimizer_offload,
    }
    fewer = [setting for setting, is_set in settings.items() if is_set]
    if not fewer:
        return []
    problems, named = [], " and ".join(fewer)
    back = " and ".join(
        key.partition("=")[0] + ("=false" if key.startswith("parallel") else "=float32") for key in fewer
    )
    if recipe.parallel.optimizer_offload and recipe.parallel.cpu_offload:
        problems.append(
            "parallel.optimizer_offload=true and parallel.cpu_offload=true: the second has the optimizer's state and "
            "its step on the host already; set one of them to false"
        )
    can = ("adamw", "adam", "muon") if fewer == ["train.masters=bfloat16"] else ("adamw", "adam")
    if recipe.optimizer.name not in can:
        able = f"{', '.join(can[:-1])} and {can[-1]}"
        problems.append(f"{named}: for {able}, and optimizer.name={recipe.optimizer.name}; set {back}")
    elif recipe.optimizer.name != "muon":
        why = f"not with {named}, whose step takes lr, betas, eps and weight_decay there; leave it out, or set {back}"
        problems += _kwargs(spec, _ADAMS, f"optimizer.kwargs.{{}}: {why}")
    if masters == "bfloat16" and dtype not in ("auto", "bfloat16"):
        problems.append(
            f"train.masters=bfloat16 keeps weights in bfloat16, in which train.dtype={dtype} would gain nothing: set "
            "train.dtype=bfloat16, or train.masters=float32"
        )
    elif state != "float32" and dtype == "float64":
        problems.append(
            f"train.dtype=float64 is for exact numbers, and optimizer.state={state} rounds moments: set "
            "train.dtype=float32 or bfloat16, or optimizer.state=float32"
        )
    if masters == "bfloat16" and recipe.parallel.cpu_offload:
        problems.append(
            "parallel.cpu_offload=true steps on the host, where the rounding of train.masters=bfloat16 would take "
            "longer than all else: set parallel.cpu_offload=false, or train.masters=float32"
        )
    return problems


# What dtrain's own AdamW and Adam take of `optimizer.kwargs`, as torch's do.
_SIZE = (lambda v: is_finite(v) and v >= 0, "a finite number, at least 0")
_ADAMS: dict[str, Range] = {
    "lr": _SIZE,
    "betas": (
        lambda v: isinstance(v, list) and len(v) == 2 and all(is_finite(beta) and 0 <= beta < 1 for beta in v),
        "two numbers from 0 up to 1",
    ),
    "eps": _SIZE,
    "weight_decay": _SIZE,
}


def _kwargs(spec: RunSpec, holds: Mapping[str, Range], unknown: str) -> list[str]:
    """Return the entries of `optimizer.kwargs` that are none of `holds`, in the words of `unknown`, or break its
    rule."""
    problems = []
    for key, value in spec.recipe.optimizer.kwargs.items():
        if key not in holds:
            problems.append(unknown.format(key))
        elif not holds[key][0](value):
            problems.append(f"optimizer.kwargs.{key}={shown(value)} must be {holds[key][1]}")
    return problems


def notes(spec: RunSpec) -> list[str]:
    """Return a note on a learning rate of 0, with which a pipeline can be checked. Muon has two rates, and the
    arguments of the optimizer's class win."""
    section = spec.recipe.optimizer
    others = (section.adam_lr or 0.0) if section.name == "muon" else 0.0
    if section.lr != 0 or others > 0 or "lr" in section.kwargs:
        return []
    return [
        "note: optimizer.lr=0: the run computes losses and gradients and leaves the weights as they are. To train, set "
        "a rate, such as 1e-5 (2e-4 with lora)"
    ]


def _muon(spec: RunSpec) -> list[str]:
    """Check `optimizer.kwargs` of muon, and `optimizer.adam_lr` of others."""
    section, name = spec.recipe.optimizer, spec.recipe.optimizer.name
    if name != "muon":
        is_set = section.adam_lr is not None
        fix = f"optimizer.adam_lr is muon's, and optimizer.name={name}: set optimizer.lr, or optimizer.adam_lr=null"
        return [fix] if is_set else []
    holds: dict[str, Range] = {
        "momentum": (lambda v: is_finite(v) and 0 <= v < 1, "a number from 0 up to 1"),
        "nesterov": (lambda v: isinstance(v, bool), "true or false"),
        "ns_steps": (lambda v: type(v) is int and 1 <= v < 100, "a whole number from 1 to 99"),
        "ns_coefficients": (lambda v: isinstance(v, list) and len(v) == 3 and all(map(is_finite, v)), "three numbers"),
        "adjust_lr_fn": (lambda v: v in ("match_rms_adamw", "original"), "match_rms_adamw or original"),
    }
    return _kwargs(spec, holds, f"optimizer.kwargs.{{}} is none of muon's: {', '.join(holds)}")


def resolve(spec: RunSpec, host: Host) -> bool:
    """Put the optimizer over the model on meta, on the first rank."""
    host.first(partial(build, spec))
    return True


def build(spec: RunSpec) -> None:
    """Put the optimizer over the model, where no stranger's code is needed for it. Raises UserError, also where it
    cannot step what FSDP shards."""
    section, model = spec.recipe.optimizer, spec.model
    if model is None or not (section.name in NAMES or is_torchs(section.name)):
        return
    spec.optimizer = build_optimizer(section, model.named_parameters(), spec.recipe.run.seed)
    is_mixed = spec.precision.compute not in (torch.float32, torch.float64)  # one process mixes by FSDP
    if (spec.world.size > 1 or is_mixed) and isinstance(spec.optimizer, UNSHARDED_ONLY):
        raise UserError(cannot_step_shards(section.name))
