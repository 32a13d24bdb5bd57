"""On-policy distillation: the student completes the prompts of the data and is trained on its own completions.

A rollout has no rewards. The section of the recipe and the loss are those of method `distill` in dtrain.methods.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from dtrain.base.batch import Batch
from dtrain.base.errors import Problem
from dtrain.base.ranks import Ranks
from dtrain.data.formats.prompts import PromptOptions
from dtrain.data.rows.rows import Cursor, Rows
from dtrain.inference.decodable import find_decoding_problem
from dtrain.inference.native import NativeEngine
from dtrain.methods.distill import DistillMethod
from dtrain.methods.method import RunContext
from dtrain.models.common.config import ModelConfig
from dtrain.policy import Policy
from dtrain.rl.collect import CompletionSampler, PromptRow, Rollout, iterate_prompts, length_metrics, read_prompts
from dtrain.rl.rollouts import Buffer, Rollouts
from dtrain.rl.samples import Sample


@dataclass
class StudentCollector:
    """Collects rollouts without rewards. All ranks call its methods together.

    Attributes:
        share: The share of a rollout's samples that the student generates. The others are rows of the data.
        prompts: The number of prompts of a rollout.
        sampler: Generates the student's completions.
        rows: The training data.
    """

    share: Fraction
    prompts: int
    sampler: CompletionSampler
    rows: Rows

    def collect(self, cursor: Cursor, version: int) -> Rollout | None:
        """Collect the rollout whose prompts begin at `cursor`. None at the end of the data's epochs.

        Collectives:
            Those of the engine.
        """
        began = time.perf_counter()
        prompts = read_prompts(self.rows, cursor, self.prompts)
        if not prompts:
            return None
        student_prompts = [prompt for prompt in prompts if self.is_sampled(prompt.index)]
        completions = self.sampler.sample(student_prompts, version) if student_prompts else []
        by_index = {prompt.index: completion for prompt, completion in zip(student_prompts, completions, strict=True)}
        samples = []
        for prompt in prompts:
            if prompt.index in by_index:
                samples.append(by_index[prompt.index])
            else:
                (row,) = prompt.sample_group.samples
                samples.append(self._sample_of_data(row))
        measured = length_metrics(completions) | {"rollout_time": time.perf_counter() - began}
        lines = self._sample_lines(student_prompts, completions) if Ranks().is_first else []
        advantages, counted, trained = _all_counted(samples)
        return Rollout(samples, advantages, counted, trained, prompts[-1].sample_group, measured, lines)

    def answers(self, rows: Rows, batch: int, version: int) -> Iterator[Buffer]:
        """Yield the student's greedy completions of all prompts of `rows`, `batch` prompts at a time.

        Collectives:
            Those of the engine.
        """
        for prompts in iterate_prompts(rows, batch):
            samples = self.sampler.sample(prompts, version, greedy=True)
            yield Buffer.from_samples(samples, *_all_counted(samples))

    def is_sampled(self, index: int) -> bool:
        """Return whether the student completes prompt number `index`.

        The student's prompts are spread evenly over the data: among the first n prompts are floor(n * share) of them.
        For example, with a share of 2/5 the student completes the prompts 2, 4, 7, 9, ... (counted from 0).
        """
        return (index + 1) * self.share // 1 > index * self.share // 1

    def _sample_of_data(self, sample: int) -> Sample:
        """Return a row of the data as a sample, trained as with `distill.samples=data`."""
        ids, trained = self.rows.samples[sample][1]
        return Sample([], ids.tolist(), trained.tolist(), [0.0] * len(ids), "data")

    def _sample_lines(self, prompts: Sequence[PromptRow], completions: Sequence[Sample]) -> list[dict[str, Any]]:
        """Return the rows of samples.jsonl, one for each completion of the student."""
        return [
            {
                "group": prompt.index,
                "prompt": prompt.row["prompt"],
                "completion": self.sampler.tokenizer.decode(list(sample.ids), skip_special_tokens=True),
                "tokens": len(sample.ids),
                "finish": sample.finish,
            }
            for prompt, sample in zip(prompts, completions, strict=True)
        ]


def _all_counted(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the advantages, all 0, and `counted` and `trained`, all true, [N] each."""
    every = torch.ones(len(samples), dtype=torch.bool)
    return torch.zeros(len(samples)), every, every


class OnPolicyDistillMethod(DistillMethod):
    """Method `distill` with `distill.samples=student`.

    The student completes the data's prompts itself and learns the teacher's distribution at the tokens that it sampled
    (Agarwal et al., arXiv:2306.13649). The loss is that of `DistillMethod`. Steps take a rollout's samples in the
    data's order, so `distill.student_share` of each step's samples are the student's. On validation data the student
    completes the prompts greedily.
    """

    kind = "prompts"
    shared_beginnings = "prompts"

    def problems(self) -> list[Problem]:
        section, errors = self.section, self.unread_problems()
        rollout, batch = section.prompts_per_step, self.recipe.train.global_batch
        if rollout is not None and isinstance(batch, int) and rollout >= 1 and batch >= 1 and rollout % batch:
            text = f"train.global_batch={batch} does not divide a rollout of distill.prompts_per_step={rollout} prompts"
            fix = f"Set distill.prompts_per_step={-(-rollout // batch) * batch}, or leave it out"
            errors.append(Problem("train.global_batch", text, fix))
        errors += self.completion_length_problems()
        if section.student_share == 1 and self.recipe.data.loss_on != "assistant":
            text = (
                f"data.loss_on={self.recipe.data.loss_on} has no effect if the student samples every completion, "
                "because the sampled tokens are trained"
            )
            errors.append(Problem("data.loss_on", text, "Leave it out, or lower distill.student_share"))
        return errors

    def model_problems(self, model: ModelConfig) -> list[Problem]:
        problem = find_decoding_problem(model)
        if problem is None:
            return []
        text = f"distill.samples=student cannot sample from {model.architecture}: {problem}"
        return [Problem("distill.samples", text, "Set distill.samples=data")]

    def format_problem(self, format: str) -> str | None:
        if format in ("preference", "text"):
            return (
                "distill.samples=student draws its own answers to prompts; give it messages, question or "
                "prompt_completion, or set distill.samples=data"
            )
        if format == "question" and self.section.student_share < 1:
            return "a question has no answer for the data's part of the samples: set distill.student_share=1"
        return None

    def prompts(self) -> PromptOptions:
        section = self.section
        loss_on = self.recipe.data.loss_on if section.student_share < 1 else None
        return PromptOptions.for_length(
            self.recipe.data.max_length, section.sampling.max_new_tokens, None, loss_on=loss_on
        )

    def automatic_batch(self, rows: int) -> int:
        return self.section.prompts_per_step or super().automatic_batch(rows)

    @cached_property
    def source(self) -> Rollouts:
        settings = {"train.global_batch": self.recipe.train.global_batch}
        return Rollouts(self, settings, self.section.prompts_per_step)

    @property
    def choices(self) -> list[str]:
        num_prompts = self.source.size
        share = self.section.student_share
        steps = self.source.steps(num_prompts)
        part = "all" if share == 1 else f"{share:g} of them"
        plural = "s" if steps > 1 else ""
        line = f"a rollout: {num_prompts} prompts, {part} answered by the student, for {steps} optimizer step{plural}"
        return [line, *super().choices]

    def begin(self, policy: Policy, splits: Mapping[str, Rows], run: RunContext) -> None:
        """Open the teacher and the engine."""
        super().begin(policy, splits, run)
        self._run = run
        self.collector = open_student(self, policy, splits["train"], run)

    def before_step(self, cursor: Cursor) -> None:
        """Sample a rollout if the steps on the last one are done."""
        rollout = self.source.next_rollout(self.collector.collect, cursor)
        if rollout is not None:
            self._run.metrics.write_rows("samples", self.source.position.step + 1, rollout.rows)

    def with_prompt_ids(self, batch: Batch) -> Batch:
        """Override `Method.with_prompt_ids`. Nothing is shared if the teacher, which gets the same rows, cannot."""
        return super().with_prompt_ids(batch) if self.teacher.can_share_prompts else batch

    def train_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the divergences and the rollout's lengths. Only a rollout's first step has `rollout_time`."""
        return self.source.fields | self.divergences(sums)

    def val_batches(self, policy: Policy, rows: Rows) -> Iterator[Batch]:
        for buffer in self.collector.answers(rows, self.recipe.train.num_batch_rows, self.source.position.step):
            shares = self.source.split_over_ranks(policy, buffer, range(len(buffer)))
            yield buffer.batch(shares[policy.mesh.dp_rank])


def open_student(method: OnPolicyDistillMethod, policy: Policy, rows: Rows, run: RunContext) -> StudentCollector:
    """Return the collector of the method's rollouts, with the native engine and the prompts of `rows`."""
    recipe, section = method.recipe, method.section
    tokenizer = run.source.tokenizer
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    engine = NativeEngine(policy, decode=decode, print_line=run.metrics.print_line)
    length, seed = recipe.data.max_length, recipe.run.seed
    sampler = CompletionSampler(engine, tokenizer, section.sampling, length, seed, run.should_stop)
    return StudentCollector(Fraction(str(section.student_share)), method.source.size, sampler, rows)
