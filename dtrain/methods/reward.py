"""Reward models and classifiers: a head of one output or several in place of the vocabulary's, read at the last token
of each document.

As transformers' classes for sequence classification read it, that is the last token which is not the config's
pad_token_id. The batch's labels stand at that token alone, so that a row's one label says where its score is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.base.batch import Batch, num_documents
from dtrain.base.errors import Problem
from dtrain.base.ranges import WEIGHT
from dtrain.checkpoint.huggingface.model_files import padding_token
from dtrain.data.formats.labels import Label
from dtrain.data.rows.rows import GlobalBatch, Rows
from dtrain.methods.method import Method, RunContext
from dtrain.policy import Policy
from dtrain.policy.other_models import add_targets_at_last_tokens
from dtrain.policy.score import LogprobSource, Loss

HEAD = "score"
"""The module of a classifier that gives its outputs."""


@dataclass
class RewardKeys:
    """`reward`: read by method reward."""

    task: Literal["pairs", "classes", "numbers"] = "pairs"
    """What the rows are. pairs: chosen and rejected answers, with a `margin` where they have one; classes, numbers:
    texts or messages with a `label`, a whole number from 0 or any number."""
    num_labels: Annotated[int | None, (lambda v: 1 <= v <= 2**20, "at least 1, up to 2**20, or null")] = None
    """How many classes there are. null: one output, a reward."""
    center_rewards_coefficient: Annotated[float | None, (WEIGHT[0], f"{WEIGHT[1]}, or null for none")] = None
    """The weight of (r_chosen + r_rejected)², which keeps rewards near zero (arXiv:2312.09244). null: none."""


class RewardMethod(Method):
    """The losses of the global batch, each a mean over its pairs or documents.

    pairs: −log σ(r_chosen − r_rejected − margin) (Bradley-Terry; margins: Touvron et al., arXiv:2307.09288, equation 2)
    + center_rewards_coefficient · (r_chosen + r_rejected)² (Eisenstein et al., arXiv:2312.09244); classes: the cross
    entropy of the label; numbers: the squared error.
    """

    Section = RewardKeys
    section: RewardKeys
    about = "a reward model or classifier"
    measures = ("rewards_chosen", "rewards_rejected", "rewards_margin", "accuracy", "reward_mean")
    curves = MappingProxyType({**Method.curves, "accuracy": "accuracy"})

    _rows: Mapping[str, Rows] = MappingProxyType({})
    _pad: int | None = None
    _documents = 1  # of a loss

    def variant(self) -> str | None:
        return "pairs" if self.section.task == "pairs" else None

    def missing(self) -> list[Problem]:
        if self.section.task != "classes" or self.section.num_labels is not None:
            return []
        key = "reward.num_labels"
        fix = "Set it to the number of classes, which are 0, 1, .. in the rows' label"
        return [Problem(key, f"{key} is missing", fix, is_missing=True)]

    def problems(self) -> list[Problem]:
        section, errors = self.section, []
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
            named = ", ".join([*lora.modules_to_save, HEAD])
            text = "lora: the new head of a reward model has to be fully trained next to the adapter"
            errors.append(Problem("lora.modules_to_save", text, f"Set lora.modules_to_save=[{named}]"))
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
        return self.section.num_labels or 1

    def label(self) -> Label:
        return Label("label", self.section.num_labels if self.section.task == "classes" else None)

    def begin(self, policy: Policy, splits: Mapping[str, Rows], run: RunContext) -> None:
        config = policy.model.config
        self._rows, self._pad = dict(splits), config.pad_token_id
        if self._pad is None:  # as the export's config.json will say
            self._pad = padding_token(self.recipe.model.directory, config.eos_token_ids)
        if config.has_new_head and self.recipe.model.init == "pretrained":
            run.metrics.say(
                f"score: a new head of {config.num_labels} output{'s' if config.num_labels != 1 else ''}, "
                f"drawn by run.seed: {self.recipe.model.path} is a language model"
            )

    def batch(self, rows: GlobalBatch, split: str = "train") -> Batch:
        """Return the batch with `targets`: each row's number at the label of its document, a pair's at that of the
        chosen one."""
        samples, column = self._rows[split].samples, self.label().column
        values = [value for index in rows.samples for value in self._targets(samples.row(index)["columns"][column])]
        return add_targets_at_last_tokens(super().batch(rows), torch.tensor(values, dtype=torch.float64), self._pad)

    def _targets(self, value: float) -> tuple[float, ...]:
        """Return the target of each document of a sample."""
        return (value,)

    def prepare(self, policy: Policy, batch: Batch) -> tuple[Batch, Loss]:
        if "targets" not in batch:  # a plan's
            batch = add_targets_at_last_tokens(batch, torch.zeros(num_documents(batch), dtype=torch.float64), self._pad)
        return batch, self.loss

    def loss(
        self, source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalars: the share of the loss, and sums over the pairs or documents."""
        scores, targets = source.scores(), source.sum_by_document(batch["targets"])  # [documents, labels], [documents]
        losses, sums = self._losses(scores, targets)
        total = losses.sum() * self._documents / global_seqs
        count = torch.full((), len(losses), device=scores.device)
        measured = {"loss": losses.sum(), **sums, "count": count}
        return source.count_once(total), {name: source.count_once(value.detach()) for name, value in measured.items()}

    def _losses(self, scores: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """scores [documents, labels], targets [documents] -> losses [documents], and sums over them."""
        if self.section.task == "classes":
            accuracy = (scores.argmax(1) == targets).sum()
            return F.cross_entropy(scores, targets.long(), reduction="none"), {"accuracy": accuracy}
        return (scores.squeeze(1) - targets.to(scores)).square(), {"reward_mean": scores.sum()}

    def train_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        count = max(sums["count"], 1)
        return {name: value / count for name, value in sums.items() if name not in ("count", "loss")}

    def val_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        val_loss = sums["loss"] / max(sums["count"], 1)
        return {"val_loss": val_loss, **{f"val_{name}": value for name, value in self.train_metrics(sums).items()}}


class RewardPairsMethod(RewardMethod):
    """A head that rates a better and a worse answer: `reward.task` is pairs."""

    kind = "pairs"
    _documents = 2

    def format_problem(self, format: str) -> str | None:
        if format not in ("auto", "preference", "tokenized"):
            return "reward.task=pairs reads preferences; set it to preference, or reward.task=classes or numbers"
        return None

    def label(self) -> Label:
        return Label("margin")

    def _targets(self, value: float) -> tuple[float, ...]:
        return value, 0.0

    def _losses(self, scores: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """scores [documents, 1], targets [documents] -> losses [pairs], and sums over them."""
        chosen, rejected = scores.squeeze(1).unflatten(0, (-1, 2)).unbind(1)  # [pairs] each
        losses = -F.logsigmoid(chosen - rejected - targets.to(scores)[::2])
        if coefficient := self.section.center_rewards_coefficient:
            losses = losses + coefficient * (chosen + rejected).square()
        return losses, {
            "rewards_chosen": chosen.sum(),
            "rewards_rejected": rejected.sum(),
            "rewards_margin": (chosen - rejected).sum(),
            "reward_mean": scores.sum() / 2,
            "accuracy": (chosen > rejected).sum(),
        }
