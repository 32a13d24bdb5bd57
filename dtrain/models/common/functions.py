"""Functions of layers: RMSNorm, gated activations and rotary position embedding.

*Norms and gates.* On a CPU, torch has no fused RMSNorm. Its composite stores two tensors of the input's size for the
backward and takes three times as long as `_RmsNorm`. `_Gated` recomputes its activation in the backward instead of
storing it. Both consist of elementwise operations and reductions over the last dimension. So they also run on DTensors
that are sharded over other dimensions, under activation checkpointing and under torch.compile.

*Rotary position embedding* (RoPE, arXiv:2104.09864). Tables are made once per forward. The frequencies follow
transformers operation by operation: a far position multiplies the last bit of a frequency into the angle, so another
order of the same formula gives other logits at 100,000 tokens.

Example: for heads of 4 elements and theta 10,000, the frequencies are [1, 0.01]. At position 2 the angles are [2,
0.02], and `rotary_tables` returns cos = [cos 2, cos 0.02, cos 2, cos 0.02] and signed_sin = [-sin 2, -sin 0.02, sin 2,
sin 0.02]. `apply_rotary` rotates the pairs (x0, x2) and (x1, x3) by these angles.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dtrain.models.common.rope_config import Rope
from dtrain.parallel.tensor import LocalParameters

aten = torch.ops.aten


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x²) + eps) · weight over the last dimension (arXiv:1910.07467).

    Args:
        x: [..., D], float32 or float64. Everything is computed in this dtype.
        weight: [D]. None: 1.
        eps: Added to the mean.
    """
    if x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return _RmsNorm.apply(x, weight, eps)


def normalize_rms(x: Tensor, eps: float) -> Tensor:
    """Divide x [..., D] by its root mean square, computed in max(float32, x's dtype) and rounded to x's dtype."""
    return rms_norm(x.to(torch.promote_types(x.dtype, torch.float32)), None, eps).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    """RMSNorm that stores its input and one number per vector for the backward."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        return x * scale if weight is None else (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # With u = x · scale and y = u · weight, the gradient of x is scale · (g · weight - u · mean(g · weight · u)).
        x, weight, scale = ctx.saved_tensors
        unit = x * scale
        grad_times_unit = grad * unit
        if weight is None:
            mean = grad_times_unit.mean(-1, keepdim=True)
            weight_grad = None
            x_grad = grad.clone()
        else:
            mean = (grad_times_unit @ weight).unsqueeze(-1).div_(x.shape[-1])
            weight_grad = grad_times_unit.flatten(0, -2).sum(0)
            x_grad = grad * weight
        return x_grad.addcmul_(unit, mean, value=-1).mul_(scale), weight_grad, None


class RMSNorm(LocalParameters):
    """RMSNorm as in Llama: the normalised input is rounded to x's dtype before it is multiplied by the weight.

    The norm is computed in max(float32, x's dtype).
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., size] and multiply by the weight, in x's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.local("weight")
        if wide == x.dtype == weight.dtype:
            return rms_norm(x, weight, self.eps)
        return weight * normalize_rms(x, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class Gemma3RMSNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight, all in max(float32, x's dtype), and is rounded once at the end."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., size] and multiply by 1 + weight, in x's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return rms_norm(x.to(wide), 1.0 + self.local("weight").to(wide), self.eps).to(x.dtype)


class Activation(NamedTuple):
    """An elementwise function and its backward.

    Attributes:
        forward: Maps an input to an output.
        backward: Maps the gradient of the output and the input to the gradient of the input.
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_tanh_backward(grad: Tensor, x: Tensor) -> Tensor:
    return aten.gelu_backward(grad, x, approximate="tanh")


def _relu_backward(grad: Tensor, x: Tensor) -> Tensor:
    return aten.threshold_backward(grad, x, 0)


ACTIVATIONS = {
    "silu": Activation(F.silu, aten.silu_backward),
    "gelu": Activation(F.gelu, aten.gelu_backward),
    "gelu_pytorch_tanh": Activation(_gelu_tanh, _gelu_tanh_backward),
    "relu": Activation(F.relu, _relu_backward),
}
"""Activations by transformers' names."""


def gated_activation(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Compute activation(gate) · up (GLU variants, arXiv:2002.05202).

    Args:
        gate: [..., F].
        up: [..., F].
        activation: An entry of `ACTIVATIONS`.

    Returns:
        [..., F].
    """
    return _Gated.apply(gate, up, activation)


class _Gated(torch.autograd.Function):
    """Gated activation that stores its inputs only, and computes the activation again in the backward."""

    @staticmethod
    def forward(ctx, gate, up, activation):
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activation.forward(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        up_grad = ctx.activation.forward(gate).mul_(grad)
        return ctx.activation.backward(grad * up, gate), up_grad, None


def clamped_gated_activation(gate: Tensor, up: Tensor, gain: float, limit: float) -> Tensor:
    """Compute the gated activation of gpt-oss: g · sigmoid(gain · g) · (u + 1).

    Args:
        gate: [..., F]. g is `gate`, but at most `limit`.
        up: [..., F]. u is `up`, clamped to [-limit, limit].
        gain: Factor inside the sigmoid.
        limit: Bound of gate and up.
    """
    return _Clamped.apply(gate, up, gain, limit)


class _Clamped(torch.autograd.Function):
    """Autograd of `clamped_gated_activation`, which stores its inputs only."""

    @staticmethod
    def forward(ctx, gate, up, gain, limit):
        ctx.save_for_backward(gate, up)
        ctx.gain, ctx.limit = gain, limit
        clamped = gate.clamp(max=limit)
        return torch.sigmoid(clamped * gain).mul_(clamped).mul_(up.clamp(-limit, limit).add_(1))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        clamped = gate.clamp(max=ctx.limit)
        sigmoid = torch.sigmoid(clamped * ctx.gain)
        up_grad = (sigmoid * clamped).mul_(grad).masked_fill_(up.abs() > ctx.limit, 0)
        # The derivative of g · σ(gain · g) is σ · (1 + gain · g · (1 - σ)).
        slope = (1 - sigmoid).mul_(clamped * ctx.gain).add_(1).mul_(sigmoid)
        slope.mul_(up.clamp(-ctx.limit, ctx.limit).add_(1)).mul_(grad)
        return slope.masked_fill_(gate > ctx.limit, 0), up_grad, None, None


def rotary_frequencies(rope: Rope, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Compute the rotary frequencies, in radians per position.

    Args:
        rope: The rotary embedding.
        head_dim: Elements of a head that are rotated.
        dtype: float32 or float64.

    Returns:
        [head_dim / 2] on the CPU.

    Example:
        >>> rotary_frequencies(Rope(theta=10_000.0), 4, torch.float64)
        tensor([1.0000, 0.0100], dtype=torch.float64)
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").to(dtype) / head_dim
    powers = rope.theta**exponents
    unscaled = 1.0 / powers
    if rope.kind == "proportional":
        unscaled[int(rope.rotary_fraction * head_dim // 2) :] = 0  # these dimensions are not rotated
    if rope.kind in ("linear", "proportional"):
        return unscaled / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, unscaled)
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, powers, head_dim)
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.pair_factors, dtype=dtype, device="cpu") * powers)
    return unscaled


def _llama3_frequencies(rope: Rope, unscaled: Tensor) -> Tensor:
    """Scale frequencies as Llama 3.1: long wavelengths by the factor, short ones not, a blend between."""
    wavelength = 2 * math.pi / unscaled
    length, low, high = rope.original_max_positions, rope.low_freq_factor, rope.high_freq_factor
    is_long = wavelength > length / low
    is_short = wavelength < length / high
    blend = (length / wavelength - low) / (high - low)
    blended = (1 - blend) * unscaled / rope.factor + blend * unscaled
    return torch.where(is_long, unscaled / rope.factor, torch.where(is_short, unscaled, blended))


def _yarn_frequencies(rope: Rope, powers: Tensor, head_dim: int) -> Tensor:
    """Scale frequencies as YaRN (arXiv:2309.00071, section 3.2).

    Dimensions that turn often within the original length keep their frequency, those that turn seldom are interpolated
    by the factor, and a ramp over the dimensions blends both.
    """

    def dimension_of(num_turns: float) -> float:
        """Return the dimension that turns `num_turns` times within the original length."""
        length = rope.original_max_positions
        return head_dim * math.log(length / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp divides by the difference
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=powers.dtype) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def rotary_tables(
    rope: Rope,
    head_dim: int,
    positions: Tensor,
    dtype: torch.dtype,
    frequency_cache: dict[Any, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the cosine and sine tables for `apply_rotary`, in max(float32, dtype), rounded to `dtype`.

    Args:
        rope: The rotary embedding.
        head_dim: Elements of a head.
        positions: [B or 1, S], or by the axes of `rope.sections` [B, S, 3].
        dtype: Dtype of the tables.
        frequency_cache: Frequencies on the device, kept for later calls with the same dtype and device. None: they are
            computed.

    Returns:
        Cosines and signed sines, each [B or 1, S, 1, R], where the first R elements of a head are rotated. The first
        half of the sines is negative.
    """
    wide = torch.promote_types(dtype, torch.float32)
    if frequency_cache is None:
        frequency_cache = {}
    # A proportional rope rotates whole heads, with frequency 0 in the dimensions that stay.
    rotated = head_dim if rope.kind == "proportional" else int(head_dim * rope.rotary_fraction)
    if (rope, rotated) not in frequency_cache:
        frequencies = rotary_frequencies(rope, rotated, wide)
        frequency_cache[rope, rotated] = frequencies.to(positions.device, non_blocking=True)
    if positions.dim() == 2:
        by_pair = positions[..., None]  # [B, S, 1]
    else:
        by_pair = _positions_by_pair(rope, positions, rotated // 2, frequency_cache)  # [B, S, R / 2]
    angles = by_pair.to(wide) * frequency_cache[rope, rotated]  # [B, S, R / 2]
    cos, sin = angles.cos() * rope.table_scale, angles.sin() * rope.table_scale
    return torch.cat([cos, cos], -1).to(dtype).unsqueeze(2), torch.cat([-sin, sin], -1).to(dtype).unsqueeze(2)


def _positions_by_pair(rope: Rope, positions: Tensor, num_pairs: int, frequency_cache: dict[Any, Tensor]) -> Tensor:
    """Select the position that rotates each pair of dimensions, [B, S, num_pairs], from positions by axis [B, S, 3]."""
    if rope.sections is None:
        raise ValueError("The positions have several axes, but this model's rotary embedding has one.")
    axes = rope.sections.axes(num_pairs)
    if axes not in frequency_cache:
        frequency_cache[axes] = torch.tensor(axes, device="cpu").to(device=positions.device, non_blocking=True)
    return positions.index_select(-1, frequency_cache[axes])


def apply_rotary(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate pairs of elements: halves (x1, x2) become (x1·cos - x2·sin, x2·cos + x1·sin).

    Args:
        x: [B, S, H, hd].
        cos: [B or 1, S, 1, R]. If R < hd, only the first R elements of a head are rotated.
        signed_sin: [B or 1, S, 1, R], with a negative first half.

    Example:
        >>> quarter_turn = torch.tensor([0.0, 0.0]), torch.tensor([-1.0, 1.0])
        >>> apply_rotary(torch.tensor([3.0, 4.0]), *quarter_turn)
        tensor([-4.,  3.])
    """
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat([apply_rotary(x[..., :rotated], cos, signed_sin), x[..., rotated:]], -1)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def round_scale(scale: float, dtype: torch.dtype) -> float:
    """Round a factor of embeddings to `dtype`, as the checkpoints were trained.

    Example:
        >>> round_scale(2560**0.5, torch.bfloat16)  # 50.596...
        50.5
    """
    return torch.tensor(scale, dtype=dtype, device="cpu").item()
