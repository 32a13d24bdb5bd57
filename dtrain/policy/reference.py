"""The reference: other weights for the same model, frozen, that take the place of the trained ones for a while."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from dtrain.adapters.config import is_adapter
from dtrain.checkpoint.dcp.training_state import frozen_names, model_tensors
from dtrain.models.common.decoder import CausalLM
from dtrain.parallel.placement import local_tensor, on_its_device, reshard_model, weights_changed


class Reference:
    """Copy of `model`'s weights as they are now, sharded as they are, on their device. No collective, ever.

    whole: of the frozen ones too, which are the model's own otherwise. adapters: with the adapters that the model has;
    without, they are switched off while the reference is in place, and nothing of them is copied. `tensors` are plain
    tensors, or DTensors like the parameters', by the parameters' names; tied ones once.
    """

    def __init__(self, model: CausalLM, *, whole: bool, adapters: bool = True):
        self._model, self._adapters = model, adapters
        reshard_model(model)
        left_out = set() if whole else frozen_names(model)
        self.tensors: dict[str, Tensor] = {
            name: on_its_device(tensor).clone()
            for name, tensor in model_tensors(model).items()
            if name not in left_out and (adapters or not is_adapter(name))
        }
        self.is_in_place = False  # whether the model holds these weights now

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the model holds the reference's weights; after it, its own again, errors included. Shard by
        shard the two are swapped, so that no third copy exists."""
        from dtrain.adapters.lora import adapters_off  # a run without a reference needs none of it

        if self.is_in_place:
            raise RuntimeError("the reference is in the model already: use_reference_model() does not nest")
        self._swap()
        self.is_in_place = True
        try:
            with nullcontext() if self._adapters else adapters_off(self._model):
                yield
        finally:
            self._swap()
            self.is_in_place = False

    @torch.no_grad()
    def follow(self, mix: float) -> None:
        """Set reference ← mix · policy + (1 − mix) · reference (TR-DPO, arXiv:2404.09656, eq. 8)."""
        reshard_model(self._model)
        for own, tensor in self._pairs():
            own.lerp_(tensor.to(own.device), mix)  # a master may lie on the host

    @torch.no_grad()
    def _swap(self) -> None:
        reshard_model(self._model)  # what is gathered is of the other weights
        for own, tensor in self._pairs():
            kept = tensor.clone()
            tensor.copy_(own)
            own.copy_(kept)
        weights_changed(self._model)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        tensors = model_tensors(self._model)
        return [(local_tensor(own), local_tensor(tensors[name]).detach()) for name, own in self.tensors.items()]
