"""Apply a plan: a table of module pattern → style, over a model's modules, ties kept and nothing unmatched."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from dtrain.errors import UserError
from dtrain.parallel.tensor import STYLES, Style, TensorParallel

Plan = Mapping[str, str | Style | ParallelStyle]


def apply_plan(model: nn.Module, mesh: DeviceMesh, plan: Plan, *, sequence_parallel: bool) -> None:
    """Put `model` on the one-dimensional tp `mesh` by `plan`. No collective.

    A pattern names modules as `named_modules` does; `*` stands for any part. A style is a name of `tensor.STYLES`, a
    function (module, TensorParallel) or one of torch's ParallelStyle objects. Parameters shared before are shared after.

    Raises UserError for a pattern that matches no module or a style that is not known.
    """
    tp = TensorParallel(mesh, sequence_parallel, model.config.num_key_value_heads)
    modules = dict(model.named_modules())
    problems = []
    for pattern, style in plan.items():
        if isinstance(style, str) and style not in STYLES:
            problems.append(f"{pattern}: there is no style {style!r}; there are {', '.join(STYLES)}")
        if not any(fnmatchcase(name, pattern) for name in modules):
            problems.append(f"{pattern}: matches no module of the model")
    if problems:
        raise UserError("the tensor-parallel plan does not fit the model:\n  " + "\n  ".join(problems))
    tied = _tied_parameters(model)
    for pattern, style in plan.items():
        for name, module in modules.items():
            if not fnmatchcase(name, pattern):
                continue
            if isinstance(style, ParallelStyle):
                style._apply(module, mesh)
            else:
                (STYLES[style] if isinstance(style, str) else style)(module, tp)
    for (first, name), *others in tied:
        for module, other in others:
            module._parameters[other] = first._parameters[name]


def _tied_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of every parameter that stands in more than one."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]
