"""FSDP2 over a decoder: which modules form one unit, in which dtypes, and the sum (never the mean) of gradients."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method


def shard_model(model: nn.Module, mesh: DeviceMesh, *, compute_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
    """Shard `model` in place: every decoder layer a unit, and the root (embedding, norm, head) one.

    mesh: one dimension, or (replicate, shard) for HSDP. A layer is gathered before its forward and again before its
    backward (one all-gather each), its gradient reduce-scattered after; the root stays gathered between the two, for
    its head is the last of the forward and the first of the backward.

    Gradients are summed: the loss already divides by the count of the global batch.
    """
    # Inputs are not cast at unit borders: the rotary tables stay in float32 while the layers compute in bfloat16.
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # The head's weight is read inside these; unregistered, they would see this rank's shard and give wrong numbers.
    for name in ("with_head", "hidden_states"):
        register_fsdp_forward_method(model, name)


def sync_gradients(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward reduces gradients: only the last micro-batch of a step need."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        model.set_is_last_backward(enabled)
