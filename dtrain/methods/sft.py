"""Supervised fine-tuning: the mean negative log-probability of the trained tokens of the global batch, or DFT's."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dtrain.batch import Batch
from dtrain.config.schema import Recipe
from dtrain.methods.method import Method
from dtrain.policy.score import LogprobSource


class SftMethod(Method):
    """loss = −Σ log p(label) ÷ trained tokens, both over the whole global batch."""

    def loss(
        self, source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalars: the share of the loss, and the sums of what the tokens lose and of trained tokens."""
        return _share(-source.weighted_sum(), batch, global_tokens)

    def val_fields(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The mean over every trained token of the set: summed over all batches and ranks, and divided once."""
        return {"val_loss": sums["lost"] / max(sums["trained"], 1)}


class DftMethod(SftMethod):
    """Each token's log p(label) is weighted by p, as a constant (Wu et al., arXiv:2508.05629)."""

    def loss(
        self, source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As `SftMethod.loss`."""
        return _share(-source.weighted_sum(by_probability=True), batch, global_tokens)


def _share(total: Tensor, batch: Batch, global_tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    trained = torch.full((), batch["label_index"].shape[0], device=total.device)
    return total / global_tokens, {"lost": total.detach(), "trained": trained}


def build(recipe: Recipe) -> Method:
    """Return the method of the recipe's `sft.loss`."""
    return DftMethod(recipe) if recipe.sft.loss == "dft" else SftMethod(recipe)
