"""Preference tuning: pairs of a chosen and a rejected completion, against a reference or without one.

The loss of a pair is a function of the summed log-probabilities of its two completions (`losses.preference`); its mean
is over the pairs of the global batch, whatever the micro-batches and the mesh. In a batch the documents of a pair are
neighbours, the chosen one first: two rows, or two documents of a packed row.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from dtrain.batch import IGNORE, Batch, document_ids, documents, rows_in, sum_by_document
from dtrain.config.schema import Recipe
from dtrain.data import GlobalBatch, Rows
from dtrain.losses.preference import length_desensitised_weights
from dtrain.methods.method import Method, Run
from dtrain.methods.objective import Objective, PairSums
from dtrain.methods.precompute import at_first_labels, reference_table, table_name
from dtrain.policy import Policy
from dtrain.policy.score import LogprobSource, Loss

FIELDS = ("rewards_chosen", "rewards_rejected", "rewards_margin", "accuracy")


class Dpo(Method):
    """Direct preference optimisation (Rafailov et al., arXiv:2305.18290) and its relatives.

    loss = Σ over pairs of the objective ÷ pairs + sft_weight · Σ −log p over the chosen completions' tokens ÷ their
    count, each over the global batch.
    """

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.objective = Objective(recipe.dpo)
        stays = recipe.dpo.sync_every is None  # one that moves comes with the checkpoint
        self.needs_start = self.facts.needs_reference(recipe) and recipe.dpo.reference == "start" and stays
        self._reference: Mapping[str, Tensor] = {}
        self._tables: Mapping[str, Tensor] = {}

    def begin(self, policy: Policy, splits: Mapping[str, Rows], run: Run) -> None:
        """Keeps the reference: the weights as they are, or those of another model of the same shapes; with
        `dpo.precompute` only what it says of the data."""
        if not self.facts.needs_reference(self.recipe):
            return
        path = self.recipe.dpo.reference
        keep = partial(policy.init_reference_model, None if path == "start" else path)
        if not self.recipe.dpo.precompute:
            keep()
            if self.recipe.dpo.sync_every is not None and policy.reference is not None:
                self._reference = policy.reference.tensors
            return
        name = table_name(run.identities, policy.precision.compute, self.recipe.dpo.ld_alpha)
        self._tables = {
            split: reference_table(
                policy,
                rows,
                rows.samples.directory / name,
                ld_alpha=self.recipe.dpo.ld_alpha,
                micro_rows=self.micro_rows,
                reference=keep,
            )
            for split, rows in splits.items()
        }
        policy.reference = None

    def batch(self, rows: GlobalBatch, split: str = "train") -> Batch:
        batch = super().batch(rows)
        if split in self._tables:
            sums = self._tables[split][torch.tensor(rows.samples, dtype=torch.int64)]  # [pairs, 2]
            batch["reference_logprobs"] = at_first_labels(batch, sums.flatten())
        return batch

    def prepare(self, policy: Policy, batch: Batch) -> tuple[Batch, Loss]:
        """One forward of the reference, where there is one. Where a pair's loss depends on the other pairs of the
        global batch, also one of the policy, so that each pair's part in the gradient is known before the backward.
        """
        batch = dict(batch)
        if self.recipe.dpo.ld_alpha is not None:
            ids = document_ids(batch)
            batch["token_weights"] = length_desensitised_weights(ids, batch["labels"], self.recipe.dpo.ld_alpha)
        if policy.reference is not None:
            with policy.use_reference_model():
                batch["reference_logprobs"] = policy.label_logprobs(batch, self.micro_rows)
        chosen_tokens = torch.ones((), dtype=torch.int64)  # not read without an SFT term, nor counted
        if self.objective.sft_weight:
            chosen_tokens = policy.sum_over_dp(_labels_of_chosen(batch).sum()).clamp(min=1)
        if not self.objective.whole_batch:
            return batch, partial(self.loss, chosen_tokens=chosen_tokens.to(policy.device))
        return self._weighted(policy, batch, chosen_tokens)

    def loss(
        self,
        source: LogprobSource,
        batch: Batch,
        global_seqs: Tensor,
        global_tokens: Tensor,
        *,
        chosen_tokens: Tensor | int = 1,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalars: the share of the loss, and the sums of `Objective.measure`."""
        logprobs = source.logprobs().logprobs  # [B, S/cp]
        sums = PairSums.of(source.by_document(PairSums.streams(batch, logprobs)))
        losses = self.objective.losses(sums)  # [pairs]
        total = losses.sum() * 2 / global_seqs
        if self.objective.sft_weight:
            total = total - self.objective.sft_weight * sums.plain_chosen.sum() / chosen_tokens
        measured = self.objective.measure(sums, losses)
        return source.shared(total), {name: source.shared(value.detach()) for name, value in measured.items()}

    def _weighted(self, policy: Policy, batch: Batch, chosen_tokens: Tensor) -> tuple[Batch, Loss]:
        """The gradient as a weighted sum of log-probabilities, the weights being the derivative of the global batch's
        loss by them; exact, for the weights stay what they are within a step."""
        logprobs = policy.label_logprobs(batch, self.micro_rows)
        streams = PairSums.streams(batch, logprobs)  # [4, n, S]
        count, ids = documents(batch), document_ids(batch)
        local = sum_by_document(streams, ids, count)
        gathered, first = policy.gather_over_dp(local.t())  # [documents of all ranks, 4]
        sums = PairSums.of(gathered.t())
        losses, slopes = self.objective.slopes(sums)  # [pairs], [2 · pairs]
        total = losses.sum() / max(len(losses), 1) - self.objective.sft_weight * sums.plain_chosen.sum() / chosen_tokens
        mine = torch.cat([slopes.new_zeros(1), slopes[first : first + count]])
        weights = batch.get("token_weights", 1.0) * mine[ids + 1]
        sft = self.objective.sft_weight * _labels_of_chosen(batch) / chosen_tokens
        measured = self.objective.measure(sums, losses)

        def loss(source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor):
            weighted = source.weighted_sum(batch["token_weights"])
            share = source.documents / global_seqs.to(total.dtype)  # the values are whole: each micro-batch says a part
            value = source.shared(total.to(share.device) * share)
            parts = {name: source.shared(one.to(share.device) * share) for name, one in measured.items()}
            return value + (weighted - weighted.detach()), parts

        return {**batch, "token_weights": weights - sft}, loss

    def after_step(self, policy: Policy, step: int) -> None:
        every = self.recipe.dpo.sync_every
        if every is not None and policy.reference is not None and step % every == 0:
            policy.reference.follow(self.recipe.dpo.sync_mix)

    def fields(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {name: sums[name] / max(sums["pairs"], 1) for name in FIELDS}

    def val_fields(self, sums: Mapping[str, float]) -> dict[str, float]:
        sft = self.objective.sft_weight * sums["chosen_nll"] / max(sums["chosen_tokens"], 1)
        val_loss = sums["loss"] / max(sums["pairs"], 1) + sft
        return {"val_loss": val_loss, **{f"val_{name}": value for name, value in self.fields(sums).items()}}

    def tensors(self) -> dict[str, Tensor]:
        """The reference by name [...], where it moves; one that stands still is read again where it came from."""
        return {f"reference.{name}": tensor for name, tensor in self._reference.items()}


def _labels_of_chosen(batch: Batch) -> Tensor:
    """[n, S]: where the labels of chosen completions are."""
    return (batch["labels"] != IGNORE) & (document_ids(batch) % 2 == 0) if rows_in(batch) else batch["labels"] != IGNORE
