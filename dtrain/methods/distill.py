"""Distillation: the student learns the teacher's distribution at every trained token instead of the token's label.

The tokens are those of the data, or of completions that the student samples itself (`rl.on_policy`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from dtrain.base.batch import Batch
from dtrain.base.errors import Problem, UserError
from dtrain.base.ranges import format_value
from dtrain.data.model_directory import ModelDirectory
from dtrain.data.rows.rows import Rows
from dtrain.losses.head.kl import kl_sum_from_hidden_states
from dtrain.losses.head.topk import topk_kl_sum_from_hidden_states, topk_logits_from_hidden_states
from dtrain.methods.method import AttachedModels, Method, RunContext
from dtrain.methods.sections import Distill
from dtrain.policy import Policy
from dtrain.policy.other_models import Teacher
from dtrain.policy.score import LogprobSource
from dtrain.recipe.rollouts import Sampling


class DistillMethod(Method):
    """Distillation from a teacher of the same vocabulary.

    loss = T² · Σ KL ÷ trained tokens, both over the global batch. The KL compares the softmaxes of logits ÷ T of
    teacher and student, where T is `distill.temperature`. The gradient of the KL falls as 1/T², so the factor T² keeps
    its size whatever the temperature (Hinton et al., arXiv:1503.02531, section 2).

    `distill.kl` chooses the divergence: forward KL(teacher || student), reverse KL(student || teacher) (Gu et al.,
    arXiv:2306.08543), a weighted sum of both, or the generalised Jensen-Shannon divergence.

    The teacher's forward runs inside the student's, micro-batch by micro-batch, with the same rows and the same mesh.

    Attributes:
        teacher: The teacher, after `attach_models`.
    """

    Section = Distill
    section: Distill
    teacher: Teacher
    about = "distillation"
    models = ("teacher",)
    measures = ("forward_kl", "reverse_kl", "topk_mass", "completion_len", "truncated_frac", "rollout_time")

    def variant(self) -> str | None:
        return "student" if self.section.samples == "student" else None

    def missing(self) -> list[Problem]:
        if self.section.teacher:
            return []
        fix = "Set it to the directory of a model with the student's vocabulary"
        return [Problem("distill.teacher", "distill.teacher is missing", fix, is_missing=True)]

    def problems(self) -> list[Problem]:
        """Refuse keys that are read only if the student samples."""
        keys = ["student_share", "prompts_per_step"]
        keys += [f"sampling.{key.name}" for key in fields(Sampling)]
        default = Distill()
        errors = []
        for key in keys:
            get = attrgetter(key)
            if get(self.section) == get(default):
                continue
            text = (
                f"distill.{key} is about sampling from the student, and distill.samples=data trains on the data's own "
                "completions"
            )
            errors.append(Problem(f"distill.{key}", text, "Leave it out, or set distill.samples=student"))
        return errors + self.unread_problems()

    def unread_problems(self) -> list[Problem]:
        """Refuse keys that the recipe's divergence does not read."""
        section = self.section
        readers = {
            "jsd_beta": (section.kl == "jsd", "distill.kl=jsd"),
            "mixed_kl_weight": (section.kl == "mixed", "distill.kl=mixed"),
            "zero_outside_topk": (section.top_k is not None, "distill.top_k"),
        }
        errors = []
        for key, (is_read, reader) in readers.items():
            value = getattr(section, key)
            if not is_read and value != getattr(Distill(), key):
                text = f"distill.{key}={format_value(value)} is read only with {reader}"
                errors.append(Problem(f"distill.{key}", text, f"Leave it out, or set {reader}"))
        return errors

    def other_models(self) -> list[tuple[str, str]]:
        """Return the teacher."""
        return [("distill.teacher", self.section.teacher)] if self.section.teacher else []

    def check_state(self, state: Mapping[str, Any], changed: Sequence[str] = ()) -> None:
        """Raise UserError if a resume would change `distill.samples`, besides the reasons of `Method.check_state`."""
        saved = "student" if "rollout" in state else "data"
        if saved != self.section.samples:
            raise UserError(
                f"distill.samples={self.section.samples}: the checkpoint was saved with distill.samples={saved}, and a "
                "resume cannot change it. Set it back, or begin another run with these weights (checkpoint.init_from, "
                "run.name)"
            )
        super().check_state(state, changed)

    def begin(self, policy: Policy, splits: Mapping[str, Rows], run: RunContext) -> None:
        self.attach_models(policy, run.other_models)

    def attach_models(self, policy: Policy, others: Mapping[str, ModelDirectory]) -> AttachedModels:
        """Build the teacher. Arguments, errors and collectives are those of `Method.attach_models`."""
        if self.section.teacher is None:  # `missing` reports it
            return AttachedModels()
        self.teacher = Teacher(policy, self.section.teacher)
        return AttachedModels(teacher=self.teacher)

    @property
    def _beta(self) -> float | None:
        """The teacher's share of the mixture in a Jensen-Shannon divergence. None for a KL."""
        section = self.section
        return section.jsd_beta if section.kl == "jsd" and 0 < section.jsd_beta < 1 else None

    @property
    def _options(self) -> dict[str, Any]:
        """Keyword arguments that the loss functions of `losses.head` need for the recipe's divergence."""
        section = self.section
        forward_shares = {
            "forward": 1.0,
            "reverse": 0.0,
            "mixed": section.mixed_kl_weight,
            # Read only for beta = 0 or 1, where the mixture is one of the two distributions. As in TRL, the divergence
            # is then the forward KL (beta = 0) or the reverse KL (beta = 1).
            "jsd": 1.0 - section.jsd_beta,
        }
        return {
            "forward_share": forward_shares[section.kl],
            "jsd_beta": self._beta,
            "temperature": section.temperature,
        }

    def loss(
        self, source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of a micro-batch.

        Arguments are those of `Method.loss`.

        Returns:
            This micro-batch's part of the loss, a scalar. Totals over its trained tokens, scalars: "kl" (the
            divergence), "trained" (number of tokens), and the totals that `divergences` reads.
        """
        index = batch["label_index"]
        if self.section.top_k is None:
            total, measured = self._full_kl(source, index)
        else:
            total, measured = self._topk_kl(source, index, self.section.top_k)
        measured["kl"] = total.detach()
        measured["trained"] = torch.full((), len(index), device=total.device)
        return total * self.section.temperature**2 / global_tokens, measured

    def _full_kl(self, source: LogprobSource, index: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the divergence over the full vocabulary, summed over the positions `index`.

        Args:
            source: The student's side of the micro-batch.
            index: Flat positions of the trained tokens, [T].

        Returns:
            The divergence that the recipe selects, a scalar, and the KL in each direction, by metric.

        Collectives:
            Those of the teacher's forward and of `kl_sum_from_hidden_states`.
        """
        student, shard, options = source.head_input, source.shard, self._options
        total, forward, reverse = self.teacher.run_at_head(
            source.inputs, lambda teacher: kl_sum_from_hidden_states(student, teacher, index, shard=shard, **options)
        )
        return total, {"forward_kl": forward, "reverse_kl": reverse}

    def _topk_kl(self, source: LogprobSource, index: Tensor, k: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the divergence over the teacher's k most probable tokens, summed over the positions `index`.

        Args:
            source: The student's side of the micro-batch.
            index: Flat positions of the trained tokens, [T].
            k: `distill.top_k`.

        Returns:
            The divergence, a scalar, and the student's probability of the teacher's top k, summed over the positions.

        Collectives:
            Those of the teacher's forward and of the functions of `losses.head.topk`.
        """
        logits, ids = self.teacher.run_at_head(
            source.inputs, lambda teacher: topk_logits_from_hidden_states(teacher, k, index, shard=source.shard)
        )
        total, mass = topk_kl_sum_from_hidden_states(
            source.head_input,
            logits,
            ids,
            index,
            zero_outside=self.section.zero_outside_topk,
            shard=source.shard,
            **self._options,
        )
        return total, {"topk_mass": mass}

    def train_metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        return self.divergences(totals)

    def divergences(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Return means over the trained tokens, at the recipe's temperature.

        The metrics are the KL in each direction, or with `distill.top_k` the student's probability of the teacher's top
        k. `val_metrics` reports the same values.
        """
        metrics = {}
        for name in ("forward_kl", "reverse_kl", "topk_mass"):
            if name in totals:
                metrics[name] = totals[name] / max(totals["trained"], 1)
        return metrics

    def val_metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        metrics = {"val_loss": self.section.temperature**2 * totals["kl"] / max(totals["trained"], 1)}
        for name, value in self.divergences(totals).items():
            metrics[f"val_{name}"] = value
        return metrics
