"""Tensor-parallel plans of transformers in dtrain's styles.

A config of transformers has `base_model_tp_plan`, from patterns of names to styles. Each style becomes a function that
shards a module of the model, and sets what the module does with its inputs and outputs:

    colwise                           rows of the weight; the input's gradient is summed over tp
    rowwise                           columns of the weight; the outputs are summed over tp
    colwise_gather_output             as colwise, and the outputs are gathered
    rowwise_split_input               as rowwise, for inputs that every rank has in full
    replicated_with_grad_allreduce    a norm over heads: each rank has other heads, so gradients are summed
    moe_tp_experts                    a mixture's experts, of which each rank computes a part of the inner size
    mla_kv_a_proj                     the latent of keys, whose rotary part every rank's heads read

Modules that the plan does not name are replicated. In transformers each module communicates by itself, so the gradient
of a layer's input is summed once per projection and not once per block.

Gate and up projections that transformers joins in one matrix ("packed") cannot be cut into two parts of consecutive
rows. Their weight is stored in full on every tp rank, and each rank computes with its own rows of both.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard

from dtrain.base.errors import UserError
from dtrain.models.common.decoder import CausalLM
from dtrain.models.transformers.modules import LocalModule, TransformersLinear
from dtrain.parallel.collectives import (
    all_reduce_in_backward,
    all_reduce_in_forward,
    gather_for_replicated,
    slice_for_sharded,
)
from dtrain.parallel.placement import chunk_bounds
from dtrain.parallel.tensor import (
    LocalParameters,
    TensorParallel,
    colwise,
    colwise_kv,
    distribute_parameters,
    rowwise_within,
    summed,
)

StyleFunction = Callable[[Any, TensorParallel], None]

_KEY_PROJECTIONS = ("k_proj", "v_proj")
_NO_PLAN = "transformers has no tensor-parallel plan for this class; set parallel.tp=1"


def make_plan(config: Any, model: CausalLM) -> dict[str, Any]:
    """Return the plan of a model, from patterns of dtrain's names to styles.

    A class for which transformers has no plan, or a style that dtrain does not know, gets a plan whose application
    raises UserError.

    Args:
        config: Config of transformers.
        model: The model, on the meta device.
    """
    library_plan: Mapping[str, str] | None = config.get_text_config().base_model_tp_plan
    plan: dict[str, Any] = {"model": "decoder", "lm_head": "vocab_head"}
    names = dict(model.named_modules())
    for name, module in names.items():
        if module is model.model.embed_tokens:
            plan[name] = "vocab_embedding"
    if not library_plan:
        return {"lm_head": partial(_refuse, _NO_PLAN)}
    experts: dict[str, dict[str, str]] = {}
    for name, style in library_plan.items():
        pattern = f"model.{name}"
        parent, _, last = pattern.rpartition(".")
        if any(fnmatchcase(module_name, pattern) for module_name in names):
            if style == "moe_tp_experts":
                experts.setdefault(pattern, {})
            else:
                plan[pattern] = _STYLES.get(style, partial(_refuse, f"{name}: dtrain does not know the style {style}"))
        elif any(
            fnmatchcase(module_name, parent) and last in module._parameters for module_name, module in names.items()
        ):
            experts.setdefault(parent, {})[last] = style
    for pattern, styles in experts.items():
        plan[pattern] = partial(shard_experts, styles=styles)
    return plan


def _refuse(text: str, module: nn.Module, tp: TensorParallel) -> None:
    """Raise UserError: the style of a model that cannot be sharded."""
    raise UserError(f"parallel.tp={tp.size}: {text}")


def enter_colwise(module: TransformersLinear, tp: TensorParallel) -> None:
    """Shard the outputs of a linear layer. Every rank has the full input, whose gradient is summed over tp.

    A projection to keys or values with fewer heads than ranks is replicated (`tensor.colwise_kv`).
    """
    _require_linear(module, "colwise")
    if module.key_heads is not None:
        colwise_kv(module, tp)
    else:
        colwise(module, tp)
    module.enter = partial(all_reduce_in_backward, group=tp.group)


def leave_rowwise(module: TransformersLinear, tp: TensorParallel) -> None:
    """Shard the inputs of a linear layer, and sum its outputs over tp."""
    _require_linear(module, "rowwise")
    rowwise_within(module, tp)
    module.leave = partial(all_reduce_in_forward, group=tp.group)


def colwise_gathered(module: TransformersLinear, tp: TensorParallel) -> None:
    """Shard the outputs of a linear layer, and gather them on every rank."""
    _require_linear(module, "colwise_gather_output")
    if module.out_features % tp.size:
        raise UserError(f"parallel.tp={tp.size} does not divide the {module.out_features} outputs of a layer")
    colwise(module, tp)
    module.enter = partial(all_reduce_in_backward, group=tp.group)
    module.leave = partial(gather_for_replicated, dim=-1, group=tp.group)


def rowwise_split(module: TransformersLinear, tp: TensorParallel) -> None:
    """Shard the inputs of a linear layer, which every rank has in full, and sum its outputs over tp."""
    leave_rowwise(module, tp)
    if module.in_features % tp.size:
        raise UserError(f"parallel.tp={tp.size} does not divide the {module.in_features} inputs of a layer")
    module.enter = partial(slice_for_sharded, dim=-1, group=tp.group)


def latent_keys(module: TransformersLinear, tp: TensorParallel) -> None:
    """Replicate the projection to the latent of keys, [latent, rotary part].

    The latent enters a colwise layer, which sums its gradient. The rotary part is read by the heads of every rank.
    """
    _require_linear(module, "mla_kv_a_proj")
    distribute_parameters(module, tp, module._parameters, Replicate())
    rotary_size: int = module.rotary_size  # type: ignore[assignment]

    def sum_rotary_gradient(output: Tensor) -> Tensor:
        latent, rotary = output.split([output.shape[-1] - rotary_size, rotary_size], dim=-1)
        return torch.cat([latent, all_reduce_in_backward(rotary, tp.group)], dim=-1)

    module.leave = sum_rotary_gradient


def shard_experts(module: LocalModule, tp: TensorParallel, styles: Mapping[str, str]) -> None:
    """Shard the inner size of a mixture's experts. Inputs and routing weights are full on every rank.

    Args:
        module: The experts, with stacks such as gate_up_proj [E, 2·inner, D] and down_proj [E, D, inner].
        tp: The tensor-parallel ranks.
        styles: Style of each parameter.
    """
    _require_local(module)
    for name, style in styles.items():
        parameter = module._parameters.get(name)
        if parameter is None:
            continue
        if style == "packed_colwise":
            dim = parameter.dim() - 2 if parameter.dim() > 2 else parameter.dim() - 1
            select = partial(_select_packed, dim=dim, tp=tp)
            distribute_parameters(module, tp, [name], Replicate(), grad=Partial(), select=select)
        elif style == "rowwise" and parameter.dim() == 3:
            distribute_parameters(module, tp, [name], Shard(2))
        else:
            raise UserError(f"parallel.tp={tp.size}: dtrain does not know the style {style} of the experts' {name}")
    rest = [name for name in module._parameters if name not in styles]
    if rest:
        raise UserError(f"parallel.tp={tp.size}: the plan of transformers has no style for the experts' {rest[0]}")
    module.enter = partial(all_reduce_in_backward, group=tp.group)
    module.leave = partial(all_reduce_in_forward, group=tp.group)


def _select_packed(full: Tensor, dim: int, tp: TensorParallel) -> Tensor:
    """Select this rank's part of two matrices that are joined along `dim`.

    For example, rank 1 of 2 has the rows 2, 3, 6 and 7 of 8.
    """
    half = full.shape[dim] // 2
    start, end = chunk_bounds(half, tp.size, tp.rank)
    parts = [full.narrow(dim, start, end - start), full.narrow(dim, half + start, end - start)]
    return torch.cat(parts, dim=dim)


def _require_linear(module: nn.Module, style: str) -> None:
    if not isinstance(module, TransformersLinear):
        raise UserError(f"transformers' style {style} on a {type(module).__name__} is not known to dtrain")


def _require_local(module: nn.Module) -> None:
    if not isinstance(module, LocalParameters):
        raise UserError(f"a {type(module).__name__} has no parameters to shard")


_STYLES: dict[str, StyleFunction] = {
    "colwise": enter_colwise,
    "rowwise": leave_rowwise,
    "colwise_gather_output": colwise_gathered,
    "colwise_rep": colwise_gathered,
    "rowwise_split_input": rowwise_split,
    "rowwise_rep": rowwise_split,
    "replicated_with_grad_allreduce": summed,
    "mla_kv_a_proj": latent_keys,
    "embedding_rowwise": lambda module, tp: None,
}
