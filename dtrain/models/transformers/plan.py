"""Tensor-parallel plans of transformers in dtrain's styles.

A config of transformers has `base_model_tp_plan`, from patterns of names to styles. Each style becomes a function that
shards a module of the model, and sets what the module does with its inputs and outputs:

    colwise                           rows of the weight; the input's gradient is summed over tp
    rowwise                           columns of the weight; the outputs are summed over tp
    colwise_gather_output             as colwise, and the outputs are gathered
    rowwise_split_input               as rowwise, for inputs that every rank has in full
    replicated_with_grad_allreduce    a norm over heads: each rank has other heads, so gradients are summed
    moe_tp_experts                    a mixture's experts, of which each rank computes a part of the inner size
    moe_identity_expert               an expert that returns its input, which the ranks' sum must contain once
    mla_kv_a_proj                     the latent of keys, whose rotary part every rank's heads read
    embedding_rowwise                 rows of a table, whose outputs are summed
    replicate, local_params           nothing

A name may also be that of a parameter, such as a layer's attention sinks. "colwise" then shards its heads.

Modules that the plan does not name are replicated. In transformers each module communicates by itself. Layers that are
called with the same input one after the other share its entry (`running.SharedInput`).

Gate and up projections that transformers joins in one matrix ("packed") cannot be cut into two parts of consecutive
rows. Their weight is stored in full on every tp rank, and each rank computes with its own rows of both.
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

    A class for which transformers has no plan, or a style that dtrain does not know, gets a plan whose application
    raises UserError.

    Args:
        config: Config of transformers.
        model: The model, on the meta device.
    """
    library_plan: Mapping[str, str] | None = config.get_text_config().base_model_tp_plan
    head, head_style = ("lm_head", "vocab_head") if model.config.num_labels is None else ("score", "score_head")
    names = dict(model.named_modules())
    if not library_plan:
        # Head and embedding may share a parameter, so both need a style.
        embeddings = [name for name, module in names.items() if module is model.model.embed_tokens]
        return dict.fromkeys([head, *embeddings], partial(_refuse, _NO_PLAN))
    plan: dict[str, Any] = {"model": "decoder", head: head_style}
    experts: set[str] = set()
    parameters: dict[str, dict[str, str]] = {}  # for each pattern of modules, the styles of their parameters
    for name, style in library_plan.items():
        pattern = f"model.{name}"
        parent, _, last = pattern.rpartition(".")
        if style in _NO_STYLES:
            continue
        if any(fnmatchcase(module_name, pattern) for module_name in names):
            if style == "moe_tp_experts":
                experts.add(pattern)
            else:
                refused = AdapterStyle(partial(_refuse, f"{name}: dtrain does not know the style {style}"))
                plan[pattern] = _STYLES.get(style, refused)
        elif any(
            fnmatchcase(module_name, parent) and last in module._parameters for module_name, module in names.items()
        ):
            parameters.setdefault(parent, {})[last] = style
    for pattern in experts:
        # Experts that are a list of modules, such as those of Phi-MoE's older classes, have styles of their own.
        plan[pattern] = partial(shard_experts, styles=parameters.pop(pattern, {}))
    for pattern, styles in parameters.items():
        plan[pattern] = partial(shard_parameters, styles=styles)
    for name, module in names.items():
        if module is model.model.embed_tokens:
            plan.pop(name, None)
            plan[name] = "vocab_embedding"
        elif isinstance(module, XIELUActivation) or _is_head_norm(name, module, library_plan):
            # Some plans of transformers have no style for them, although each rank has other inputs.
            if not any(fnmatchcase(name, pattern) for pattern in plan):
                plan[name] = summed
        elif isinstance(module, TransformersLinear):
            module.rotary_size = getattr(config, "qk_rope_head_dim", None)
    return plan


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
    """Tensor-parallel ranks that do not exist: rank 0 of a mesh without process groups. Styles can be applied to it."""

    @property
    def rank(self) -> int:
        """Index of the rank."""
        return 0

    @property
    def group(self) -> Any:
        """No process group."""
        return None


def find_plan_problem(model: CausalLM, size: int) -> str | None:
    """Return why a model cannot be sharded over `size` tensor-parallel ranks. None if it can. No collective.

    Args:
        model: A model on the meta device, which is sharded in place.
        size: The number of ranks.
    """
    if refused := _find_refusal(model.plan):
        return f"parallel.tp={size}: {refused}"
    mesh = DeviceMesh("cpu", list(range(size)), mesh_dim_names=("tp",), _init_backend=False, _rank=0)
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
    """Return why a plan shards nothing. None if it has styles."""
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


def latent_keys(module: TransformersLinear, tp: TensorParallel) -> None:
    """Replicate the projection to the latent of keys, [latent, rotary part].

    The latent enters a colwise layer, which sums its gradient. The rotary part is read by the heads of every rank.
    """
    _require_linear(module, "mla_kv_a_proj")
    distribute_parameters(module, tp, module._parameters, Replicate())
    rotary_size = module.rotary_size
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
    """Shard a parameter by the style that transformers has for it. Its outputs are the dimension before the last.

    For example, "colwise" shards the 64 heads of sinks [64], and the inner size of up_proj [E, inner, D]. The experts
    of Llama 4 are transposed: gate_up_proj [E, D, 2·inner] is "packed_rowwise", and down_proj [E, inner, D] "colwise".
    """
    parameter = module._parameters.get(name)
    if parameter is None:
        return
    outputs = max(parameter.dim() - 2, 0)
    dims = {"colwise": outputs, "packed_colwise": outputs, "rowwise": parameter.dim() - 1}
    dims["packed_rowwise"] = parameter.dim() - 1
    dim = dims.get(style)
    if dim is None or (dim == 0 and "packed" in style) or (parameter.dim() == 1 and style == "rowwise"):
        raise UserError(f"parallel.tp={tp.size}: dtrain does not know the style {style} of {name}")
    num_parts = 2 * tp.size if "packed" in style else tp.size
    if parameter.shape[dim] % num_parts:
        raise UserError(f"parallel.tp={tp.size} does not divide the {parameter.shape[dim]} elements of {name}")
    if "packed" in style:
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


_STYLES: dict[str, StyleFunction] = {
    "colwise": AdapterStyle(enter_colwise),
    "rowwise": AdapterStyle(leave_rowwise),
    "colwise_gather_output": AdapterStyle(colwise_gathered),
    "colwise_rep": AdapterStyle(colwise_gathered),
    "rowwise_split_input": AdapterStyle(rowwise_split),
    "rowwise_rep": AdapterStyle(rowwise_split),
    "replicated_with_grad_allreduce": summed,
    "mla_kv_a_proj": AdapterStyle(latent_keys),
    "moe_identity_expert": divide_identity,
    "embedding_rowwise": vocab_rows,
}
