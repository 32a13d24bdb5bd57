"""Interface of the optimizers that step local shards as plain tensors."""

from typing import NamedTuple

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

    `checkpoint.dcp` queries where a state tensor is in that of all ranks. `dtrain plan` lets such an optimizer step
    DTensors without memory, but replaces them by plain tensors for torch's classes, which would take minutes.
    """

    def state_location(self, parameter: Tensor, key: str) -> StateLocation | None:
        """Return the location of the state tensor `key`. None: that of the local shard of `parameter`."""
        return None
