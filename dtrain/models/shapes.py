"""Names and shapes of the layers of a model that may have a wrapper or another weight storage, and of all modules.

They are read from the model on the meta device, which takes no memory and 20 ms. Names are those of files
(`ModelConfig.whole`). Names of a vision tower are those in the model.
"""

import torch
from torch import nn

from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.linear import Linear
from dtrain.models.common.moe import ExpertLinear, Router
from dtrain.models.common.vision_names import is_in_vision_tower
from dtrain.models.registry import class_of
from dtrain.parallel.tensor import exact_modules

Shape = tuple[int, ...]


def on_meta(config: ModelConfig) -> CausalLM:
    """Return the model of `config` on the meta device."""
    with torch.device("meta"):
        model: CausalLM = class_of(config.architecture)(config)
    return model


def adaptable(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of all layers that may have a wrapper, by name in files.

    The decoder's linear layers come first, then its `parameters`, then the linear layers of the vision tower.
    """
    shapes = {**_shapes(config, Linear), **parameters(config)}
    return {name: shapes[name] for name in sorted(shapes, key=is_in_vision_tower)}  # each part in the model's order


def linears(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes [out, in] of the decoder's linear layers, in the model's order."""
    return {name: shape for name, shape in _shapes(config, Linear).items() if not is_in_vision_tower(name)}


def parameters(config: ModelConfig, all_of_them: bool = False) -> dict[str, Shape]:
    """Return the shapes [E, out, in] of stacks of experts, and [E, in] of routers that are no linear layers.

    Args:
        config: Config of the model.
        all_of_them: Include stacks that are transposed in files (gpt-oss), which may not have a wrapper.
    """
    if (experts := config.experts) is None or (experts.turned and not all_of_them):
        return {}
    return _shapes(config, Router, ExpertLinear)


def modules(config: ModelConfig) -> list[str]:
    """Return the names in files of the modules that have parameters of their own, except for `exact_modules`."""
    model = on_meta(config)
    exact = exact_modules(model)
    names = (name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False)))
    return list(dict.fromkeys(config.whole(name) for name in names if name not in exact))


def _shapes(config: ModelConfig, *kinds: type[nn.Module]) -> dict[str, Shape]:
    """Shapes of the weights in layers of these kinds. Layers that files join are one, with the rows of all."""
    shapes: dict[str, Shape] = {}
    for name, module in on_meta(config).named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, kinds) and weight is not None:
            whole, (*experts, rows, columns) = config.whole(name), weight.shape
            rows_before = shapes[whole][-2] if whole in shapes else 0
            shapes[whole] = (*experts, rows_before + rows, columns)
    return shapes
