"""On-policy distillation: the student answers the data's prompts itself, and learns the teacher's distribution at the
tokens that it drew (Agarwal et al., arXiv:2306.13649).
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from dtrain.base.batch import Batch
from dtrain.base.run_context import RunContext
from dtrain.data import Cursor, Rows, Tokenizer
from dtrain.methods.distill import DistillMethod
from dtrain.methods.rollout_method import RolloutMethod
from dtrain.policy import Policy
from dtrain.recipe.schema import Grpo
from dtrain.rl.buffer import Buffer, Sample
from dtrain.rl.collect import Collector, PromptRow, Rollout, lengths_of
from dtrain.rl.engines import open_engine


class OnPolicyDistillMethod(RolloutMethod, DistillMethod):
    """Distillation where `distill.samples` is student: the loss is `DistillMethod`'s, its tokens those of rollouts.

    Steps take a rollout's samples in the data's order, so that student_share of each step's are the student's. A
    validation set is answered by the student too, by its likeliest tokens.
    """

    @property
    def rollouts(self) -> Grpo:
        section = self.recipe.distill
        prompts = section.prompts_per_step or self.recipe.train.batch
        return Grpo(prompts_per_step=prompts, group_size=1, rewards=[], sampling=section.sampling)

    @property
    def choices(self) -> list[str]:
        drawn, share = self.rollouts.prompts_per_step, self.recipe.distill.student_share
        steps = self._steps(drawn)
        theirs = "all" if share == 1 else f"{share:g} of them"
        plural = "s" if steps > 1 else ""
        line = f"a rollout: {drawn} prompts, {theirs} answered by the student, for {steps} optimizer step{plural}"
        return [line, *super().choices]

    def begin(self, policy: Policy, splits: Mapping[str, Rows], run: RunContext) -> None:
        """Opens the teacher and the engine."""
        super().begin(policy, splits, run)
        recipe = replace(self.recipe, grpo=self.rollouts)
        tokenizer = Tokenizer.from_directory(recipe.model.directory)
        self.policy, self._run = policy, run
        self._collector: StudentCollector = StudentCollector(
            Fraction(str(recipe.distill.student_share)),
            recipe.grpo,
            engine=open_engine(recipe.grpo, policy, tokenizer, run, recipe.model.directory, recipe.lora),
            rows=splits["train"],
            tokenizer=tokenizer,
            rewards=None,
            episodes=None,
            max_length=recipe.data.max_length,
            seed=recipe.run.seed,
            ask_stop=run.ask_stop,
        )

    def _adopt(self, rollout: Rollout) -> None:
        super()._adopt(rollout)
        self._run.metrics.samples(self._position.step + 1, rollout.rows)

    def fields(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The divergences, and the rollout's lengths; `rollout_time` in the first step of a rollout alone."""
        measured = dict(self._measured)
        if self._position.done > 1:
            measured.pop("rollout_time", None)
        return measured | self.divergences(sums)

    def val_batches(self, policy: Policy, rows: Rows) -> Iterator[Batch]:
        placements, first = rows.placements(), 0
        while taken := list(islice(placements, self.recipe.train.batch)):
            prompts = self._collector.prompts_at(rows, taken, first)
            first += len(taken)
            buffer = _buffer(self._collector.answer_greedily(prompts, self._position.step))
            yield buffer.batch(self._shares(buffer, range(len(buffer)))[policy.mesh.dp_rank])


class StudentCollector(Collector):
    """Draws rollouts without rewards, in which a `share` of the samples is the student's and the rest the data's."""

    def __init__(self, share: Fraction, section: Grpo, **parts: Any):
        super().__init__(section, **parts)
        self.share = share

    def collect(self, cursor: Cursor, version: int) -> Rollout | None:
        began = time.perf_counter()
        taken = list(islice(self.rows.placements(cursor), self.section.prompts_per_step))
        if not taken:
            return None
        prompts = self.prompts_at(self.rows, taken, self.rows.rows_before(cursor))
        drawing = [prompt for prompt in prompts if self.is_drawn(prompt.index)]
        drawn = self._draw(drawing, self._requests(drawing), version, self.ask_stop) if drawing else []
        answers = iter(drawn)
        samples = [
            next(answers) if self.is_drawn(prompt.index) else self._of_data(placement.samples[0])
            for prompt, placement in zip(prompts, taken, strict=True)
        ]
        measured = lengths_of(drawn) | {"rollout_time": time.perf_counter() - began}
        lines = self._sample_lines(drawing, drawn) if self.ranks.is_first else []
        return Rollout(_buffer(samples), taken[-1].after, taken[-1].epochs, measured, lines)

    def is_drawn(self, index: int) -> bool:
        """Return whether the student answers the prompt at this place of the endless sequence. The places are spread
        evenly, so that any so many prompts in a row have `share` of them, as whole numbers allow."""
        return (index + 1) * self.share // 1 > index * self.share // 1

    def answer_greedily(self, prompts: Sequence[PromptRow], version: int) -> list[Sample]:
        """A completion of the likeliest tokens for each prompt."""
        return self._draw(prompts, self._requests(prompts, greedy=True), version)

    def _of_data(self, sample: int) -> Sample:
        """Return what the data has for a prompt: the row as it is trained with `distill.samples=data`."""
        ids, trained = self.rows.samples[sample][1]
        return Sample([], ids.tolist(), trained.tolist(), [0.0] * len(ids), "data")

    def _sample_lines(self, prompts: Sequence[PromptRow], drawn: Sequence[Sample]) -> list[dict[str, Any]]:
        """Return the rows of samples.jsonl, one for each completion that was drawn."""
        return [
            {
                "group": prompt.index,
                "prompt": prompt.row["prompt"],
                "completion": self.tokenizer.decode(list(sample.ids), skip_special_tokens=True),
                "tokens": len(sample.ids),
                "finish": sample.finish,
            }
            for prompt, sample in zip(prompts, drawn, strict=True)
        ]


def _buffer(samples: Sequence[Sample]) -> Buffer:
    """Return a buffer of samples that all count, and train what was drawn or is marked."""
    all_of_them: Tensor = torch.ones(len(samples), dtype=torch.bool)
    return Buffer.of(samples, torch.zeros(len(samples)), all_of_them, all_of_them)


build = OnPolicyDistillMethod
