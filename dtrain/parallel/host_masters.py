"""Masters on the host: this rank's shards of the trained parameters lie in pinned host memory, in float32. The device
holds copies of them, rounded to the dtype of computation, and FSDP gathers the copies.

A parameter stays one of float32 to everybody else: its gradient is reduced and kept in float32 on the device, and who
reads or writes its local tensor reads and writes the master. Code that writes uses `fsdp.Sharding.writing`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtrain.parallel.placement import chunk_bounds, cut_by, local_bounds, local_tensor, replace_local_tensor


class Master(Tensor):
    """The local tensor [held rows, ..] of a parameter under FSDP. rounded: of all ranks' shards as large as the
    largest, [rows, ..]; FSDP asks for it by the two methods that it has for tensors of other classes."""

    rounded: Tensor
    # What is computed from it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def copy(self) -> Tensor:
        """The rounded shard itself, [held rows, ..] on the device."""
        return self.rounded[: len(self)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Round anew, to the nearest, after the master was written. The host waits for it."""
        if len(self):
            self.copy.copy_(self)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        return (self.rounded,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        return None if out is not None else (outputs[0], ())  # after the first time `out` is a view of it


@torch.no_grad()
def keep_on_host(model: nn.Module, dtype: torch.dtype) -> None:
    """Move the trained parameters of `model`, under FSDP and before its first forward, to pinned host memory, where
    they are of another dtype than `dtype`, that of computation. On meta they stay there. No collective."""
    trained = [
        parameter for parameter in model.parameters() if isinstance(parameter, DTensor) and parameter.requires_grad
    ]
    moved = {parameter: local_tensor(parameter) for parameter in trained if parameter.dtype != dtype}
    for parameter, local in moved.items():
        size = _padded(parameter)
        memory = local.new_zeros(size) if local.is_meta else torch.zeros(size, dtype=local.dtype, pin_memory=True)
        if local.numel():
            memory[: len(local)] = local
        replace_local_tensor(parameter, memory)
    model.load_state_dict({}, strict=False)  # FSDP looks where its parameters lie, and lets go of where they lay
    for parameter, local in moved.items():
        memory = local_tensor(parameter)
        master = memory[: len(local)].as_subclass(Master)
        master.rounded = torch.zeros(memory.shape, dtype=dtype, device=local.device)
        replace_local_tensor(parameter, master)
        if not local.is_meta:
            master.refresh()


def masters_of(model: nn.Module) -> Iterator[Master]:
    """Return the masters of `model` that lie on the host."""
    for parameter in model.parameters():
        if isinstance(local := local_tensor(parameter), Master):
            yield local


def _padded(parameter: DTensor) -> tuple[int, ...]:
    """The size of the largest shard that FSDP makes of `parameter`, for it cuts after all others."""
    *others, (mesh, dim) = cut_by(parameter, 0)
    length = parameter.shape[0]
    for other, other_dim in others:
        start, end = chunk_bounds(length, other.size(other_dim), other.get_local_rank(other_dim))
        length = end - start
    _, rows = chunk_bounds(length, mesh.size(dim), 0)
    return rows, *(end - start for start, end in local_bounds(parameter)[1:])
