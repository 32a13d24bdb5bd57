"""SFT with the focal loss (Lin et al., arXiv:1708.02002): a method in one file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dtrain.base.batch import Batch
from dtrain.base.errors import Problem
from dtrain.base.ranges import SIZE
from dtrain.methods import Method
from dtrain.policy.score import LogprobSource


@dataclass
class Focal:
    """`focal`: read by method focal."""

    gamma: Annotated[float, SIZE] = 2.0
    """How much less a token counts that the model expects. 0: each counts alike."""


class FocalMethod(Method):
    """loss = Σ −(1 − p)^gamma · log p(label) ÷ trained tokens, both over the whole global batch."""

    Section = Focal
    section: Focal
    about = "supervised fine-tuning with the focal loss"
    measures = ("token_accuracy",)

    def problems(self) -> list[Problem]:
        if self.section.gamma != 0:
            return []
        text = "focal.gamma=0 is the loss of method=sft"
        return [Problem("focal.gamma", text, "Set method=sft, or a larger focal.gamma")]

    def loss(
        self, source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalars: the share of the loss, and the sums of what tokens lose, of trained and of likeliest ones."""
        total, correct = source.token_loss_sums(
            lambda logprobs: -((1 - logprobs.exp()) ** self.section.gamma) * logprobs
        )
        trained = torch.full((), batch["label_index"].shape[0], device=total.device)
        return total / global_tokens, {"lost": total.detach(), "trained": trained, "correct": correct}

    def train_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"token_accuracy": sums["correct"] / max(sums["trained"], 1)}

    def val_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"val_loss": sums["lost"] / max(sums["trained"], 1)} | {
            f"val_{name}": value for name, value in self.train_metrics(sums).items()
        }
