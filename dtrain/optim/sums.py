"""Gradients in bfloat16, added up over micro-batches as they are reduced.

FSDP would round each sum to the nearest, which loses terms that are small beside it; here a sum is rounded up or down
at random, so that it is right on average, however many its terms are.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dtrain.base.fused import Fused
from dtrain.optim.adam import AT_ONCE
from dtrain.optim.moments import round_bfloat16
from dtrain.optim.places import Numbers, Place, few_bits, stream


class GradientSums:
    """Sums of the gradients of a model under FSDP whose `named_parameters` are trained in bfloat16, reduced after each
    micro-batch. Before each backward `begin`, after the last `finish`: then `.grad` holds the sums. No collective."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], seed: int):
        self._seed, self._step, self._index, self._is_last = seed, 0, 0, True
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._known: dict[nn.Parameter, tuple[str, Place]] = {}
        for name, parameter in named_parameters:
            if parameter.requires_grad:
                self._known[parameter] = name, Place.of(parameter)
                parameter.register_post_accumulate_grad_hook(self._take)

    def begin(self, step: int, index: int, is_last: bool) -> None:
        """Begin the backward of micro-batch `index` of optimizer step `step`."""
        self._step, self._index, self._is_last = step, index, is_last

    def finish(self) -> None:
        """Put sums of parameters that had no gradient in the last backward into their `.grad`."""
        for parameter, total in self._sums.items():
            parameter.grad = total
        self._sums.clear()

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        """Add the gradient [..] of `parameter`, which FSDP has just reduced, to its sum."""
        if (total := self._sums.pop(parameter, None)) is not None:
            assert parameter.grad is not None
            name, place = self._known[parameter]
            kept, new = place.of_local(total), place.of_local(parameter.grad)
            bits_of = stream(self._seed, self._step, f"{name} {self._index}")
            for rows in place.runs(AT_ONCE):
                _add(kept[rows], new[rows], place.numbers(rows, bits_of))
            parameter.grad = total
        if not self._is_last and parameter.grad is not None:
            self._sums[parameter] = parameter.grad
            parameter.grad = None


@Fused
def _add(total: Tensor, new: Tensor, numbers: Numbers) -> None:
    """Add rows of a gradient to those of its sum, [rows, held_columns] each."""
    bits = few_bits((total.shape[0], total.shape[1]), numbers, total.device)
    total.copy_(round_bfloat16(total.float() + new.float(), bits))
