"""Supervised fine-tuning: the loss is a mean over the trained tokens of the global batch."""

from collections.abc import Mapping
from functools import cached_property, partial
from types import MappingProxyType

import torch
from torch import Tensor

from dtrain.base.batch import Batch
from dtrain.base.errors import Problem, UserError, problems_of_error
from dtrain.base.ranges import NUMBER, format_value
from dtrain.losses.head.weighted_sum import FORMULAS
from dtrain.losses.token_options import LOSSES, RANGES, find_loss, is_loss_name
from dtrain.methods.method import Method
from dtrain.methods.sections import Sft
from dtrain.policy.score import LogprobSource
from dtrain.recipe import spelling


class SftMethod(Method):
    """Supervised fine-tuning.

    loss = Σ `sft.loss`(log p(label)) ÷ trained tokens, both over the global batch.
    """

    Section = Sft
    section: Sft
    about = "supervised fine-tuning"
    measures = ("token_accuracy",)
    curves = MappingProxyType({**Method.curves, "token_accuracy": "token accuracy"})

    def image_problems(self) -> list[Problem]:
        """Return no problem: rows may have images."""
        return []

    def problems(self) -> list[Problem]:
        """Check `sft.loss`, its options and label smoothing."""
        section = self.section
        if not is_loss_name(section.loss):
            hint = spelling.value_hint("sft.loss", section.loss, LOSSES)
            return [Problem("sft.loss", f"sft.loss={section.loss} is not a loss of tokens{hint}")]
        try:
            loss = find_loss(section.loss)
        except UserError as error:
            return problems_of_error("sft.loss", error)
        errors = []
        for name, value in section.kwargs.items():
            key = f"sft.kwargs.{name}"
            allowed, sentence = RANGES.get(name, NUMBER)
            if name not in loss.options:
                errors.append(Problem(key, f"{key} is not read by sft.loss={section.loss}", "Leave it out"))
            elif section.loss in LOSSES and not allowed(value):
                errors.append(Problem(key, f"{key}={format_value(value)} must be {sentence}"))
        if section.label_smoothing and not loss.smooths:
            key = "sft.label_smoothing"
            smoothing = [name for name, other in LOSSES.items() if other.smooths]
            text = f"{key}={section.label_smoothing} has no meaning for sft.loss={section.loss}"
            errors.append(Problem(key, text, f"Leave it out, or set sft.loss={' or '.join(smoothing)}"))
        return errors

    def code(self) -> list[tuple[str, str | None, str]]:
        return [("sft.loss", self.section.loss, "loss")]

    @cached_property
    def _token_loss(self) -> partial[Tensor]:
        """The loss of tokens with its options."""
        loss = find_loss(self.section.loss)
        function = FORMULAS[loss.function] if isinstance(loss.function, str) else loss.function
        return partial(function, **{**loss.options, **self.section.kwargs})

    def loss(
        self, source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of a micro-batch.

        Arguments are those of `Method.loss`.

        Returns:
            This micro-batch's part of the loss, a scalar. Totals over its trained tokens, scalars: "lost" (the tokens'
            losses), "trained" (number of tokens) and "correct" (number of labels that are the model's argmax).
        """
        total, correct = source.token_loss_sums(self._token_loss, label_smoothing=self.section.label_smoothing)
        trained = torch.full((), batch["label_index"].shape[0], device=total.device)
        return total / global_tokens, {"lost": total.detach(), "trained": trained, "correct": correct}

    def train_metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Return the share of trained tokens whose label is the model's argmax."""
        return {"token_accuracy": totals["correct"] / max(totals["trained"], 1)}

    def val_metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Return means over all trained tokens of the validation set."""
        count = max(totals["trained"], 1)
        return {"val_loss": totals["lost"] / count, "val_token_accuracy": totals["correct"] / count}
