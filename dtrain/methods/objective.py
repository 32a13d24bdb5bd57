"""What preference tuning minimises, as a recipe's `dpo` section says it: losses by name with their weights, over the
sums of a pair's log-probabilities."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtrain.batch import IGNORE, Batch
from dtrain.config.schema import Dpo as Section
from dtrain.losses.preference import combined_preference_loss, preference_rewards, preference_weights
from dtrain.losses.preference_options import LOSSES, SFT


class PairSums(NamedTuple):
    """Sums over the labelled tokens of pairs, [pairs] each.

    chosen, rejected, ref_chosen, ref_rejected: Σ weight · log p under the policy and the reference (0 without one);
    chosen_lengths, rejected_lengths: tokens; plain_chosen: Σ log p without weights.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    plain_chosen: Tensor

    @staticmethod
    def streams(batch: Batch, logprobs: Tensor) -> Tensor:
        """logprobs [B, S] of a batch's labels -> the streams [4, B, S] whose sums by document `of` takes."""
        weights = batch["token_weights"].to(logprobs) if "token_weights" in batch else torch.ones_like(logprobs)
        reference = batch["reference_logprobs"].to(logprobs) if "reference_logprobs" in batch else None
        return torch.stack(
            [
                logprobs * weights,
                torch.zeros_like(logprobs) if reference is None else reference * weights,
                (batch["labels"] != IGNORE).to(logprobs),
                logprobs,
            ]
        )

    @classmethod
    def of(cls, sums: Tensor) -> "PairSums":
        """sums [4, documents], a pair's two next to each other."""
        (chosen, rejected), (ref_chosen, ref_rejected), lengths, plain = sums.unflatten(1, (-1, 2)).transpose(1, 2)
        return cls(chosen, rejected, ref_chosen, ref_rejected, lengths[0], lengths[1], plain[0])


class Objective:
    """The recipe's losses and weights. `whole_batch`: a pair's loss depends on the other pairs of the batch."""

    def __init__(self, section: Section):
        names = [section.loss] if isinstance(section.loss, str) else list(section.loss)
        weights = section.loss_weights or [1.0] * len(names)
        by_name = list(zip(names, weights, strict=True))
        self.beta = section.beta
        self.sft_weight = section.sft_weight + sum(weight for name, weight in by_name if name == SFT)
        self._names = [name for name in names if name != SFT]
        self._options: dict[str, Any] = {
            "beta": section.beta,
            "loss_weights": [weight for name, weight in by_name if name != SFT],
            "label_smoothing": section.label_smoothing,
            "f_divergence": section.f_divergence,
            **section.kwargs,
        }
        per_batch = {name for name in self._names if LOSSES[name].whole_batch}
        if section.kwargs.get("bco_shift") != "batch":
            per_batch.discard("bco_pair")
        self.whole_batch = bool(per_batch)

    def losses(self, sums: PairSums) -> Tensor:
        """[pairs], the weighted sum of the named losses, without the SFT term."""
        if not self._names:
            return torch.zeros_like(sums.chosen)
        return combined_preference_loss(self._names, *sums[:4], **self._named(sums))

    def slopes(self, sums: PairSums) -> tuple[Tensor, Tensor]:
        """The losses [pairs], and their mean's derivative by the sums of chosen and rejected in turn, [2 · pairs]."""
        found = preference_weights(self._names, *sums[:4], **self._named(sums))
        return found.losses, torch.stack([found.chosen, found.rejected], 1).flatten()

    def _named(self, sums: PairSums) -> dict[str, Any]:
        lengths = {"chosen_lengths": sums.chosen_lengths, "rejected_lengths": sums.rejected_lengths}
        return lengths | self._options

    def measure(self, sums: PairSums, losses: Tensor) -> dict[str, Tensor]:
        """Sums over the pairs, scalars, from which the metrics are made; losses [pairs]."""
        rewards = preference_rewards(*sums[:4], beta=self.beta)
        return {
            "pairs": torch.full((), len(losses), device=losses.device),
            "loss": losses.sum(),
            "rewards_chosen": rewards.chosen.sum(),
            "rewards_rejected": rewards.rejected.sum(),
            "rewards_margin": rewards.margin.sum(),
            "accuracy": rewards.accuracy.sum(),
            "chosen_nll": -sums.plain_chosen.sum(),
            "chosen_tokens": sums.chosen_lengths.sum(),
        }
