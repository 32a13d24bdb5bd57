"""Reward models and classifiers: a head of one output or several in place of the vocabulary's, read at the last token
of each document.

As transformers' classes for sequence classification read it, that is the last token which is not the config's
pad_token_id. The batch's labels stand at that token alone, so that a row's one label says where its score is read.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.base.batch import Batch, documents
from dtrain.base.run_context import RunContext
from dtrain.checkpoint.huggingface.model_files import padding_token
from dtrain.data import GlobalBatch, Rows
from dtrain.methods.method import Method
from dtrain.policy import Policy
from dtrain.policy.reward_model import at_the_ends
from dtrain.policy.score import LogprobSource, Loss
from dtrain.recipe.schema import Recipe


class RewardMethod(Method):
    """The losses of the global batch, each a mean over its pairs or documents.

    pairs: −log σ(r_chosen − r_rejected − margin) (Bradley-Terry; margins: Touvron et al., arXiv:2307.09288, equation 2)
    + center_rewards_coefficient · (r_chosen + r_rejected)² (Eisenstein et al., arXiv:2312.09244); classes: the cross
    entropy of the label; numbers: the squared error.
    """

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self._rows: dict[str, Rows] = {}
        self._pad: int | None = None
        self._task = recipe.reward.task

    def begin(self, policy: Policy, splits: Mapping[str, Rows], run: RunContext) -> None:
        config = policy.model.config
        self._rows, self._pad = dict(splits), config.pad_token_id
        if self._pad is None:  # as the export's config.json will say
            self._pad = padding_token(self.recipe.model.directory, config.eos_token_ids)
        if config.has_new_head and self.recipe.model.init == "pretrained":
            run.metrics.say(
                f"score: a new head of {config.labels} output{'s' if config.labels != 1 else ''}, drawn by run.seed: "
                f"{self.recipe.model.path} is a language model"
            )

    def batch(self, rows: GlobalBatch, split: str = "train") -> Batch:
        """Return the batch with `targets`: each row's number at the label of its document, a pair's at that of the
        chosen one."""
        samples, column = self._rows[split].samples, self._label_column
        values = [samples.row(index)["columns"][column] for index in rows.samples]
        if self._task == "pairs":
            values = [target for value in values for target in (value, 0.0)]
        return at_the_ends(super().batch(rows), torch.tensor(values, dtype=torch.float64), self._pad)

    def prepare(self, policy: Policy, batch: Batch) -> tuple[Batch, Loss]:
        if "targets" not in batch:  # a plan's
            batch = at_the_ends(batch, torch.zeros(documents(batch), dtype=torch.float64), self._pad)
        return batch, self.loss

    def loss(
        self, source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalars: the share of the loss, and sums over the pairs or documents."""
        scores, targets = source.scores(), source.by_document(batch["targets"])  # [documents, labels], [documents]
        if self._task == "pairs":
            total, count, measured = self._pairs(scores.squeeze(1), targets.to(scores))
            total = total * 2 / global_seqs
        else:
            losses = self._losses(scores, targets)  # [documents]
            total, count = losses.sum() / global_seqs, len(losses)
            measured = {"loss": losses.sum()}
            if self._task == "classes":
                measured["accuracy"] = (scores.argmax(1) == targets).sum()
            else:
                measured["reward_mean"] = scores.sum()
        measured["count"] = torch.full((), count, device=scores.device)
        return source.shared(total), {name: source.shared(value.detach().to(total)) for name, value in measured.items()}

    def _pairs(self, scores: Tensor, targets: Tensor) -> tuple[Tensor, int, dict[str, Tensor]]:
        """scores [documents] -> the sum of the losses, the pairs, and sums over these."""
        chosen, rejected = scores.unflatten(0, (-1, 2)).unbind(1)  # [pairs] each
        losses = -F.logsigmoid(chosen - rejected - targets[::2])
        if coefficient := self.recipe.reward.center_rewards_coefficient:
            losses = losses + coefficient * (chosen + rejected).square()
        return (
            losses.sum(),
            len(losses),
            {
                "loss": losses.sum(),
                "rewards_chosen": chosen.sum(),
                "rewards_rejected": rejected.sum(),
                "rewards_margin": (chosen - rejected).sum(),
                "reward_mean": scores.sum() / 2,
                "accuracy": (chosen > rejected).sum(),
            },
        )

    def _losses(self, scores: Tensor, targets: Tensor) -> Tensor:
        """scores [documents, labels], targets [documents] -> [documents]"""
        if self._task == "classes":
            return F.cross_entropy(scores, targets.long(), reduction="none")
        return (scores.squeeze(1) - targets.to(scores)).square()

    @property
    def _label_column(self) -> str:
        label = self.spec.label(self.recipe)
        assert label is not None
        return label.column

    def fields(self, sums: Mapping[str, float]) -> dict[str, float]:
        count = max(sums["count"], 1)
        return {name: value / count for name, value in sums.items() if name not in ("count", "loss")}

    def val_fields(self, sums: Mapping[str, float]) -> dict[str, float]:
        val_loss = sums["loss"] / max(sums["count"], 1)
        return {"val_loss": val_loss, **{f"val_{name}": value for name, value in self.fields(sums).items()}}


build = RewardMethod
