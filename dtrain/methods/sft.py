"""Supervised fine-tuning: the mean negative log-probability of the trained tokens of the global batch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dtrain.batch import Batch
from dtrain.methods.method import Method
from dtrain.policy.score import LogprobSource


class SftMethod(Method):
    """loss = −Σ log p(label) ÷ trained tokens, both over the whole global batch."""

    def loss(
        self, source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalars: the share of the loss, and the sums of negative log-probabilities and of trained tokens."""
        total = -source.weighted_sum()
        trained = torch.full((), batch["label_index"].shape[0], device=total.device)
        return total / global_tokens, {"nll": total.detach(), "trained": trained}

    def val_fields(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The mean over every trained token of the set: summed over all batches and ranks, and divided once."""
        return {"val_loss": sums["nll"] / max(sums["trained"], 1)}
