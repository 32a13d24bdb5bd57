"""Preference tuning (DPO and related losses) on pairs of a chosen and a rejected completion.

The loss of a pair is a function of the summed log-probabilities of its two completions, under the policy and in most
losses under a reference (`losses.preference`). The mean is over all pairs of the global batch, whatever the
micro-batches and the mesh. In a batch, the two documents of a pair are consecutive: first the chosen, then the rejected
one. They are two rows, or two documents of a packed row.

Most losses look at one pair at a time, so micro-batches compute them one after another. Some compare the pairs of the
batch with each other. Their gradient is computed in two passes (`DpoMethod._prepare_full_batch`):

    1. A forward without gradient computes the log-probability totals x of all documents in the global batch. From
       these follow the loss L(x) and its derivative by each total, s = dL/dx.
    2. Each micro-batch's loss is Σ s · x with s as constants. Its gradient is Σ s · dx/dθ, which is exactly that of L,
       because the weights θ do not change within a step.

With `dpo.precompute`, the reference scores every pair of a set once before the first step. The result is a table,
float64 [pairs, 2], with Σ weight · log p of the chosen and of the rejected completion. It is stored next to the data's
cache, and its file name depends on the reference's weights, the dtype and the weights of tokens.
"""

import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtrain.base.batch import (
    IGNORE_INDEX,
    Batch,
    collate,
    collate_with_images,
    document_ids,
    num_documents,
    num_rows,
    sum_by_document,
)
from dtrain.base.errors import Problem, UserError, problems_of_error
from dtrain.base.json_files import digest
from dtrain.base.ranges import format_value, is_number
from dtrain.base.ranks import Ranks
from dtrain.data.rows.rows import GlobalBatch, Rows, pack
from dtrain.losses.preference.losses import (
    combined_preference_loss,
    length_desensitised_weights,
    preference_rewards,
    preference_weights,
)
from dtrain.losses.preference.options import (
    LOSSES,
    SFT,
    find_loss,
    is_loss_name,
    over_the_batch,
    problems,
    usable_losses,
)
from dtrain.methods.method import MethodWithReference, RunContext
from dtrain.methods.sections import Dpo
from dtrain.policy import Policy
from dtrain.policy.batching import all_reduce, gather_rows
from dtrain.policy.score import LogprobSource, Loss
from dtrain.recipe import spelling

# Pairs that the reference scores in one batch for `dpo.precompute`.
PAIRS_PER_BATCH = 1024

FIELDS = ("rewards_chosen", "rewards_rejected", "rewards_margin", "accuracy", "pair_weight")


class PairTotals(NamedTuple):
    """Totals over the labelled tokens of pairs, [pairs] each.

    Example: pair 0 of a batch whose chosen completion has two tokens with log p = -1 and -2, and whose rejected one has
    one token with log p = -4, and weights of 1: chosen[0] = -3, rejected[0] = -4, chosen_lengths[0] = 2,
    rejected_lengths[0] = 1.

    Attributes:
        chosen: Σ weight · log p of the chosen completion under the policy.
        rejected: The same of the rejected completion.
        ref_chosen: Σ weight · log p of the chosen completion under the reference. 0 without a reference.
        ref_rejected: The same of the rejected completion.
        chosen_lengths: Labelled tokens of the chosen completion.
        rejected_lengths: Labelled tokens of the rejected completion.
        chosen_logps: Σ log p of the chosen completion under the policy, without weights.
        pair_weights: WPO's weights, constants: min(1, w(chosen) · w(rejected)) with
            w = exp(mean over the tokens of log p − log Σ p²) under the policy (Zhou et al., arXiv:2406.11827, equation
            2 and section 3.2). TRL 1.16 does not limit the product to 1; earlier versions did. None without WPO.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    chosen_logps: Tensor
    pair_weights: Tensor | None = None

    @staticmethod
    def streams(batch: Batch, logprobs: Tensor, log_p2: Tensor | None = None) -> Tensor:
        """Stack the values per token whose totals by document are the argument of `of`.

        Args:
            batch: The batch. Without `token_weights`, every weight is 1. Without `reference_logprobs`, they are 0.
            logprobs: log p of the labels under the policy, [B, S].
            log_p2: log Σ p² at each label, for WPO, [B, S].

        Returns:
            [4, B, S]: weighted log p under the policy, weighted log p under the reference, 1 at labels and 0 elsewhere,
            and log p under the policy without weights. With `log_p2` [5, B, S], whose last entry is log p − log Σ p².
        """
        weights = torch.ones_like(logprobs)
        if "token_weights" in batch:
            weights = batch["token_weights"].to(logprobs)
        weighted_reference = torch.zeros_like(logprobs)
        if "reference_logprobs" in batch:
            weighted_reference = batch["reference_logprobs"].to(logprobs) * weights
        is_labelled = (batch["labels"] != IGNORE_INDEX).to(logprobs)
        streams = [logprobs * weights, weighted_reference, is_labelled, logprobs]
        if log_p2 is not None:
            streams.append((logprobs - log_p2).detach())
        return torch.stack(streams)

    @classmethod
    def of(cls, totals: Tensor) -> "PairTotals":
        """Arrange totals by document as totals by pair.

        Args:
            totals: Totals of `streams` by document, [4 or 5, documents], where documents 2i and 2i + 1 are the chosen
                and the rejected completion of pair i.
        """
        by_pair = totals.unflatten(1, (-1, 2)).transpose(1, 2)  # [4 or 5, 2, pairs]
        policy, reference, lengths, unweighted = by_pair[:4]
        pair_weights = None
        if len(by_pair) > 4:
            mean_alignment = by_pair[4] / lengths.clamp(min=1)  # [2, pairs]
            pair_weights = mean_alignment.sum(0).clamp(max=0).exp().detach()
        return cls(
            chosen=policy[0],
            rejected=policy[1],
            ref_chosen=reference[0],
            ref_rejected=reference[1],
            chosen_lengths=lengths[0],
            rejected_lengths=lengths[1],
            chosen_logps=unweighted[0],
            pair_weights=pair_weights,
        )


class LossesWithSlopes(NamedTuple):
    """Losses of all pairs of a global batch, with derivatives.

    Attributes:
        losses: [pairs].
        slopes: Derivatives of the mean loss by Σ weight · log p of each document: chosen and rejected in turn,
            [2 · pairs].
    """

    losses: Tensor
    slopes: Tensor


class Objective:
    """The losses of a recipe with their weights.

    Attributes:
        beta: Strength of the pull towards the reference.
        sft_weight: Weight of the chosen completions' negative log-likelihood.
        needs_full_batch: Whether the loss of a pair depends on the other pairs of the batch.
    """

    def __init__(self, section: Dpo):
        names = section.losses
        weights = section.loss_weights or [1.0] * len(names)
        self.beta = section.beta
        self._names: list[str] = []
        pair_loss_weights: list[float] = []
        sft_weight: float = 0
        # "sft" is a loss of tokens, so it is computed next to the losses of pairs.
        for name, weight in zip(names, weights, strict=True):
            if name == SFT:
                sft_weight += weight
            else:
                self._names.append(name)
                pair_loss_weights.append(weight)
        self.sft_weight = section.sft_weight + sft_weight
        self._options: dict[str, Any] = {
            "beta": section.beta,
            "loss_weights": pair_loss_weights,
            "label_smoothing": section.label_smoothing,
            "f_divergence": section.f_divergence,
            **section.kwargs,
        }
        self.needs_full_batch = bool(over_the_batch(self._names, section.kwargs))

    def losses(self, totals: PairTotals) -> Tensor:
        """Return the weighted sum of the losses times the weight of each pair, [pairs], without the SFT term."""
        if not self._names:
            return torch.zeros_like(totals.chosen)
        losses = combined_preference_loss(self._names, *totals[:4], **self._keywords(totals))
        return losses if totals.pair_weights is None else losses * totals.pair_weights

    def losses_with_slopes(self, totals: PairTotals) -> LossesWithSlopes:
        """Return the losses with the derivatives of their mean by each log-probability total."""
        weights = preference_weights(self._names, *totals[:4], **self._keywords(totals))
        return LossesWithSlopes(weights.losses, torch.stack([weights.chosen, weights.rejected], 1).flatten())

    def _keywords(self, totals: PairTotals) -> dict[str, Any]:
        lengths = {"chosen_lengths": totals.chosen_lengths, "rejected_lengths": totals.rejected_lengths}
        return lengths | self._options

    def measure(self, totals: PairTotals, losses: Tensor) -> dict[str, Tensor]:
        """Return totals over the pairs, from which the metrics are computed.

        Args:
            totals: Totals of the pairs.
            losses: Their losses, [pairs].
        """
        rewards = preference_rewards(*totals[:4], beta=self.beta)
        measured = {
            "pairs": torch.full((), len(losses), device=losses.device),
            "loss": losses.sum(),
            "rewards_chosen": rewards.chosen.sum(),
            "rewards_rejected": rewards.rejected.sum(),
            "rewards_margin": rewards.margin.sum(),
            "accuracy": rewards.accuracy.sum(),
            "chosen_nll": -totals.chosen_logps.sum(),
            "chosen_tokens": totals.chosen_lengths.sum(),
        }
        if totals.pair_weights is not None:
            measured["pair_weight"] = totals.pair_weights.sum()
        return measured


class DpoMethod(MethodWithReference):
    """Direct preference optimisation (Rafailov et al., arXiv:2305.18290) and its relatives.

    loss = mean of the objective over pairs + sft_weight · mean of −log p over the chosen completions' tokens,
    both over the global batch.
    """

    Section = Dpo
    section: Dpo
    about = "direct preference optimization"
    kind = "pairs"
    references = "start, base, none"
    shared_beginnings = "pairs"
    measures = FIELDS
    curves = MappingProxyType({**MethodWithReference.curves, "accuracy": "accuracy"})
    adapter_learning_rates = (5e-6, "1e-5")  # full tuning takes 5e-7 to 1e-6

    # Tables of `dpo.precompute`, by split.
    _tables: Mapping[str, Tensor] = MappingProxyType({})

    def image_problems(self) -> list[Problem]:
        return []

    def code(self) -> list[tuple[str, str | None, str]]:
        return [("dpo.loss", name, "loss") for name in self.section.losses]

    @cached_property
    def objective(self) -> Objective:
        """The losses with their weights."""
        return Objective(self.section)

    def problems(self) -> list[Problem]:
        section = self.section
        has_reference = section.reference not in (None, "none")
        errors = loss_problems(
            section.loss,
            section.loss_weights,
            has_reference=has_reference,
            beta=section.beta,
            label_smoothing=section.label_smoothing,
            f_divergence=section.f_divergence,
            options=section.kwargs,
        )
        names = section.losses
        batch_losses = over_the_batch(names, section.kwargs)
        if section.use_weighting and batch_losses:
            text = (
                f"dpo.use_weighting=true weighs each pair, and dpo.loss={batch_losses[0]} compares pairs with one "
                "another"
            )
            errors.append(Problem("dpo.use_weighting", text, "Set dpo.use_weighting=false, or another loss"))
        if section.use_weighting and set(names) == {SFT}:
            text = "dpo.use_weighting=true weighs losses that compare two completions, and dpo.loss=sft does not"
            errors.append(Problem("dpo.use_weighting", text))
        if section.sync_every is not None and section.precompute:
            text = "dpo.sync_every moves the reference, so dpo.precompute cannot score with it once"
            errors.append(Problem("dpo.precompute", text, "Set dpo.sync_every=null or dpo.precompute=false"))
        errors += self.base_problems() + self.loss_on_problems()
        if not has_reference:
            needing: dict[str, Any] = {}
            if section.sync_every is not None:
                needing["sync_every"] = section.sync_every
            if section.precompute:
                needing["precompute"] = section.precompute
            for key, value in needing.items():
                text = f"dpo.{key}={format_value(value)} needs a reference, and dpo.reference is none"
                errors.append(Problem(f"dpo.{key}", text, "Set dpo.reference=start"))
        return errors

    def format_problem(self, format: str) -> str | None:
        if format == "question":
            return super().format_problem(format)
        if format not in ("auto", "preference", "tokenized"):
            return "method=dpo trains on pairs; set it to preference, or method=sft"
        return None

    def needs_reference(self) -> bool:
        """Check whether one of the losses reads a reference, and the recipe has a reference."""
        is_read = any(loss.needs_reference for loss in usable_losses(self.section.losses).values())
        return is_read and self.section.reference not in (None, "none")

    def keeps_reference_weights(self) -> bool:
        return self.needs_reference() and not self.section.precompute

    def begin(self, policy: Policy, splits: Mapping[str, Rows], run: RunContext) -> None:
        """Build the reference.

        With `dpo.precompute` the tables of its scores are read or computed, and the reference is freed afterwards.
        Arguments are those of `Method.begin`.

        Collectives:
            Those of building the reference, or with `dpo.precompute` those of `reference_table` for each split.
        """
        if not self.needs_reference():
            return
        if not self.section.precompute:
            self.attach_models(policy, run.other_models)
            return
        tables = {}
        for split, rows in splits.items():
            tables[split] = reference_table(self, policy, rows, run.identities, self.section.ld_alpha)
        self._tables = tables
        policy.reference = None

    def batch(self, rows: GlobalBatch, split: str = "train") -> Batch:
        """Return the batch, with the reference's scores if there is a table of them."""
        batch = super().batch(rows)
        if split in self._tables:
            scores = self._tables[split][torch.tensor(rows.samples, dtype=torch.int64)]  # [pairs, 2]
            batch["reference_logprobs"] = at_first_labels(batch, scores.flatten())
        return batch

    def prepare(self, policy: Policy, batch: Batch) -> tuple[Batch, Loss]:
        """Compute everything that the loss reads besides this micro-batch's log-probabilities under the policy.

        This is the reference's log-probabilities, with an SFT term the number of chosen tokens in the global batch, and
        for losses that compare pairs the first of two passes (see the module).

        Collectives:
            Those of a forward of the reference. With an SFT term, one all-reduce over dp. For losses that compare
            pairs, also those of a forward of the policy and a gather over dp.
        """
        batch = dict(batch)
        if self.section.ld_alpha is not None:
            ids = document_ids(batch)
            batch["token_weights"] = length_desensitised_weights(ids, batch["labels"], self.section.ld_alpha)
        if policy.reference is not None:
            with policy.use_reference_model():
                batch["reference_logprobs"] = policy.logprobs(batch, self.micro_rows)
        chosen_tokens = torch.ones((), dtype=torch.int64)  # not read without an SFT term, so not counted
        if self.objective.sft_weight:
            chosen_tokens = all_reduce(_chosen_labels(batch).sum(), policy.mesh.dp).clamp(min=1)
        if not self.objective.needs_full_batch:
            return batch, partial(self.loss, chosen_tokens=chosen_tokens.to(policy.device, non_blocking=True))
        return self._prepare_full_batch(policy, batch, chosen_tokens)

    def loss(
        self,
        source: LogprobSource,
        batch: Batch,
        global_seqs: Tensor,
        global_tokens: Tensor,
        *,
        chosen_tokens: Tensor | int = 1,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of a micro-batch, for losses that look at one pair at a time.

        Args:
            source: Log-probabilities of the micro-batch.
            batch: The micro-batch.
            global_seqs: Completions in the global batch, two per pair.
            global_tokens: Not used.
            chosen_tokens: Labels of chosen completions in the global batch.

        Returns:
            This micro-batch's part of the loss, and the scalars of `Objective.measure`.
        """
        scores = source.logprobs(log_p2=self.section.use_weighting)  # [B, S/cp]
        streams = PairTotals.streams(batch, scores.logprobs, scores.log_p2)
        totals = PairTotals.of(source.sum_by_document(streams))
        losses = self.objective.losses(totals)  # [pairs]
        total = losses.sum() * 2 / global_seqs
        if self.objective.sft_weight:
            total = total - self.objective.sft_weight * totals.chosen_logps.sum() / chosen_tokens
        measured = self.objective.measure(totals, losses)
        return source.count_once(total), {name: source.count_once(value.detach()) for name, value in measured.items()}

    def _prepare_full_batch(self, policy: Policy, batch: Batch, chosen_tokens: Tensor) -> tuple[Batch, Loss]:
        """Compute the first pass, and return the batch and the loss of the second pass (see the module).

        Args:
            policy: The policy.
            batch: This dp rank's batch, with the reference's log-probabilities.
            chosen_tokens: Labels of chosen completions in the global batch, a scalar.

        Collectives:
            Those of a forward of the policy, and two all-gathers over dp.
        """
        # First pass: totals of all documents in the global batch, and the derivatives of the loss by these.
        logprobs = policy.logprobs(batch, self.micro_rows)
        streams = PairTotals.streams(batch, logprobs)  # [4, n, S]
        count, ids = num_documents(batch), document_ids(batch)
        local_totals = sum_by_document(streams, ids, count)
        gathered, first = gather_rows(local_totals.t(), policy.mesh.dp)  # [documents of all ranks, 4]
        totals = PairTotals.of(gathered.t())
        losses, slopes = self.objective.losses_with_slopes(totals)  # [pairs], [2 · pairs]
        mean_loss = losses.sum() / max(len(losses), 1)
        total = mean_loss - self.objective.sft_weight * totals.chosen_logps.sum() / chosen_tokens

        # Weights of this rank's tokens in the second pass. Padding has the document id -1, and a slope of 0.
        local_slopes = torch.cat([slopes.new_zeros(1), slopes[first : first + count]])
        weights = batch.get("token_weights", 1.0) * local_slopes[ids + 1]
        sft_weights = self.objective.sft_weight * _chosen_labels(batch) / chosen_tokens
        measured = self.objective.measure(totals, losses)

        def loss(source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor):
            weighted = source.weighted_sum(batch["token_weights"])
            # The first pass has computed loss and metrics of the global batch. Each micro-batch reports its share of
            # them, so that the sum over micro-batches and ranks is right. The shares are float64, because in float32
            # they would not add up exactly: the count of 5 pairs would not be 5 again.
            part = source.num_documents / global_seqs.double()
            value = source.count_once(total.to(part.device, non_blocking=True) * part)
            parts = {}
            for name, global_value in measured.items():
                parts[name] = source.count_once(global_value.to(part.device, non_blocking=True) * part)
            # Only the gradient of the weighted sum counts, not its value.
            return value + (weighted - weighted.detach()), parts

        return {**batch, "token_weights": weights - sft_weights}, loss

    def train_metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Return the means of `FIELDS` over pairs."""
        return {name: totals[name] / max(totals["pairs"], 1) for name in FIELDS if name in totals}

    def val_metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        sft = self.objective.sft_weight * totals["chosen_nll"] / max(totals["chosen_tokens"], 1)
        metrics = {"val_loss": totals["loss"] / max(totals["pairs"], 1) + sft}
        for name, value in self.train_metrics(totals).items():
            metrics[f"val_{name}"] = value
        return metrics


def _chosen_labels(batch: Batch) -> Tensor:
    """Return a mask [n, S] of the labels of chosen completions, which are the documents with even ids."""
    is_label = batch["labels"] != IGNORE_INDEX
    if not num_rows(batch):
        return is_label
    return is_label & (document_ids(batch) % 2 == 0)


def loss_problems(
    names: str | Sequence[str],
    loss_weights: Sequence[float] | None,
    *,
    has_reference: bool,
    beta: float,
    label_smoothing: float = 0.0,
    f_divergence: str = "reverse_kl",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[Problem]:
    """Check the losses of a `dpo` section and their options.

    Each option that differs from its default must be read by at least one of the losses. A divergence other than
    reverse_kl must be read by all of them.

    Args:
        names: `dpo.loss`, a name or a list of names.
        loss_weights: `dpo.loss_weights`.
        has_reference: Whether the recipe has a reference.
        beta: `dpo.beta`.
        label_smoothing: `dpo.label_smoothing`.
        f_divergence: `dpo.f_divergence`.
        options: `dpo.kwargs`.
    """
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        return [Problem("dpo.loss", "dpo.loss names no loss")]
    names_of_losses = (*LOSSES, SFT)
    unknown = [name for name in names if name != SFT and not is_loss_name(name)]
    losses = []
    errors = []
    for name in names:
        if not is_loss_name(name):
            continue
        try:
            find_loss(name)
        except UserError as error:
            errors += problems_of_error("dpo.loss", error)
        else:
            losses.append(name)
    for name in unknown:
        hint = spelling.value_hint("dpo.loss", name, names_of_losses)
        errors.append(Problem("dpo.loss", f"dpo.loss={name} is not a preference loss{hint}"))
    if loss_weights is not None:
        if len(loss_weights) != len(names):
            text = f"dpo.loss_weights has {len(loss_weights)} numbers for {len(names)} losses"
            errors.append(Problem("dpo.loss_weights", text, "Give each loss one number"))
        for weight in loss_weights:
            if not is_number(weight):
                errors.append(Problem("dpo.loss_weights", f"dpo.loss_weights: {weight} is not a finite number"))
    values = {"beta": beta, "label_smoothing": label_smoothing, "f_divergence": f_divergence, **options}
    return errors + problems(losses, values, has_reference=has_reference, section="dpo.", kwargs="dpo.kwargs.")


def reference_table(
    method: MethodWithReference,
    policy: Policy,
    rows: Rows,
    identities: Mapping[str, str],
    ld_alpha: float | None,
) -> Tensor:
    """Return the reference's scores of all pairs, from the file next to their cache, or compute and write them.

    Args:
        method: Builds the reference if the policy has none and the table has to be computed.
        policy: The policy that is trained.
        rows: Rows of pairs.
        identities: Digests of the files that the run reads at its start. The table's name depends on the digests of the
            reference and of the model's config.
        ld_alpha: Length desensitisation of the token weights (`dpo.ld_alpha`). None: every weight is 1.

    Returns:
        Σ weight · log p of the chosen and of the rejected completion under the reference, float64 [pairs, 2].

    Collectives:
        One all-gather of objects over all ranks. If the table is computed, also those of building the reference and of
        its forwards, and one all-reduce over dp.
    """
    depends_on = [identities["dpo.reference"], identities["model.config"], str(policy.precision.compute)]
    name = f"reference-{digest([*depends_on, ld_alpha])[:16]}.bin"
    file = rows.samples.directory / name
    shape = (len(rows.samples), 2)
    stored = _read_table(file, 16 * shape[0])
    # All ranks must take the same branch, because computing the table is collective.
    every_rank_has_it = all(Ranks().gather_results(lambda: stored is not None))
    if stored is not None and every_rank_has_it:
        return torch.frombuffer(stored, dtype=torch.float64).view(shape)
    if policy.reference is None:
        method.build_reference(policy)
    table = torch.zeros(shape, dtype=torch.float64)
    with policy.use_reference_model():
        for start in range(0, shape[0], PAIRS_PER_BATCH):
            samples = range(start, min(start + PAIRS_PER_BATCH, shape[0]))
            _score_pairs(method, policy, rows, samples, table, ld_alpha)
    all_reduce(table, policy.mesh.dp)  # each pair was scored by one rank
    if policy.rank == 0:
        # Another run may write the same table at the same time, and a reader must never see a part of one.
        partial_file = file.with_suffix(f".{secrets.token_hex(8)}.part")
        content = table.numpy().tobytes()
        with partial_file.open("wb") as output:
            output.write(content + hashlib.sha256(content).digest())
            output.flush()
            os.fsync(output.fileno())
        partial_file.rename(file)
    return table


def _read_table(file: Path, size: int) -> bytearray | None:
    """Read a table of `size` bytes, which are followed by their SHA-256. None if the file is missing or incomplete."""
    if not file.is_file() or file.stat().st_size != size + hashlib.sha256().digest_size:
        return None
    content = bytearray(file.read_bytes())
    table, checksum = content[:size], content[size:]
    return table if hashlib.sha256(table).digest() == checksum else None


def _score_pairs(
    method: MethodWithReference, policy: Policy, rows: Rows, samples: range, table: Tensor, ld_alpha: float | None
) -> None:
    """Score this dp rank's part of the pairs `samples`, and write the results to their rows of `table`.

    The collectives are those of the model's forwards. All ranks call this, also those without a pair.
    """
    bins: list[list[int]] = []  # the samples of each row
    if rows.packing:
        lengths = rows.samples.lengths(torch.arange(samples.start, samples.stop)).tolist()
        for members in pack(lengths, rows.capacity):
            bins.append([samples[index] for index in members])
    else:
        bins = [[index] for index in samples]
    local_bins = bins[policy.mesh.dp_rank :: policy.mesh.dp_size]
    built = []
    order: list[int] = []
    for members in local_bins:
        built += rows.build(members)
        order += members
    batch: Batch = collate(built) if rows.images is None else collate_with_images(built)
    batch = method.with_prompt_ids(batch)
    logprobs = policy.logprobs(batch, method.micro_rows).double()
    ids = document_ids(batch)
    if ld_alpha is not None:
        logprobs = logprobs * length_desensitised_weights(ids, batch["labels"], ld_alpha)
    totals = sum_by_document(logprobs, ids, num_documents(batch))
    table[torch.tensor(order, dtype=torch.int64)] = totals.view(-1, 2)


def at_first_labels(batch: Batch, totals: Tensor) -> Tensor:
    """Place each document's total at its first label, and 0 at all other tokens.

    The sum over a document's tokens is then its total. So totals that were computed before can replace the stream
    `reference_logprobs`. Token weights do not change them, because the weight at a first label is 1.

    Args:
        batch: The batch.
        totals: Total of each document, [documents].

    Returns:
        float64 [n, S].

    Example:
        >>> batch = {"labels": torch.tensor([[-100, 5, 6, -100, 7]]), "seq_ids": torch.tensor([[0, 0, 0, 1, 1]])}
        >>> at_first_labels(batch, torch.tensor([-3.0, -4.0], dtype=torch.float64))
        tensor([[ 0., -3.,  0.,  0., -4.]], dtype=torch.float64)
    """
    labelled = (batch["labels"] != IGNORE_INDEX).flatten().nonzero().squeeze(1)
    document_of_label = document_ids(batch).flatten()[labelled]
    is_first = torch.ones_like(document_of_label, dtype=torch.bool)
    is_first[1:] = document_of_label[1:] != document_of_label[:-1]
    stream = torch.zeros(batch["labels"].numel(), dtype=torch.float64)
    stream[labelled[is_first]] = totals[document_of_label[is_first]]
    return stream.view(batch["labels"].shape)
