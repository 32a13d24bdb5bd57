"""The reference: a second set of weights for the same model, frozen, that takes the place of the trained ones for a
while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dtrain.checkpoint.training_state import model_tensors
from dtrain.parallel.fsdp import give_weights_back
from dtrain.parallel.placement import local_tensor


class Reference:
    """A copy of `model`'s weights as they are now, sharded as they are, on their device. No collective, ever.

    `tensors` are plain tensors, or DTensors like the parameters', by the parameters' names; tied ones once.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        give_weights_back(model)
        self.tensors: dict[str, Tensor] = {
            name: tensor.detach().clone() for name, tensor in model_tensors(model).items()
        }
        self._is_in = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model holds the reference's weights inside, and its own again after, whatever happens. Shard by shard the
        two trade places, so that no third copy exists."""
        if self._is_in:
            raise RuntimeError("the reference is in the model already: use_reference_model() does not nest")
        self._trade()
        self._is_in = True
        try:
            yield
        finally:
            self._trade()
            self._is_in = False

    @torch.no_grad()
    def follow(self, mix: float) -> None:
        """reference ← mix · policy + (1 − mix) · reference (TR-DPO, arXiv:2404.09656, eq. 8)."""
        give_weights_back(self._model)
        for name, tensor in model_tensors(self._model).items():
            local_tensor(self.tensors[name]).lerp_(local_tensor(tensor.detach()), mix)

    @torch.no_grad()
    def _trade(self) -> None:
        give_weights_back(self._model)  # what is gathered is of the other weights
        for name, tensor in model_tensors(self._model).items():
            ours, theirs = local_tensor(tensor.detach()), local_tensor(self.tensors[name])
            kept = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(kept)
