"""The configuration of adapters (LoRA, rsLoRA and DoRA in PEFT's terms) and the layers that get one.

Imports no torch. Names match as in PEFT (https://huggingface.co/docs/peft/package_reference/lora):

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
_TOWER = "model.language_model."  # prefix of a multimodal model for the text tower's `model.`
_ROUTER = ".mlp.gate"
PARAMETERS = ("lora_A", "lora_B", "lora_magnitude")
Names = str | tuple[str, ...]


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
        dropout: Share of an adapter's inputs that is dropped in training.
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
        uses_tower_names: Whether patterns match names of a multimodal model with a text tower.
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

        Entries of `target` for experts become `parameters`. If `all-linear` is among the others, it replaces them.

        Args:
            values: Values by name, with lists in place of tuples. Names of no field are ignored.
        """
        known: dict[str, Any] = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
        known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        if isinstance(target := known.get("target"), tuple):
            known["parameters"] = (*known.get("parameters", ()), *filter(_is_of_experts, target))
            others = tuple(name for name in target if not _is_of_experts(name))
            known["target"] = ALL_LINEAR if ALL_LINEAR in others else others
        return cls(**known)

    def select_layers(self, names: Iterable[str]) -> dict[str, LoraLayer]:
        """Return the adapter of each layer that gets one. names: the names of a model's `adaptable_shapes`, whose order
        is kept."""
        return {name: self._layer(name) for name in names if self._is_target(name)}

    def select_parameters(self, names: Iterable[str]) -> list[str]:
        """Return the stacks of experts and routers among `names` that get an adapter."""
        return [name for name in names if is_expert_or_router(name) and self._is_target(name)]

    def select_saved_modules(self, modules: Iterable[str]) -> list[str]:
        """Return the modules of `modules` that `modules_to_save` selects."""
        return [
            name
            for name in modules
            if any(
                owner.endswith(end)
                for owner in containing_modules(self.matched_name(name))
                for end in self.modules_to_save
            )
        ]

    def is_targeted(self, name: str) -> bool:
        called = self.matched_name(name)
        is_wanted = not is_in_vision_tower(name) if self.target == ALL_LINEAR else is_selected(called, self.target)
        return is_wanted and not (self.exclude and is_selected(called, self.exclude))

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
        """Return the name that patterns and lists are matched with."""
        return to_tower_name(name) if self.uses_tower_names else name

    def _is_target(self, name: str) -> bool:
        if is_expert_or_router(name):
            called = parameter_name(self.matched_name(name))
            means = [called, called.rpartition(".")[0]] if is_stack(name) else [called]
            return any(
                is_selected(candidate, self.parameters) for candidate in means
            ) and not self.select_saved_modules([name])
        if name in EMBEDDING_AND_HEAD or not self.is_targeted(name):
            return False
        # `layers` does not apply to full names, as in PEFT.
        if self.layers is not None and self.matched_name(name) not in self.target:
            number = re.search(r"\.layers\.(\d+)\.", name)
            if number is None or int(number[1]) not in self.layers:
                return False
        return not self.select_saved_modules([name])

    def _layer(self, name: str) -> LoraLayer:
        called = parameter_name(self.matched_name(name))
        rank = value_by_pattern(self.rank_pattern, called, self.rank)
        alpha = value_by_pattern(self.alpha_pattern, called, self.alpha)
        return LoraLayer(rank, alpha / math.sqrt(rank) if self.rslora else alpha / rank)


def adapter_parameter_shapes(shape: Sequence[int], rank: int, dora: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's parameters by name. shape: of the weight, [out, in] or [E, out, in]."""
    *experts, rows, columns = shape
    shapes: dict[str, tuple[int, ...]] = {"lora_A": (*experts, rank, columns), "lora_B": (*experts, rows, rank)}
    return shapes | ({"lora_magnitude": (rows,)} if dora else {})


def is_stack(name: str) -> bool:
    """Check for the name of a stack of experts in files."""
    return name.rpartition(".")[0].endswith(".experts")


def is_expert_or_router(name: str) -> bool:
    """Check for the name of a stack of experts or a router, which are no linear layers in transformers."""
    return is_stack(name) or name.endswith(_ROUTER)


def parameter_name(name: str) -> str:
    """Return the name of a module in PEFT's `target_parameters`."""
    return f"{name}.weight" if name.endswith(_ROUTER) else name


def _is_of_experts(entry: str) -> bool:
    """Check whether an entry of a recipe's target means experts or routers, for example `experts.down_proj`."""
    last = entry.split(".")[-2:]
    return "experts" in last or last == ["gate", "weight"]


def to_tower_name(name: str) -> str:
    """Return the name in a multimodal model of a text model's part. Names of a vision tower are returned unchanged."""
    return name if is_in_vision_tower(name) else re.sub(r"^model\.", _TOWER, name)


def from_tower_name(name: str) -> str:
    """Undo `uses_tower_names`."""
    return "model." + name.removeprefix(_TOWER) if name.startswith(_TOWER) else name


def containing_modules(name: str) -> list[str]:
    """Return the names that select a module in `modules_to_save`.

    A module of the vision tower is also selected by the modules that contain it, for example
    `model.visual.merger.mlp` by `model.visual` and `model.visual.merger`.
    """
    if not is_in_vision_tower(name):
        return [name]
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(2, len(parts) + 1)]


def is_selected(name: str, wanted: Names) -> bool:
    """Check whether `wanted` selects a module of this name."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(name == entry or name.endswith(f".{entry}") for entry in wanted)


def value_by_pattern(patterns: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that matches a module's name, or `otherwise`."""
    return next((value for pattern, value in patterns.items() if matches_suffix(pattern, name)), otherwise)


def is_adapter(name: str) -> bool:
    """Check whether the parameter of this name is part of an adapter."""
    return name.rpartition(".")[2] in PARAMETERS
