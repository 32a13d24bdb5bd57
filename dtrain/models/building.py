"""Models from their ModelConfig, on meta or a device, their initial values, and names and shapes of their layers.

Initial values depend on the seed, the parameter's name and the logical position, never on the layout. Each element has
the random number of its flat index in the full parameter, in the sequence of seed and name (`base.randomness`). So any
slice, on any rank, has the bits that one process would have.

Names and shapes of layers that may have a wrapper or another weight storage are read from the model on the meta device,
which takes no memory and 20 ms. Names are those of files (`ModelConfig.file_module`). Names of a vision tower are those
in the model.
"""

import math
from fnmatch import fnmatchcase

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

_EMBEDDINGS = ("model.embed_tokens.weight", "model.embed_tokens_per_layer.weight")


def build(
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> CausalLM:
    """The model of `config`, its parameters in `dtype` on `device` and NOT initialised: `init_weights` or
    `checkpoint.huggingface.read` fills them. device "meta" takes no memory; `to_empty` gives it later.

    No collective, no randomness.
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
    """`model.to(dtype)`; what `full_precision_modules` have in float32 at least."""
    model.to(dtype)
    for module in full_precision_modules(model).values():
        module.to(torch.promote_types(dtype, torch.float32))


@torch.no_grad()
def init_weights(model: CausalLM, seed: int, only: str = "*") -> None:
    """Fill every parameter by `model.initial_values`, with transformers' distributions: normal(0, initializer_range)
    for matrices (zero in the padding token's embedding), ones or zeros for norms, zeros for biases, the logarithm of
    uniform(0.01, 16) for the decay of linear attention. Parameters may be plain or DTensors; a rank draws what it
    holds. Normals are drawn in float64, then rounded. only: a pattern of the parameters that are filled. No
    collective."""
    config = model.config
    for name, parameter in model.named_parameters():
        if not fnmatchcase(name, only):
            continue
        local = local_tensor(parameter)
        kind = next(kind for pattern, kind in model.initial_values.items() if fnmatchcase(name, pattern))
        if kind == "normal":
            fill_normal(
                local, parameter.shape, local_slices(parameter), random_key(seed, name), config.initializer_range
            )
        elif kind == "decay":
            (held,) = local_slices(parameter)
            places = torch.arange(held.start, held.stop, device=local.device)
            local.copy_(random_uniform(places, random_key(seed, name)).mul_(16 - 0.01).add_(0.01).log_())
        else:
            local.fill_(1.0 if kind == "ones" else 0.0)
        if name in _EMBEDDINGS and config.pad_token_id is not None:
            held = local_slices(parameter)[0]
            row = config.pad_token_id % parameter.shape[0]
            if held.start <= row < held.stop:
                local[row - held.start] = 0.0
    values = {pattern: value for tower in model.model.vision for pattern, value in tower.initial_buffers.items()}
    values |= model.initial_buffers
    for name, buffer in model.named_buffers() if only == "*" else ():  # which are not trained
        buffer.fill_(next(value for pattern, value in values.items() if fnmatchcase(name, pattern)))


def fill_normal(local: Tensor, shape: torch.Size, held: tuple[slice, ...], key: int, std: float) -> None:
    """Fill a slice of a parameter with normal(0, std), in chunks: on a CPU the arithmetic stays in its cache.

    Args:
        local: The slice.
        shape: Shape of the whole parameter.
        held: Where the slice is in it, a range for each dimension.
        key: Key of the numbers; each is a function of it and of the element's flat index in the whole parameter.
        std: Standard deviation.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = torch.zeros((), dtype=torch.int64, device=local.device)
    for bounds, stride in zip(held[1:], strides[1:], strict=True):
        inner = inner[..., None] + torch.arange(bounds.start, bounds.stop, device=local.device) * stride
    rows = max(1, (2**15 if local.device.type == "cpu" else 2**22) // max(inner.numel(), 1))
    for start in range(held[0].start, held[0].stop, rows):
        end = min(start + rows, held[0].stop)
        outer = torch.arange(start, end, device=local.device) * strides[0]
        flat = outer.view(-1, *[1] * inner.dim()) + inner
        local[start - held[0].start : end - held[0].start] = _normal(flat, key).mul_(std)


def _normal(index: Tensor, key: int) -> Tensor:
    """Standard normals [...] float64 of flat indices [...] int64: the inverse distribution function of a uniform."""
    return torch.erfinv(random_uniform(index, key).mul_(2).sub_(1)).mul_(math.sqrt(2))


def build_on_meta(config: ModelConfig) -> CausalLM:
    """Return the model of `config` on the meta device."""
    with torch.device("meta"):
        model: CausalLM = load_class(config.architecture)(config)
    return model


def adaptable_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of all layers that may have a wrapper, by name in files.

    The decoder's linear layers come first, then its `expert_shapes`, then the linear layers of the vision tower.
    """
    shapes = {**_shapes(config, Linear), **expert_shapes(config)}
    return {name: shapes[name] for name in sorted(shapes, key=is_in_vision_tower)}  # each part in the model's order


def linear_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes [out, in] of the decoder's linear layers, in the model's order."""
    return {name: shape for name, shape in _shapes(config, Linear).items() if not is_in_vision_tower(name)}


def expert_shapes(config: ModelConfig, all_of_them: bool = False) -> dict[str, Shape]:
    """Return the shapes [E, out, in] of stacks of experts, and [E, in] of routers that are no linear layers.

    Args:
        config: Config of the model.
        all_of_them: Include stacks that are transposed in files (gpt-oss), which may not have a wrapper.
    """
    if (experts := config.experts) is None or (experts.is_transposed and not all_of_them):
        return {}
    return _shapes(config, Router, ExpertLinear)


def module_names(config: ModelConfig) -> list[str]:
    """Return the names in files of the modules with parameters of their own, except for `full_precision_modules`."""
    model = build_on_meta(config)
    exact = full_precision_modules(model)
    names = (name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False)))
    return list(dict.fromkeys(config.file_module(name) for name in names if name not in exact))


def _shapes(config: ModelConfig, *kinds: type[nn.Module]) -> dict[str, Shape]:
    """Shapes of the weights in layers of these kinds. Layers that files join are one, with the rows of all."""
    shapes: dict[str, Shape] = {}
    for name, module in build_on_meta(config).named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, kinds) and weight is not None:
            whole, (*experts, rows, columns) = config.file_module(name), weight.shape
            rows_before = shapes[whole][-2] if whole in shapes else 0
            shapes[whole] = (*experts, rows_before + rows, columns)
    return shapes
