"""Supervised fine-tuning: the mean over the trained tokens of the global batch of a loss of their log-probability."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from dtrain.base.batch import Batch
from dtrain.losses.head import weighted_sum
from dtrain.losses.token.options import LOSSES
from dtrain.methods.method import Method
from dtrain.policy.score import LogprobSource
from dtrain.recipe.schema import Recipe


class SftMethod(Method):
    """loss = Σ `sft.loss`(log p(label)) ÷ trained tokens, both over the whole global batch."""

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        section = recipe.sft
        named = LOSSES[section.loss]
        self._token_loss = partial(getattr(weighted_sum, named.function), **{**named.options, **section.kwargs})
        self._smoothing = section.label_smoothing

    def loss(
        self, source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalars: the share of the loss, and the sums of what the tokens lose, of trained tokens, and of those that
        are the likeliest."""
        total, correct = source.token_loss_sums(self._token_loss, label_smoothing=self._smoothing)
        trained = torch.full((), batch["label_index"].shape[0], device=total.device)
        return total / global_tokens, {"lost": total.detach(), "trained": trained, "correct": correct}

    def fields(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The share of trained tokens that the model finds likeliest."""
        return {"token_accuracy": sums["correct"] / max(sums["trained"], 1)}

    def val_fields(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Means over every trained token of the set: summed over all batches and ranks, and divided once."""
        count = max(sums["trained"], 1)
        return {"val_loss": sums["lost"] / count, "val_token_accuracy": sums["correct"] / count}


build = SftMethod
