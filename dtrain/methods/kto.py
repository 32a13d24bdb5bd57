"""KTO: tuning by single replies that are wanted or not, against a reference.

The reward of a reply is r = β · log(p / p_ref), summed over its tokens. It is compared with z = β · KL(p || p_ref). The
divergence is estimated on mismatched documents: the prompt of each row followed by the reply of another row, which the
data and the seed determine. Example with 4 samples and a distance of 3:

    trained      prompt 0 + reply 0     prompt 1 + reply 1     prompt 2 + reply 2     prompt 3 + reply 3
    mismatched   prompt 0 + reply 3     prompt 1 + reply 0     prompt 2 + reply 1     prompt 3 + reply 2

    z = β · max(0, mean of log(p / p_ref) over the mismatched replies of the global batch)

z is one number per step, a constant without gradient. It is computed before the first backward, so no micro-batch and
no mesh changes it.

In a batch, the mismatched rows follow the trained ones. The stream `desirable` marks them: 1 on the labels of wanted
replies, -1 on those of unwanted ones, and 0 on mismatched rows.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dtrain.base.batch import IGNORE_INDEX, Batch, collate, document_ids, num_documents, trim
from dtrain.base.errors import Problem, UserError
from dtrain.base.randomness import random_key
from dtrain.data.formats.labels import is_desirable
from dtrain.data.rows.rows import GlobalBatch, Rows, build_row, pack
from dtrain.losses.preference import formulas
from dtrain.methods.method import MethodWithReference, RunContext
from dtrain.methods.sections import Kto
from dtrain.policy import Policy
from dtrain.policy.batching import all_reduce
from dtrain.policy.score import LogprobSource, Loss

# Replies that are checked at the start for whether both kinds occur.
MAX_CHECKED_REPLIES = 256
# The values of `kto.loss`. A function gets rewards and the divergence, and returns the losses of desirable and of
# undesirable replies.
LOSSES = {"kto": formulas.kto, "apo_zero_unpaired": formulas.apo_zero_unpaired}


class KtoMethod(MethodWithReference):
    """Kahneman-Tversky optimisation (Ethayarajh et al., arXiv:2402.01306) and APO-zero for single replies.

    loss = mean over the replies of the global batch of weight · loss.
    """

    Section = Kto
    section: Kto
    about = "KTO, by replies that are wanted or not"
    kind = "labelled"
    shared_beginnings = "prompts"
    measures = ("rewards_chosen", "rewards_rejected", "rewards_margin", "logps_chosen", "logps_rejected", "kl")
    curves = MappingProxyType({**MethodWithReference.curves, "rewards_margin": "margin of rewards"})
    adapter_learning_rates = (5e-6, "1e-5")  # full tuning takes 5e-7 to 5e-6

    # Rows by split.
    _splits: Mapping[str, Rows] = MappingProxyType({})

    @property
    def _needs_divergence(self) -> bool:
        """Whether the loss compares with an estimate of the divergence."""
        return self.section.loss == "kto"

    def problems(self) -> list[Problem]:
        section, errors = self.section, self.base_problems()
        if section.reference in (None, "none"):
            text = "kto.reference=none: the reward of a reply is measured against a reference"
            errors.append(Problem("kto.reference", text, "Set kto.reference=start"))
        if section.desirable_weight == section.undesirable_weight == 0:
            text = "kto.desirable_weight and kto.undesirable_weight are both 0, so nothing would be learned"
            errors.append(Problem("kto.desirable_weight", text))
        return errors + self.loss_on_problems()

    def format_problem(self, format: str) -> str | None:
        if format in ("text", "question"):
            return "method=kto trains on replies with a label; give it prompt, completion and label"
        return None

    def needs_reference(self) -> bool:
        return True

    def check_data(self, columns: Mapping[str, Mapping[str, Any]], samples: Mapping[str, int]) -> None:
        """Raise UserError if a split has only one row, so that no other row has a reply for a mismatched document."""
        for split, count in samples.items():
            if self._needs_divergence and count < 2:
                raise UserError(
                    f"data.{split} has one reply, and KTO's estimate of the divergence needs replies of other rows. "
                    "Add rows, or set kto.loss=apo_zero_unpaired"
                )

    def begin(self, policy: Policy, splits: Mapping[str, Rows], run: RunContext) -> None:
        """Build the reference, and print a note if all replies that are checked are wanted, or all unwanted.

        Arguments and collectives are those of `Method.begin`.
        """
        if "train" in splits:
            samples = splits["train"].samples
            step = -(-len(samples) // MAX_CHECKED_REPLIES)  # rounded up
            labels = {is_desirable(samples, index) for index in range(0, len(samples), step)}
            if len(labels) == 1:
                label = "wanted" if True in labels else "unwanted"
                run.metrics.print_line(
                    f"note: all replies that were checked are {label}. KTO learns most if there are both kinds"
                )
        self._splits = splits
        self.attach_models(policy, run.other_models)

    def batch(self, rows: GlobalBatch, split: str = "train") -> Batch:
        """Return the rows followed by a mismatched document for each of their samples, with the stream `desirable`."""
        split_rows = self._splits[split]
        mismatched: list[tuple[Tensor, Tensor]] = []
        if self._needs_divergence:
            mismatched = list(self._mismatched(split_rows, rows.samples))
        mismatched_rows = []
        if split_rows.packing:
            for members in pack([len(ids) for ids, _ in mismatched], split_rows.capacity):
                mismatched_rows.append(build_row([mismatched[index] for index in members]))
        else:
            mismatched_rows = [build_row([document]) for document in mismatched]
        batch = self.with_prompt_ids(collate([*rows.rows, *mismatched_rows]))
        # One mark per document. Padding has the document id -1, so its mark comes first.
        marks = [0.0]
        for index in rows.samples:
            marks.append(1.0 if is_desirable(split_rows.samples, index) else -1.0)
        marks += [0.0] * len(mismatched)
        mark_of_token = torch.tensor(marks, dtype=torch.float64)[document_ids(batch) + 1]
        return {**batch, "desirable": torch.where(batch["labels"] != IGNORE_INDEX, mark_of_token, 0.0)}

    def _mismatched(self, rows: Rows, samples: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a mismatched document for each sample: its prompt, and the reply of the sample a fixed distance later.

        A document is its ids and a mask of the trained tokens, [s] each, cut to the rows' maximum length.
        """
        count = len(rows.samples)
        distance = 1 + random_key("kto", self.recipe.run.seed) % (count - 1)
        for index in samples:
            ((ids, trained),) = rows.samples[index]
            ((other_ids, other_trained),) = rows.samples[(index + distance) % count]
            prompt_length = _reply_start(trained)
            reply_start = _reply_start(other_trained)
            reply = slice(reply_start, reply_start + rows.max_length - prompt_length)
            mask = torch.cat([torch.zeros(prompt_length, dtype=torch.bool), other_trained[reply]])
            yield torch.cat([ids[:prompt_length], other_ids[reply]]), mask

    def prepare(self, policy: Policy, batch: Batch) -> tuple[Batch, Loss]:
        """Compute the reference's log-probabilities, and the estimate of the divergence.

        Collectives:
            Those of one forward of the reference, and one all-reduce over dp. With `kto.loss=kto` also those of a
            forward of the reference and a forward of the policy over the mismatched documents.
        """
        trained, mismatched = _split_mismatched(batch)
        log_ratio = self._score(policy, trained=trained, mismatched=mismatched)
        return trained, self._loss_at(policy, self._divergence(policy, log_ratio))

    def _loss_at(self, policy: Policy, divergence: Tensor) -> Loss:
        """Return `loss` with its argument `divergence` set, on the policy's device."""
        return partial(self.loss, divergence=divergence.to(policy.device, non_blocking=True))

    def _score(self, policy: Policy, *, trained: Batch | None = None, mismatched: Batch | None = None) -> Tensor:
        """Score both batches with the reference, and the mismatched one with the policy too.

        Both are scored in one call because swapping in the reference's weights takes time.

        Args:
            policy: The policy, with the reference.
            trained: The trained rows, to which the stream `reference_logprobs` is added. None: not scored.
            mismatched: The mismatched documents. None: not scored. `kto.loss=apo_zero_unpaired` never scores them.

        Returns:
            Σ log(p / p_ref) over this rank's mismatched replies, and their number, [2]. Zeros if there are none.
        """
        log_ratio = torch.zeros(2, dtype=torch.float64)
        if not self._needs_divergence:
            mismatched = None
        logprobs = None if mismatched is None else policy.logprobs(mismatched, self.micro_rows).double()
        with policy.use_reference_model():
            if mismatched is not None and logprobs is not None:
                logprobs -= policy.logprobs(mismatched, self.micro_rows).double()
                log_ratio[0], log_ratio[1] = logprobs.sum(), num_documents(mismatched)
            if trained is not None:
                trained["reference_logprobs"] = policy.logprobs(trained, self.micro_rows)
        return log_ratio

    def _divergence(self, policy: Policy, log_ratio: Tensor) -> Tensor:
        """Estimate KL(p || p_ref) over the mismatched replies of all ranks.

        Args:
            policy: The policy, for its mesh.
            log_ratio: This rank's result of `_score`, [2]; overwritten.

        Returns:
            The estimate, a scalar, at least 0.

        Collectives:
            One all-reduce over dp.
        """
        total, count = all_reduce(log_ratio, policy.mesh.dp)
        return (total / count.clamp(min=1)).clamp(min=0)

    def loss(
        self,
        source: LogprobSource,
        batch: Batch,
        global_seqs: Tensor,
        global_tokens: Tensor,
        *,
        divergence: Tensor | float = 0.0,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of a micro-batch.

        Args:
            source: Log-probabilities of the micro-batch.
            batch: The micro-batch.
            global_seqs: Replies in the global batch.
            global_tokens: Not used.
            divergence: The estimate of KL(p || p_ref).

        Returns:
            This micro-batch's part of the loss, and scalars added up over wanted and over unwanted replies.
        """
        section = self.section
        logprobs = source.logprobs().logprobs  # [B, S/cp]
        streams = [logprobs, batch["reference_logprobs"].to(logprobs), batch["desirable"].to(logprobs)]
        policy, reference, marks = source.sum_by_document(torch.stack(streams))  # [replies] each
        rewards = section.beta * (policy - reference)
        divergence = torch.as_tensor(divergence).to(rewards)
        # 1 for the replies of a kind, else 0. Padding is of neither kind.
        desirable, undesirable = (marks > 0).to(rewards), (marks < 0).to(rewards)
        desirable_loss, undesirable_loss = LOSSES[section.loss](rewards, section.beta * divergence)
        weighted_desirable = section.desirable_weight * desirable * desirable_loss
        weighted_undesirable = section.undesirable_weight * undesirable * undesirable_loss
        losses = weighted_desirable + weighted_undesirable
        measured = {
            "chosen": desirable.sum(),
            "rejected": undesirable.sum(),
            "rewards_chosen": (desirable * rewards).sum(),
            "rewards_rejected": (undesirable * rewards).sum(),
            "logps_chosen": (desirable * policy).sum(),
            "logps_rejected": (undesirable * policy).sum(),
            "kl": divergence * (desirable + undesirable).sum(),
            "loss": losses.sum(),
        }
        total = source.count_once(losses.sum() / global_seqs)
        return total, {name: source.count_once(value.detach()) for name, value in measured.items()}

    def validation(self, policy: Policy, rows: Rows) -> Iterator[tuple[Batch, Loss]]:
        """Yield the validation batches with their loss.

        The divergence is estimated once, over all `rows`. So all batches are read twice: first for the estimate, then
        for the loss.
        """
        log_ratio = torch.zeros(2, dtype=torch.float64)
        if self._needs_divergence:
            for batch in self.val_batches(policy, rows):
                _, mismatched = _split_mismatched(batch)
                log_ratio += self._score(policy, mismatched=mismatched)
        loss = self._loss_at(policy, self._divergence(policy, log_ratio))
        for batch in self.val_batches(policy, rows):
            trained, _ = _split_mismatched(batch)
            self._score(policy, trained=trained)
            yield trained, loss

    def train_metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Return means over the wanted replies (`rewards_chosen`, ..) and the unwanted ones (`rewards_rejected`, ..).

        Metrics of a kind without replies are left out.
        """
        metrics = {}
        for quantity in ("rewards", "logps"):
            for kind in ("chosen", "rejected"):
                if totals[kind]:
                    name = f"{quantity}_{kind}"
                    metrics[name] = totals[name] / totals[kind]
        if totals["chosen"] and totals["rejected"]:
            metrics["rewards_margin"] = metrics["rewards_chosen"] - metrics["rewards_rejected"]
        if self._needs_divergence:
            metrics["kl"] = totals["kl"] / max(totals["chosen"] + totals["rejected"], 1)
        return metrics

    def val_metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        metrics = {"val_loss": totals["loss"] / max(totals["chosen"] + totals["rejected"], 1)}
        for name, value in self.train_metrics(totals).items():
            metrics[f"val_{name}"] = value
        return metrics


def _reply_start(trained: Tensor) -> int:
    """Return the index of the first token of a document's reply, at least 1: the first token belongs to the prompt.

    Args:
        trained: Mask of the trained tokens, [s].

    Example:
        >>> _reply_start(torch.tensor([False, False, True, True]))
        2
    """
    return max(1, int(trained.int().argmax()))


def _split_mismatched(batch: Batch) -> tuple[Batch, Batch]:
    """Split a batch into the trained rows and the mismatched rows, each with its own width."""
    is_trained = (batch["desirable"] != 0).any(1)
    trained = {name: stream[is_trained] for name, stream in batch.items()}
    mismatched = {name: stream[~is_trained] for name, stream in batch.items()}
    return trim(trained), trim(mismatched)
