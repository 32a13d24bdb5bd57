"""Apply a plan: a table of module pattern → style, over a model's modules, ties kept and nothing left half placed."""

import inspect
from collections.abc import Mapping
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from dtrain.errors import UserError
from dtrain.parallel.local import LocalParameters
from dtrain.parallel.tensor import STYLES, Style, TensorParallel, replicated

Plan = Mapping[str, str | Style | ParallelStyle]


def find_plan(custom: str | Plan | None, model: nn.Module) -> Plan:
    """The model's own plan, or what replaces it: a table, or the import path of a table or of a function that gives
    one, of the model or of nothing. Raises UserError."""
    if custom is None:
        return model.plan
    if not isinstance(custom, str):
        return custom
    module, _, name = custom.rpartition(".")
    try:
        plan = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"custom_plan={custom}: {error}; give the import path of a plan") from error
    if callable(plan):
        plan = plan(model) if inspect.signature(plan).parameters else plan()
    if not isinstance(plan, Mapping):
        raise UserError(f"custom_plan={custom} is a {type(plan).__name__}, not a table of module pattern and style")
    return plan


def apply_plan(model: nn.Module, mesh: DeviceMesh, plan: Plan, *, sequence_parallel: bool) -> None:
    """Put `model` on the one-dimensional tp `mesh` by `plan`. No collective.

    A pattern names modules as `named_modules` does; `*` stands for any part. A style is a name of `tensor.STYLES`, a
    function (module, TensorParallel) or one of torch's ParallelStyle objects. Where several patterns match a module,
    the last one counts; where none does, it is replicated. Parameters shared before are shared after.

    Raises UserError for a pattern that matches no module, a style that is not known, and named styles that do not go
    together: they would train wrong numbers. Functions and torch's objects answer for themselves.
    """
    tp = TensorParallel(mesh, sequence_parallel, model.config.num_key_value_heads)
    modules = dict(model.named_modules())
    matched = {name: [pattern for pattern in plan if fnmatchcase(name, pattern)] for name in modules}
    problems = []
    for pattern, style in plan.items():
        if isinstance(style, str) and style not in STYLES:
            problems.append(f"{pattern}: there is no style {style!r}; there are {', '.join(STYLES)}")
        if not any(pattern in patterns for patterns in matched.values()):
            problems.append(f"{pattern}: matches no module of the model")
    styles = {name: plan[patterns[-1]] for name, patterns in matched.items() if patterns}
    tied = _tied_parameters(model)
    problems = problems or _contradictions(modules, styles, tied, sequence_parallel)
    if problems:
        raise UserError("the tensor-parallel plan does not fit the model:\n  " + "\n  ".join(problems))
    for name, style in styles.items():
        if isinstance(style, ParallelStyle):
            style._apply(modules[name], mesh)
        else:
            (STYLES[style] if isinstance(style, str) else style)(modules[name], tp)
    for name, module in modules.items():
        if name not in styles and isinstance(module, LocalParameters):
            replicated(module, tp)
    for (first, name), *others in tied:
        for module, other in others:
            module._parameters[other] = first._parameters[name]


_IN_BLOCK = {"colwise", "colwise_kv", "rowwise", "head_norm"}


def _contradictions(
    modules: dict[str, nn.Module],
    styles: dict[str, Any],
    tied: list[list[tuple[nn.Module, str]]],
    sequence_parallel: bool,
) -> list[str]:
    """What named styles need of one another; a table that breaks it runs, and gives wrong gradients."""
    if not all(isinstance(style, str) for style in styles.values()):
        return []
    used = set(styles.values())
    problems = []
    for name, module in modules.items():
        style, parent = styles.get(name), name.rpartition(".")[0]
        in_block = styles.get(parent) == "block"
        if style in _IN_BLOCK and not in_block:
            problems.append(f"{name}: {style} needs the style block on {parent}")
        if in_block and style is not None and style not in _IN_BLOCK:
            problems.append(f"{name}: {style} is no style of a layer in a block, and {parent} is one")
        if module._parameters and style is None and (in_block or sequence_parallel):
            why = f"{parent} is a block" if in_block else "sequence parallel cuts what it reads"
            problems.append(f"{name}: has no style, and {why}")
        if style == "block" and "rowwise" not in {styles[other] for other in styles if other.startswith(f"{name}.")}:
            problems.append(f"{name}: a block needs a rowwise layer, which sums what its ranks computed")
    if ("vocab_head" in used) != ("decoder" in used):
        problems.append("vocab_head and decoder go together: the head's ranks hand the decoder parts of its gradient")
    if sequence_parallel and not {"decoder", "vocab_embedding"} <= used:
        problems.append("sequence parallel needs the styles decoder and vocab_embedding, which cut and join it")
    names = {module: name for name, module in modules.items()}
    for places in tied:
        sharing = [names[module] for module, _ in places]
        if len({name in styles for name in sharing}) > 1:
            problems.append(f"{' and '.join(sharing)} share a parameter: both have a style, or neither")
    return problems


def _tied_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of every parameter that stands in more than one."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]
