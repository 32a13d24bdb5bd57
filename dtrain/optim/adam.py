"""The update of AdamW and Adam, and a step of AdamW with float32 moments.

A recipe's `adamw` and `adam` are torch's own classes (`policy/optimizer.py`). The functions here are for dtrain's own
optimizers: `Muon` steps embeddings, heads and vectors with `adam_step`, and `memory.low_bit_adam` builds on
`adam_update`.

With gradient g, moments m and v, step number t, learning rate lr and weight decay λ (Kingma and Ba, arXiv:1412.6980;
Loshchilov and Hutter, arXiv:1711.05101):

    w ← (1 − lr·λ)·w                        AdamW; Adam adds λ·w to g instead
    m ← β₁·m + (1 − β₁)·g
    v ← β₂·v + (1 − β₂)·g²
    w ← w − lr ÷ (1 − β₁ᵗ) · m ÷ (√v ÷ √(1 − β₂ᵗ) + ε)

Example: the first step with g = 0.5, w = 1, lr = 0.1, λ = 0, β₁ = 0.9 and β₂ = 0.999 has m = 0.05 and v = 0.00025, so
m ÷ (1 − β₁) = 0.5 and √v ÷ √(1 − β₂) = 0.5, and w becomes 1 − 0.1 = 0.9.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtrain.base.fused import Fused
from dtrain.optim.local_shard import (
    BitPositions,
    LocalShard,
    bit_positions,
    random_bits,
    random_sequence,
    round_bfloat16,
)
from dtrain.parallel.placement import local_tensor

MOMENTS = "exp_avg", "exp_avg_sq"
"""Keys of the two moments in an optimizer's state, those of torch's classes."""


class AdamScalars(NamedTuple):
    """Coefficients of AdamW or Adam for one parameter group at one step.

    All are float64 scalars on the host. A compiled kernel receives such tensors by value, so another learning rate or
    step does not recompile it.

    Attributes:
        weight_factor: Factor of the weights, 1 - lr·λ. None for Adam and without weight decay.
        gradient_decay: Factor of the weights that are added to the gradient, λ. None for AdamW and without decay.
        beta1: Decay of the first moment.
        one_minus_beta1: Factor of the gradient in the first moment.
        beta2: Decay of the second moment.
        one_minus_beta2: Factor of the squared gradient in the second moment.
        root_factor: Factor of the second moment's root, 1 / sqrt(1 - beta2^t).
        eps: Added to the denominator.
        rate: Learning rate divided by 1 - beta1^t.
    """

    weight_factor: Tensor | None
    gradient_decay: Tensor | None
    beta1: Tensor
    one_minus_beta1: Tensor
    beta2: Tensor
    one_minus_beta2: Tensor
    root_factor: Tensor
    eps: Tensor
    rate: Tensor


def adam_scalars(group: Mapping[str, Any], step: int, *, is_decoupled: bool = True) -> AdamScalars:
    """Compute the coefficients of an optimizer step.

    Args:
        group: Parameter group with lr, betas, eps and weight_decay.
        step: Number of the step, counted from 1.
        is_decoupled: Whether the decay multiplies the weights (AdamW), or is added to the gradient (Adam).
    """
    beta1, beta2 = group["betas"]
    lr, weight_decay = group["lr"], group["weight_decay"]
    weight_factor = gradient_decay = None
    if weight_decay and is_decoupled:
        weight_factor = _scalar(1 - lr * weight_decay)
    elif weight_decay:
        gradient_decay = _scalar(weight_decay)
    return AdamScalars(
        weight_factor=weight_factor,
        gradient_decay=gradient_decay,
        beta1=_scalar(beta1),
        one_minus_beta1=_scalar(1 - beta1),
        beta2=_scalar(beta2),
        one_minus_beta2=_scalar(1 - beta2),
        root_factor=_scalar((1 - beta2**step) ** -0.5),
        eps=_scalar(group["eps"]),
        rate=_scalar(lr / (1 - beta1**step)),
    )


def adam_update(values: Tensor, gradient: Tensor, first: Tensor, second: Tensor, scalars: AdamScalars) -> None:
    """Update weights and moments in place.

    Args:
        values: Weights in float32 or float64, any shape.
        gradient: Gradient, with the shape and dtype of `values`. It is not changed.
        first: First moment, with the shape and dtype of `values`.
        second: Second moment, with the shape and dtype of `values`.
        scalars: Coefficients of the step.
    """
    if scalars.weight_factor is not None:
        values.mul_(scalars.weight_factor)
    if scalars.gradient_decay is not None:
        gradient = gradient + values * scalars.gradient_decay
    # Each product and each sum is rounded separately. torch's fused kernels round the elements at the ends of a tensor
    # differently from those in the middle, and which elements are at the ends of a shard depends on the mesh.
    first.mul_(scalars.beta1).add_(gradient * scalars.one_minus_beta1)
    second.mul_(scalars.beta2).add_((gradient * scalars.one_minus_beta2).mul_(gradient))
    denominator = second.sqrt().mul_(scalars.root_factor).add_(scalars.eps)
    values.sub_((first / denominator).mul_(scalars.rate))


@torch.no_grad()
def adam_step(
    parameter: nn.Parameter, state: dict[str, Any], group: Mapping[str, Any], shard: LocalShard, name: str, seed: int
) -> None:
    """Step the local shard of one parameter by AdamW, with moments in float32 (float64 for a float64 parameter).

    Args:
        parameter: Parameter with a gradient, a plain tensor or a DTensor, in float64, float32 or bfloat16. bfloat16
            weights are rounded stochastically.
        state: Optimizer state of the parameter, filled in the first step: exp_avg, exp_avg_sq and step.
        group: The parameter's group, with lr, betas, eps and weight_decay.
        shard: The parameter's local shard.
        name: The parameter's name in the model. With seed and step, it selects the random bits.
        seed: Seed of the random bits.
    """
    assert parameter.grad is not None
    if not state:
        local = local_tensor(parameter).detach()
        for key in MOMENTS:
            state[key] = torch.zeros_like(local, dtype=torch.promote_types(local.dtype, torch.float32))
        state["step"] = torch.zeros(())
    state["step"] += 1
    step = int(state["step"].item())
    scalars = adam_scalars(group, step)
    sequence = random_sequence(seed, step, name)
    weights, gradient = shard.as_matrix(parameter), shard.as_matrix(parameter.grad)
    first, second = shard.as_matrix(state["exp_avg"]), shard.as_matrix(state["exp_avg_sq"])
    for rows in shard.row_slices():
        positions = bit_positions(shard, rows, sequence)
        _step_rows(weights[rows], gradient[rows], first[rows], second[rows], scalars, positions)


@Fused
def _step_rows(
    weights: Tensor, gradient: Tensor, first: Tensor, second: Tensor, scalars: AdamScalars, positions: BitPositions
) -> None:
    """Step a slice of a shard's rows, [rows, local_columns].

    The weights and the gradient may have any dtype. The moments have the dtype of the computation.
    """
    # Makes no copy if the weights have this dtype already. `adam_update` then changes them in place.
    values = weights.to(first.dtype)
    adam_update(values, gradient.to(first.dtype), first, second, scalars)
    if weights.dtype == torch.bfloat16:
        bits = random_bits(values.shape, positions, values.device)
        weights.copy_(round_bfloat16(values, bits))


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
