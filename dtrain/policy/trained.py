"""Choice of the parameters that are trained, by `train.vision`, `train.train_only` and `train.freeze` or an adapter;
and the dtype of the others."""

from collections.abc import Collection
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch import nn

from dtrain.adapters.config import is_adapter
from dtrain.base.errors import UserError
from dtrain.base.name_patterns import matched, unmatched
from dtrain.base.problems import Problem
from dtrain.models.common.decoder import CausalLM
from dtrain.parallel.tensor import exact_modules
from dtrain.policy.config import PolicyConfig
from dtrain.recipe.schema import Train

if TYPE_CHECKING:
    from dtrain.models.vision.common import VisionTower


def choose_trained(model: CausalLM, recipe: PolicyConfig, dtype: torch.dtype) -> None:
    """Add the adapter of `recipe`, and leave out of training what it does not train; that is kept in `dtype`, that of
    computation: it needs no master copy, no gradient and no optimizer state.

    model: on meta, before it lies on a mesh. Raises UserError for patterns that match nothing, for dropout of a vision
    tower's adapters, and where nothing is left to train.
    """
    if recipe.lora is None:
        _freeze(model, _left_out(model, _names(model), recipe.train), dtype)
        return
    from dtrain.adapters.lora import add_adapters
    from dtrain.checkpoint.huggingface.quantized import hold_in_4_bits
    from dtrain.checkpoint.peft.config import adapter_of
    from dtrain.models.shapes import adaptable

    config = adapter_of(asdict(recipe.lora))
    if problem := config.dropout_problem(adaptable(model.config)):
        raise UserError(problem)
    model.adapters = add_adapters(model, config, recipe.run.seed)
    modules = {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)}
    whole = {module for module in modules if config.saved([model.config.whole(module)])}
    trained = {model.config.whole(module) for module in whole}
    is_nf4 = recipe.lora.quantize == "nf4"
    hold_in_4_bits(model, recipe.model.directory, dtype, nf4=is_nf4, except_for=trained)
    frozen = {
        parameter
        for parameter, known in _names(model).items()
        if not any(is_adapter(name) or name.rpartition(".")[0] in whole for name in known)
    }
    _freeze(model, frozen, dtype)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("lora.target names layers of the vision tower alone, and no data have images: name others")


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _left_out(model: CausalLM, names: dict[nn.Parameter, list[str]], section: Train) -> set[nn.Parameter]:
    """Return the parameters, of these `names`, that `section` leaves out. A pattern names parameters as
    `named_parameters` does; `*` stands for any part. A parameter of several names (a tied head) matches if one of its
    names does."""
    all_names, of_tower = [name for known in names.values() for name in known], set[str]()
    problems = unmatched(section.parameter_patterns, all_names)
    for tower in model.model.vision:
        of_tower |= frozen_names(section, tower)
        problems += frozen_pattern_problems(section, tower, all_names)
    if problems:
        raise UserError(problems[0])
    only, frozen = section.train_only, section.freeze
    out = {
        parameter
        for parameter, known in names.items()
        if (only and not matched(known, only)) or matched(known, frozen) or of_tower.intersection(known)
    }
    if len(out) == len(names):
        vision = f"train.vision={section.vision}, " if of_tower else ""
        raise UserError(f"{vision}train.train_only and train.freeze leave no parameter to train")
    return out


def frozen_names(section: Train, tower: "VisionTower") -> set[str]:
    """Return the names, in the model of `tower`, of its parameters that `train.vision` freezes."""
    trained = {"frozen": (), "projector": tower.projector, "all": ("*",)}[section.vision]
    return {f"model.{name}" for name, _ in tower.named_parameters() if not matched([name], trained)}


def frozen_pattern_problems(section: Train, tower: "VisionTower", names: Collection[str]) -> list[Problem]:
    """Refuse patterns of `train.train_only` that match only parameters that `train.vision` freezes.

    Args:
        section: The section `train`.
        tower: The vision tower.
        names: Names of all parameters of the model.
    """
    frozen = frozen_names(section, tower)
    problems = []
    for pattern in section.train_only:
        named = {name for name in names if matched([name], [pattern])}
        if named and named <= frozen:
            text = f"train.train_only: {pattern} matches only parameters that train.vision={section.vision} freezes"
            problems.append(Problem("train.train_only", text, "Set train.vision=all"))
    return problems


def _freeze(model: nn.Module, frozen: Collection[nn.Parameter], dtype: torch.dtype) -> None:
    exact = {parameter for module in exact_modules(model).values() for parameter in module.parameters()}
    wide = torch.promote_types(dtype, torch.float32)
    floats = (
        (parameter, wide if parameter in exact else dtype) for parameter in frozen if parameter.is_floating_point()
    )
    copies = {parameter: nn.Parameter(parameter.detach().to(own), requires_grad=False) for parameter, own in floats}
    for module in model.modules():
        for name, held in module._parameters.items():
            if held is not None and held in copies:
                module._parameters[name] = copies[held]
