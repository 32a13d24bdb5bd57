"""Reward models and classifiers: a head with one output or a few, read at the last token of each document.

The last token is the last one that is not the config's pad_token_id, as in transformers' classes for sequence
classification. Each document of a batch has exactly one label, at that token. So the labels mark the positions at which
scores are read. For example, with pad_token_id 0:

    input_ids     7  8  9  0  0
    labels        -  -  0  -  -      (- is -100)
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.base.batch import Batch, num_documents
from dtrain.base.errors import Problem
from dtrain.checkpoint.huggingface.model_files import padding_token
from dtrain.data.formats.labels import Label
from dtrain.data.rows.rows import GlobalBatch, Rows
from dtrain.methods.method import Method, RunContext
from dtrain.methods.sections import RewardKeys
from dtrain.policy import Policy
from dtrain.policy.other_models import add_targets_at_last_tokens
from dtrain.policy.score import LogprobSource, Loss

HEAD = "score"
"""Name of the head's module in a classifier."""


class RewardMethod(Method):
    """Reward models and classifiers. The loss is a mean over the pairs or documents of the global batch.

    The loss depends on `reward.task`:

        pairs      −log σ(r_chosen − r_rejected − margin) + center_rewards_coefficient · (r_chosen + r_rejected)².
                   The first term is the Bradley-Terry model, with margins as in Touvron et al., arXiv:2307.09288,
                   equation 2. The second is from Eisenstein et al., arXiv:2312.09244. See `RewardPairsMethod`.
        classes    the cross entropy of the label
        numbers    the squared error
    """

    Section = RewardKeys
    section: RewardKeys
    about = "a reward model or classifier"
    measures = ("rewards_chosen", "rewards_rejected", "rewards_margin", "accuracy", "reward_mean")
    curves = MappingProxyType({**Method.curves, "accuracy": "accuracy"})

    _rows: Mapping[str, Rows] = MappingProxyType({})  # by split
    _pad: int | None = None  # the padding token
    _documents_per_loss = 1

    def variant(self) -> str | None:
        return "pairs" if self.section.task == "pairs" else None

    def missing(self) -> list[Problem]:
        if self.section.task != "classes" or self.section.num_labels is not None:
            return []
        key = "reward.num_labels"
        fix = "Set it to the number of classes, which are 0, 1, .. in the rows' label"
        return [Problem(key, f"{key} is missing", fix, is_missing=True)]

    def problems(self) -> list[Problem]:
        section = self.section
        errors = []
        key = "reward.num_labels"
        if section.task == "classes" and section.num_labels == 1:
            errors.append(Problem(key, f"{key}=1: one class leaves nothing to predict", "Set it to 2 or more"))
        if section.task != "classes" and section.num_labels not in (None, 1):
            text = f"{key}={section.num_labels}: reward.task={section.task} has one output"
            errors.append(Problem(key, text, "Leave it out, or set reward.task=classes"))
        if section.task != "pairs" and section.center_rewards_coefficient is not None:
            key = "reward.center_rewards_coefficient"
            errors.append(Problem(key, f"{key} is read only with reward.task=pairs", "Leave it out"))
        lora = self.recipe.lora
        if lora is not None and lora.path is None and HEAD not in lora.modules_to_save:
            modules = ", ".join([*lora.modules_to_save, HEAD])
            text = "lora: the new head of a reward model has to be fully trained next to the adapter"
            errors.append(Problem("lora.modules_to_save", text, f"Set lora.modules_to_save=[{modules}]"))
        if self.recipe.eval is not None:
            text = "eval samples answers, and a reward model gives none"
            errors.append(Problem("eval", text, "Leave it out"))
        if self.recipe.data.loss_on != "assistant":
            text = (
                f"data.loss_on={self.recipe.data.loss_on} has no effect with method=reward, which reads a text at its "
                "last token"
            )
            errors.append(Problem("data.loss_on", text, "Leave it out"))
        return errors

    def format_problem(self, format: str) -> str | None:
        if format in ("preference", "question"):
            return f"reward.task={self.section.task} reads texts with a label; set reward.task=pairs for preferences"
        return None

    def labels(self) -> int | None:
        """Return the number of outputs of the new head: the number of classes, or 1 for a reward or a number."""
        return self.section.num_labels or 1

    def label(self) -> Label:
        return Label("label", self.section.num_labels if self.section.task == "classes" else None)

    def begin(self, policy: Policy, splits: Mapping[str, Rows], run: RunContext) -> None:
        """Find the padding token, and print a line for a new head. Arguments are those of `Method.begin`."""
        config = policy.model.config
        self._rows = dict(splits)
        self._pad = config.pad_token_id
        if self._pad is None:  # then use the padding token that the export's config.json will have
            self._pad = padding_token(self.recipe.model.directory, config.eos_token_ids)
        if config.has_new_head and self.recipe.model.init == "pretrained":
            run.metrics.print_line(
                f"score: a new head of {config.num_labels} output{'s' if config.num_labels != 1 else ''}, "
                f"initialised from run.seed: {self.recipe.model.path} is a language model"
            )

    def batch(self, rows: GlobalBatch, split: str = "train") -> Batch:
        """Return the batch with the stream `targets`, which has the target of each document at its label.

        The target of a pair is its margin, at the label of the chosen document.
        """
        samples, column = self._rows[split].samples, self.label().column
        values: list[float] = []
        for index in rows.samples:
            values += self._targets(samples.row(index)["columns"][column])
        return add_targets_at_last_tokens(super().batch(rows), torch.tensor(values, dtype=torch.float64), self._pad)

    def _targets(self, value: float) -> tuple[float, ...]:
        """Return the target of each document of a sample."""
        return (value,)

    def prepare(self, policy: Policy, batch: Batch) -> tuple[Batch, Loss]:
        """Return the batch and the loss. The batches of a plan have no targets, so they get targets of 0."""
        if "targets" not in batch:
            batch = add_targets_at_last_tokens(batch, torch.zeros(num_documents(batch), dtype=torch.float64), self._pad)
        return batch, self.loss

    def loss(
        self, source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of a micro-batch.

        Arguments are those of `Method.loss`.

        Returns:
            This micro-batch's part of the loss, a scalar, and totals over its pairs or documents, scalars.
        """
        scores = source.scores()  # [documents, labels]
        targets = source.sum_by_document(batch["targets"])  # [documents]
        losses, totals = self._losses(scores, targets)
        total = losses.sum() * self._documents_per_loss / global_seqs
        count = torch.full((), len(losses), device=scores.device)
        measured = {"loss": losses.sum(), **totals, "count": count}
        return source.count_once(total), {name: source.count_once(value.detach()) for name, value in measured.items()}

    def _losses(self, scores: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses of documents, [documents], and totals over them.

        Args:
            scores: [documents, labels].
            targets: [documents].
        """
        if self.section.task == "classes":
            accuracy = (scores.argmax(1) == targets).sum()
            return F.cross_entropy(scores, targets.long(), reduction="none"), {"accuracy": accuracy}
        return (scores.squeeze(1) - targets.to(scores)).square(), {"reward_mean": scores.sum()}

    def train_metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Return means over pairs or documents."""
        count = max(totals["count"], 1)
        return {name: value / count for name, value in totals.items() if name not in ("count", "loss")}

    def val_metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        metrics = {"val_loss": totals["loss"] / max(totals["count"], 1)}
        for name, value in self.train_metrics(totals).items():
            metrics[f"val_{name}"] = value
        return metrics


class RewardPairsMethod(RewardMethod):
    """Reward model trained on pairs of a better and a worse answer (`reward.task` is pairs)."""

    kind = "pairs"
    shared_beginnings = "pairs"
    _documents_per_loss = 2

    def format_problem(self, format: str) -> str | None:
        if format not in ("auto", "preference", "tokenized"):
            return "reward.task=pairs reads preferences; set it to preference, or reward.task=classes or numbers"
        return None

    def label(self) -> Label:
        return Label("margin")

    def _targets(self, value: float) -> tuple[float, ...]:
        return value, 0.0

    def _losses(self, scores: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses of pairs, [pairs], and totals over them.

        Args:
            scores: [documents, 1], the chosen and the rejected document of each pair in turn.
            targets: The margin at each chosen document, [documents].
        """
        chosen, rejected = scores.squeeze(1).unflatten(0, (-1, 2)).unbind(1)  # [pairs] each
        losses = -F.logsigmoid(chosen - rejected - targets.to(scores)[::2])
        coefficient = self.section.center_rewards_coefficient
        if coefficient:
            losses = losses + coefficient * (chosen + rejected).square()
        return losses, {
            "rewards_chosen": chosen.sum(),
            "rewards_rejected": rejected.sum(),
            "rewards_margin": (chosen - rejected).sum(),
            "reward_mean": scores.sum() / 2,
            "accuracy": (chosen > rejected).sum(),
        }
