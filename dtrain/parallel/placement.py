"""A rank's part of a parameter or gradient: which global slice it is; the norm over all parts, and clipping by it.

DTensor's own `compute_local_shape_and_global_offset` is wrong for some uneven FSDP×TP shards, so the arithmetic is
ours, and reading, initialising and saving share it: a dimension is first cut by the plain `Shard`s in mesh order
(tensor parallel), then by FSDP's `_StridedShard`, each into chunks of ceil(n / k), the last ones shorter or empty.

In the norm an element that several ranks hold counts once: a rank's share of the power sum is divided by the number of
ranks that hold the same elements, whatever mix of meshes and placements the gradients have.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard


def chunk_bounds(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and end of part `index` of `length` elements cut as `torch.chunk` cuts them, empty parts included."""
    size = -(-length // parts)
    start = min(index * size, length)
    return start, min(start + size, length)


def local_tensor(tensor: Tensor) -> Tensor:
    """The plain tensor [..] that this rank holds of `tensor`, sharing its storage. No collective."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of this rank's local shards of `tensors`. None counts as 0."""
    return sum(local_tensor(tensor).nbytes for tensor in tensors if tensor is not None)


def replace_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Make `local` [..] what this rank holds of `tensor`. No collective."""
    tensor._local_tensor = local


def make_dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], whole: Tensor) -> DTensor:
    """The DTensor of the shape of `whole` of which this rank holds `local`. No collective."""
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def to_parameter_device(tensor: Tensor) -> Tensor:
    """Return `tensor` [..] without its gradient, on the parameter's device. Only a host master is copied."""
    if isinstance(tensor, DTensor) and tensor._local_tensor.device != tensor.device:
        return make_dtensor(tensor._local_tensor.to(tensor.device), tensor.device_mesh, tensor.placements, tensor)
    return tensor.detach()


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """The global slice, one per dimension of [..], that `local_tensor(tensor)` is; all of it for a plain tensor.

    No collective. Raises ValueError for a Partial placement, which is no slice of anything.
    """
    bounds = local_bounds(tensor)
    held = tuple(end - start for start, end in bounds)
    shape = tuple(local_tensor(tensor).shape)
    if 0 in held and 0 in shape:
        # FSDP2 gives a rank without rows a tensor whose other dimensions are of its own choice.
        return tuple(slice(start, start + size) for (start, _), size in zip(bounds, shape, strict=True))
    if held != shape:
        placements = tensor.placements if isinstance(tensor, DTensor) else None
        raise ValueError(f"placements {placements} of {tuple(tensor.shape)} say {held}, the rank holds {shape}")
    return tuple(slice(start, end) for start, end in bounds)


def local_bounds(
    tensor: Tensor, rank_in: Callable[[DeviceMesh, int], int] = DeviceMesh.get_local_rank
) -> tuple[tuple[int, int], ...]:
    """Start and end of a rank's part in each dimension of `tensor` [..], as its placements have them: the others too of
    a part without elements. rank_in: the rank's number in a dimension of a mesh (default: this rank's). No collective.
    Raises ValueError as `local_slices`."""
    bounds = [(0, n) for n in tensor.shape]
    for dim in range(tensor.dim()):
        for mesh, mesh_dim in get_sharding_dims(tensor, dim):
            start, end = bounds[dim]
            low, high = chunk_bounds(end - start, mesh.size(mesh_dim), rank_in(mesh, mesh_dim))
            bounds[dim] = (start + low, start + high)
    return tuple(bounds)


def get_sharding_dims(tensor: Tensor, dim: int) -> list[tuple[DeviceMesh, int]]:
    """The mesh and its dimensions that cut dimension `dim` of `tensor` [..], in the order in which they do."""
    if not isinstance(tensor, DTensor):
        return []
    if tensor.device_mesh.get_coordinate() is None:
        raise ValueError(f"this rank is not on the mesh of a tensor placed as {tensor.placements}")
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError("a Partial tensor has no local slice; redistribute it first")
    placed = list(enumerate(tensor.placements))
    plain = [mesh_dim for mesh_dim, placement in placed if isinstance(placement, Shard) and placement.dim == dim]
    strided = [
        mesh_dim for mesh_dim, placement in placed if isinstance(placement, _StridedShard) and placement.dim == dim
    ]
    return [(tensor.device_mesh, mesh_dim) for mesh_dim in plain + strided]


_REQUIRED: Any = object()


def grad_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The 2-norm over the full gradients of `parameters`, each logical element once: a scalar on their device.

    Computed in max(float32, the gradients' dtype), summed in float64. Where a gradient is a DTensor, one all-reduce of
    a scalar over the world, which must be what the meshes lie on; plain gradients beside DTensors are taken to be the
    same on every rank.
    """
    grads = _grads(parameters)
    dtype = _widest(grads, torch.float32)
    return _norm(grads, 2.0, dtype, [None]).to(dtype) if grads else torch.zeros(())


def get_grad_norm(
    parameters: Iterable[Tensor] | Tensor,
    dp_cp_group: dist.ProcessGroup | None = _REQUIRED,
    tp_group: dist.ProcessGroup | None = _REQUIRED,
    norm_type: float | str = 2,
    dtype: torch.dtype = torch.float32,
    *,
    dp_group: dist.ProcessGroup | None = _REQUIRED,
) -> float:
    """The p-norm over the ranks of two groups, as NeMo-RL's users call it; None is a group of one. dp_group is the
    earlier name of dp_cp_group. norm_type: p, a number above 0, or "inf".

    Computed in max(`dtype`, the gradients' dtype), summed in float64. One all-reduce of a scalar over each group, none
    where all gradients are plain: as in `grad_norm`, those are the same on every rank. Reading the number waits for the
    device. Gradients that are replicated over tp count once.
    """
    data_groups = [group for group in (dp_cp_group, dp_group) if group is not _REQUIRED]
    if len(data_groups) != 1 or tp_group is _REQUIRED:
        raise TypeError("get_grad_norm needs tp_group and one of dp_cp_group and dp_group, its earlier name")
    grads = _grads([parameters] if isinstance(parameters, Tensor) else parameters)
    groups = [group for group in (*data_groups, tp_group) if group is not None]
    return _norm(grads, float(norm_type), _widest(grads, dtype), groups).item() if grads else 0.0


def clip_grads_(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients in place by min(1, max_norm / norm), in their own dtype; norm: a scalar (`grad_norm`).
    No collective, no host sync."""
    grads = [local_tensor(grad) for grad in _grads(parameters)]
    # torch's clip_grad_norm_ adds the same 1e-6.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for dtype in {grad.dtype for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.dtype == dtype], scale.to(dtype))


def clip_grad_by_total_norm_(
    parameters: Iterable[Tensor] | Tensor, max_grad_norm: float, total_norm: float, dtype: torch.dtype = torch.float32
) -> None:
    """`clip_grads_` by a number that `get_grad_norm` gave. The real gradients are scaled, whatever `dtype` says: it is
    that of the factor, at least."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = _grads(parameters)
    if grads:
        norm = torch.tensor(total_norm, dtype=torch.promote_types(dtype, torch.float64))
        clip_grads_(parameters, max_grad_norm, norm.to(local_tensor(grads[0]).device))


def scale_grads_(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply the gradients by `factor` in place."""
    torch._foreach_mul_([local_tensor(grad) for grad in _grads(parameters)], factor)


def nonfinite_names(named_parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of parameters whose gradient holds an inf or NaN on this rank."""
    return [
        name
        for name, parameter in named_parameters
        if parameter.grad is not None and not bool(torch.isfinite(local_tensor(parameter.grad)).all())
    ]


def _grads(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _widest(tensors: Iterable[Tensor], dtype: torch.dtype) -> torch.dtype:
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), dtype)


def _copies(tensor: Tensor, ranks: int) -> float:
    """Return how many of `ranks` hold each element of `tensor`: all of them, divided by the parts that it is cut
    into."""
    parts = 1
    if isinstance(tensor, DTensor):
        for mesh_dim, placement in enumerate(tensor.placements):
            if not isinstance(placement, Replicate):
                parts *= tensor.device_mesh.size(mesh_dim)
    return ranks / parts


def _norm(
    grads: list[Tensor], norm_type: float, dtype: torch.dtype, groups: Sequence[dist.ProcessGroup | None]
) -> Tensor:
    """The p-norm over the ranks of all `groups` (None: the world), of this rank alone where no gradient is a DTensor: a
    float64 scalar. Elements are raised in `dtype`."""
    groups = groups if any(isinstance(grad, DTensor) for grad in grads) else []
    total = _local_power_sum(grads, norm_type, dtype, math.prod(map(dist.get_world_size, groups)))
    is_max = math.isinf(norm_type)
    for group in groups:
        dist.all_reduce(total, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
    return total if is_max else total.pow(1.0 / norm_type)


def _local_power_sum(grads: list[Tensor], norm_type: float, dtype: torch.dtype, ranks: int) -> Tensor:
    """This rank's share of Σ|g|^p, or of the maximum for p = inf: a float64 scalar."""
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type}: a number above 0, or inf")
    powers = _powers([local_tensor(grad) for grad in grads], norm_type, dtype)
    if math.isinf(norm_type):
        return powers.max().nan_to_num(math.inf, math.inf)  # a maximum over ranks may lose a NaN
    copies = torch.tensor([_copies(grad, ranks) for grad in grads], dtype=powers.dtype)
    return (powers / copies.to(powers.device, non_blocking=True)).sum()  # no wait for the device


def _powers(grads: list[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    """Σ|g|^p of each tensor, or its maximum for p = inf: [tensors] float64. Elements are raised in `dtype`."""
    if grads[0].device.type == "cpu" and not math.isinf(norm_type):
        return torch.stack([_power_on_cpu(grad, norm_type, dtype) for grad in grads])
    norms = torch.stack(torch._foreach_norm(grads, norm_type, dtype=dtype)).double()
    return norms if math.isinf(norm_type) else norms.pow(norm_type)


def _power_on_cpu(grad: Tensor, norm_type: float, dtype: torch.dtype) -> Tensor:
    """By rows of 128: torch's CPU kernel adds one element after another, which loses 2e-3 of 40M float32 elements."""
    flat = grad.flatten()
    whole = flat.numel() // 128 * 128
    parts = flat[:whole].view(-1, 128), flat[None, whole:]
    norms = [torch.linalg.vector_norm(part, norm_type, dim=1, dtype=dtype).double() for part in parts]
    return torch.cat(norms).pow(norm_type).sum()
