"""Interface of the optimizers that step local shards as plain tensors, and the allocation of an optimizer's state."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer


class StateLocation(NamedTuple):
    """Location of a rank's part of a state tensor in the tensor of all ranks.

    Attributes:
        global_size: Size of the tensor of all ranks.
        offsets: Indices in it at which this rank's part begins.
    """

    global_size: tuple[int, ...]
    offsets: tuple[int, ...]


class ShardOptimizer(Optimizer):
    """Interface of dtrain's own optimizers, which step local shards as plain tensors.

    `checkpoint.dcp` queries where a state tensor is in that of all ranks.

    Attributes:
        state_is_on_host: Whether the state is in host memory, and copied to the device during a step.
    """

    state_is_on_host = False

    def allocate_state(self) -> None:
        """Allocate the state of every parameter, as a step would. Weights keep their values."""
        _step_without_change(self)

    def step_buffer_bytes(self) -> int:
        """Return the bytes on the device of the buffers through which a step copies state that is on the host."""
        return 0

    def is_fused_on(self, device_type: str) -> bool:
        """Check whether a step on devices of this type reads and writes each of its tensors once."""
        return False

    def state_location(self, parameter: Tensor, key: str) -> StateLocation | None:
        """Return the location of the state tensor `key`. None: that of the local shard of `parameter`."""
        return None


def allocate_state(optimizer: Optimizer) -> None:
    """Give a new optimizer the state that it has after a step, without changing a weight.

    The contents of the state mean nothing until they are loaded. Does nothing if there is state already.

    Raises:
        ValueError: If parameters have gradients.

    Collectives:
        Those of the optimizer's step.
    """
    if optimizer.state:
        return
    if isinstance(optimizer, ShardOptimizer):
        optimizer.allocate_state()
    else:
        _step_without_change(optimizer)


@torch.no_grad()
def _step_without_change(optimizer: Optimizer) -> None:
    """Step with gradients of 0 at a learning rate of 0."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter.grad is not None for parameter in parameters):
        raise ValueError("allocate_state is for an optimizer between steps: there are gradients")
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for group, rate in rates:
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    optimizer.step()
    for group, rate in rates:
        group["lr"] = rate
    for parameter in parameters:
        parameter.grad = None
