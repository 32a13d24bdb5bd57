"""Building models from a `ModelConfig`: modules, initial values, and names and shapes of layers.

*Initial values* depend on the seed, the parameter's name and the logical position, never on the layout. Each element
has the random number of its flat index in the full parameter, in the sequence of seed and name (`base.randomness`). So
a slice on any rank has the bits that one process would compute for it. For example, element [3, 5] of a weight [10, 8]
has flat index 29 on every mesh.

*Names and shapes* of layers that may have a wrapper or another weight storage are read from the model on the meta
device, which takes no memory and 20 ms. Names are those of files (`ModelConfig.file_module`). Names of a vision tower
are those in the model.
"""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import Tensor, nn

from dtrain.attention.kernels import SdpaKernel
from dtrain.base.randomness import random_key, random_uniform
from dtrain.models.common.config import ModelConfig, is_in_vision_tower
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.linear import Linear
from dtrain.models.common.moe import ExpertLinear, Router, connect_routing
from dtrain.models.registry import load_class
from dtrain.parallel.placement import local_slices, local_tensor
from dtrain.parallel.tensor import full_precision_modules

Shape = tuple[int, ...]
Value = TypeVar("Value")

_EMBEDDINGS = ("model.embed_tokens.weight", "model.embed_tokens_per_layer.weight")


def build(
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> CausalLM:
    """Build a model, not initialised: `init_weights` or `checkpoint.huggingface.read` fills it.

    Issues no collective and uses no random numbers.

    Args:
        config: Config of the model.
        dtype: Dtype of the parameters, except for those of `full_precision_modules`.
        device: Device of the parameters. "meta" takes no memory, and `to_empty` allocates it later.
    """
    device = torch.device(device)
    model = build_on_meta(config)
    if config.experts is not None:
        model.routing = connect_routing(model, config.experts.num_experts)
    cast_parameters(model, dtype)
    if device.type != "meta":
        model.to_empty(device=device)
    model.tie_weights()
    model.use_kernel(SdpaKernel())
    return model


def cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast a model to `dtype`, and its `full_precision_modules` to max(float32, dtype)."""
    model.to(dtype)
    for module in full_precision_modules(model).values():
        module.to(torch.promote_types(dtype, torch.float32))


@torch.no_grad()
def init_weights(model: CausalLM, seed: int, only: str = "*") -> None:
    """Initialise the parameters of a model with transformers' distributions. Issues no collective.

    `model.initial_values` has the distribution of each parameter:

        normal   normal(0, initializer_range), computed in float64 and rounded. The padding token's embedding is zero
        ones     1
        zeros    0
        decay    the logarithm of uniform(0.01, 16), for the decay of linear attention

    Args:
        model: The model. Parameters may be plain tensors or DTensors, of which a rank fills its shard.
        seed: Seed of the random numbers.
        only: Pattern of the parameters that are filled. Buffers are only filled with "*".
    """
    config = model.config
    for name, parameter in model.named_parameters():
        if not fnmatchcase(name, only):
            continue
        local, bounds = local_tensor(parameter), local_slices(parameter)
        kind = _first_match(model.initial_values, name)
        if kind == "normal":
            fill_normal(local, parameter.shape, bounds, random_key(seed, name), config.initializer_range)
        elif kind == "decay":
            (rows,) = bounds
            index = torch.arange(rows.start, rows.stop, device=local.device)
            local.copy_(random_uniform(index, random_key(seed, name)).mul_(16 - 0.01).add_(0.01).log_())
        else:
            local.fill_(1.0 if kind == "ones" else 0.0)
        if name in _EMBEDDINGS and config.pad_token_id is not None:
            rows = bounds[0]
            pad_row = config.pad_token_id % parameter.shape[0]
            if rows.start <= pad_row < rows.stop:
                local[pad_row - rows.start] = 0.0
    if only == "*":
        _init_buffers(model)


def _init_buffers(model: CausalLM) -> None:
    """Fill the buffers, which are not trained. Those that no pattern matches keep their values."""
    values: dict[str, float] = {}
    for tower in model.model.vision:
        values |= tower.initial_buffers
    values |= model.initial_buffers
    for name, buffer in model.named_buffers():
        if any(fnmatchcase(name, pattern) for pattern in values):
            buffer.fill_(_first_match(values, name))


def _first_match(values: Mapping[str, Value], name: str) -> Value:
    """Return the value of the first pattern (fnmatch) that matches a name."""
    for pattern, value in values.items():
        if fnmatchcase(name, pattern):
            return value
    raise KeyError(name)


def fill_normal(local: Tensor, shape: torch.Size, bounds: tuple[slice, ...], key: int, std: float) -> None:
    """Fill a slice of a parameter with normal(0, std).

    The slice is filled in chunks of rows: on a CPU, the arithmetic of a chunk stays in the cache.

    Args:
        local: The slice.
        shape: Shape of the full parameter.
        bounds: Position of the slice in the full parameter, a range for each dimension.
        key: Key of the random numbers. Each is a function of the key and of the element's flat index in the full
            parameter.
        std: Standard deviation.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # Flat index within a row, for all elements of one row of the slice.
    row_index = torch.zeros((), dtype=torch.int64, device=local.device)
    for part, stride in zip(bounds[1:], strides[1:], strict=True):
        row_index = row_index[..., None] + torch.arange(part.start, part.stop, device=local.device) * stride
    chunk_elements = 2**15 if local.device.type == "cpu" else 2**22
    chunk_rows = max(1, chunk_elements // max(row_index.numel(), 1))
    rows = bounds[0]
    for start in range(rows.start, rows.stop, chunk_rows):
        end = min(start + chunk_rows, rows.stop)
        first_index = torch.arange(start, end, device=local.device) * strides[0]  # of each row
        index = first_index.view(-1, *[1] * row_index.dim()) + row_index
        local[start - rows.start : end - rows.start] = _standard_normal(index, key).mul_(std)


def _standard_normal(index: Tensor, key: int) -> Tensor:
    """Return standard normals, float64, of flat indices [...] int64: the inverse normal CDF of uniform numbers."""
    return torch.erfinv(random_uniform(index, key).mul_(2).sub_(1)).mul_(math.sqrt(2))


def build_on_meta(config: ModelConfig) -> CausalLM:
    """Return the model of `config` on the meta device."""
    cls = load_class(config.architecture) if config.transformers is None else _transformers_class()
    with torch.device("meta"):
        model: CausalLM = cls(config)
    return model


def _transformers_class() -> type[CausalLM]:
    from dtrain.models.transformers.model import TransformersCausalLM  # loads transformers

    return TransformersCausalLM


def adaptable_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of all layers that may have a wrapper, by name in files.

    The decoder's linear layers come first, then its `expert_shapes`, then the linear layers of the vision tower.
    """
    shapes = {**_layer_shapes(config, Linear), **expert_shapes(config)}
    # Sorting is stable, so the decoder and the tower keep the model's order.
    return {name: shapes[name] for name in sorted(shapes, key=is_in_vision_tower)}


def linear_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes [out, in] of the decoder's linear layers by name in files, in the model's order."""
    return {name: shape for name, shape in _layer_shapes(config, Linear).items() if not is_in_vision_tower(name)}


def expert_shapes(config: ModelConfig, all_of_them: bool = False) -> dict[str, Shape]:
    """Return the shapes of stacks of experts, [E, out, in], and of routers that are no linear layers, [E, in].

    Args:
        config: Config of the model.
        all_of_them: Include stacks that are transposed in files (gpt-oss). They may not have a wrapper.
    """
    if config.experts is None:
        return {}
    if config.experts.is_transposed and not all_of_them:
        return {}
    return _layer_shapes(config, Router, ExpertLinear)


def module_names(config: ModelConfig) -> list[str]:
    """Return the names in files of the modules with parameters of their own, except for `full_precision_modules`."""
    model = build_on_meta(config)
    full_precision = full_precision_modules(model)
    names: dict[str, None] = {}  # an ordered set
    for name, module in model.named_modules():
        has_parameters = len(list(module.parameters(recurse=False))) > 0
        if has_parameters and name not in full_precision:
            names[config.file_module(name)] = None
    return list(names)


def _layer_shapes(config: ModelConfig, *kinds: type[nn.Module]) -> dict[str, Shape]:
    """Return the shapes of the weights in layers of some classes, by name in files.

    Layers that files join are one layer with the rows of all. For example, q_proj [8, 16] and two projections [4, 16]
    in Phi-3 are qkv_proj [16, 16].
    """
    shapes: dict[str, Shape] = {}
    for name, module in build_on_meta(config).named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, kinds) and weight is not None:
            file_name = config.file_module(name)
            *experts, rows, columns = weight.shape
            if file_name in shapes:
                rows += shapes[file_name][-2]
            shapes[file_name] = (*experts, rows, columns)
    return shapes
