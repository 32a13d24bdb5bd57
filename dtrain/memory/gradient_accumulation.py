"""Accumulation of bfloat16 gradients over micro-batches, with stochastic rounding.

FSDP would round each sum to the nearest bfloat16 number, which loses terms that are small compared with the sum. For
example, 256 + 0.5 is 256 in bfloat16, however often 0.5 is added. Here a sum is rounded up or down at random: to 258
with the probability 0.25, and to 256 otherwise. So it is right on average for any number of terms.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dtrain.base.fused import Fused
from dtrain.optim.local_shard import (
    BitPositions,
    LocalShard,
    bit_positions,
    random_16_bits,
    random_sequence,
    round_bfloat16,
)


class GradientAccumulator:
    """Accumulates the gradients of a model whose bfloat16 gradients FSDP reduces after each micro-batch.

    `begin` is called before each backward, and `finish` after the last backward of a step. Then `.grad` of each
    parameter is the sum over the micro-batches. No collectives.

    Args:
        named_parameters: Parameters of the model. Those that need no gradient are left out.
        seed: Seed of the random bits.

    For example:

        accumulator = GradientAccumulator(model.named_parameters(), seed=0)
        for index, micro_batch in enumerate(micro_batches):
            accumulator.begin(step, index, is_last=index + 1 == len(micro_batches))
            loss(micro_batch).backward()
        accumulator.finish()
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], seed: int):
        self._seed = seed
        self._step = self._micro_batch = 0
        self._is_last = True
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._shards: dict[nn.Parameter, tuple[str, LocalShard]] = {}
        for name, parameter in named_parameters:
            if parameter.requires_grad:
                self._shards[parameter] = name, LocalShard.of(parameter)
                parameter.register_post_accumulate_grad_hook(self._add_gradient)

    def begin(self, step: int, micro_batch: int, is_last: bool) -> None:
        """Prepare for the backward of a micro-batch.

        Args:
            step: Number of the optimizer step, from which the random bits are derived.
            micro_batch: Number of the micro-batch in the step.
            is_last: Whether this is the last micro-batch of the step.
        """
        self._step, self._micro_batch, self._is_last = step, micro_batch, is_last

    def finish(self) -> None:
        """Set `.grad` of parameters that had no gradient in the last backward."""
        for parameter, total in self._sums.items():
            parameter.grad = total
        self._sums.clear()

    @torch.no_grad()
    def _add_gradient(self, parameter: nn.Parameter) -> None:
        """Add the gradient of `parameter`, which FSDP has just reduced, to its sum."""
        total = self._sums.pop(parameter, None)
        if total is not None:
            assert parameter.grad is not None
            name, shard = self._shards[parameter]
            total_matrix, gradient = shard.as_matrix(total), shard.as_matrix(parameter.grad)
            sequence = random_sequence(self._seed, self._step, f"{name} {self._micro_batch}")
            for rows in shard.row_slices():
                _add(total_matrix[rows], gradient[rows], bit_positions(shard, rows, sequence))
            parameter.grad = total
        # FSDP would add the next micro-batch's gradient to `.grad` itself, so the sum is kept elsewhere until then.
        if not self._is_last and parameter.grad is not None:
            self._sums[parameter] = parameter.grad
            parameter.grad = None


@Fused
def _add(total: Tensor, gradient: Tensor, positions: BitPositions) -> None:
    """Add rows of a gradient to those of its sum, [rows, local_columns] each."""
    bits = random_16_bits((total.shape[0], total.shape[1]), positions, total.device)
    total.copy_(round_bfloat16(total.float() + gradient.float(), bits))
