"""Names and shapes in a model's vision tower, from its config."""

import torch
from torch import nn

from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import Linear
from dtrain.models.registry import class_of
from dtrain.models.vision.common import VisionTower


def tower_of(config: ModelConfig) -> VisionTower:
    """Return the vision tower of `config`, which has one, on meta."""
    with torch.device("meta"):
        tower: VisionTower = class_of(config.architecture).vision_tower(config.vision)
    return tower


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return [out, in] of each linear layer of the tower of `config`, by its name in the model."""
    modules = _modules(config).items()
    return {name: (layer.out_features, layer.in_features) for name, layer in modules if isinstance(layer, Linear)}


def own_modules(config: ModelConfig) -> list[str]:
    """Return the names in the model of the modules of the tower of `config` that have parameters of their own."""
    return [name for name, module in _modules(config).items() if any(True for _ in module.parameters(recurse=False))]


def _modules(config: ModelConfig) -> dict[str, nn.Module]:
    return {f"model.{name}": module for name, module in tower_of(config).named_modules() if name}
