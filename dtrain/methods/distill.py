"""Distillation: the student learns the teacher's distribution at every trained token, not its label; those of the
data, or of completions that it draws itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from dtrain.base.batch import Batch
from dtrain.base.errors import Problem, UserError
from dtrain.base.ranges import DIVISOR, FRACTION, UP_TO_1, at_least, format_value
from dtrain.data.model_directory import ModelDirectory
from dtrain.data.rows.rows import Rows
from dtrain.losses.head.kl import kl_sum_from_hidden_states
from dtrain.losses.head.topk import topk_kl_sum_from_hidden_states, topk_logits_from_hidden_states
from dtrain.methods.method import AttachedModels, Method, RunContext
from dtrain.policy import Policy
from dtrain.policy.other_models import Teacher
from dtrain.policy.score import LogprobSource
from dtrain.recipe.rollouts import Sampling


@dataclass
class Distill:
    """`distill`: read by method distill."""

    teacher: str | None = None
    """Required. The directory or hub id of a model with the student's vocabulary, of any size. It is frozen and lies
    on the same mesh."""
    top_k: Annotated[
        int | None, (lambda v: 1 <= v < 2**31, "at least 1, below 2**31, or null for the whole vocabulary")
    ] = None
    """Number of the teacher's likeliest tokens that count. null: all, exactly."""
    kl: Literal["forward", "reverse", "mixed", "jsd"] = "forward"
    """forward: KL(teacher || student), reverse: KL(student || teacher), mixed: both, jsd: the generalized
    Jensen-Shannon divergence (arXiv:2306.13649)."""
    temperature: Annotated[float, DIVISOR] = 1.0
    """Divides the logits of both; the loss is multiplied by its square."""
    mixed_kl_weight: Annotated[float, FRACTION] = 0.5
    """The forward KL's share where `kl` is mixed; the reverse KL has the rest."""
    jsd_beta: Annotated[float, FRACTION] = 0.5
    """The teacher's share of the mixture where `kl` is jsd. 0: the forward KL; 1: the reverse KL."""
    zero_outside_topk: bool = True
    """With `top_k`. true: the teacher is zero outside its top k, and what the student gives to other tokens counts
    against it. false: the student too is normalised over the teacher's top k, and free elsewhere."""
    samples: Literal["data", "student"] = "data"
    """Whose completions are trained on. student: the data's rows are prompts, as under method grpo, and the student's
    own answers are what it learns from, drawn as training goes on."""
    student_share: Annotated[float, (UP_TO_1[0], "more than 0, up to 1; distill.samples=data has none")] = 1.0
    """The share of a step's samples that the student draws. The rest are the data's."""
    prompts_per_step: Annotated[int | None, at_least(1, ", or null for those of a step")] = None
    """Prompts of a rollout, a multiple of train.global_batch. null: as many, so that each step's samples are drawn by
    the weights of that step."""
    sampling: Sampling = field(default_factory=Sampling)
    """Sampling of the student's completions."""


class DistillMethod(Method):
    """loss = T² · Σ KL ÷ trained tokens, both over the whole global batch, the KL between the softmaxes of
    logits ÷ T of teacher and student.

    The factor T² = temperature² keeps the gradient's size, which falls as 1/T², whatever the temperature (Hinton et
    al., arXiv:1503.02531, section 2). The KL's direction is the recipe's: forward KL(teacher || student), reverse
    KL(student || teacher) (Gu et al., arXiv:2306.08543), a mix of both, or each one's KL to their mixture (`jsd`).

    The teacher's forward runs inside the student's, micro-batch by micro-batch, with the same rows and the same mesh.
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
        section, default = self.section, Distill()
        named = [key for key in ("student_share", "prompts_per_step") if getattr(section, key) != getattr(default, key)]
        drawn = (f"sampling.{key.name}" for key in fields(Sampling))
        named += [key for key in drawn if attrgetter(key)(section) != attrgetter(key)(default)]
        errors = []
        for key in named:
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
        return [("distill.teacher", self.section.teacher)] if self.section.teacher else []

    def check_state(self, state: Mapping[str, Any], changed: Sequence[str] = ()) -> None:
        """Raise UserError if the checkpoint was saved with the other value of `distill.samples`, too."""
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
        """Override `Method.attach_models`: the teacher."""
        if self.section.teacher is None:  # the recipe is refused
            return AttachedModels()
        self.teacher = Teacher(policy, self.section.teacher)
        return AttachedModels(teacher=self.teacher)

    @property
    def _beta(self) -> float | None:
        """The teacher's share of the mixture; None without one."""
        section = self.section
        return section.jsd_beta if section.kl == "jsd" and 0 < section.jsd_beta < 1 else None

    @property
    def _options(self) -> dict[str, Any]:
        section = self.section
        ends = 1.0 - section.jsd_beta  # a mixture that is one of the two: the KL to the other, as TRL has it
        shares = {"forward": 1.0, "reverse": 0.0, "mixed": section.mixed_kl_weight, "jsd": ends}
        return {"forward_share": shares[section.kl], "jsd_beta": self._beta, "temperature": section.temperature}

    def loss(
        self, source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalars: the share of the loss, and the sums of the KL and of the trained tokens."""
        index = batch["label_index"]
        if self.section.top_k is None:
            total, measured = self._whole(source, index)
        else:
            total, measured = self._topk(source, index, self.section.top_k)
        measured["kl"] = total.detach()
        measured["trained"] = torch.full((), len(index), device=total.device)
        return total * self.section.temperature**2 / global_tokens, measured

    def _whole(self, source: LogprobSource, index: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        student, shard, options = source.head_input, source.shard, self._options
        total, forward, reverse = self.teacher.run_at_head(
            source.inputs, lambda teacher: kl_sum_from_hidden_states(student, teacher, index, shard=shard, **options)
        )
        return total, {"forward_kl": forward, "reverse_kl": reverse}

    def _topk(self, source: LogprobSource, index: Tensor, k: int) -> tuple[Tensor, dict[str, Tensor]]:
        logits, ids = self.teacher.run_at_head(
            source.inputs, lambda teacher: topk_logits_from_hidden_states(teacher, k, index, shard=source.shard)
        )
        total, inside = topk_kl_sum_from_hidden_states(
            source.head_input,
            logits,
            ids,
            index,
            zero_outside=self.section.zero_outside_topk,
            shard=source.shard,
            **self._options,
        )
        return total, {"topk_mass": inside}

    def train_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return self.divergences(sums)

    def divergences(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Means over the trained tokens at the recipe's temperature: the KL in each direction, or the probability that
        the student gives to the teacher's top k."""
        return {
            name: sums[name] / max(sums["trained"], 1)
            for name in ("forward_kl", "reverse_kl", "topk_mass")
            if name in sums
        }

    def val_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        val_loss = self.section.temperature**2 * sums["kl"] / max(sums["trained"], 1)
        return {"val_loss": val_loss, **{f"val_{name}": value for name, value in self.divergences(sums).items()}}
