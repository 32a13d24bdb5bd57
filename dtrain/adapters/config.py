"""The configuration of adapters (LoRA, rsLoRA and DoRA in PEFT's terms) and the layers that get one.

Imports no torch. Names are matched as in PEFT (https://huggingface.co/docs/peft/package_reference/lora):

    a list          each entry is a module's name or the end of one, for example `q_proj`
    a text          a regular expression for the full name
    `all-linear`    every linear layer of the decoder

In PEFT `all-linear` includes the vision tower. Here the tower's layers must be named by a list or an expression, so
that a recipe means the same layers with and without images. In transformers, experts are stacks of matrices and most
routers are single matrices, not linear layers. Only lists name them, as PEFT's `target_parameters` do.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtrain.base.name_patterns import matches_suffix
from dtrain.models.common.config import is_in_vision_tower

ALL_LINEAR = "all-linear"
EMBEDDING_AND_HEAD = ("model.embed_tokens", "lm_head")
PARAMETERS = ("lora_A", "lora_B", "lora_magnitude")
Names = str | tuple[str, ...]  # a regular expression, or a list of names

_TEXT_TOWER = "model.language_model."  # prefix that a multimodal model has in place of the text model's `model.`
_ROUTER = ".mlp.gate"


@dataclass(frozen=True)
class LoraLayer:
    """The adapter of one layer.

    Attributes:
        rank: Rank r.
        scale: Scale s of B·A.
    """

    rank: int
    scale: float


@dataclass(frozen=True)
class AdapterConfig:
    """Configuration of the adapters of a model.

    Methods take and return names of a text model, and names of its vision tower.

    Attributes:
        rank: Rank of layers that `rank_pattern` does not name.
        alpha: Alpha of layers that `alpha_pattern` does not name. The scale is alpha / rank.
        dropout: Probability with which an input element of an adapter is dropped in training.
        target: Modules that get an adapter.
        parameters: Stacks of experts and routers that get an adapter. `exclude` and `layers` do not apply to them, as
            in PEFT.
        exclude: Modules of `target` that get no adapter.
        rslora: Whether the scale is alpha / sqrt(rank), as in rsLoRA.
        dora: Whether adapters are DoRA.
        rank_pattern: Ranks by a regular expression for the end of a module's name.
        alpha_pattern: Alphas, likewise.
        modules_to_save: Modules whose own parameters are trained.
        layers: Numbers of the decoder layers that may get an adapter. None for all.
        uses_tower_names: Whether patterns are matched with the names of a multimodal model with a text tower.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target: Names = ALL_LINEAR
    parameters: tuple[str, ...] = ()
    exclude: Names = ()
    rslora: bool = False
    dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    uses_tower_names: bool = False

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "AdapterConfig":
        """Return the config of values by field name.

        Entries of `target` for experts become `parameters`. If `all-linear` is among the other entries, it replaces
        them.

        Args:
            values: Values by name, with lists in place of tuples. Names of no field are ignored.

        Example:
            >>> config = AdapterConfig.from_values({"rank": 4, "target": ["q_proj", "experts.down_proj"]})
            >>> config.target, config.parameters
            (('q_proj',), ('experts.down_proj',))
        """
        fields: dict[str, Any] = {}
        for name, value in values.items():
            if name in cls.__dataclass_fields__:
                fields[name] = tuple(value) if isinstance(value, list) else value
        target = fields.get("target")
        if isinstance(target, tuple):
            of_experts = [name for name in target if _names_experts(name)]
            of_modules = [name for name in target if not _names_experts(name)]
            fields["parameters"] = (*fields.get("parameters", ()), *of_experts)
            fields["target"] = ALL_LINEAR if ALL_LINEAR in of_modules else tuple(of_modules)
        return cls(**fields)

    def select_layers(self, names: Iterable[str]) -> dict[str, LoraLayer]:
        """Return the adapter of each layer that gets one, in the order of the names.

        Args:
            names: The names of a model's `adaptable_shapes`.
        """
        return {name: self._layer(name) for name in names if self._is_target(name)}

    def select_parameters(self, names: Iterable[str]) -> list[str]:
        """Return the stacks of experts and routers among `names` that get an adapter."""
        return [name for name in names if is_expert_or_router(name) and self._is_target(name)]

    def select_saved_modules(self, modules: Iterable[str]) -> list[str]:
        """Return the modules of `modules` that `modules_to_save` selects."""
        return [name for name in modules if self._is_saved(name)]

    def _is_saved(self, name: str) -> bool:
        for container in containing_modules(self.matched_name(name)):
            if any(container.endswith(end) for end in self.modules_to_save):
                return True
        return False

    def is_targeted(self, name: str) -> bool:
        """Check whether `target` selects a module and `exclude` does not."""
        matched_name = self.matched_name(name)
        if self.target == ALL_LINEAR:
            is_in_target = not is_in_vision_tower(name)
        else:
            is_in_target = is_selected(matched_name, self.target)
        if not is_in_target:
            return False
        return not (self.exclude and is_selected(matched_name, self.exclude))

    def dropout_problem(self, names: Iterable[str]) -> str | None:
        """Explain why the dropout cannot be used with the adapted layers, or return None.

        Dropout is a function of tokens, and the inputs of a vision tower are patches.

        Args:
            names: The names of a model's `adaptable_shapes`.
        """
        if not self.dropout:
            return None
        of_vision = [name for name in self.select_layers(names) if is_in_vision_tower(name)]
        if not of_vision:
            return None
        return (
            f"lora.dropout={self.dropout:g} is for inputs of tokens, and {of_vision[0]} of the vision tower, which "
            "lora.target names, has patches: set lora.dropout=0 (of an adapter at lora.path its lora_dropout), or name "
            "no layers of the tower"
        )

    def matched_name(self, name: str) -> str:
        """Return the name with which patterns and lists are matched."""
        return to_tower_name(name) if self.uses_tower_names else name

    def _is_target(self, name: str) -> bool:
        """Check whether a layer gets an adapter."""
        if self._is_saved(name):
            return False  # trained itself
        if is_expert_or_router(name):
            parameter = parameter_name(self.matched_name(name))
            # `experts` alone means all stacks of a layer's experts.
            candidates = [parameter, parameter.rpartition(".")[0]] if is_stack(name) else [parameter]
            return any(is_selected(candidate, self.parameters) for candidate in candidates)
        if name in EMBEDDING_AND_HEAD or not self.is_targeted(name):
            return False
        # `layers` does not apply to full names, as in PEFT.
        if self.layers is not None and self.matched_name(name) not in self.target:
            number = re.search(r"\.layers\.(\d+)\.", name)
            return number is not None and int(number[1]) in self.layers
        return True

    def _layer(self, name: str) -> LoraLayer:
        """Return the rank and scale of a layer's adapter."""
        matched_name = parameter_name(self.matched_name(name))
        rank = value_by_pattern(self.rank_pattern, matched_name, self.rank)
        alpha = value_by_pattern(self.alpha_pattern, matched_name, self.alpha)
        return LoraLayer(rank, alpha / math.sqrt(rank) if self.rslora else alpha / rank)


def adapter_parameter_shapes(shape: Sequence[int], rank: int, dora: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's parameters by name.

    Args:
        shape: Shape of the weight, [out, in] or [E, out, in].
        rank: Rank of the adapter.
        dora: Whether the adapter is DoRA.

    Example:
        >>> adapter_parameter_shapes((2048, 1024), rank=16, dora=True)
        {'lora_A': (16, 1024), 'lora_B': (2048, 16), 'lora_magnitude': (2048,)}
    """
    *experts, rows, columns = shape
    shapes: dict[str, tuple[int, ...]] = {"lora_A": (*experts, rank, columns), "lora_B": (*experts, rows, rank)}
    if dora:
        shapes["lora_magnitude"] = (rows,)
    return shapes


def is_stack(name: str) -> bool:
    """Check whether a name in files is that of a stack of experts.

    Example:
        >>> is_stack("model.layers.0.mlp.experts.gate_up_proj")
        True
    """
    return name.rpartition(".")[0].endswith(".experts")


def is_expert_or_router(name: str) -> bool:
    """Check whether a name is that of a stack of experts or a router, which are no linear layers in transformers."""
    return is_stack(name) or name.endswith(_ROUTER)


def parameter_name(name: str) -> str:
    """Return the name of a module in PEFT's `target_parameters`.

    Example:
        >>> parameter_name("model.layers.0.mlp.gate")
        'model.layers.0.mlp.gate.weight'
    """
    return f"{name}.weight" if name.endswith(_ROUTER) else name


def _names_experts(entry: str) -> bool:
    """Check whether an entry of a recipe's target means experts or routers, for example `experts.down_proj`."""
    last_two = entry.split(".")[-2:]
    return "experts" in last_two or last_two == ["gate", "weight"]


def to_tower_name(name: str) -> str:
    """Return the name that a part of a text model has in a multimodal model. Names of a vision tower do not change.

    Example:
        >>> to_tower_name("model.layers.0.self_attn.q_proj")
        'model.language_model.layers.0.self_attn.q_proj'
    """
    return name if is_in_vision_tower(name) else re.sub(r"^model\.", _TEXT_TOWER, name)


def from_tower_name(name: str) -> str:
    """Undo `to_tower_name`."""
    return "model." + name.removeprefix(_TEXT_TOWER) if name.startswith(_TEXT_TOWER) else name


def containing_modules(name: str) -> list[str]:
    """Return the names that select a module in `modules_to_save`.

    A module of the vision tower is also selected by the modules that contain it.

    Example:
        >>> containing_modules("model.visual.merger.mlp")
        ['model.visual', 'model.visual.merger', 'model.visual.merger.mlp']
        >>> containing_modules("model.norm")
        ['model.norm']
    """
    if not is_in_vision_tower(name):
        return [name]
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(2, len(parts) + 1)]


def is_selected(name: str, selection: Names) -> bool:
    """Check whether a regular expression or a list of names selects a module.

    Example:
        >>> is_selected("model.layers.0.self_attn.q_proj", ("q_proj", "v_proj"))
        True
        >>> is_selected("model.layers.0.self_attn.q_proj", ".*mlp.*")
        False
    """
    if isinstance(selection, str):
        return re.fullmatch(selection, name) is not None
    return any(name == entry or name.endswith(f".{entry}") for entry in selection)


def value_by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a module's name, or `default`.

    Example:
        >>> value_by_pattern({"q_proj": 4}, "model.layers.0.self_attn.q_proj", 16)
        4
    """
    for pattern, value in patterns.items():
        if matches_suffix(pattern, name):
            return value
    return default


def is_adapter(name: str) -> bool:
    """Check whether a parameter belongs to an adapter.

    Example:
        >>> is_adapter("model.layers.0.self_attn.q_proj.lora_A")
        True
    """
    return name.rpartition(".")[2] in PARAMETERS
