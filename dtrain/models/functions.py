"""Norms and gated activations that keep less for the backward than autograd would.

On a CPU torch has no fused RMSNorm, and its composite keeps two tensors of the input's size and takes three times as
long; the gate recomputes its activation instead of keeping it. Both are elementwise plus reductions over the last
dimension, so they run on DTensors sharded elsewhere, under activation checkpointing and under torch.compile.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

aten = torch.ops.aten


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x², last dimension) + eps) · weight (arXiv:1910.07467), all in x's dtype: float32 or float64.

    x [..., D]; weight [D] or None.
    """
    if x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return _RmsNorm.apply(x, weight, eps)


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


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
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
