"""Mixtures of experts of transformers, computed by dtrain's products.

transformers stores the experts of a layer in stacks, `gate_up_proj` [E, 2·inner, D] and `down_proj` [E, D, inner], and
calls a registered function with them. `compute_experts` is dtrain's function. It sorts the tokens by expert as
`models.common.moe` does, so it computes in every dtype, in a fixed order, and also on the meta device, where the number
of tokens of each expert is not known.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dtrain.models.common.moe import grouped_product, sort_by_expert
from dtrain.models.transformers.modules import TransformersExperts
from dtrain.parallel.experts import collect_token_rows, repeat_token_rows


def compute_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the weighted sum of each token's experts, as transformers' `ExpertsInterface` calls it.

    Args:
        module: The experts of a layer. transformers describes their form by `has_gate`, `has_bias`, `is_transposed` and
            `has_post_expert_norm`.
        hidden_states: [T, D].
        top_k_index: Experts of each token, [T, k] int64.
        top_k_weights: Their weights, [T, k].

    Returns:
        [T, D].

    Collectives:
        Those of `Experts.compute_on_expert_ranks`.
    """
    order, counts = sort_by_expert(top_k_index, module.num_experts, None)
    rows = repeat_token_rows(hidden_states, order, top_k_index.shape[1])
    if isinstance(module, TransformersExperts):
        results = module.compute_on_expert_ranks(rows, counts, partial(_compute_local_experts, module))
    else:  # while shapes are recorded, the modules are those of transformers
        results = _compute_local_experts(module, rows, counts)
    results_by_token = collect_token_rows(results, order, *top_k_index.shape)  # [T, k, D]
    weights = top_k_weights.to(results.dtype)
    return torch.bmm(weights[:, None], results_by_token).squeeze(1)


def _compute_local_experts(module: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """Compute rows of this rank's experts.

    Args:
        module: As in `compute_experts`.
        rows: Rows sorted by expert, [m, D].
        counts: Rows of each of this rank's experts, [E/ep] int64.

    Returns:
        [m, D].
    """
    experts = None
    if module.has_bias:
        # The expert of each row, for biases, which are added row by row.
        numbers = torch.arange(len(counts), device=counts.device)
        experts = numbers.repeat_interleave(counts, output_size=len(rows))
    name = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _expert_linear(module, name, rows, counts, experts)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    results = _expert_linear(module, "down_proj", inner, counts, experts)
    if module.has_post_expert_norm:
        results = module.post_expert_norm(results)
    return results


def _expert_linear(module: Any, name: str, rows: Tensor, counts: Tensor, experts: Tensor | None) -> Tensor:
    """Multiply rows [m, in] by the matrices `name` of their experts, and add the biases, [m, out]."""
    stack = getattr(module, name)
    if module.is_transposed:
        stack = stack.transpose(1, 2)
    output = grouped_product(rows, stack, counts)
    return output if experts is None else output + getattr(module, f"{name}_bias")[experts]
