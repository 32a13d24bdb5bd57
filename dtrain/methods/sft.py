"""Supervised fine-tuning: the mean over the trained tokens of the global batch of a loss of their log-probability."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType
from typing import Annotated, Any

import torch
from torch import Tensor

from dtrain.base.batch import Batch
from dtrain.base.errors import Problem
from dtrain.base.ranges import NUMBER, format_value, is_number
from dtrain.losses.head import weighted_sum
from dtrain.losses.token_options import LOSSES, RANGES
from dtrain.methods.method import Method
from dtrain.policy.score import LogprobSource
from dtrain.recipe import spelling


@dataclass
class Sft:
    """`sft`: read by method sft."""

    loss: str = "nll"
    """nll: −log p of each trained token. dft: that times p, as a constant (arXiv:2508.05629). The table is
    dtrain/losses/token_options.py."""
    label_smoothing: Annotated[float, (lambda v: is_number(v) and 0 <= v < 1, "from 0 to below 1")] = 0.0
    """With nll: this share of a token's loss is the mean of −log p over the whole vocabulary, as in transformers. The
    validation loss has it too."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """More options of the loss."""


class SftMethod(Method):
    """loss = Σ `sft.loss`(log p(label)) ÷ trained tokens, both over the whole global batch."""

    Section = Sft
    section: Sft
    about = "supervised fine-tuning"
    measures = ("token_accuracy",)
    curves = MappingProxyType({**Method.curves, "token_accuracy": "token accuracy"})

    def image_problems(self) -> list[Problem]:
        return []

    def problems(self) -> list[Problem]:
        """Check `sft.loss`, its options and label smoothing."""
        section = self.section
        if section.loss not in LOSSES:
            hint = spelling.value_hint("sft.loss", section.loss, LOSSES)
            return [Problem("sft.loss", f"sft.loss={section.loss} is not a loss of tokens{hint}")]
        named, errors = LOSSES[section.loss], []
        for name, value in section.kwargs.items():
            key = f"sft.kwargs.{name}"
            allowed, sentence = RANGES.get(name, NUMBER)
            if name not in named.options:
                errors.append(Problem(key, f"{key} is not read by sft.loss={section.loss}", "Leave it out"))
            elif not allowed(value):
                errors.append(Problem(key, f"{key}={format_value(value)} must be {sentence}"))
        if section.label_smoothing and not named.smooths:
            key = "sft.label_smoothing"
            smoothing = [name for name, loss in LOSSES.items() if loss.smooths]
            text = f"{key}={section.label_smoothing} has no meaning for sft.loss={section.loss}"
            errors.append(Problem(key, text, f"Leave it out, or set sft.loss={' or '.join(smoothing)}"))
        return errors

    @cached_property
    def _token_loss(self) -> partial[Tensor]:
        named = LOSSES[self.section.loss]
        return partial(getattr(weighted_sum, named.function), **{**named.options, **self.section.kwargs})

    def loss(
        self, source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalars: the share of the loss, and the sums of what the tokens lose, of trained tokens, and of those that
        are the likeliest."""
        total, correct = source.token_loss_sums(self._token_loss, label_smoothing=self.section.label_smoothing)
        trained = torch.full((), batch["label_index"].shape[0], device=total.device)
        return total / global_tokens, {"lost": total.detach(), "trained": trained, "correct": correct}

    def train_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The share of trained tokens that the model finds likeliest."""
        return {"token_accuracy": sums["correct"] / max(sums["trained"], 1)}

    def val_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Means over every trained token of the set: summed over all batches and ranks, and divided once."""
        count = max(sums["trained"], 1)
        return {"val_loss": sums["lost"] / count, "val_token_accuracy": sums["correct"] / count}
