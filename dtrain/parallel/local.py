"""Modules that compute with this rank's part of their parameters, whatever those are: plain tensors or DTensors."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement


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


class LocalParameters:
    """Beside nn.Module among a module's bases: `local(name)` is the plain tensor that this rank computes with.

    `local_views` holds a LocalView for each parameter that a style has placed; without one it is the parameter itself.
    """

    local_views: dict[str, LocalView] = {}  # replaced on the instance, never changed

    def local(self, name: str) -> Tensor | None:
        parameter = self._parameters[name]
        view = self.local_views.get(name)
        return parameter if view is None or parameter is None else view(parameter)
