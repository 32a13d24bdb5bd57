"""The reference model: a second, frozen set of weights that is swapped into the policy's model for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dtrain.adapters.config import is_adapter
from dtrain.checkpoint.dcp.training_state import frozen_names, model_tensors
from dtrain.models.common.decoder import CausalLM
from dtrain.parallel.fsdp import Sharding
from dtrain.parallel.placement import local_tensor, to_parameter_device


class Reference:
    """Copy of a model's current weights, sharded like them and on their device. No method communicates.

    Args:
        model: The model whose weights are copied, and into which they are swapped.
        sharding: Sharding of `model`.
        copy_frozen: Copy the frozen weights too. Otherwise the reference shares them with the model.
        with_adapters: Whether the reference has the model's adapters. Without, their weights are not copied, and
        forwards
            of the reference must be called without them (`Scorer.run_at_head`).

    Attributes:
        has_adapters: Whether forwards of the reference have the model's adapters.
        tensors: The copied weights by parameter name: plain tensors, or DTensors like the parameters. Tied weights
            appear once.
    """

    def __init__(self, model: CausalLM, sharding: Sharding, *, copy_frozen: bool, with_adapters: bool = True):
        self._model, self._sharding, self.has_adapters = model, sharding, with_adapters
        sharding.reshard()
        left_out = set() if copy_frozen else frozen_names(model)
        self.tensors: dict[str, Tensor] = {
            name: to_parameter_device(tensor).clone()
            for name, tensor in model_tensors(model).items()
            if name not in left_out and (with_adapters or not is_adapter(name))
        }
        self.is_swapped_in = False  # whether the model holds these weights now

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context in which the model has the reference's weights. Afterwards it has its own again, errors included.

        The weights are swapped shard by shard, so no third copy exists. Adapters are not touched: whether a forward has
        them is an argument of the forward (`has_adapters`).

        Raises:
            RuntimeError: If the reference is in place already.
        """
        if self.is_swapped_in:
            raise RuntimeError("the reference is in the model already: use_reference_model() does not nest")
        self._swap()
        self.is_swapped_in = True
        try:
            yield
        finally:
            self._swap()
            self.is_swapped_in = False

    @torch.no_grad()
    def update_towards_policy(self, mix: float) -> None:
        """Set reference ← mix · policy + (1 − mix) · reference (TR-DPO, arXiv:2404.09656, eq. 8)."""
        self._sharding.reshard()
        for own, tensor in self._pairs():
            own.lerp_(tensor.to(own.device), mix)  # a master may be in host memory

    @torch.no_grad()
    def _swap(self) -> None:
        with self._sharding.writing():
            for own, tensor in self._pairs():
                kept = tensor.clone()
                tensor.copy_(own)
                own.copy_(kept)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return the local shards of each weight of the reference and of the model."""
        tensors = model_tensors(self._model)
        return [(local_tensor(own), local_tensor(tensors[name]).detach()) for name, own in self.tensors.items()]
