"""Weights in 4 bits: NF4 of QLoRA (arXiv:2305.14314, appendix E) with bitsandbytes' codes, and products with them.

A row is divided into blocks of 64 weights. The scale of a block is its largest magnitude, and a weight is stored as the
code, 0 to 15, of one of 16 levels between -1 and 1. Its value is level * scale. Two codes share a byte, the first in
its high half. For example, a weight [4096, 1024] has codes [4096, 512] uint8 and scales [4096, 16] int32.

Example: in a block with scale 0.5, the weight 0.21 is scaled to 0.42. The nearest level is 0.4407, with code 12, so the
weight is read as 0.2204.

Scales are the bits of float32 numbers, stored as int32. So they stay exact when a model's floats are cast to the dtype
of computation. If tensor parallelism cuts a layer by its inputs, each rank has full blocks, so that the ranks' weights
are those of one process.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.adapters.config import is_stack
from dtrain.base.errors import Problem
from dtrain.base.fused import Fused, uniform_iterations
from dtrain.base.ranges import join_with_or
from dtrain.models.building import expert_shapes, linear_shapes
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.linear import Linear
from dtrain.models.common.moe import ExpertLinear, expert_products

BLOCK = 64
"""Number of neighbouring weights of a row that share a scale."""

CODES, SCALES = "weight_codes", "weight_scales"
PARTS = CODES, SCALES
"""A layer's parameters in place of its weight."""

LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_CUT_BY_INPUTS = ("o_proj", "out_proj", "down_proj", "output_linear")  # layers with the tensor-parallel style `rowwise`
_MIN_SCALE = 1e-38  # divisor of a block of zeros


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight to NF4, computed in float32 on the weight's device.

    The computation needs a few times the weight's memory.

    Args:
        weight: [..., rows, columns], any float dtype. `columns` must be a multiple of 64.

    Returns:
        Codes, [..., rows, columns/2] uint8, and scales, [..., rows, columns/64] int32.

    Example:
        >>> weight = torch.zeros(1, 64)
        >>> weight[0, :2] = torch.tensor([0.5, 0.21])
        >>> codes, scales = quantize(weight)
        >>> divmod(codes[0, 0].item(), 16), scales.view(torch.float32).item()
        ((15, 12), 0.5)
    """
    blocks = weight.float().unflatten(-1, (-1, BLOCK))  # [..., rows, columns/64, 64]
    scales = blocks.abs().amax(-1)
    levels = _levels(weight.device)
    midpoints = (levels[:-1] + levels[1:]) / 2
    # Multiply by the inverse instead of dividing: bitsandbytes does so, and its codes depend on that rounding.
    scaled = blocks * (1 / scales.clamp(min=_MIN_SCALE))[..., None]
    codes = torch.bucketize(scaled, midpoints, out_int32=True).to(torch.uint8).flatten(-2)
    return codes[..., ::2] << 4 | codes[..., 1::2], scales.view(torch.int32)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the weight of codes and scales. Besides the result, the computation needs the memory of a tile.

    Args:
        codes: [..., rows, columns/2] uint8.
        scales: [..., rows, columns/64] int32.
        dtype: Dtype of the result, to which each weight is rounded once from float32.

    Returns:
        [..., rows, columns].
    """
    weight = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1], dtype=dtype, device=codes.device)
    code_blocks, scale_blocks, weight_blocks = (
        codes.reshape(-1, BLOCK // 2),
        scales.reshape(-1, 1),
        weight.view(-1, BLOCK),
    )
    if torch.compiler.is_compiling() or _write_blocks.will_compile(codes):
        tiles = [(code_blocks, scale_blocks, weight_blocks)]
    else:
        tile = (2**18 if codes.device.type == "cpu" else 2**22) // BLOCK  # on a CPU, a tile fits into the cache
        tiles = [
            *zip(code_blocks.split(tile), scale_blocks.split(tile), weight_blocks.split(tile), strict=True),
        ]
    pairs = _level_pairs(codes.device, codes.is_meta)
    for tile_codes, tile_scales, tile_weight in uniform_iterations(tiles, codes):
        _write_blocks(tile_codes, tile_scales, tile_weight, pairs)
    return weight


@Fused
def _write_blocks(codes: Tensor, scales: Tensor, weight: Tensor, pairs: Tensor) -> None:
    """Write the weights of codes [blocks, 32] and scales [blocks, 1] to `weight` [blocks, 64]."""
    levels = F.embedding(codes.int(), pairs).flatten(1)
    weight.copy_(levels.mul_(scales.view(torch.float32)))


def nf4_product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x · Wᵀ + bias, where W is dequantised to the dtype of `x`.

    The backward dequantises W again, so that only codes and scales are saved.

    Args:
        x: [..., in].
        codes: [out, in/2] uint8.
        scales: [out, in/64] int32.
        bias: [out], or None.

    Returns:
        [..., out].
    """
    return cast(Tensor, _Product.apply(x, codes, scales, bias))


@dataclass(frozen=True)
class NF4Weight:
    """Storage of a linear layer's weight W [out, in] in 4 bits (a `WeightStorage`).

    The layer's parameters are `weight_codes` [out, in/2] uint8 and `weight_scales` [out, in/64] int32.

    Attributes:
        dtype: Dtype of computation.
        shape: Shape of the full weight.
    """

    dtype: torch.dtype
    shape: torch.Size

    def product(self, x: Tensor, bias: Tensor | None, read: Callable[[str], Tensor]) -> Tensor:
        """Override `WeightStorage.product`: [..., in] -> [..., out]."""
        return nf4_product(x, read(CODES), read(SCALES), bias)

    def dense_weight(self, read: Callable[[str], Tensor]) -> Tensor:
        """Return W [out, in] in `dtype`."""
        return dequantize(read(CODES), read(SCALES), self.dtype)


class NF4Stack(NF4Weight):
    """Storage of experts' weights W [E, out, in] in 4 bits (an `ExpertStorage`).

    The layer's parameters are `weight_codes` [E, out, in/2] uint8 and `weight_scales` [E, out, in/64] int32.
    """

    def grouped_product(self, x: Tensor, counts: Tensor, read: Callable[[str], Tensor]) -> Tensor:
        """Override `ExpertStorage.grouped_product`: [m, in] -> [m, out].

        The backward dequantises W again, so that only codes and scales are saved.
        """
        return cast(Tensor, _Grouped.apply(x, read(CODES), read(SCALES), counts))


@dataclass(frozen=True)
class QuantizedStack:
    """Matrices [E, out, in] that are dequantised when they are indexed (`ExpertMatrices`).

    Attributes:
        codes: [E, out, in/2] uint8.
        scales: [E, out, in/64] int32.
        dtype: Dtype of the matrices.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes [E, out, in]."""
        return *self.codes.shape[:-1], 2 * self.codes.shape[-1]

    def __getitem__(self, index: int | slice) -> Tensor:
        return dequantize(self.codes[index], self.scales[index], self.dtype)


def quantize_weights(model: CausalLM, dtype: torch.dtype, names: Iterable[str]) -> None:
    """Replace weights of a model by frozen parameters for codes and scales, which `read_weights` fills.

    Args:
        model: A model on the meta device that is not yet on a mesh. Sizes must fit (`find_block_problems`).
        dtype: Dtype of computation.
        names: Names of the layers in files. `checkpoint.huggingface.quantized` chooses them.
    """
    # Here and not at the top of the file, because it loads torch._dynamo.
    torch.compiler.assume_constant_result(_level_pairs)
    for name in names:
        for part in model.config.model_modules(name):
            layer = cast(Linear | ExpertLinear, model.get_submodule(part))
            shape = layer.weight.shape
            layer.register_parameter("weight", None)
            layer.weight_storage = NF4Weight(dtype, shape) if isinstance(layer, Linear) else NF4Stack(dtype, shape)
            for parameter, weights_per_element, kind in ((CODES, 2, torch.uint8), (SCALES, BLOCK, torch.int32)):
                columns = shape[-1] // weights_per_element
                empty = torch.empty(*shape[:-1], columns, dtype=kind, device="meta")
                layer.register_parameter(parameter, nn.Parameter(empty, requires_grad=False))


def has_nf4_weight(layer: nn.Module) -> bool:
    """Check whether a layer is a linear or expert layer whose weight is stored in 4 bits."""
    return isinstance(layer, Linear | ExpertLinear) and isinstance(layer.weight_storage, NF4Weight)


def nf4_layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the layers that `lora.quantize=nf4` stores in 4 bits: all but routers and gates of experts.

    Returns:
        Shapes by name in files: [out, in] of linear layers and [E, out, in] of stacks of experts.
    """
    routers_and_gates = (".router.proj", ".shared_expert_gate")
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in linear_shapes(config).items():
        if not name.endswith(routers_and_gates):
            shapes[name] = shape
    for name, stack_shape in expert_shapes(config, all_of_them=True).items():
        if is_stack(name):
            shapes[name] = stack_shape
    return shapes


def find_block_problems(config: ModelConfig, names: Iterable[str], tp: int) -> list[Problem]:
    """Check that layers can be stored in 4 bits on tensor-parallel ranks, once for all layers of a name and size.

    Args:
        config: The model's config.
        names: Names of the layers in files.
        tp: Tensor-parallel ranks.
    """
    shapes = linear_shapes(config) | nf4_layer_shapes(config)
    if config.unquantized_modules is None:
        made, key, fix = "lora.quantize=nf4 makes", "lora.quantize", "Set lora.quantize=none"
    else:
        made, key, fix = "bitsandbytes made", "model.path", "Use the original checkpoint"
    problems = []
    checked = dict.fromkeys((name.rpartition(".")[2], shapes[name][-1]) for name in names)
    for name, num_inputs in checked:
        num_blocks = num_inputs // BLOCK
        if num_inputs % BLOCK:
            text = f"{made} blocks of {BLOCK} inputs, which do not divide the {num_inputs} of {name}"
            problems.append(Problem(key, text, fix))
        elif name in _CUT_BY_INPUTS and num_blocks % tp:
            fitting = [str(size) for size in range(1, tp) if num_blocks % size == 0]
            text = (
                f"parallel.tp={tp} does not divide the {num_blocks} blocks of {BLOCK} inputs that {made} of "
                f"{name}'s {num_inputs}"
            )
            problems.append(Problem("parallel.tp", text, f"Use {join_with_or(fitting)}"))
    return problems


class _Product(torch.autograd.Function):
    """Autograd of `nf4_product`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return F.linear(x, dequantize(codes, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, Tensor | None]:
        grad = grads[0]
        codes, scales = ctx.saved_tensors
        needs_x_grad, _, _, needs_bias_grad = ctx.needs_input_grad
        x_grad = grad @ dequantize(codes, scales, grad.dtype) if needs_x_grad else None
        bias_grad = grad.flatten(0, -2).sum(0) if needs_bias_grad else None
        return x_grad, None, None, bias_grad


class _Grouped(torch.autograd.Function):
    """Autograd of `NF4Stack.grouped_product`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales, counts)
        return expert_products(x, QuantizedStack(codes, scales, x.dtype), counts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        grad = grads[0].contiguous()
        codes, scales, counts = ctx.saved_tensors
        x_grad = expert_products(grad, QuantizedStack(codes, scales, grad.dtype), counts, back=True)
        return x_grad, None, None, None


def _levels(device: torch.device) -> Tensor:
    """Return the 16 levels, float32."""
    return torch.tensor(LEVELS, dtype=torch.float32, device=device)


def _level_pairs(device: torch.device, is_meta: bool) -> Tensor:
    """Return the levels of the two weights of each byte, [256, 2] float32.

    Args:
        device: Device of the result.
        is_meta: Whether the codes are on the meta device. Function modes may report another device for them.
    """
    return _cached_level_pairs(device, is_meta)


@cache  # the host waits for the device when the table is made
def _cached_level_pairs(device: torch.device, is_meta: bool) -> Tensor:
    levels = _levels(device)
    return torch.cartesian_prod(levels, levels)
