"""NeMo-RL's functions that parallelise a model from Python: tensor parallel, activation checkpointing, FSDP2.

They take dtrain's models, change them in place, and return them. All of them are one function here, because families
differ only in their tables (`model.plan`). NeMo-RL's own style for the norms of Qwen3's q and k is the style
`head_norm`.
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
    """Parallelise a model: apply its tensor-parallel plan, checkpoint its layers, and shard it by FSDP2.

    Gradients are summed over `dp_mesh`, not averaged.

    Args:
        model: One of dtrain's models.
        dp_mesh: One dimension, or two, (replicate, shard), for HSDP.
        tp_mesh: One dimension. None or one rank: no tensor parallel.
        mp_policy: FSDP's dtypes.
        offload_policy: Where FSDP stores the shards.
        sequence_parallel: Whether activations between blocks are sharded along the sequence.
        activation_checkpointing: Whether the backward recomputes each layer.
        custom_plan: Replaces the model's plan: a plan, or the import path of one or of a function that returns one.

    Raises:
        ValueError: If the model has no plan, the plan cannot be used, or tp does not fit the model's sizes.
    """
    if getattr(model, "plan", None) is None:
        raise ValueError(f"{type(model).__name__} has no plan: these functions take dtrain's models (dtrain.models)")
    if tp_mesh is not None and tp_mesh.size() > 1:
        problems = check_model_mesh(model.config, tp_mesh.size())
        if problems:
            raise ValueError("\n".join(map(str, problems)))
        try:
            apply_plan(model, tp_mesh, find_plan(custom_plan, model), sequence_parallel=sequence_parallel)
        except UserError as error:
            raise ValueError(str(error)) from error
    if activation_checkpointing:
        # Imported here because `dtrain.memory` imports this package.
        from dtrain.memory.activation_checkpointing import checkpoint_activations

        checkpoint_activations(model, "full")
    shard_model(model, dp_mesh, mp_policy, offload_policy)
    return model


_parallelize_qwen = _parallelize_llama
_parallelize_gemma3 = _parallelize_llama


class _ByClassName(Mapping[str | type, Callable[..., ParallelModel]]):
    """Mapping from names of model classes to functions, which can also be looked up by the class.

    A class is found by its own name or that of a base, whether it is dtrain's or transformers'.
    """

    def __init__(self, functions: dict[str, Callable[..., ParallelModel]]):
        self._functions = functions

    def __getitem__(self, model: str | type) -> Callable[..., ParallelModel]:
        if isinstance(model, str):
            return self._functions[model]
        for base in model.__mro__:
            if base.__name__ in self._functions:
                return self._functions[base.__name__]
        raise KeyError(model.__name__)

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)


# NeMo-RL's table. `_parallelize_model` accepts every model with a plan, also those that are not listed here.
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
    """NeMo-RL's style for a module of rotary tables. dtrain's models have no such module, so it cannot be created.

    Raises:
        NotImplementedError: Always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "RotaryEmbedParallel shards the output of a rotary module, and dtrain's models have none: every rank "
            "computes the full rotary tables from the positions once per forward. Leave the entry out of the plan"
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
    """Parallelise a model as `_parallelize_llama` does, with policies that are built from these arguments.

    Args:
        model: One of dtrain's models.
        dp_mesh: One dimension, or two, (replicate, shard), for HSDP.
        tp_mesh: One dimension. None or one rank: no tensor parallel.
        param_dtype: Dtype in which layers compute. Gradients are reduced in max(float32, `param_dtype`).
        sequence_parallel: Whether activations between blocks are sharded along the sequence.
        activation_checkpointing: Whether the backward recomputes each layer.
        cpu_offload: Whether FSDP stores the shards in host memory.
        custom_parallel_plan: Replaces the model's plan: a plan, or the import path of one or of a function that returns
            one.

    Raises:
        ValueError: As in `_parallelize_llama`.
    """
    precision = mixed_precision(param_dtype, torch.promote_types(param_dtype, torch.float32))
    offload = CPUOffloadPolicy(pin_memory=False) if cpu_offload else OffloadPolicy()
    return _parallelize_llama(
        model,
        dp_mesh,
        tp_mesh,
        precision,
        offload,
        sequence_parallel,
        activation_checkpointing,
        custom_parallel_plan,
    )


def to_local_if_dtensor(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, sharing its storage, or any other tensor itself. No collective."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
