"""Tuning by single replies that are wanted or not, against a reference (KTO).

The reward of a reply is β · log(p / p_ref) of its tokens. It is compared with z = β · KL(p || p_ref), estimated on
replies that do not belong to their prompts: each row's prompt with the reply of another row. Which one is a matter of
the data and the seed. z is one number for the whole global batch, clamped at 0 and a constant, known before the first
backward of a step: no micro-batch and no mesh changes it.

In a batch such rows stand behind those that are trained; their stream `desirable` is 0.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from dtrain.base.batch import IGNORE_INDEX, Batch, collate, document_ids, num_documents, trim
from dtrain.base.errors import Problem, UserError
from dtrain.base.randomness import random_key
from dtrain.base.ranges import DIVISOR, UP_TO_1, WEIGHT, at_least
from dtrain.data.formats.labels import is_desirable
from dtrain.data.rows.rows import GlobalBatch, Rows, build_row, pack
from dtrain.losses.preference import formulas
from dtrain.methods.method import MethodWithReference, RunContext
from dtrain.policy import Policy
from dtrain.policy.batching import all_reduce
from dtrain.policy.score import LogprobSource, Loss

MAX_CHECKED_REPLIES = 256  # replies, for whether there are both kinds


@dataclass
class Kto:
    """`kto`: read by method kto."""

    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto: a reply's reward is compared with the divergence from the reference. apo_zero_unpaired: with zero."""
    beta: Annotated[float, DIVISOR] = 0.1
    """Strength of the pull towards the reference."""
    desirable_weight: Annotated[float, WEIGHT] = 1.0
    """Weight of the replies that are wanted. Where a file has few of them, more than 1 makes up for it."""
    undesirable_weight: Annotated[float, WEIGHT] = 1.0
    """Weight of the others."""
    reference: str = "start"
    """As `dpo.reference`: start, base, or the path of a model of the same shapes."""
    sync_every: Annotated[int | None, at_least(1, ", or null for a reference that stands still")] = None
    """The reference moves towards the policy every so many steps. null: it stands still."""
    sync_mix: Annotated[float, UP_TO_1] = 0.6
    """Step of its move: reference = sync_mix · policy + (1 − sync_mix) · reference."""


class KtoMethod(MethodWithReference):
    """Kahneman-Tversky optimisation (Ethayarajh et al., arXiv:2402.01306) and APO-zero for single replies.

    loss = Σ over replies of weight · loss ÷ replies, over the global batch.
    """

    Section = Kto
    section: Kto
    about = "KTO, by replies that are wanted or not"
    kind = "labelled"
    measures = ("rewards_chosen", "rewards_rejected", "rewards_margin", "logps_chosen", "logps_rejected", "kl")
    curves = MappingProxyType({**MethodWithReference.curves, "rewards_margin": "margin of rewards"})
    adapter_learning_rates = (5e-6, "1e-5")  # full tuning takes 5e-7 to 5e-6

    _splits: Mapping[str, Rows] = MappingProxyType({})

    @property
    def _estimates(self) -> bool:
        """Return whether the loss compares with an estimate of the divergence."""
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
        """Raises UserError where a split has one row alone: it has no reply of another."""
        for split, count in samples.items():
            if self._estimates and count < 2:
                raise UserError(
                    f"data.{split} has one reply, and KTO's estimate of the divergence needs those of other rows: give "
                    "it more, or set kto.loss=apo_zero_unpaired"
                )

    def begin(self, policy: Policy, splits: Mapping[str, Rows], run: RunContext) -> None:
        for split, rows in splits.items():
            some = range(0, len(rows.samples), -(-len(rows.samples) // MAX_CHECKED_REPLIES))
            if split == "train" and len(kinds := {is_desirable(rows.samples, index) for index in some}) == 1:
                which = "is wanted" if True in kinds else "is one that is not wanted"
                run.metrics.say(f"note: each reply that was looked at {which}: KTO learns most where there are both")
        self._splits = splits
        self.attach_models(policy, run.other_models)

    def batch(self, rows: GlobalBatch, split: str = "train") -> Batch:
        """The rows, and behind them as many documents of prompts with other rows' replies."""
        of_split = self._splits[split]
        others = list(self._mismatched(of_split, rows.samples)) if self._estimates else []
        if of_split.packing:
            places = pack([len(ids) for ids, _ in others], of_split.capacity)
            more = [build_row([others[place] for place in members]) for members in places]
        else:
            more = [build_row([document]) for document in others]
        batch = collate([*rows.rows, *more])
        signs = [0.0, *(1.0 if is_desirable(of_split.samples, index) else -1.0 for index in rows.samples)]  # 0: padding
        signs += [0.0] * len(others)
        marks = torch.tensor(signs, dtype=torch.float64)[document_ids(batch) + 1]
        return {**batch, "desirable": torch.where(batch["labels"] != IGNORE_INDEX, marks, 0.0)}

    def _mismatched(self, rows: Rows, samples: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids, trained) of each sample's prompt with the reply of the sample that stands a fixed way behind it."""
        count = len(rows.samples)
        way = 1 + random_key("kto", self.recipe.run.seed) % (count - 1)
        for index in samples:
            ((ids, trained),) = rows.samples[index]
            ((other, marked),) = rows.samples[(index + way) % count]
            prompt = _reply(trained)
            reply = slice(_reply(marked), _reply(marked) + rows.max_length - prompt)
            joined = torch.cat([torch.zeros(prompt, dtype=torch.bool), marked[reply]])
            yield torch.cat([ids[:prompt], other[reply]]), joined

    def prepare(self, policy: Policy, batch: Batch) -> tuple[Batch, Loss]:
        """Forwards of the policy and the reference over the mismatched replies, and one of the reference over the
        others. One all-reduce."""
        own, others = _split(batch)
        log_ratio = self._ask_reference(policy, own=own, others=others)
        return own, self._loss_at(policy, self._divergence(policy, log_ratio))

    def _loss_at(self, policy: Policy, divergence: Tensor) -> Loss:
        return partial(self.loss, divergence=divergence.to(policy.device, non_blocking=True))

    def _ask_reference(self, policy: Policy, *, own: Batch | None = None, others: Batch | None = None) -> Tensor:
        """Ask the reference once: write what it says of `own` into its stream, and return Σ log(p / p_ref) over this
        rank's mismatched replies `others` with their number, [2], zeros where nothing is estimated."""
        total = torch.zeros(2, dtype=torch.float64)
        others = others if self._estimates else None
        logprobs = None if others is None else policy.logprobs(others, self.micro_rows).double()
        with policy.use_reference_model():
            if others is not None and logprobs is not None:
                logprobs -= policy.logprobs(others, self.micro_rows).double()
                total[0], total[1] = logprobs.sum(), num_documents(others)
            if own is not None:
                own["reference_logprobs"] = policy.logprobs(own, self.micro_rows)
        return total

    def _divergence(self, policy: Policy, log_ratio: Tensor) -> Tensor:
        """The estimate of KL(p || p_ref), at least 0, a scalar; log_ratio [2], this rank's, is summed over all."""
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
        """Scalars: the share of the loss, and sums over the replies that are wanted and those that are not."""
        section = self.section
        logprobs = source.logprobs().logprobs  # [B, S/cp]
        streams = [logprobs, batch["reference_logprobs"].to(logprobs), batch["desirable"].to(logprobs)]
        policy, reference, marks = source.sum_by_document(torch.stack(streams))  # [replies] each
        rewards = section.beta * (policy - reference)
        divergence = torch.as_tensor(divergence).to(rewards)
        wanted, unwanted = (marks > 0).to(rewards), (marks < 0).to(rewards)  # padding is neither
        if_wanted, if_unwanted = getattr(formulas, section.loss)(rewards, section.beta * divergence)
        losses = section.desirable_weight * wanted * if_wanted + section.undesirable_weight * unwanted * if_unwanted
        measured = {
            "chosen": wanted.sum(),
            "rejected": unwanted.sum(),
            "rewards_chosen": (wanted * rewards).sum(),
            "rewards_rejected": (unwanted * rewards).sum(),
            "logps_chosen": (wanted * policy).sum(),
            "logps_rejected": (unwanted * policy).sum(),
            "kl": divergence * (wanted + unwanted).sum(),
            "loss": losses.sum(),
        }
        total = source.count_once(losses.sum() / global_seqs)
        return total, {name: source.count_once(value.detach()) for name, value in measured.items()}

    def validation(self, policy: Policy, rows: Rows) -> Iterator[tuple[Batch, Loss]]:
        """Yield batches with one estimate of the divergence over all of `rows`: a pass of its own."""
        log_ratio = torch.zeros(2, dtype=torch.float64)
        for batch in self.val_batches(policy, rows) if self._estimates else ():
            log_ratio += self._ask_reference(policy, others=_split(batch)[1])
        loss = self._loss_at(policy, self._divergence(policy, log_ratio))
        for batch in self.val_batches(policy, rows):
            own, _ = _split(batch)
            self._ask_reference(policy, own=own)
            yield own, loss

    def train_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """`rewards_chosen` and `logps_chosen` are of replies that are wanted, `.._rejected` of the others, where the
        batch has such."""
        result = {
            f"{what}_{which}": sums[f"{what}_{which}"] / sums[which]
            for what in ("rewards", "logps")
            for which in ("chosen", "rejected")
            if sums[which]
        }
        if sums["chosen"] and sums["rejected"]:
            result["rewards_margin"] = result["rewards_chosen"] - result["rewards_rejected"]
        if self._estimates:
            result["kl"] = sums["kl"] / max(sums["chosen"] + sums["rejected"], 1)
        return result

    def val_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        val_loss = sums["loss"] / max(sums["chosen"] + sums["rejected"], 1)
        return {"val_loss": val_loss, **{f"val_{name}": value for name, value in self.train_metrics(sums).items()}}


def _reply(trained: Tensor) -> int:
    """Return the index at which the reply of a document begins; trained [s]. A document's first token belongs to the
    prompt."""
    return max(1, int(trained.int().argmax()))


def _split(batch: Batch) -> tuple[Batch, Batch]:
    """The rows that are trained, and those of the estimate."""
    is_own = (batch["desirable"] != 0).any(1)
    own, others = ({name: stream[rows] for name, stream in batch.items()} for rows in (is_own, ~is_own))
    return trim(own), trim(others)
