"""The configuration of an adapter, and the layers of a model that get one: LoRA, rsLoRA and DoRA in PEFT's terms.
Imports no torch.

Names match as PEFT matches them (https://huggingface.co/docs/peft/package_reference/lora): a list entry is a module's
name or the end of it, a text is a regular expression for the whole name, `all-linear` every linear layer of the
decoder. There PEFT means those of a vision tower too: here a list or an expression names them, so that a recipe means
the same layers with images and without. Experts are stacks of matrices, two a layer, and most routers are single ones:
no linear layers in transformers. Only lists name them, as PEFT's target_parameters do.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtrain.base.name_patterns import matches_suffix
from dtrain.models.common.vision_names import is_in_vision_tower

ALL_LINEAR = "all-linear"
ENDS = ("model.embed_tokens", "lm_head")
_TOWER = "model.language_model."  # what a multimodal model calls its text tower's `model.`
_ROUTER = ".mlp.gate"
PARAMETERS = ("lora_A", "lora_B", "lora_magnitude")
Names = str | tuple[str, ...]


@dataclass(frozen=True)
class LoraLayer:
    """The adapter of one layer: its rank r, and the scale s of B·A."""

    rank: int
    scale: float


@dataclass(frozen=True)
class AdapterConfig:
    """rank, alpha: those of layers that no pattern names; a pattern's key is a regular expression for the end of a
    module's name. parameters: the stacks of experts and the routers that get one, whatever `exclude` and `layers` say,
    as in PEFT. layers: the numbers of the decoder layers that may have one; None for all. in_tower: names match as
    those of a multimodal model, with a text tower; those that the methods take and give are a text model's, with the
    vision tower's beside them, all the same."""

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
    in_tower: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "AdapterConfig":
        """Return the adapter of the fields' values by name, lists for tuples; other names are passed over. A target's
        entries for experts become `parameters`, and with all-linear among the others these are that."""
        known: dict[str, Any] = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
        known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        if isinstance(target := known.get("target"), tuple):
            known["parameters"] = (*known.get("parameters", ()), *filter(_is_of_experts, target))
            others = tuple(name for name in target if not _is_of_experts(name))
            known["target"] = ALL_LINEAR if ALL_LINEAR in others else others
        return cls(**known)

    def adapted(self, names: Iterable[str]) -> dict[str, LoraLayer]:
        """Return those of a model's `adaptable` names that get an adapter, with its rank and scale, in order."""
        return {name: self._layer(name) for name in names if self._is_target(name)}

    def adapted_parameters(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are stacks of experts or routers and that get an adapter."""
        return [name for name in names if is_parameter(name) and self._is_target(name)]

    def saved(self, modules: Iterable[str]) -> list[str]:
        """Return the modules with parameters that are trained whole."""
        return [
            name
            for name in modules
            if any(owner.endswith(end) for owner in owners(self.called(name)) for end in self.modules_to_save)
        ]

    def targets(self, name: str) -> bool:
        called = self.called(name)
        is_wanted = not is_in_vision_tower(name) if self.target == ALL_LINEAR else matches(called, self.target)
        return is_wanted and not (self.exclude and matches(called, self.exclude))

    def dropout_problem(self, names: Iterable[str]) -> str | None:
        """Return why its dropout does not go with those of a model's `adaptable` names that it adapts; None where it
        does. What it draws is a function of tokens, and the inputs of a vision tower are patches."""
        if not self.dropout:
            return None
        of_vision = [name for name in self.adapted(names) if is_in_vision_tower(name)]
        if not of_vision:
            return None
        return (
            f"lora.dropout={self.dropout:g} is for inputs of tokens, and {of_vision[0]} of the vision tower, which "
            "lora.target names, has patches: set lora.dropout=0 (of an adapter at lora.path its lora_dropout), or name "
            "no layers of the tower"
        )

    def called(self, name: str) -> str:
        """The name that patterns and lists are matched with."""
        return in_tower(name) if self.in_tower else name

    def _is_target(self, name: str) -> bool:
        if is_parameter(name):
            called = parameter_name(self.called(name))
            means = [called, called.rpartition(".")[0]] if is_stack(name) else [called]
            return any(matches(candidate, self.parameters) for candidate in means) and not self.saved([name])
        if name in ENDS or not self.targets(name):
            return False
        # Whole names count in any layer, as in PEFT.
        if self.layers is not None and self.called(name) not in self.target:
            number = re.search(r"\.layers\.(\d+)\.", name)
            if number is None or int(number[1]) not in self.layers:
                return False
        return not self.saved([name])

    def _layer(self, name: str) -> LoraLayer:
        called = parameter_name(self.called(name))
        rank = by_pattern(self.rank_pattern, called, self.rank)
        alpha = by_pattern(self.alpha_pattern, called, self.alpha)
        return LoraLayer(rank, alpha / math.sqrt(rank) if self.rslora else alpha / rank)


def shapes_of(shape: Sequence[int], rank: int, dora: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's parameters by name: of a weight of this shape, [out, in] or experts'
    [E, out, in]."""
    *experts, rows, columns = shape
    shapes: dict[str, tuple[int, ...]] = {"lora_A": (*experts, rank, columns), "lora_B": (*experts, rows, rank)}
    return shapes | ({"lora_magnitude": (rows,)} if dora else {})


def is_stack(name: str) -> bool:
    """Return whether it is the name of a stack of experts in files."""
    return name.rpartition(".")[0].endswith(".experts")


def is_parameter(name: str) -> bool:
    """Return whether it is the name of a stack of experts or a router, no linear layer in transformers."""
    return is_stack(name) or name.endswith(_ROUTER)


def parameter_name(name: str) -> str:
    """Return what PEFT's target_parameters call the module `name`, or its name."""
    return f"{name}.weight" if name.endswith(_ROUTER) else name


def _is_of_experts(entry: str) -> bool:
    """Return whether an entry of a recipe's target means stacks of experts, `experts` or one of theirs, or routers."""
    last = entry.split(".")[-2:]
    return "experts" in last or last == ["gate", "weight"]


def in_tower(name: str) -> str:
    """Return what a multimodal model calls the part of its text tower that a text model calls `name`; a name of its
    vision tower as it is."""
    return name if is_in_vision_tower(name) else re.sub(r"^model\.", _TOWER, name)


def out_of_tower(name: str) -> str:
    """Undo `in_tower`."""
    return "model." + name.removeprefix(_TOWER) if name.startswith(_TOWER) else name


def owners(name: str) -> list[str]:
    """Return the names that select a module in `modules_to_save`.

    A module of the vision tower is also selected by the modules that contain it, for example
    `model.visual.merger.mlp` by `model.visual` and `model.visual.merger`.
    """
    if not is_in_vision_tower(name):
        return [name]
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(2, len(parts) + 1)]


def matches(name: str, wanted: Names) -> bool:
    """Return whether a module of this name is meant by `wanted`."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(name == entry or name.endswith(f".{entry}") for entry in wanted)


def by_pattern(patterns: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    """Return what a `rank_pattern` or `alpha_pattern` says of the module of this name: its first key that means it."""
    return next((value for pattern, value in patterns.items() if matches_suffix(pattern, name)), otherwise)


def is_adapter(name: str) -> bool:
    """Return whether the parameter of this name is part of an adapter."""
    return name.rpartition(".")[2] in PARAMETERS
