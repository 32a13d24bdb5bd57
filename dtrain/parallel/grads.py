"""The norm of a model's gradients over every mesh, clipping by it, and the names of gradients that are not finite."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from dtrain.parallel.placement import local_tensor


def _copies(tensor: Tensor) -> int:
    """How many ranks hold each element of `tensor`: the product of its replicated mesh dimensions."""
    if not isinstance(tensor, DTensor):
        return 1
    copies = 1
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            copies *= tensor.device_mesh.size(mesh_dim)
    return copies


def grad_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The 2-norm over the full gradients of `parameters`, each logical element once: a scalar on their device.

    Computed in max(float32, the gradients' dtype). Where a gradient is a DTensor, one all-reduce of a scalar over the
    world; its replicated elements are divided by the number of ranks that hold them.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.zeros(())
    locals_ = [local_tensor(grad) for grad in grads]
    dtype = torch.promote_types(locals_[0].dtype, torch.float32)
    norms = torch.stack(torch._foreach_norm(locals_, 2, dtype=dtype))
    copies = torch.tensor([_copies(grad) for grad in grads], dtype=dtype, device=norms.device)
    total = (norms.square() / copies).sum()
    if any(isinstance(grad, DTensor) for grad in grads):
        dist.all_reduce(total)
    return total.sqrt()


def clip_grads_(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients in place by min(1, max_norm / norm), in their own dtype. No collective, no host sync."""
    grads = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    # torch's clip_grad_norm_ adds the same 1e-6.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, scale.to(grads[0].dtype) if grads else scale)


def scale_grads_(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply the gradients by `factor` in place."""
    torch._foreach_mul_([local_tensor(p.grad) for p in parameters if p.grad is not None], factor)


def nonfinite_names(named_parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of parameters whose gradient holds an inf or NaN on this rank."""
    return [
        name
        for name, parameter in named_parameters
        if parameter.grad is not None and not bool(torch.isfinite(local_tensor(parameter.grad)).all())
    ]
