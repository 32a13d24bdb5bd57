"""Preference tuning: pairs of a chosen and a rejected completion, against a reference or without one.

The loss of a pair is a function of the summed log-probabilities of its two completions (`losses.preference`); its mean
is over the pairs of the global batch, whatever the micro-batches and the mesh. In a batch the documents of a pair are
neighbours, the chosen one first: two rows, or two documents of a packed row.

With `dpo.precompute` the reference's sums for every pair of a set are computed once before the first step and
stored next to the data's cache. The table is float64 [pairs, 2]: Σ weight · log p of the chosen and of the rejected
completion. The name of its file depends on the reference's weights, the dtype and the weights of tokens.
"""

import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

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
from dtrain.base.errors import Problem
from dtrain.base.json_files import digest
from dtrain.base.ranges import FRACTION, UP_TO_1, WEIGHT, at_least, format_value, is_number
from dtrain.base.ranks import Ranks
from dtrain.data.rows.rows import GlobalBatch, Rows, pack
from dtrain.losses.preference.losses import (
    combined_preference_loss,
    length_desensitised_weights,
    preference_rewards,
    preference_weights,
)
from dtrain.losses.preference.options import LOSSES, SFT, over_the_batch, problems
from dtrain.methods.method import MethodWithReference, RunContext
from dtrain.policy import Policy
from dtrain.policy.batching import all_reduce, gather_rows
from dtrain.policy.score import LogprobSource, Loss
from dtrain.recipe import spelling

PAIRS_PER_BATCH = 1024  # pairs of a set that are scored at once for `dpo.precompute`

FIELDS = ("rewards_chosen", "rewards_rejected", "rewards_margin", "accuracy", "pair_weight")


@dataclass
class Dpo:
    """`dpo`: read by method dpo."""

    loss: str | list[str] = "sigmoid"
    """A loss's name (dtrain/losses/preference/options.py lists them), or a list with `loss_weights`."""
    beta: float = 0.1
    """Strength of the pull towards the reference."""
    label_smoothing: float = 0.0
    """The share of preferences that are assumed to be wrong."""
    reference: str | None = "start"
    """start: the weights that training starts from; none (also null); base: the model without its adapter (`lora`),
    even where that was trained before; or the path of a model of the same shapes."""
    sft_weight: Annotated[float, WEIGHT] = 0.0
    """Weight of the chosen completions' own negative log-likelihood per token in the loss."""
    loss_weights: list[float] | None = None
    """Weights of the names in `loss`, in their order. null: 1 each."""
    f_divergence: str = "reverse_kl"
    """The divergence from the reference: reverse_kl | forward_kl | js_divergence | alpha_divergence."""
    ld_alpha: Annotated[float | None, (FRACTION[0], "from 0 to 1, or null for no weights")] = None
    """LD-DPO's weight of the tokens beyond the shorter completion. null: off."""
    use_weighting: bool = False
    """WPO: a pair's loss is weighted by how likely the policy finds its completions (arXiv:2406.11827)."""
    precompute: bool = False
    """The reference scores all data once, before the first step, into the data's cache. After that it takes no memory
    and no time. This pays where the run sees each pair more than once. These scores come from other batches, so they
    are rounded otherwise: `accuracy` is a toss-up in the first step, where policy and reference are the same."""
    sync_every: Annotated[int | None, at_least(1, ", or null for a reference that stands still")] = None
    """The reference moves towards the policy every so many steps. null: it stands still."""
    sync_mix: Annotated[float, UP_TO_1] = 0.6
    """Step of its move: reference = sync_mix · policy + (1 − sync_mix) · reference."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """More options of the losses, such as `{simpo_gamma: 0.5}` for simpo."""

    @property
    def losses(self) -> list[str]:
        return [self.loss] if isinstance(self.loss, str) else list(self.loss)


class PairTotals(NamedTuple):
    """Sums over the labelled tokens of pairs, [pairs] each.

    chosen, rejected, ref_chosen, ref_rejected: Σ weight · log p under the policy and the reference (0 without one);
    chosen_lengths, rejected_lengths: tokens; plain_chosen: Σ log p without weights. pair_weights: WPO's, constants:
    min(1, w(chosen)·w(rejected)), w = exp(mean over the tokens of log p − log Σ p²) under the policy (Zhou et al.,
    arXiv:2406.11827, equation 2 and section 3.2); None without. TRL 1.16 leaves the product unbounded; earlier ones had
    this bound.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    plain_chosen: Tensor
    pair_weights: Tensor | None = None

    @staticmethod
    def streams(batch: Batch, logprobs: Tensor, log_p2: Tensor | None = None) -> Tensor:
        """logprobs [B, S] of a batch's labels, and for WPO's weights log Σ p² -> the streams [4 or 5, B, S] whose sums
        by document `of` takes."""
        weights = batch["token_weights"].to(logprobs) if "token_weights" in batch else torch.ones_like(logprobs)
        reference = batch["reference_logprobs"].to(logprobs) if "reference_logprobs" in batch else None
        aligned = [] if log_p2 is None else [(logprobs - log_p2).detach()]
        return torch.stack(
            [
                logprobs * weights,
                torch.zeros_like(logprobs) if reference is None else reference * weights,
                (batch["labels"] != IGNORE_INDEX).to(logprobs),
                logprobs,
                *aligned,
            ]
        )

    @classmethod
    def of(cls, sums: Tensor) -> "PairTotals":
        """sums [4 or 5, documents], a pair's two next to each other."""
        by_pair = sums.unflatten(1, (-1, 2)).transpose(1, 2)
        (chosen, rejected), (ref_chosen, ref_rejected), lengths, plain, *aligned = by_pair
        weights = (aligned[0] / lengths.clamp(min=1)).sum(0).clamp(max=0).exp().detach() if aligned else None
        return cls(chosen, rejected, ref_chosen, ref_rejected, lengths[0], lengths[1], plain[0], weights)


class Objective:
    """The recipe's losses and weights. `whole_batch`: a pair's loss depends on the other pairs of the batch."""

    def __init__(self, section: Dpo):
        names = section.losses
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
        self.whole_batch = bool(over_the_batch(self._names, section.kwargs))

    def losses(self, sums: PairTotals) -> Tensor:
        """[pairs], the weighted sum of the named losses times the pair's weight, without the SFT term."""
        if not self._names:
            return torch.zeros_like(sums.chosen)
        losses = combined_preference_loss(self._names, *sums[:4], **self._named(sums))
        return losses if sums.pair_weights is None else losses * sums.pair_weights

    def slopes(self, sums: PairTotals) -> tuple[Tensor, Tensor]:
        """The losses [pairs], and their mean's derivative by the sums of chosen and rejected in turn, [2 · pairs]."""
        weights = preference_weights(self._names, *sums[:4], **self._named(sums))
        return weights.losses, torch.stack([weights.chosen, weights.rejected], 1).flatten()

    def _named(self, sums: PairTotals) -> dict[str, Any]:
        lengths = {"chosen_lengths": sums.chosen_lengths, "rejected_lengths": sums.rejected_lengths}
        return lengths | self._options

    def measure(self, sums: PairTotals, losses: Tensor) -> dict[str, Tensor]:
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
            **({} if sums.pair_weights is None else {"pair_weight": sums.pair_weights.sum()}),
        }


class DpoMethod(MethodWithReference):
    """Direct preference optimisation (Rafailov et al., arXiv:2305.18290) and its relatives.

    loss = Σ over pairs of the objective ÷ pairs + sft_weight · Σ −log p over the chosen completions' tokens ÷ their
    count, each over the global batch.
    """

    Section = Dpo
    section: Dpo
    about = "direct preference optimization"
    kind = "pairs"
    references = "start, base, none"
    measures = FIELDS
    curves = MappingProxyType({**MethodWithReference.curves, "accuracy": "accuracy"})
    adapter_learning_rates = (5e-6, "1e-5")  # full tuning takes 5e-7 to 1e-6

    _tables: Mapping[str, Tensor] = MappingProxyType({})

    def image_problems(self) -> list[Problem]:
        return []

    @cached_property
    def objective(self) -> Objective:
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
        if section.use_weighting and (across := over_the_batch(names, section.kwargs)):
            text = f"dpo.use_weighting=true weighs each pair, and dpo.loss={across[0]} compares pairs with one another"
            errors.append(Problem("dpo.use_weighting", text, "Set dpo.use_weighting=false, or another loss"))
        if section.use_weighting and set(names) == {SFT}:
            text = "dpo.use_weighting=true weighs losses that compare two completions, and dpo.loss=sft does not"
            errors.append(Problem("dpo.use_weighting", text))
        if section.sync_every is not None and section.precompute:
            text = "dpo.sync_every moves the reference, so dpo.precompute cannot score with it once"
            errors.append(Problem("dpo.precompute", text, "Set dpo.sync_every=null or dpo.precompute=false"))
        errors += self.base_problems() + self.loss_on_problems()
        for key, value in (("sync_every", section.sync_every), ("precompute", section.precompute or None)):
            if value is not None and not has_reference:
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
        """Return False also where every loss of the list goes without."""
        reads = any(LOSSES[name].needs_reference for name in self.section.losses if name in LOSSES)
        return reads and self.section.reference not in (None, "none")

    def keeps_reference_weights(self) -> bool:
        return self.needs_reference() and not self.section.precompute

    def begin(self, policy: Policy, splits: Mapping[str, Rows], run: RunContext) -> None:
        """Build the reference; with `dpo.precompute` only what it says of the data."""
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
        batch = super().batch(rows)
        if split in self._tables:
            sums = self._tables[split][torch.tensor(rows.samples, dtype=torch.int64)]  # [pairs, 2]
            batch["reference_logprobs"] = at_first_labels(batch, sums.flatten())
        return batch

    def prepare(self, policy: Policy, batch: Batch) -> tuple[Batch, Loss]:
        """Run one forward of the reference, where there is one. Where a pair's loss depends on the other pairs of the
        global batch, also one of the policy, so that each pair's part in the gradient is known before the backward.
        """
        batch = dict(batch)
        if self.section.ld_alpha is not None:
            ids = document_ids(batch)
            batch["token_weights"] = length_desensitised_weights(ids, batch["labels"], self.section.ld_alpha)
        if policy.reference is not None:
            with policy.use_reference_model():
                batch["reference_logprobs"] = policy.logprobs(batch, self.micro_rows)
        chosen_tokens = torch.ones((), dtype=torch.int64)  # not read without an SFT term, nor counted
        if self.objective.sft_weight:
            chosen_tokens = all_reduce(_labels_of_chosen(batch).sum(), policy.mesh.dp).clamp(min=1)
        if not self.objective.whole_batch:
            return batch, partial(self.loss, chosen_tokens=chosen_tokens.to(policy.device, non_blocking=True))
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
        scores = source.logprobs(log_p2=self.section.use_weighting)  # [B, S/cp]
        sums = PairTotals.of(source.sum_by_document(PairTotals.streams(batch, scores.logprobs, scores.log_p2)))
        losses = self.objective.losses(sums)  # [pairs]
        total = losses.sum() * 2 / global_seqs
        if self.objective.sft_weight:
            total = total - self.objective.sft_weight * sums.plain_chosen.sum() / chosen_tokens
        measured = self.objective.measure(sums, losses)
        return source.count_once(total), {name: source.count_once(value.detach()) for name, value in measured.items()}

    def _weighted(self, policy: Policy, batch: Batch, chosen_tokens: Tensor) -> tuple[Batch, Loss]:
        """The gradient as a weighted sum of log-probabilities, the weights being the derivative of the global batch's
        loss by them; exact, for the weights stay what they are within a step."""
        logprobs = policy.logprobs(batch, self.micro_rows)
        streams = PairTotals.streams(batch, logprobs)  # [4, n, S]
        count, ids = num_documents(batch), document_ids(batch)
        local = sum_by_document(streams, ids, count)
        gathered, first = gather_rows(local.t(), policy.mesh.dp)  # [documents of all ranks, 4]
        sums = PairTotals.of(gathered.t())
        losses, slopes = self.objective.slopes(sums)  # [pairs], [2 · pairs]
        total = losses.sum() / max(len(losses), 1) - self.objective.sft_weight * sums.plain_chosen.sum() / chosen_tokens
        mine = torch.cat([slopes.new_zeros(1), slopes[first : first + count]])
        weights = batch.get("token_weights", 1.0) * mine[ids + 1]
        sft = self.objective.sft_weight * _labels_of_chosen(batch) / chosen_tokens
        measured = self.objective.measure(sums, losses)

        def loss(source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor):
            weighted = source.weighted_sum(batch["token_weights"])
            # The values are those of the global batch, and each micro-batch reports a part of them, in float64: in
            # float32 the parts of 5 pairs would not add up to 5.
            part = source.num_documents / global_seqs.double()
            value = source.count_once(total.to(part.device, non_blocking=True) * part)
            parts = {}
            for name, whole in measured.items():
                parts[name] = source.count_once(whole.to(part.device, non_blocking=True) * part)
            return value + (weighted - weighted.detach()), parts

        return {**batch, "token_weights": weights - sft}, loss

    def train_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {name: sums[name] / max(sums["pairs"], 1) for name in FIELDS if name in sums}

    def val_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        sft = self.objective.sft_weight * sums["chosen_nll"] / max(sums["chosen_tokens"], 1)
        val_loss = sums["loss"] / max(sums["pairs"], 1) + sft
        return {"val_loss": val_loss, **{f"val_{name}": value for name, value in self.train_metrics(sums).items()}}


def _labels_of_chosen(batch: Batch) -> Tensor:
    """[n, S]: where the labels of chosen completions are."""
    return (
        (batch["labels"] != IGNORE_INDEX) & (document_ids(batch) % 2 == 0)
        if num_rows(batch)
        else batch["labels"] != IGNORE_INDEX
    )


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
    """Check the losses of a `dpo` section.

    Every option has to be read by at least one loss of the list, and a divergence other than reverse_kl by all of them.
    """
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        return [Problem("dpo.loss", "dpo.loss names no loss")]
    known = (*LOSSES, SFT)
    unknown = [name for name in names if name not in known]
    errors = []
    for name in unknown:
        hint = spelling.value_hint("dpo.loss", name, known)
        errors.append(Problem("dpo.loss", f"dpo.loss={name} is not a preference loss{hint}"))
    if loss_weights is not None:
        if len(loss_weights) != len(names):
            text = f"dpo.loss_weights has {len(loss_weights)} numbers for {len(names)} losses"
            errors.append(Problem("dpo.loss_weights", text, "Give each loss one number"))
        for weight in loss_weights:
            if not is_number(weight):
                errors.append(Problem("dpo.loss_weights", f"dpo.loss_weights: {weight} is not a finite number"))
    losses = [name for name in names if name in LOSSES]
    values = {"beta": beta, "label_smoothing": label_smoothing, "f_divergence": f_divergence, **options}
    return errors + problems(losses, values, has_reference=has_reference, section="dpo.", kwargs="dpo.kwargs.")


def reference_table(
    method: MethodWithReference,
    policy: Policy,
    rows: Rows,
    identities: Mapping[str, str],
    ld_alpha: float | None,
) -> Tensor:
    """Return the table of `rows`' pairs, from the file next to their cache, or compute and write it.

    Args:
        method: Builds the reference if the policy has none and the table has to be computed.
        policy: The policy that is trained.
        rows: Rows of pairs.
        identities: Digests of what the run reads at its start; the file's name depends on the reference's.
        ld_alpha: Length desensitisation of the token weights (`dpo.ld_alpha`). None: every weight is 1.

    Returns:
        Sums of the reference's log-probabilities of the chosen and the rejected completion, float64 [pairs, 2].

    Collectives:
        One gather of objects; if the table is computed, those of the forwards and one all-reduce over dp.
    """
    depends_on = [identities["dpo.reference"], identities["model.config"], str(policy.precision.compute)]
    name = f"reference-{digest([*depends_on, ld_alpha])[:16]}.bin"
    file = rows.samples.directory / name
    shape = (len(rows.samples), 2)
    kept = _read_table(file, 16 * shape[0])
    everywhere = all(Ranks().gather_results(lambda: kept is not None))
    if kept is not None and everywhere:
        return torch.frombuffer(kept, dtype=torch.float64).view(shape)
    if policy.reference is None:
        method.build_reference(policy)
    table = torch.zeros(shape, dtype=torch.float64)
    with policy.use_reference_model():
        for start in range(0, shape[0], PAIRS_PER_BATCH):
            _score_pairs(method, policy, rows, range(start, min(start + PAIRS_PER_BATCH, shape[0])), table, ld_alpha)
    all_reduce(table, policy.mesh.dp)  # each pair was scored by one rank
    if policy.rank == 0:
        partial = file.with_suffix(f".{secrets.token_hex(8)}.part")  # another run may be at the same table
        content = table.numpy().tobytes()
        with partial.open("wb") as written:
            written.write(content + hashlib.sha256(content).digest())
            written.flush()
            os.fsync(written.fileno())
        partial.rename(file)
    return table


def _read_table(file: Path, size: int) -> bytearray | None:
    """The table's `size` bytes in a file that ends with their SHA-256; None where it is not there, or not whole."""
    if not file.is_file() or file.stat().st_size != size + hashlib.sha256().digest_size:
        return None
    content = bytearray(file.read_bytes())
    table, checksum = content[:size], content[size:]
    return table if hashlib.sha256(table).digest() == checksum else None


def _score_pairs(
    method: MethodWithReference, policy: Policy, rows: Rows, samples: range, table: Tensor, ld_alpha: float | None
) -> None:
    """Write the sums of this dp rank's share of `samples` to their rows of `table`."""
    if rows.packing:
        lengths = rows.samples.lengths(torch.arange(samples.start, samples.stop)).tolist()
        bins = [[samples[index] for index in members] for members in pack(lengths, rows.capacity)]
    else:
        bins = [[index] for index in samples]
    mine = bins[policy.mesh.dp_rank :: policy.mesh.dp_size]
    built = [row for members in mine for row in rows.build(members)]
    batch: Batch = collate(built) if rows.images is None else collate_with_images(built)
    logprobs = policy.logprobs(batch, method.micro_rows).double()
    ids = document_ids(batch)
    if ld_alpha is not None:
        logprobs = logprobs * length_desensitised_weights(ids, batch["labels"], ld_alpha)
    sums = sum_by_document(logprobs, ids, num_documents(batch))
    order = torch.tensor([index for members in mine for index in members], dtype=torch.int64)
    table[order] = sums.view(-1, 2)


def at_first_labels(batch: Batch, sums: Tensor) -> Tensor:
    """A stream [n, S] whose sums by document are `sums` [documents]: each stands at its document's first label, where
    every weight is 1."""
    labelled = (batch["labels"] != IGNORE_INDEX).flatten().nonzero().squeeze(1)
    owners = document_ids(batch).flatten()[labelled]
    is_first = torch.ones_like(owners, dtype=torch.bool)
    is_first[1:] = owners[1:] != owners[:-1]
    stream = torch.zeros(batch["labels"].numel(), dtype=torch.float64)
    stream[labelled[is_first]] = sums[owners[is_first]]
    return stream.view(batch["labels"].shape)
