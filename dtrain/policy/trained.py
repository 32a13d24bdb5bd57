"""Which parameters are trained: what `train.train_only` and `train.freeze` leave, and the dtype of the others."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from dtrain.config.schema import Train
from dtrain.errors import UserError


def freeze(model: nn.Module, section: Train, dtype: torch.dtype) -> None:
    """Leave out of training what the patterns of `section` say, and keep it in `dtype`, that of computation: it needs
    no master copy, no gradient and no optimizer state.

    model: before it lies on a mesh. A pattern names parameters as `named_parameters` does; `*` stands for any part. A
    parameter of several names (a tied head) matches if one of its names does. Raises UserError for a pattern that
    matches nothing, and where nothing is left to train.
    """
    only, frozen = section.train_only, section.freeze
    if not only and not frozen:
        return
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for key, patterns in (("train.train_only", only), ("train.freeze", frozen)):
        for pattern in patterns:
            if not any(_matches(known, [pattern]) for known in names.values()):
                first = next(iter(names.values()))[0]
                raise UserError(
                    f"{key}: {pattern} matches no parameter of the model; they have names such as {first}, and * "
                    "stands for any part"
                )
    frozen_copies = {
        parameter: nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        for parameter, known in names.items()
        if (only and not _matches(known, only)) or _matches(known, frozen)
    }
    if len(frozen_copies) == len(names):
        raise UserError("train.train_only and train.freeze leave no parameter to train")
    for module in model.modules():
        for name, held in module._parameters.items():
            if held is not None and held in frozen_copies:
                module._parameters[name] = frozen_copies[held]


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
