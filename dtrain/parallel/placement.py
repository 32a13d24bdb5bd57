"""A rank's part of a parameter: which global slice it is, and how a module computes with it.

DTensor's own `compute_local_shape_and_global_offset` is wrong for some uneven FSDP×TP shards, so the arithmetic is
ours, and reading, initialising and saving share it: a dimension is first cut by the plain `Shard`s in mesh order
(tensor parallel), then by FSDP's `_StridedShard`, each into chunks of ceil(n / k), the last ones shorter or empty.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
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


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """The global slice, one per dimension of [..], that `local_tensor(tensor)` is; all of it for a plain tensor.

    No collective. Raises ValueError for a Partial placement, which is no slice of anything.
    """
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, n) for n in tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not on the mesh of a tensor placed as {tensor.placements}")
    bounds = [(0, n) for n in tensor.shape]

    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise ValueError("a Partial tensor has no local slice; redistribute it first")
    placed = list(enumerate(tensor.placements))
    plain = [(mesh_dim, one.dim) for mesh_dim, one in placed if isinstance(one, Shard)]
    strided = [(mesh_dim, one.dim) for mesh_dim, one in placed if isinstance(one, _StridedShard)]
    for mesh_dim, dim in plain + strided:
        start, end = bounds[dim]
        low, high = chunk_bounds(end - start, tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim])
        bounds[dim] = (start + low, start + high)
    held = tuple(end - start for start, end in bounds)
    shape = tuple(tensor._local_tensor.shape)
    if 0 in held and 0 in shape:
        # FSDP2 gives a rank without rows a tensor whose other dimensions are of its own choice.
        return tuple(slice(start, start + size) for (start, _), size in zip(bounds, shape, strict=True))
    if held != shape:
        raise ValueError(f"placements {tensor.placements} of {tuple(tensor.shape)} say {held}, the rank holds {shape}")
    return tuple(slice(start, end) for start, end in bounds)


@dataclass(frozen=True)
class LocalView:
    """How a module reads a parameter placed on the tp mesh.

    grad: how the ranks' local gradients stand to the whole one (Partial: they are summed); of: what of the local part.
    """

    grad: Placement
    of: Callable[[Tensor], Tensor] | None = None

    def __call__(self, parameter: DTensor) -> Tensor:
        if parameter.device_mesh.ndim != 1:
            raise RuntimeError(
                "a tensor-parallel module was used outside the forward of its FSDP root, where its weights are shards: "
                "call the model, or a method registered with register_fsdp_forward_method"
            )
        local = parameter.to_local(grad_placements=[self.grad])
        return local if self.of is None else self.of(local)


class LocalParameters(nn.Module):
    """A module that computes with its parameters as `local(name)` gives them.

    `local_views` holds a LocalView for each parameter that a style has placed; without one it is the parameter itself.
    """

    local_views: dict[str, LocalView] = {}  # replaced on the instance, never changed

    def local(self, name: str) -> Tensor:
        """The plain tensor that this rank computes with: the parameter of that name, such as a weight [out, in],
        or what its view takes of it, [out/tp, in] where it is column-parallel. No collective forward."""
        parameter = getattr(self, name)
        view = self.local_views.get(name)
        return parameter if view is None else view(parameter)
