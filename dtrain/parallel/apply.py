"""Application of a tensor-parallel plan, which is a table from patterns of module names to styles.

Example of a plan for a Llama layer (`models` has the plan of each family):

    model.layers.*.self_attn            block            hidden states enter here, once for q, k and v
    model.layers.*.self_attn.q_proj     colwise
    model.layers.*.self_attn.o_proj     rowwise          partial sums leave here

`apply_plan` shards a model by its plan. It checks first that the styles fit each other, because many wrong plans would
run without an error and give wrong gradients.
"""

import inspect
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from dtrain.base.errors import UserError
from dtrain.base.plugins import import_object
from dtrain.parallel.tensor import (
    STYLE_MODULES,
    STYLES,
    AdapterStyle,
    LocalParameters,
    ParallelModel,
    Stack,
    Style,
    TensorParallel,
    replicated,
)

AnyStyle = str | Style | ParallelStyle
Plan = Mapping[str, AnyStyle]


def find_plan(custom: str | Plan | None, model: ParallelModel) -> Plan:
    """Return the plan that a recipe selects.

    Args:
        custom: A plan, or the import path or plugin name of a plan or of a function that returns a plan. The function
            is called with the model if it has a parameter. None: the model's own plan.
        model: The model.

    Raises:
        UserError: If the path cannot be imported, or does not lead to a plan.
    """
    if custom is None:
        return model.plan
    if not isinstance(custom, str):
        return custom
    plan = import_object(custom, "parallel.custom_plan")
    if callable(plan):
        plan = plan(model) if inspect.signature(plan).parameters else plan()
    if not isinstance(plan, Mapping):
        raise UserError(
            f"parallel.custom_plan={custom} is a {type(plan).__name__}, not a table of module pattern and style"
        )
    return plan


def apply_plan(model: ParallelModel, mesh: DeviceMesh, plan: Plan, *, sequence_parallel: bool) -> None:
    """Shard `model` in place over the tp ranks. No collective.

    Modules that no pattern matches are replicated. Parameters that were shared before are shared afterwards.

    Functions and torch's ParallelStyle objects are not checked, except that they must not be used on a layer with an
    adapter, whose matrices they do not know.

    Args:
        model: The model, whose parameters are the same on every rank.
        mesh: The tp ranks, one dimension.
        plan: From patterns of module names (`*` matches any part of a name) to styles. A style is a name in
            `tensor.STYLES`, a function (module, TensorParallel), or one of torch's ParallelStyle objects. A function
            that knows adapters is an `AdapterStyle`. If several
            patterns match a module, the last one counts.
        sequence_parallel: Whether activations between blocks are sharded along the sequence.

    Raises:
        UserError: If a pattern matches no module, a style is unknown, or named styles do not fit each other.
    """
    tp = TensorParallel(mesh, sequence_parallel, model.config.num_key_value_heads)
    modules = dict(model.named_modules())
    tied = _tied_parameters(model)
    styles = match_styles(model, plan, sequence_parallel=sequence_parallel)
    for name, style in styles.items():
        if isinstance(style, ParallelStyle):
            style._apply(modules[name], mesh)
        elif isinstance(style, str):
            STYLES[style](modules[name], tp)
        else:
            style(modules[name], tp)
    for name, module in modules.items():
        if name not in styles and isinstance(module, LocalParameters):
            replicated(module, tp)
    # Styles have made a separate DTensor in each module that shares a parameter.
    for (first, name), *others in tied:
        for module, other in others:
            module._parameters[other] = first._parameters[name]


def match_styles(model: ParallelModel, plan: Plan, *, sequence_parallel: bool) -> dict[str, AnyStyle]:
    """Return the style of each module that a plan matches, by module name. The model is not changed.

    Args:
        model: The model.
        plan: See `apply_plan`.
        sequence_parallel: Whether activations between blocks are sharded along the sequence.

    Raises:
        UserError: As in `apply_plan`.
    """
    modules = dict(model.named_modules())
    styles: dict[str, AnyStyle] = {}
    used_patterns = set()
    for name in modules:
        patterns = [pattern for pattern in plan if fnmatchcase(name, pattern)]
        used_patterns.update(patterns)
        if patterns:
            styles[name] = plan[patterns[-1]]

    problems = []
    for pattern, style in plan.items():
        if isinstance(style, str) and style not in STYLES:
            problems.append(f"{pattern}: there is no style {style!r}; there are {', '.join(STYLES)}")
        if pattern not in used_patterns:
            problems.append(f"{pattern}: matches no module of the model")
    if not problems:  # the other checks need known styles
        problems = _merge_layers(_PlanCheck.of(model, styles, sequence_parallel).problems(), modules)
    if problems:
        raise UserError("the tensor-parallel plan does not fit the model:\n  " + "\n  ".join(problems))
    return styles


def style_name(style: AnyStyle) -> str:
    """Return the name of a style, or that of its function or class."""
    if isinstance(style, str):
        return style
    if isinstance(style, AdapterStyle):
        style = style.function
    return getattr(style, "__qualname__", type(style).__name__)


_BLOCKS = ("block", "within")
_IN_BLOCK = {"colwise", "colwise_kv", "rowwise", "rowwise_within", "head_norm", "heads", "latent", "router", "within"}
_SUMMING = ("rowwise", "rowwise_within", "expert_rowwise")  # styles whose layers sum what the ranks of a block compute


@dataclass
class _PlanCheck:
    """Check whether the named styles of a plan fit each other.

    A plan that fails this check would run and give wrong gradients. A style without a name (a function or one of
    torch's ParallelStyle objects) may do anything, also the work of a missing style. So modules next to such a style
    are not reported for a missing style.

    Attributes:
        modules: Modules of the model by name.
        styles: Style of each matched module by name.
        tied: Places of each shared parameter, as modules and names of parameters.
        is_sharding_sequence: Whether sequence parallel shards what modules outside of blocks read.
        unnamed: Names of the modules whose style has no name.
    """

    modules: dict[str, nn.Module]
    styles: dict[str, AnyStyle]
    tied: list[list[tuple[nn.Module, str]]]
    is_sharding_sequence: bool
    unnamed: set[str]

    @classmethod
    def of(cls, model: ParallelModel, styles: dict[str, AnyStyle], sequence_parallel: bool) -> "_PlanCheck":
        unnamed = {name for name, style in styles.items() if not isinstance(style, str)}
        has_named = len(unnamed) < len(styles)
        # A plan without any named style shards the sequence by its own means.
        is_sharding_sequence = sequence_parallel and (has_named or not unnamed)
        return cls(dict(model.named_modules()), styles, _tied_parameters(model), is_sharding_sequence, unnamed)

    def problems(self) -> list[str]:
        """Return the problems of the plan, one line each."""
        problems = self._wrong_classes() + self._unknown_adapters()
        for name, module in self.modules.items():
            problems += self._problems_of_module(name, module)
        return problems + self._problems_of_ends() + self._problems_of_ties()

    def _wrong_classes(self) -> list[str]:
        """Check that modules have the class that their style needs."""
        problems = []
        for name, style in self.styles.items():
            if not isinstance(style, str):
                continue
            needed = STYLE_MODULES.get(style, LocalParameters)
            if not isinstance(self.modules[name], needed):
                problems.append(
                    f"{name}: {style} is a style of a {needed.__name__} ({needed.__module__}), and this is a "
                    f"{type(self.modules[name]).__name__}"
                )
        return problems

    def _unknown_adapters(self) -> list[str]:
        """Check that layers with an adapter have a style that knows adapters."""
        problems = []
        for name, style in self.styles.items():
            if isinstance(style, str | AdapterStyle) or style in STYLES.values():
                continue
            if any(key.startswith("lora_") for key in self.modules[name]._parameters):
                problems.append(
                    f"{name}: {style_name(style)} does not know the adapter of this layer; give it a named style "
                    f"({', '.join(STYLES)}), or name the layer in lora.exclude"
                )
        return problems

    def _problems_of_module(self, name: str, module: nn.Module) -> list[str]:
        """Check a module's style against that of its parent, and a block against the layers inside."""
        problems = []
        style = self.styles.get(name)
        parent = name.rpartition(".")[0]
        is_in_block = self.styles.get(parent) in (*_BLOCKS, "router")
        if name not in self.unnamed and style in _IN_BLOCK and not is_in_block and parent not in self.unnamed:
            problems.append(f"{name}: {style} needs the style block on {parent}")
        if name not in self.unnamed and style not in (None, *_IN_BLOCK) and is_in_block:
            problems.append(f"{name}: {style} is no style of a layer in a block, and {parent} is one")
        if module._parameters and style is None:
            if is_in_block:
                problems.append(f"{name}: has no style, and {parent} is a block")
            elif self.is_sharding_sequence:
                problems.append(
                    f"{name}: has no style, and sequence parallel cuts what it reads; give it one, or set "
                    "parallel.sequence_parallel=false"
                )
        if style in _BLOCKS:
            inner = [other for other in self.styles if other.startswith(f"{name}.")]
            has_sum = any(other in self.unnamed or self.styles[other] in _SUMMING for other in inner)
            if not has_sum:
                problems.append(f"{name}: a block needs a rowwise layer, which sums what its ranks computed")
        return problems

    def _problems_of_ends(self) -> list[str]:
        """Check that embedding, decoder and head have styles that go together."""
        # A function on an embedding, the head or the full decoder may shard or gather the sequence or the vocabulary
        # itself, so nothing can be checked.
        for name in self.unnamed:
            if isinstance(self.modules[name], nn.Embedding | Stack) or "." not in name:
                return []
        named = {style for style in self.styles.values() if isinstance(style, str)}
        has_head = "vocab_head" in named or "score_head" in named
        problems = []
        if has_head != ("decoder" in named):
            problems.append(
                "vocab_head and decoder go together: the head's ranks hand the decoder parts of its gradient"
            )
        if self.is_sharding_sequence and not {"decoder", "vocab_embedding"} <= named:
            problems.append(
                "sequence parallel needs the styles decoder and vocab_embedding, which cut and join it; give them, or "
                "set parallel.sequence_parallel=false"
            )
        return problems

    def _problems_of_ties(self) -> list[str]:
        """Check that all modules which share a parameter have a style, or none has."""
        names = {module: name for name, module in self.modules.items()}
        problems = []
        for places in self.tied:
            sharing = [names[module] for module, _ in places]
            num_styled = sum(name in self.styles for name in sharing)
            if num_styled not in (0, len(sharing)):
                problems.append(f"{' and '.join(sharing)} share a parameter: both have a style, or neither")
        return problems


def _merge_layers(problems: list[str], modules: Collection[str]) -> list[str]:
    """Merge problems that every layer has into one line, in which `*` replaces the layer's number."""
    num_modules = Counter(_without_layer_number(name) for name in modules)
    groups: dict[str, list[str]] = {}
    for problem in problems:
        groups.setdefault(_without_layer_number(problem), []).append(problem)
    lines = []
    for general, members in groups.items():
        pattern = general.partition(":")[0]
        if len(members) == num_modules[pattern]:
            lines.append(general)
        else:
            lines += members
    return lines


def _without_layer_number(text: str) -> str:
    """Replace numbers in module names by `*`, for example layers.3.mlp by layers.*.mlp."""
    return re.sub(r"\.\d+(?=[.: ]|$)", ".*", text)


def _tied_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of each parameter that several modules share: the modules, and its name in each."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [tied for tied in places.values() if len(tied) > 1]
