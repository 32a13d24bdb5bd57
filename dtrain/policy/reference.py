"""The reference model: a second set of weights, which is temporarily swapped into the policy's model.

No second model is built. Only the trained weights are copied, so for LoRA the reference costs no memory at all: it is
the model without its adapters.
"""

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
        copy_frozen: Whether to copy the frozen weights too. Otherwise the reference shares them with the model.
        with_adapters: Whether the reference has the model's adapters. If not, their weights are not copied, and
            forwards of the reference must switch the adapters off (`Scorer.run_at_head`).

    Attributes:
        has_adapters: Whether forwards of the reference have the model's adapters.
        is_swapped_in: Whether the model has the reference's weights now.
        tensors: The copied weights by parameter name: plain tensors, or DTensors like the parameters. Tied weights
            appear once.
    """

    def __init__(self, model: CausalLM, sharding: Sharding, *, copy_frozen: bool, with_adapters: bool = True):
        self._model, self._sharding = model, sharding
        self.has_adapters = with_adapters
        sharding.reshard()
        shared = set() if copy_frozen else frozen_names(model)
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in model_tensors(model).items():
            if name in shared or (is_adapter(name) and not with_adapters):
                continue
            self.tensors[name] = to_parameter_device(tensor).clone()
        self.is_swapped_in = False

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swap the reference's weights into the model inside of this context.

        On exit the weights are swapped back, also after an error. They are swapped shard by shard, so there is never a
        third full copy. A reference without adapters leaves the model's adapters in place: each forward must switch
        them off by its own argument, for which callers read `has_adapters`.

        Raises:
            RuntimeError: If the reference is swapped in already.
        """
        if self.is_swapped_in:
            raise RuntimeError("the reference is swapped in already: use_reference_model() cannot be nested")
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
        for reference, weight in self._pairs():
            reference.lerp_(weight.to(reference.device), mix)  # a master weight may be in host memory

    @torch.no_grad()
    def _swap(self) -> None:
        with self._sharding.writing():
            for reference, weight in self._pairs():
                copy = weight.clone()
                weight.copy_(reference)
                reference.copy_(copy)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return the local shards of each copied weight: the reference's and the model's."""
        tensors = model_tensors(self._model)
        pairs = []
        for name, reference in self.tensors.items():
            pairs.append((local_tensor(reference), local_tensor(tensors[name]).detach()))
        return pairs
