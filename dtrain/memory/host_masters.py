"""Float32 weights in pinned host memory, and rounded copies of them on the device.

With `parallel.optimizer_offload`, this rank's shards of the trained parameters are stored in float32 in host memory.
The device stores copies in the dtype of computation, and FSDP gathers the copies. For example, a shard of 1 M weights
takes 4 MB of host memory, and 2 MB on the device in bfloat16.

For all other code, such a parameter is a float32 parameter: its gradient is reduced and stored in float32 on the
device, and reading or writing its local tensor reads or writes the float32 weights. Code that writes must use
`parallel.fsdp.Sharding.writing`, which rounds the copies again.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtrain.base.torch_functions import has_values
from dtrain.parallel.fsdp import MasterTensor
from dtrain.parallel.placement import chunk_bounds, get_sharding_dims, local_bounds, local_tensor, replace_local_tensor


class HostMaster(MasterTensor):
    """Local tensor [local rows, ..] of a parameter whose float32 weights are in host memory.

    Operations on it return plain tensors. FSDP calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` of a local tensor
    that has these methods, and gathers what they return in place of the tensor itself.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def device_copy(self) -> Tensor:
        """The rounded weights on the device, [local rows, ...], without the rows by which FSDP pads a shard."""
        return self.rounded[: len(self)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Override `MasterTensor.refresh`: round to the nearest. The host waits for the copy."""
        if len(self):
            self.device_copy.copy_(self)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        """Return the tensors that FSDP gathers, and no metadata."""
        return (self.rounded,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the full weights, made of the gathered tensors, and the tensors that FSDP frees with them."""
        if out is not None:
            return None  # from the second time on, `out` is a view of the gathered tensor
        return outputs[0], ()


@torch.no_grad()
def move_masters_to_host(model: nn.Module, dtype: torch.dtype) -> None:
    """Move the trained parameters of a model to pinned host memory, with copies on the device. No collective.

    Parameters that have the dtype of computation already stay on the device, and parameters on meta stay on meta.

    Args:
        model: Model under FSDP, before its first forward.
        dtype: Dtype of computation.
    """
    old_locals: dict[DTensor, Tensor] = {}
    for candidate in model.parameters():
        if isinstance(candidate, DTensor) and candidate.requires_grad and candidate.dtype != dtype:
            old_locals[candidate] = local_tensor(candidate)
    for parameter, local in old_locals.items():
        size = _largest_shard_size(parameter)
        if has_values(local):
            memory = torch.zeros(size, dtype=local.dtype, pin_memory=True)
        else:
            memory = local.new_zeros(size)
        if local.numel():
            memory[: len(local)] = local
        replace_local_tensor(parameter, memory)
    # FSDP keeps references to the old local tensors. Loading a state dict, even an empty one, makes it look them up
    # again.
    model.load_state_dict({}, strict=False)
    for parameter, local in old_locals.items():
        memory = local_tensor(parameter)
        master = memory[: len(local)].as_subclass(HostMaster)
        master.rounded = torch.zeros(memory.shape, dtype=dtype, device=local.device)
        replace_local_tensor(parameter, master)
        if has_values(local):
            master.refresh()


def _largest_shard_size(parameter: DTensor) -> tuple[int, ...]:
    """Return the size of the largest local shard of a parameter on any FSDP rank, to which FSDP pads the others."""
    # FSDP is the last to divide the rows.
    *others, (mesh, dim) = get_sharding_dims(parameter, 0)
    num_rows = parameter.shape[0]
    for other, other_dim in others:
        start, end = chunk_bounds(num_rows, other.size(other_dim), other.get_local_rank(other_dim))
        num_rows = end - start
    _, largest = chunk_bounds(num_rows, mesh.size(dim), 0)
    return largest, *(end - start for start, end in local_bounds(parameter)[1:])
