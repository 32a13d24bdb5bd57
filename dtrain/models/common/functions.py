"""Functions of layers: norms and gated activations that keep little for the backward, and rotary position embedding.

On a CPU torch has no fused RMSNorm, and its composite keeps two tensors of the input's size and takes three times as
long; the gate recomputes its activation instead of keeping it. Both are elementwise plus reductions over the last
dimension, so they run on DTensors sharded elsewhere, under activation checkpointing and under torch.compile.

Rotary position embedding (arXiv:2104.09864) has its tables made once per forward. Frequencies follow transformers
operation by operation: far positions multiply their last bit into the angle, so another order of the same formula gives
other logits at 100,000 tokens.
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
    """x [..., D] / sqrt(mean(x², last dimension) + eps) · weight [D] or none (arXiv:1910.07467), all in x's dtype:
    float32 or float64."""
    return F.rms_norm(x, x.shape[-1:], weight, eps) if x.is_cuda else _RmsNorm.apply(x, weight, eps)


def normalize_rms(x: Tensor, eps: float) -> Tensor:
    """Return x [..., D] over its root mean square, computed in max(float32, x's dtype), in x's dtype."""
    return rms_norm(x.to(torch.promote_types(x.dtype, torch.float32)), None, eps).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        return x * scale if weight is None else (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        unit = x * scale
        along = grad * unit
        if weight is None:
            mean, weight_grad = along.mean(-1, keepdim=True), None
            x_grad = grad.clone()
        else:
            mean, weight_grad = (along @ weight).unsqueeze(-1).div_(x.shape[-1]), along.flatten(0, -2).sum(0)
            x_grad = grad * weight
        return x_grad.addcmul_(unit, mean, value=-1).mul_(scale), weight_grad, None


class RMSNorm(LocalParameters):
    """weight · norm(x). The norm is computed in max(float32, x's dtype) and rounded before the weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], in x's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.local("weight")
        if wide == x.dtype == weight.dtype:
            return rms_norm(x, weight, self.eps)
        return weight * normalize_rms(x, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class Gemma3RMSNorm(RMSNorm):
    """(1 + weight) · norm(x), all in max(float32, x's dtype), rounded once at the end."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], in x's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return rms_norm(x.to(wide), 1.0 + self.local("weight").to(wide), self.eps).to(x.dtype)


class Activation(NamedTuple):
    """An elementwise function and its backward, (grad, input) -> grad of the input."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


ACTIVATIONS = {
    "silu": Activation(F.silu, aten.silu_backward),
    "gelu": Activation(F.gelu, aten.gelu_backward),
    "gelu_pytorch_tanh": Activation(
        lambda x: F.gelu(x, approximate="tanh"), lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh")
    ),
    "relu": Activation(F.relu, lambda grad, x: aten.threshold_backward(grad, x, 0)),
}


def gated_activation(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) · up (GLU variants, arXiv:2002.05202). gate, up: [..., F]."""
    return _Gated.apply(gate, up, activation)


class _Gated(torch.autograd.Function):
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
    """g · sigmoid(gain · g) · (u + 1), g = min(gate, limit), u = up held between -limit and limit: the gate of gpt-oss.
    gate, up: [..., F]."""
    return _Clamped.apply(gate, up, gain, limit)


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, gain, limit):
        ctx.save_for_backward(gate, up)
        ctx.gain, ctx.limit = gain, limit
        held = gate.clamp(max=limit)
        return torch.sigmoid(held * gain).mul_(held).mul_(up.clamp(-limit, limit).add_(1))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        held = gate.clamp(max=ctx.limit)
        share = torch.sigmoid(held * ctx.gain)
        up_grad = (share * held).mul_(grad).masked_fill_(up.abs() > ctx.limit, 0)
        slope = (1 - share).mul_(held * ctx.gain).add_(1).mul_(share)
        slope.mul_(up.clamp(-ctx.limit, ctx.limit).add_(1)).mul_(grad)
        return slope.masked_fill_(gate > ctx.limit, 0), up_grad, None, None


def rotary_frequencies(rope: Rope, head_dim: int, dtype: torch.dtype) -> Tensor:
    """[head_dim / 2] radians per position in `dtype` (float32 or float64), on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").to(dtype) / head_dim
    powers = rope.theta**exponents
    plain = 1.0 / powers
    if rope.kind == "proportional":
        plain[int(rope.rotary_fraction * head_dim // 2) :] = 0  # these stay as they are
    if rope.kind in ("linear", "proportional"):
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, powers, head_dim)
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.pair_factors, dtype=dtype, device="cpu") * powers)
    return plain


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended (Llama 3.1's model card)."""
    wavelength = 2 * math.pi / plain
    length, low, high = rope.original_max_positions, rope.low_freq_factor, rope.high_freq_factor
    is_long, is_short = wavelength > length / low, wavelength < length / high
    share = (length / wavelength - low) / (high - low)
    blended = (1 - share) * plain / rope.factor + share * plain
    return torch.where(is_long, plain / rope.factor, torch.where(is_short, plain, blended))


def _yarn(rope: Rope, powers: Tensor, head_dim: int) -> Tensor:
    """Dimensions that turn often are kept, those that turn seldom interpolated (arXiv:2309.00071, section 3.2)."""

    def dimension(turns: float) -> float:
        length = rope.original_max_positions
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=powers.dtype) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def rotary_tables(
    rope: Rope, head_dim: int, positions: Tensor, dtype: torch.dtype, held: dict[Any, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sign·sin, each [B or 1, S, 1, turned] in `dtype`, for positions [B or 1, S], or [B or 1, S, 3] by the
    axes of `rope.sections`; `rotate` wants both. turned: the dimensions of a head that are rotated, all or its first
    ones. Computed in max(float32, dtype). held: where the frequencies on the device stay for the next call, of like
    sizes."""
    wide, held = torch.promote_types(dtype, torch.float32), {} if held is None else held
    turned = head_dim if rope.kind == "proportional" else int(head_dim * rope.rotary_fraction)
    if (rope, turned) not in held:
        held[rope, turned] = rotary_frequencies(rope, turned, wide).to(positions.device, non_blocking=True)
    by_pair = positions[..., None] if positions.dim() == 2 else _by_pair(rope, positions, turned // 2, held)
    angles = by_pair.to(wide) * held[rope, turned]  # [B, S, turned / 2]
    cos, sin = angles.cos() * rope.table_scale, angles.sin() * rope.table_scale
    return torch.cat([cos, cos], -1).to(dtype).unsqueeze(2), torch.cat([-sin, sin], -1).to(dtype).unsqueeze(2)


def _by_pair(rope: Rope, positions: Tensor, pairs: int, held: dict[Any, Tensor]) -> Tensor:
    """Return the position that turns each pair, [B, S, pairs], of positions [B, S, 3] by axis."""
    if rope.sections is None:
        raise ValueError("positions of several axes, and this model's rotary embedding has one")
    axes = rope.sections.axes(pairs)
    if axes not in held:
        held[axes] = torch.tensor(axes, device="cpu").to(device=positions.device, non_blocking=True)
    return positions.index_select(-1, held[axes])


def apply_rotary(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """x [B, S, H, hd] with its halves (x1, x2) turned: (x1·cos − x2·sin, x2·cos + x1·sin); those of its first
    dimensions where the tables are for these alone."""
    turned = cos.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat([apply_rotary(x[..., :turned], cos, signed_sin), x[..., turned:]], -1)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def round_scale(scale: float, dtype: torch.dtype) -> float:
    """Return the factor of embeddings rounded to `dtype`, as checkpoints were trained: 50.6 is 50.5 in bfloat16."""
    return torch.tensor(scale, dtype=dtype, device="cpu").item()
