"""Tensor-parallel plans of transformers in dtrain's styles.

A config of transformers has `base_model_tp_plan`, which maps patterns of names to styles. For each style, dtrain has a
function that shards the parameters of a module, and sets the collectives of its inputs and outputs (`enter`, `leave`):

    colwise                           rows of the weight; the input's gradient is summed over tp
    rowwise                           columns of the weight; the outputs are summed over tp
    colwise_gather_output             as colwise, and the outputs are gathered; older name: colwise_rep
    rowwise_split_input               as rowwise, for inputs that every rank has in full; older name: rowwise_rep
    replicated_with_grad_allreduce    replicated; for a norm over heads: ranks have other heads, so gradients are summed
    moe_tp_experts                    experts of a mixture: each rank computes a part of their inner size
    moe_identity_expert               an expert that returns its input: divided by tp, because outputs are summed
    mla_kv_a_proj                     replicated; the gradient of the rotary part of the latent is summed over tp
    embedding_rowwise                 rows of a table; the outputs are summed over tp
    replicate, local_params           replicated, as are the modules that the plan does not name

A name may also be that of a parameter, such as a layer's attention sinks (`_shard_parameter`).

dtrain's own models have one collective for each block (`parallel.tensor`). Here, each layer has its own. Consecutive
layers with the same input, such as q_proj, k_proj and v_proj, share one all-reduce of its gradient
(`running.SharedInput`). Activations are not sharded along the sequence: `parallel.sequence_parallel=auto` means false.

transformers joins some gate and up projections in one matrix ("packed"). A rank needs rows of both, which are not
consecutive. The joined weight is therefore stored unsharded on every tp rank, and each rank computes with its rows.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from transformers.activations import XIELUActivation

from dtrain.base.errors import UserError
from dtrain.models.common.decoder import CausalLM
from dtrain.models.transformers.modules import LocalModule, TransformersLinear
from dtrain.models.transformers.running import get_running
from dtrain.parallel.apply import match_styles
from dtrain.parallel.collectives import (
    all_reduce_in_backward,
    all_reduce_in_forward,
    gather_for_replicated,
    slice_for_sharded,
)
from dtrain.parallel.placement import chunk_bounds
from dtrain.parallel.tensor import (
    STYLES,
    AdapterStyle,
    LocalParameters,
    TensorParallel,
    colwise,
    colwise_kv,
    distribute_parameters,
    rowwise_within,
    summed,
    vocab_rows,
)

StyleFunction = Callable[[Any, TensorParallel], None]

# Names of norms of queries and keys, and of the projections to them.
_HEAD_NORMS = {"q_norm": "q_proj", "k_norm": "k_proj", "q_layernorm": "q_proj", "k_layernorm": "k_proj",
               "query_layernorm": "q_proj", "key_layernorm": "k_proj"}  # fmt: skip
_NO_STYLES = ("replicate", "local_params")
_NO_PLAN = "transformers has no tensor-parallel plan for this class"


def make_plan(config: Any, model: CausalLM) -> dict[str, Any]:
    """Return the plan of a model, from patterns of dtrain's names to styles.

    Making a plan never fails, because models are also built without tensor parallelism. If transformers has no plan for
    the class, or dtrain does not know a style, the plan contains `_refuse`, which raises UserError when it is applied.

    Args:
        config: Config of transformers.
        model: The model, on the meta device.
    """
    library_plan: Mapping[str, str] | None = config.get_text_config().base_model_tp_plan
    head, head_style = ("lm_head", "vocab_head") if model.config.num_labels is None else ("score", "score_head")
    modules = dict(model.named_modules())
    embeddings = [name for name, module in modules.items() if module is model.model.embed_tokens]
    if not library_plan:
        # Head and embedding may share a parameter, so both need a style.
        return dict.fromkeys([head, *embeddings], partial(_refuse, _NO_PLAN))
    plan: dict[str, Any] = {"model": "decoder", head: head_style}
    plan |= _translate_plan(library_plan, modules, getattr(config, "qk_rope_head_dim", None))
    for name in embeddings:
        plan.pop(name, None)  # the last entry that matches a module decides, so this one is moved to the end
        plan[name] = "vocab_embedding"
    for name, module in modules.items():
        # Some plans of transformers have no style for these modules, although each rank has other inputs for them.
        has_sharded_inputs = isinstance(module, XIELUActivation) or _is_head_norm(name, module, library_plan)
        if has_sharded_inputs and not any(fnmatchcase(name, pattern) for pattern in plan):
            plan[name] = summed
    return plan


def _translate_plan(
    library_plan: Mapping[str, str], modules: Mapping[str, nn.Module], rotary_size: int | None
) -> dict[str, StyleFunction]:
    """Return dtrain's styles for a plan of transformers, by pattern of dtrain's names of modules.

    For example, gpt-oss has these entries, of which the last two are one style of the module `layers.*.mlp.experts`:

        layers.*.self_attn.q_proj               colwise
        layers.*.self_attn.sinks                colwise, a parameter
        layers.*.mlp.experts                    moe_tp_experts
        layers.*.mlp.experts.gate_up_proj       packed_colwise, a parameter

    Args:
        library_plan: Styles of transformers by pattern, without the name of the decoder.
        modules: The model's modules by name.
        rotary_size: Elements of the rotary part in the latent of keys. None: no multi-head latent attention.
    """
    plan: dict[str, StyleFunction] = {}
    experts: list[str] = []
    parameter_styles: dict[str, dict[str, str]] = {}  # by pattern of modules, the styles of their parameters
    for library_pattern, style in library_plan.items():
        if style in _NO_STYLES:
            continue
        pattern = f"model.{library_pattern}"
        parent_pattern, _, parameter = pattern.rpartition(".")
        if _match_modules(pattern, modules):
            if style == "moe_tp_experts":
                experts.append(pattern)
            elif style == "mla_kv_a_proj":
                plan[pattern] = AdapterStyle(partial(latent_keys, rotary_size=rotary_size))
            else:
                refused = AdapterStyle(partial(_refuse, f"{library_pattern}: dtrain does not know the style {style}"))
                plan[pattern] = _STYLES.get(style, refused)
        elif any(parameter in parent._parameters for parent in _match_modules(parent_pattern, modules)):
            parameter_styles.setdefault(parent_pattern, {})[parameter] = style
    for pattern in experts:
        # Experts that are a list of modules, such as those of Phi-MoE's older classes, have no parameters themselves.
        plan[pattern] = partial(shard_experts, styles=parameter_styles.pop(pattern, {}))
    for pattern, styles in parameter_styles.items():
        plan[pattern] = partial(shard_parameters, styles=styles)
    return plan


def _match_modules(pattern: str, modules: Mapping[str, nn.Module]) -> list[nn.Module]:
    """Return the modules whose names match a pattern."""
    return [module for name, module in modules.items() if fnmatchcase(name, pattern)]


def _is_head_norm(name: str, module: nn.Module, library_plan: Mapping[str, str]) -> bool:
    """Check whether a module is a norm over each head of queries or keys, whose heads are sharded.

    For example, the plan of GLM-4.5 names q_proj and not q_norm.
    """
    parent, _, last = name.rpartition(".")
    projection = f"{parent}.{_HEAD_NORMS.get(last)}"
    if last not in _HEAD_NORMS or not module._parameters:
        return False
    return any(
        style == "colwise" and fnmatchcase(projection, f"model.{pattern}") for pattern, style in library_plan.items()
    )


class _PlannedRanks(TensorParallel):
    """Rank 0 of a tensor-parallel mesh without processes, to check that all styles of a plan can be applied."""

    @property
    def rank(self) -> int:
        """Index of the rank."""
        return 0

    @property
    def group(self) -> Any:
        """No process group."""
        return None


def find_plan_problem(model: CausalLM, size: int) -> str | None:
    """Return the first problem of sharding a model over `size` tensor-parallel ranks, or None. No collective.

    Args:
        model: A model on the meta device, which is sharded in place.
        size: The number of ranks.
    """
    if refused := _find_refusal(model.plan):
        return f"parallel.tp={size}: {refused}"
    # DTensor caches meshes by their sizes and names. Under the name "tp", a later run in this process would get this
    # mesh, which has no process group.
    mesh = DeviceMesh("cpu", list(range(size)), mesh_dim_names=("planned_tp",), _init_backend=False, _rank=0)
    tp = _PlannedRanks(mesh, False, model.config.num_key_value_heads)
    modules = dict(model.named_modules())
    try:
        for name, style in match_styles(model, model.plan, sequence_parallel=False).items():
            apply_style = STYLES[style] if isinstance(style, str) else cast(StyleFunction, style)
            apply_style(modules[name], tp)
    except UserError as error:
        return str(error)
    return None


def _find_refusal(plan: Mapping[str, Any]) -> str | None:
    """Return the reason for refusing tensor parallelism that a plan contains, or None."""
    for style in plan.values():
        if isinstance(style, partial) and style.func is _refuse:
            return str(style.args[0])
    return None


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
    module.enter = partial(_enter, tp=tp)


def _enter(hidden: Tensor, tp: TensorParallel) -> Tensor:
    """Return the input of a sharded layer, whose gradient is summed over tp, once for all layers with this input."""
    forward = get_running()
    if forward is None:
        return all_reduce_in_backward(hidden, tp.group)
    return forward.shared_input.enter(hidden, tp.group)


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
    module.enter = partial(_enter, tp=tp)
    module.leave = partial(gather_for_replicated, dim=-1, group=tp.group)


def rowwise_split(module: TransformersLinear, tp: TensorParallel) -> None:
    """Shard the inputs of a linear layer, which every rank has in full, and sum its outputs over tp."""
    leave_rowwise(module, tp)
    if module.in_features % tp.size:
        raise UserError(f"parallel.tp={tp.size} does not divide the {module.in_features} inputs of a layer")
    module.enter = partial(slice_for_sharded, dim=-1, group=tp.group)


def latent_keys(module: TransformersLinear, tp: TensorParallel, rotary_size: int | None) -> None:
    """Replicate the projection to the latent of keys, [..., latent + rotary_size].

    The gradient of the latent is summed by the colwise layer that reads it. The gradient of the rotary part, which the
    heads of every rank read without another layer, is summed here.

    Args:
        module: The projection.
        tp: The tensor-parallel ranks.
        rotary_size: Elements of the rotary part. None: the config has no field for it, which is an error.
    """
    _require_linear(module, "mla_kv_a_proj")
    distribute_parameters(module, tp, module._parameters, Replicate())
    if rotary_size is None:
        raise UserError(f"parallel.tp={tp.size}: the config of the model has no qk_rope_head_dim")

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
        _shard_parameter(module, tp, name, style)
    rest = [name for name, parameter in module.named_parameters() if name not in styles]
    if rest:
        raise UserError(f"parallel.tp={tp.size}: the plan of transformers has no style for the experts' {rest[0]}")
    module.enter = partial(all_reduce_in_backward, group=tp.group)
    module.leave = partial(all_reduce_in_forward, group=tp.group)


def shard_parameters(module: LocalModule, tp: TensorParallel, styles: Mapping[str, str]) -> None:
    """Shard parameters of a module that computes between colwise and rowwise layers, such as attention sinks [H].

    Other parameters of the module are replicated, and their gradients are summed.
    """
    if all(module._parameters.get(name) is None for name in styles):
        return  # for example a layer without sinks, in a model where others have some
    _require_local(module)
    for name, style in styles.items():
        _shard_parameter(module, tp, name, style)
    rest = [name for name in module._parameters if name not in styles]
    distribute_parameters(module, tp, rest, Replicate(), grad=Partial())


def _shard_parameter(module: LocalModule, tp: TensorParallel, name: str, style: str) -> None:
    """Shard a parameter by the style that transformers has for it.

    In transformers' stacks of matrices, "colwise" means the dimension before the last and "rowwise" the last. "packed"
    means that this dimension contains two matrices, one after the other. A bias or a vector has only "colwise":

        sinks [H]                                   colwise          H
        up_proj [E, inner, D]                       colwise          inner
        gate_up_proj [E, 2·inner, D]                packed_colwise   2·inner
        down_proj [E, D, inner]                     rowwise          inner
        gate_up_proj [E, D, 2·inner] of Llama 4     packed_rowwise   2·inner
    """
    parameter = module._parameters.get(name)
    if parameter is None:
        return
    is_packed = style.startswith("packed_")
    direction = style.removeprefix("packed_")
    if direction == "colwise":
        dim = max(parameter.dim() - 2, 0)
    else:
        dim = parameter.dim() - 1
    is_vector = parameter.dim() == 1
    is_known = direction in ("colwise", "rowwise") and not (is_vector and direction == "rowwise")
    if not is_known or (is_packed and dim == 0):
        raise UserError(f"parallel.tp={tp.size}: dtrain does not know the style {style} of {name}")
    num_parts = 2 * tp.size if is_packed else tp.size
    if parameter.shape[dim] % num_parts:
        raise UserError(f"parallel.tp={tp.size} does not divide the {parameter.shape[dim]} elements of {name}")
    if is_packed:
        # A rank's rows of both matrices are not consecutive, so the parameter is replicated, and the rows are selected.
        select = partial(_select_packed, dim=dim, tp=tp)
        distribute_parameters(module, tp, [name], Replicate(), grad=Partial(), select=select)
    else:
        distribute_parameters(module, tp, [name], Shard(dim))


class IdentityExpert(nn.Identity):
    """Expert that returns its input, as a part of results that are summed over tp ranks.

    Attributes:
        num_ranks: Number of ranks.
    """

    num_ranks = 1

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's part of the input, which all ranks have."""
        return x / self.num_ranks


def divide_identity(module: nn.Module, tp: TensorParallel) -> None:
    """Divide the output of an expert that returns its input."""
    if type(module) is not nn.Identity:
        raise UserError(f"transformers' style moe_identity_expert on a {type(module).__name__} is not known to dtrain")
    module.__class__ = IdentityExpert
    module.num_ranks = tp.size  # type: ignore[assignment]  # nn.Module's stub has a Tensor or a Module here


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


# Styles of modules. `_translate_plan` adds those that need more than the module.
_STYLES: dict[str, StyleFunction] = {
    "colwise": AdapterStyle(enter_colwise),
    "rowwise": AdapterStyle(leave_rowwise),
    "colwise_gather_output": AdapterStyle(colwise_gathered),
    "colwise_rep": AdapterStyle(colwise_gathered),
    "rowwise_split_input": AdapterStyle(rowwise_split),
    "rowwise_rep": AdapterStyle(rowwise_split),
    "replicated_with_grad_allreduce": summed,
    "moe_identity_expert": divide_identity,
    "embedding_rowwise": vocab_rows,
}
