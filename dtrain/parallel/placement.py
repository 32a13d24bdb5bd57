"""A rank's part of a parameter: which global slice it is, and how a module computes with it.

DTensor's own `compute_local_shape_and_global_offset` is wrong for some uneven FSDP×TP shards, so the arithmetic is
ours, and reading, initialising and saving share it: a dimension is first cut by the plain `Shard`s in mesh order
(tensor parallel), then by FSDP's `_StridedShard`, each into chunks of ceil(n / k), the last ones shorter or empty.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Shard, _StridedShard


def chunk_bounds(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and end of part `index` of `length` elements cut as `torch.chunk` cuts them, empty parts included."""
    size = -(-length // parts)
    start = min(index * size, length)
    return start, min(start + size, length)


def local_tensor(tensor: Tensor) -> Tensor:
    """The plain tensor [..] that this rank holds of `tensor`, sharing its storage. No collective."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def on_its_device(tensor: Tensor) -> Tensor:
    """`tensor` [..] without its gradient: itself, or a copy of a master that lies on the host (`masters`), which is a
    parameter of the device all the same. No collective."""
    if isinstance(tensor, DTensor) and tensor._local_tensor.device != tensor.device:
        local, mesh = tensor._local_tensor.to(tensor.device), tensor.device_mesh
        size, stride = tensor.shape, tensor.stride()
        return DTensor.from_local(local, mesh, tensor.placements, run_check=False, shape=size, stride=stride)
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


def local_bounds(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Start and end of this rank's part in each dimension of `tensor` [..], as its placements have them: the others
    too of a part without elements. No collective. Raises ValueError as `local_slices`."""
    bounds = [(0, n) for n in tensor.shape]
    for dim in range(tensor.dim()):
        for mesh, mesh_dim in cut_by(tensor, dim):
            start, end = bounds[dim]
            low, high = chunk_bounds(end - start, mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim))
            bounds[dim] = (start + low, start + high)
    return tuple(bounds)


def cut_by(tensor: Tensor, dim: int) -> list[tuple[DeviceMesh, int]]:
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


@dataclass(frozen=True)
class LocalView:
    """The view by which a module reads a parameter placed on the tp mesh.

    grad: how the ranks' local gradients stand to the whole one (Partial: they are summed); of: what of the local part.
    is_expert: whether the parameter is cut over ep too, before tp.
    """

    grad: Placement | None
    of: Callable[[Tensor], Tensor] | None = None
    is_expert: bool = False

    def __call__(self, parameter: DTensor) -> Tensor:
        grads = ([Shard(0)] if self.is_expert else []) + ([] if self.grad is None else [self.grad])
        if parameter.device_mesh.ndim != len(grads):
            raise RuntimeError(
                "a tensor-parallel module was used outside the forward of its FSDP root, where its weights are shards: "
                "call the model, or a method registered with register_fsdp_forward_method"
            )
        local = parameter.to_local(grad_placements=grads)
        return local if self.of is None else self.of(local)


class LocalParameters(nn.Module):
    """A module that computes with its parameters as `local(name)` gives them.

    `local_views` holds a LocalView for each parameter that a style has placed; without one it is the parameter itself.
    keeps_precision: its parameters are held, and computed with, in float32 at least. gathered_alone: FSDP gathers them
    for its forward alone.
    """

    keeps_precision = False
    gathered_alone = False
    local_views: dict[str, LocalView] = {}  # replaced on the instance, never changed

    def local(self, name: str) -> Tensor:
        """The plain tensor that this rank computes with: the parameter of that name, such as a weight [out, in],
        or what its view takes of it, [out/tp, in] where it is column-parallel. No collective forward."""
        parameter = getattr(self, name)
        view = self.local_views.get(name)
        return parameter if view is None else view(parameter)


def exact_modules(model: nn.Module) -> dict[str, LocalParameters]:
    """By name the modules of `model` that keep their precision."""
    modules = ((name, module) for name, module in model.named_modules() if isinstance(module, LocalParameters))
    return {name: module for name, module in modules if module.keeps_precision}
