"""Models onto meshes from Python, under the names that NeMo-RL's users know: a plan, checkpointing, FSDP2, in that
order.

Each of these puts dtrain's model on its meshes in place and returns it; all apply the model's own table (`model.plan`).
The norm over each head of q and k is the style `head_norm`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from dtrain.base.errors import UserError
from dtrain.parallel.apply import Plan, apply_plan, find_plan
from dtrain.parallel.fsdp import mixed_precision, shard_model
from dtrain.parallel.size_checks import check_model_mesh
from dtrain.parallel.tensor import ParallelModel


def _parallelize_llama(
    model: ParallelModel,
    dp_mesh: DeviceMesh,
    tp_mesh: DeviceMesh | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    sequence_parallel: bool = False,
    activation_checkpointing: bool = False,
    custom_plan: str | Plan | None = None,
) -> ParallelModel:
    """`model` with its plan, or `custom_plan`, over `tp_mesh`, its layers checkpointed whole where asked, sharded over
    `dp_mesh`.

    dp_mesh: one dimension, or (replicate, shard). tp_mesh: one dimension; None or of size 1: no tensor parallel.
    Gradients are summed over dp_mesh, never averaged. Collective where FSDP2's is. The families differ in their tables
    alone.

    Raises ValueError for a model without a plan, and for sizes that tp cannot share out.
    """
    if getattr(model, "plan", None) is None:
        raise ValueError(f"{type(model).__name__} has no plan: these functions take dtrain's models (dtrain.models)")
    if tp_mesh is not None and tp_mesh.size() > 1:
        if problems := check_model_mesh(model.config, tp_mesh.size()):
            raise ValueError("\n".join(map(str, problems)))
        try:
            apply_plan(model, tp_mesh, find_plan(custom_plan, model), sequence_parallel=sequence_parallel)
        except UserError as error:
            raise ValueError(str(error)) from error
    if activation_checkpointing:
        # Optional, so that importing this package loads none of `dtrain.memory`, which imports it.
        from dtrain.memory.activation_checkpointing import checkpoint_activations

        checkpoint_activations(model, "full")
    shard_model(model, dp_mesh, mp_policy, offload_policy)
    return model


_parallelize_qwen = _parallelize_llama
_parallelize_gemma3 = _parallelize_llama


class _ByClassName(Mapping[str | type, Callable[..., ParallelModel]]):
    """Mapping from names of model classes, looked up by the class as well: dtrain's, or transformers' of the name."""

    def __init__(self, functions: dict[str, Callable[..., ParallelModel]]):
        self._functions = functions

    def __getitem__(self, model: str | type) -> Callable[..., ParallelModel]:
        names = [base.__name__ for base in model.__mro__] if isinstance(model, type) else [model]
        return self._functions[next((name for name in names if name in self._functions), names[0])]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)


# The function of each class that NeMo-RL has one for; `_parallelize_model` takes every model with a plan.
PARALLIZE_FUNCTIONS: Mapping[str | type, Callable[..., ParallelModel]] = _ByClassName(
    {
        "Qwen2ForCausalLM": _parallelize_qwen,
        "Qwen3ForCausalLM": _parallelize_qwen,
        "LlamaForCausalLM": _parallelize_llama,
        "Gemma3ForCausalLM": _parallelize_gemma3,
        "Gemma3ForConditionalGeneration": _parallelize_gemma3,
    }
)


class RotaryEmbedParallel:
    """NeMo-RL's style for a module of rotary tables, which no model here has. Raises NotImplementedError when made."""

    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "RotaryEmbedParallel cuts what a rotary module gives, and dtrain's models have none: a decoder makes the "
            "tables from positions once per forward, whole on every rank; leave the entry out of the plan"
        )


def _parallelize_model(
    model: ParallelModel,
    dp_mesh: DeviceMesh,
    tp_mesh: DeviceMesh | None,
    param_dtype: torch.dtype,
    sequence_parallel: bool = False,
    activation_checkpointing: bool = False,
    cpu_offload: bool = False,
    custom_parallel_plan: str | Plan | None = None,
) -> ParallelModel:
    """Apply a model's plan as `_parallelize_llama` does, with policies made here: layers compute in `param_dtype`,
    gradients are reduced in max(float32, it), outputs stay in it; cpu_offload keeps parameters in host memory.

    custom_parallel_plan: a table that replaces the model's, or the import path of one or of a function that gives one.
    Raises ValueError also for a plan that cannot be used.
    """
    return _parallelize_llama(
        model,
        dp_mesh,
        tp_mesh,
        mixed_precision(param_dtype, torch.promote_types(param_dtype, torch.float32)),
        CPUOffloadPolicy(pin_memory=False) if cpu_offload else OffloadPolicy(),
        sequence_parallel,
        activation_checkpointing,
        custom_parallel_plan,
    )


def to_local_if_dtensor(tensor: Tensor) -> Tensor:
    """This rank's plain part [..] of a DTensor, sharing its storage; any other tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
