"""Apply a plan: a table of module pattern → style, over a model's modules, ties kept and nothing left half placed."""

import inspect
import re
from collections import Counter
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from dtrain.base.errors import UserError
from dtrain.parallel.tensor import (
    STYLE_MODULES,
    STYLES,
    LocalParameters,
    ParallelModel,
    Stack,
    Style,
    TensorParallel,
    replicated,
)

Plan = Mapping[str, str | Style | ParallelStyle]


def find_plan(custom: str | Plan | None, model: ParallelModel) -> Plan:
    """The model's own plan, or what replaces it: a table, or the import path of a table or of a function that returns
    one, called with the model or without arguments. Raises UserError."""
    if custom is None:
        return model.plan
    if not isinstance(custom, str):
        return custom
    module, _, name = custom.rpartition(".")
    try:
        plan = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"parallel.custom_plan={custom}: {error}; give the import path of a plan") from error
    if callable(plan):
        plan = plan(model) if inspect.signature(plan).parameters else plan()
    if not isinstance(plan, Mapping):
        raise UserError(
            f"parallel.custom_plan={custom} is a {type(plan).__name__}, not a table of module pattern and style"
        )
    return plan


def apply_plan(model: ParallelModel, mesh: DeviceMesh, plan: Plan, *, sequence_parallel: bool) -> None:
    """Put `model` on the one-dimensional tp `mesh` by `plan`. No collective.

    A pattern names modules as `named_modules` does; `*` stands for any part. A style is a name of `tensor.STYLES`, a
    function (module, TensorParallel) or one of torch's ParallelStyle objects. Where several patterns match a module,
    the last one counts; where none does, it is replicated. Parameters shared before are shared after.

    Raises UserError for a pattern that matches no module, a style that is not known, and named styles that do not go
    together: they would train wrong numbers. Functions and torch's objects answer for themselves, but not for an
    adapter's matrices, which they do not know.
    """
    tp = TensorParallel(mesh, sequence_parallel, model.config.num_key_value_heads)
    modules, tied = dict(model.named_modules()), _tied_parameters(model)
    styles = match_styles(model, plan, sequence_parallel=sequence_parallel)
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


def match_styles(
    model: ParallelModel, plan: Plan, *, sequence_parallel: bool
) -> dict[str, Style | str | ParallelStyle]:
    """The style of each module that `plan` names. Raises UserError as `apply_plan` does; the model stays as it is."""
    modules = dict(model.named_modules())
    matched = {name: [pattern for pattern in plan if fnmatchcase(name, pattern)] for name in modules}
    problems = []
    for pattern, style in plan.items():
        if isinstance(style, str) and style not in STYLES:
            problems.append(f"{pattern}: there is no style {style!r}; there are {', '.join(STYLES)}")
        if not any(pattern in patterns for patterns in matched.values()):
            problems.append(f"{pattern}: matches no module of the model")
    styles = {name: plan[patterns[-1]] for name, patterns in matched.items() if patterns}
    contradictions = _contradictions(modules, styles, _tied_parameters(model), sequence_parallel)
    problems = problems or _by_layers(contradictions, modules)
    if problems:
        raise UserError("the tensor-parallel plan does not fit the model:\n  " + "\n  ".join(problems))
    return styles


def style_name(style: str | Style | ParallelStyle) -> str:
    """A style's name, or that of its function or class."""
    return style if isinstance(style, str) else getattr(style, "__qualname__", type(style).__name__)


_BLOCKS = ("block", "within")
_IN_BLOCK = {"colwise", "colwise_kv", "rowwise", "rowwise_within", "head_norm", "heads", "latent", "router", "within"}
_JOINING = ("rowwise", "rowwise_within", "expert_rowwise")


def _contradictions(
    modules: dict[str, nn.Module],
    styles: dict[str, Any],
    tied: list[list[tuple[nn.Module, str]]],
    sequence_parallel: bool,
) -> list[str]:
    """Return what named styles need of one another and lack; a table that breaks it runs, and gives wrong gradients. A
    style without a name may be what another needs."""
    named = {style for style in styles.values() if isinstance(style, str)}
    unnamed = {name for name, style in styles.items() if not isinstance(style, str)}
    cut = sequence_parallel and (named or not unnamed)
    problems = []
    for name, style in styles.items():
        kind = STYLE_MODULES.get(style, LocalParameters) if name not in unnamed else nn.Module
        if not isinstance(modules[name], kind):
            class_name = type(modules[name]).__name__
            problems.append(
                f"{name}: {style} is a style of a {kind.__name__} ({kind.__module__}), and this is a {class_name}"
            )
    for name in unnamed:
        if styles[name] not in STYLES.values() and any(key.startswith("lora_") for key in modules[name]._parameters):
            problems.append(
                f"{name}: {style_name(styles[name])} does not know the adapter beside this layer; give it a named "
                f"style ({', '.join(STYLES)}), or name the layer in lora.exclude"
            )
    for name, module in modules.items():
        style, parent = styles.get(name), name.rpartition(".")[0]
        in_block = styles.get(parent) in (*_BLOCKS, "router")
        if name not in unnamed and style in _IN_BLOCK and not in_block and parent not in unnamed:
            problems.append(f"{name}: {style} needs the style block on {parent}")
        if name not in unnamed and style not in (None, *_IN_BLOCK) and in_block:
            problems.append(f"{name}: {style} is no style of a layer in a block, and {parent} is one")
        if module._parameters and style is None and (in_block or cut):
            reading = "sequence parallel cuts what it reads; give it one, or set parallel.sequence_parallel=false"
            problems.append(f"{name}: has no style, and {f'{parent} is a block' if in_block else reading}")
        inside = {other for other in styles if other.startswith(f"{name}.")}
        joining = {other for other in inside if styles[other] in _JOINING}
        if style in _BLOCKS and not (inside & unnamed or joining):
            problems.append(f"{name}: a block needs a rowwise layer, which sums what its ranks computed")
    # Functions on an embedding, the head or the whole decoder may cut or join a sequence or vocabulary themselves.
    if not any(isinstance(modules[name], nn.Embedding | Stack) or "." not in name for name in unnamed):
        if bool({"vocab_head", "score_head"} & named) != ("decoder" in named):
            problems.append(
                "vocab_head and decoder go together: the head's ranks hand the decoder parts of its gradient"
            )
        if cut and not {"decoder", "vocab_embedding"} <= named:
            needed = "the styles decoder and vocab_embedding, which cut and join it"
            problems.append(f"sequence parallel needs {needed}; give them, or set parallel.sequence_parallel=false")
    names = {module: name for name, module in modules.items()}
    for places in tied:
        sharing = [names[module] for module, _ in places]
        if len({name in styles for name in sharing}) > 1:
            problems.append(f"{' and '.join(sharing)} share a parameter: both have a style, or neither")
    return problems


def _by_layers(problems: list[str], modules: Collection[str]) -> list[str]:
    """A problem that every layer has alike once, the layer's number written `*`; the others as they are."""

    def any_layer(text: str) -> str:
        return re.sub(r"\.\d+(?=[.: ]|$)", ".*", text)

    names = Counter(map(any_layer, modules))
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(any_layer(problem), []).append(problem)
    lines = []
    for general, members in alike.items():
        lines += [general] if len(members) == names[general.partition(":")[0]] else members
    return lines


def _tied_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [names for names in places.values() if len(names) > 1]
