"""Distillation: the student learns the teacher's distribution at every trained token, not its label."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dtrain.base.batch import Batch
from dtrain.base.run_context import RunContext
from dtrain.data import Rows
from dtrain.losses import (
    KlSums,
    jsd_sum_from_hidden_states,
    kl_sum_from_hidden_states,
    topk_kl_sum_from_hidden_states,
    topk_logits_from_hidden_states,
)
from dtrain.methods.method import Method
from dtrain.policy import Policy
from dtrain.policy.score import LogprobSource
from dtrain.policy.teacher import Teacher
from dtrain.recipe.schema import Recipe


class DistillMethod(Method):
    """loss = T² · Σ KL ÷ trained tokens, both over the whole global batch, the KL between the softmaxes of
    logits ÷ T of teacher and student.

    The factor T² = temperature² keeps the gradient's size, which falls as 1/T², whatever the temperature (Hinton et
    al., arXiv:1503.02531, section 2). The KL's direction is the recipe's: forward KL(teacher || student), reverse
    KL(student || teacher) (Gu et al., arXiv:2306.08543), a mix of both, or each one's KL to their mixture (`jsd`).

    The teacher's forward runs inside the student's, micro-batch by micro-batch, with the same rows and the same mesh.
    """

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        section = recipe.distill
        beta = section.jsd_beta if section.kl == "jsd" else None
        # A mixture that is one of the two: the KL to the other, as TRL has it.
        ends = 1.0 - beta if beta is not None else 0.0
        shares = {"forward": 1.0, "reverse": 0.0, "mixed": section.mixed_kl_weight, "jsd": ends}
        self._beta = beta if beta is not None and 0 < beta < 1 else None
        share = {"forward_share": shares[section.kl]} if self._beta is None else {}
        self._options: dict[str, Any] = {**share, "temperature": section.temperature}
        self._factor = section.temperature**2

    def begin(self, policy: Policy, splits: Mapping[str, Rows], run: RunContext) -> None:
        if self.recipe.distill.teacher is not None:  # without one the recipe is refused
            self.teacher = Teacher(policy, self.recipe.distill.teacher)

    def loss(
        self, source: LogprobSource, batch: Batch, global_seqs: Tensor, global_tokens: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Scalars: the share of the loss, and the sums of the KL and of the trained tokens."""
        index = batch["label_index"]
        if self.recipe.distill.top_k is None:
            total, measured = self._whole(source, index)
        else:
            total, measured = self._topk(source, index, self.recipe.distill.top_k)
        measured["kl"] = total.detach()
        measured["trained"] = torch.full((), len(index), device=total.device)
        return total * self._factor / global_tokens, measured

    def _whole(self, source: LogprobSource, index: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        student, options = source.head_input, self._options
        divergence: Callable[..., KlSums] = kl_sum_from_hidden_states
        if self._beta is not None:
            divergence = partial(jsd_sum_from_hidden_states, beta=self._beta)
        total, forward, reverse = self.teacher.at_head(
            source.inputs, lambda teacher: divergence(student, teacher, index, shard=source.shard, **options)
        )
        return total, {"forward_kl": forward, "reverse_kl": reverse}

    def _topk(self, source: LogprobSource, index: Tensor, k: int) -> tuple[Tensor, dict[str, Tensor]]:
        logits, ids = self.teacher.at_head(
            source.inputs, lambda teacher: topk_logits_from_hidden_states(teacher, k, index, shard=source.shard)
        )
        total, inside = topk_kl_sum_from_hidden_states(
            source.head_input,
            logits,
            ids,
            index,
            jsd_beta=self._beta,
            zero_outside=self.recipe.distill.zero_outside_topk,
            shard=source.shard,
            **self._options,
        )
        return total, {"topk_mass": inside}

    def fields(self, sums: Mapping[str, float]) -> dict[str, float]:
        return self.divergences(sums)

    def divergences(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Means over the trained tokens at the recipe's temperature: the KL in each direction, or the probability that
        the student gives to the teacher's top k."""
        return {
            name: sums[name] / max(sums["trained"], 1)
            for name in ("forward_kl", "reverse_kl", "topk_mass")
            if name in sums
        }

    def val_fields(self, sums: Mapping[str, float]) -> dict[str, float]:
        val_loss = self._factor * sums["kl"] / max(sums["trained"], 1)
        return {"val_loss": val_loss, **{f"val_{name}": value for name, value in self.divergences(sums).items()}}


build = DistillMethod
