"""Which slice of a parameter a rank stores, and the norm of gradients that are stored in such slices.

**Slices.** DTensor's own `compute_local_shape_and_global_offset` is wrong for some uneven FSDP × TP shards, so this
module computes slices itself. Reading, initialising, saving and planning all use it. A dimension is first divided by
the plain `Shard` placements in mesh order (tensor parallel), and then each chunk is divided by FSDP's `_StridedShard`.
Both divide as `torch.chunk` does: n elements over k ranks are chunks of ceil(n / k), of which the last may be shorter
or empty.

Example: a weight with 7 rows, sharded by rows over tp = 2 and then over FSDP's 3 ranks.

    tp divides 7 rows into chunks of ceil(7 / 2) = 4         tp 0: rows 0 to 3          tp 1: rows 4 to 6
    FSDP divides 4 rows by ceil(4 / 3) = 2, 3 rows by 1      fsdp 0: 0 1                fsdp 0: 4
                                                             fsdp 1: 2 3                fsdp 1: 5
                                                             fsdp 2: empty              fsdp 2: 6

On fsdp rank 1 and tp rank 1, `local_bounds` returns (5, 6) for this dimension: the start and the end of the local rows
in the full weight. A rank with an empty shard has (4, 4).

**Norms.** The gradient norm of the full model counts every logical element once, whatever the meshes and placements of
the gradients are. Each rank divides its sum of squares of a gradient by the number of ranks that store the same
elements. Then one all-reduce over all ranks gives the full sum. Example with tp = 2:

    gradient                          rank 0      rank 1      copies of an element
    norm weight, replicated           [3]         [3]         2
    linear weight, sharded            [4]         [12]        1

    rank 0: 3²/2 + 4² = 20.5       rank 1: 3²/2 + 12² = 148.5       √(20.5 + 148.5) = 13 = √(3² + 4² + 12²)
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
    """Return the start and the end of chunk `index` when `length` elements are divided into `parts` chunks.

    Chunks are those of `torch.chunk`, except that there are always `parts` of them: the last ones may be empty.

    Example:
        >>> [chunk_bounds(7, 3, index) for index in range(3)]
        [(0, 3), (3, 6), (6, 7)]
        >>> [chunk_bounds(4, 3, index) for index in range(3)]
        [(0, 2), (2, 4), (4, 4)]
    """
    size = -(-length // parts)  # rounded up
    start = min(index * size, length)
    return start, min(start + size, length)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, or any other tensor itself. Shares the storage. No collective."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of this rank's local shards of `tensors`. None counts as 0."""
    return sum(local_tensor(tensor).nbytes for tensor in tensors if tensor is not None)


def replace_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Replace the local shard of `tensor` by `local`, of the same shape. No collective."""
    tensor._local_tensor = local


def make_dtensor(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], full: Tensor) -> DTensor:
    """Return a DTensor whose local shard on this rank is `local`. No collective.

    Args:
        local: This rank's shard. It is not copied.
        mesh: The mesh.
        placements: One placement per dimension of the mesh.
        full: Tensor from which only the global shape and the strides are taken.
    """
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def to_parameter_device(tensor: Tensor) -> Tensor:
    """Return `tensor`, detached, with its local shard on the parameter's own device.

    A copy is made only for a parameter whose float32 master is in host memory (`memory.host_masters`).
    """
    if isinstance(tensor, DTensor) and tensor._local_tensor.device != tensor.device:
        return make_dtensor(tensor._local_tensor.to(tensor.device), tensor.device_mesh, tensor.placements, tensor)
    return tensor.detach()


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slices, one per dimension of the full tensor, that select this rank's local shard. No collective.

    For a tensor that is no DTensor, they select all of it.

    Raises:
        ValueError: If a placement is Partial, or if the local shard does not have the computed shape.
    """
    bounds = local_bounds(tensor)
    computed_shape = tuple(end - start for start, end in bounds)
    shape = tuple(local_tensor(tensor).shape)
    if 0 in computed_shape and 0 in shape:
        # FSDP2 may give a rank without rows a tensor whose other dimensions are full, whatever the placements say. The
        # slices then follow the tensor that exists.
        return tuple(slice(start, start + size) for (start, _), size in zip(bounds, shape, strict=True))
    if computed_shape != shape:
        placements = tensor.placements if isinstance(tensor, DTensor) else None
        raise ValueError(
            f"the local shard of a {tuple(tensor.shape)} tensor placed as {placements} should have the shape "
            f"{computed_shape}, but it has the shape {shape}"
        )
    return tuple(slice(start, end) for start, end in bounds)


def local_bounds(
    tensor: Tensor, rank_in: Callable[[DeviceMesh, int], int] = DeviceMesh.get_local_rank
) -> tuple[tuple[int, int], ...]:
    """Return the start and the end of a rank's shard in each dimension of the full tensor. No collective.

    Bounds follow from the placements only. In contrast to `local_slices`, an empty shard has the bounds of the other
    dimensions, too. The module's docstring has an example.

    Args:
        tensor: A DTensor, or any other tensor, which is not sharded.
        rank_in: Returns a rank's index in a dimension of a mesh. By default that of this rank.

    Raises:
        ValueError: If a placement is Partial, or this rank is not on the mesh.
    """
    bounds = [(0, size) for size in tensor.shape]
    for dim in range(tensor.dim()):
        for mesh, mesh_dim in get_sharding_dims(tensor, dim):
            # Divide what the mesh dimensions before this one have left over.
            start, end = bounds[dim]
            chunk_start, chunk_end = chunk_bounds(end - start, mesh.size(mesh_dim), rank_in(mesh, mesh_dim))
            bounds[dim] = (start + chunk_start, start + chunk_end)
    return tuple(bounds)


def get_sharding_dims(tensor: Tensor, dim: int) -> list[tuple[DeviceMesh, int]]:
    """Return the mesh dimensions that shard dimension `dim` of `tensor`, in the order in which they divide it.

    Args:
        tensor: A DTensor, or any other tensor, which is not sharded.
        dim: Dimension of the tensor.

    Returns:
        Pairs of the mesh and the index of its dimension: first plain shards (tp), then strided ones (FSDP).

    Raises:
        ValueError: If a placement is Partial, or this rank is not on the mesh.
    """
    if not isinstance(tensor, DTensor):
        return []
    if tensor.device_mesh.get_coordinate() is None:
        raise ValueError(f"this rank is not on the mesh of a tensor placed as {tensor.placements}")
    plain_dims = []
    strided_dims = []
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Partial):
            raise ValueError("a Partial tensor has no local slice; redistribute it first")
        # `_StridedShard` was a subclass of `Shard` in earlier releases of torch, and both have `dim`.
        if isinstance(placement, _StridedShard):
            if placement.dim == dim:
                strided_dims.append(mesh_dim)
        elif isinstance(placement, Shard) and placement.dim == dim:
            plain_dims.append(mesh_dim)
    return [(tensor.device_mesh, mesh_dim) for mesh_dim in plain_dims + strided_dims]


_REQUIRED: Any = object()


def grad_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Compute the 2-norm over the full gradients of `parameters`, counting each logical element once.

    Elements are squared in max(float32, the gradients' dtype), and summed in float64.

    Args:
        parameters: Parameters; those without a gradient do not count. If some gradients are DTensors, the others are
            assumed to be the same on every rank.

    Returns:
        A scalar on the device of the gradients.

    Collectives:
        One all-reduce of a scalar over the world if any gradient is a DTensor. Its mesh must have all ranks.
    """
    grads = _collect_grads(parameters)
    if not grads:
        return torch.zeros(())
    dtype = _widest_dtype(grads, torch.float32)
    return _norm(grads, 2.0, dtype, [None]).to(dtype)


def get_grad_norm(
    parameters: Iterable[Tensor] | Tensor,
    dp_cp_group: dist.ProcessGroup | None = _REQUIRED,
    tp_group: dist.ProcessGroup | None = _REQUIRED,
    norm_type: float | str = 2,
    dtype: torch.dtype = torch.float32,
    *,
    dp_group: dist.ProcessGroup | None = _REQUIRED,
) -> float:
    """Compute the p-norm of the gradients over the ranks of two groups. NeMo-RL's function.

    Elements are raised to p in max(`dtype`, the gradients' dtype), and summed in float64. Gradients that are replicated
    over tp count once. The host waits for the device.

    Args:
        parameters: Parameters; those without a gradient do not count.
        dp_cp_group: Data- and context-parallel ranks. None: this rank only.
        tp_group: Tensor-parallel ranks. None: this rank only.
        norm_type: p, a number above 0, or "inf".
        dtype: Smallest dtype in which elements are raised to p.
        dp_group: Earlier name of `dp_cp_group`.

    Raises:
        TypeError: If a group is missing.
        ValueError: If `norm_type` is not above 0.

    Collectives:
        One all-reduce of a scalar over each group. None if no gradient is a DTensor: such gradients are the same on
        every rank.
    """
    data_groups = [group for group in (dp_cp_group, dp_group) if group is not _REQUIRED]
    if len(data_groups) != 1 or tp_group is _REQUIRED:
        raise TypeError("get_grad_norm needs tp_group and one of dp_cp_group and dp_group, its earlier name")
    grads = _collect_grads([parameters] if isinstance(parameters, Tensor) else parameters)
    if not grads:
        return 0.0
    groups = [group for group in (*data_groups, tp_group) if group is not None]
    return _norm(grads, float(norm_type), _widest_dtype(grads, dtype), groups).item()


def clip_grads_(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients in place by min(1, max_norm / norm), in their own dtype. No collective.

    The host does not wait for the device.

    Args:
        parameters: Parameters; those without a gradient are skipped.
        max_norm: Norm to which gradients are clipped.
        norm: Norm of the full gradients, a scalar, as returned by `grad_norm`.
    """
    grads = [local_tensor(grad) for grad in _collect_grads(parameters)]
    # torch's clip_grad_norm_ adds the same 1e-6.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for dtype in {grad.dtype for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.dtype == dtype], scale.to(dtype))


def clip_grad_by_total_norm_(
    parameters: Iterable[Tensor] | Tensor, max_grad_norm: float, total_norm: float, dtype: torch.dtype = torch.float32
) -> None:
    """Scale the gradients in place by min(1, max_grad_norm / total_norm). NeMo-RL's function. No collective.

    Args:
        parameters: Parameters; those without a gradient are skipped.
        max_grad_norm: Norm to which gradients are clipped.
        total_norm: Norm of the full gradients, as returned by `get_grad_norm`.
        dtype: Smallest dtype in which the factor is computed. Gradients keep their own dtype.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = _collect_grads(parameters)
    if grads:
        norm = torch.tensor(total_norm, dtype=torch.promote_types(dtype, torch.float64))
        clip_grads_(parameters, max_grad_norm, norm.to(local_tensor(grads[0]).device))


def scale_grads_(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply the gradients by `factor` in place."""
    torch._foreach_mul_([local_tensor(grad) for grad in _collect_grads(parameters)], factor)


def nonfinite_names(named_parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of parameters whose gradient has an inf or NaN on this rank. The host waits for the device."""
    names = []
    for name, parameter in named_parameters:
        if parameter.grad is None:
            continue
        if not bool(torch.isfinite(local_tensor(parameter.grad)).all()):
            names.append(name)
    return names


def _collect_grads(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of the parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _widest_dtype(tensors: Iterable[Tensor], dtype: torch.dtype) -> torch.dtype:
    """Return the smallest dtype that has all values of `dtype` and of the tensors' dtypes."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), dtype)


def _num_copies(tensor: Tensor, ranks: int) -> float:
    """Return how many of `ranks` ranks store the same element of `tensor`.

    For example, 8 ranks with a weight that is sharded over tp = 2 and replicated otherwise: 8 / 2 = 4 copies.
    """
    parts = 1
    if isinstance(tensor, DTensor):
        for mesh_dim, placement in enumerate(tensor.placements):
            if not isinstance(placement, Replicate):
                parts *= tensor.device_mesh.size(mesh_dim)
    return ranks / parts


def _norm(
    grads: list[Tensor], norm_type: float, dtype: torch.dtype, groups: Sequence[dist.ProcessGroup | None]
) -> Tensor:
    """Compute the p-norm over the ranks of all groups.

    Args:
        grads: The gradients. If none is a DTensor, the norm is computed on this rank without a collective.
        norm_type: p.
        dtype: Dtype in which elements are raised to p.
        groups: The groups, whose product has all ranks. None stands for the world.

    Returns:
        A scalar in float64.
    """
    if not any(isinstance(grad, DTensor) for grad in grads):
        groups = []
    num_ranks = math.prod(dist.get_world_size(group) for group in groups)
    total = _local_power_sum(grads, norm_type, dtype, num_ranks)
    is_max = math.isinf(norm_type)
    for group in groups:
        dist.all_reduce(total, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
    return total if is_max else total.pow(1.0 / norm_type)


def _local_power_sum(grads: list[Tensor], norm_type: float, dtype: torch.dtype, ranks: int) -> Tensor:
    """Return this rank's part of Σ|g|^p, or its maximum of |g| for p = inf: a float64 scalar."""
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type}: a number above 0, or inf")
    powers = _powers([local_tensor(grad) for grad in grads], norm_type, dtype)
    if math.isinf(norm_type):
        # A MAX over ranks may lose a NaN, but not an inf.
        return powers.max().nan_to_num(math.inf, math.inf)
    # Every rank adds the same elements of a replicated gradient, so each adds only its part of them.
    copies = torch.tensor([_num_copies(grad, ranks) for grad in grads], dtype=powers.dtype)
    return (powers / copies.to(powers.device, non_blocking=True)).sum()  # no wait for the device


def _powers(grads: list[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    """Return Σ|g|^p of each tensor, or its maximum of |g| for p = inf: float64 [tensors]."""
    if grads[0].device.type == "cpu" and not math.isinf(norm_type):
        return torch.stack([_power_on_cpu(grad, norm_type, dtype) for grad in grads])
    norms = torch.stack(torch._foreach_norm(grads, norm_type, dtype=dtype)).double()
    return norms if math.isinf(norm_type) else norms.pow(norm_type)


def _power_on_cpu(grad: Tensor, norm_type: float, dtype: torch.dtype) -> Tensor:
    """Return Σ|g|^p of one tensor, computed by rows of 128 elements.

    torch's CPU kernel adds one element after another, which loses 2e-3 of the norm of 40M float32 elements. Short sums
    that are added in float64 do not.
    """
    flat = grad.flatten()
    num_in_rows = flat.numel() // 128 * 128
    full_rows = flat[:num_in_rows].view(-1, 128)
    rest = flat[None, num_in_rows:]
    norms = [torch.linalg.vector_norm(part, norm_type, dim=1, dtype=dtype).double() for part in (full_rows, rest)]
    return torch.cat(norms).pow(norm_type).sum()
