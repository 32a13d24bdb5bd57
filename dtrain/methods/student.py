"""The student's own samples for on-policy distillation, drawn as rollouts without rewards."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dtrain.base.ranks import Ranks
from dtrain.base.run_context import RunContext
from dtrain.data import Cursor, Rows, Tokenizer
from dtrain.inference.native import NativeEngine
from dtrain.methods.rollouts import Buffer
from dtrain.policy import Policy
from dtrain.rl.collect import CompletionSampler, PromptRow, Rollout, Sample, lengths_of, prompts_from, prompts_of

if TYPE_CHECKING:
    from dtrain.methods.distill import OnPolicyDistillMethod


@dataclass
class StudentCollector:
    """Draws rollouts of so many `prompts` without rewards, in which a `share` of the samples is the student's and the
    rest the data's. Collective."""

    share: Fraction
    prompts: int
    sampler: CompletionSampler
    rows: Rows

    def collect(self, cursor: Cursor, version: int) -> Rollout | None:
        began = time.perf_counter()
        prompts = prompts_from(self.rows, cursor, self.prompts)
        if not prompts:
            return None
        drawing = [prompt for prompt in prompts if self.is_drawn(prompt.index)]
        drawn = self.sampler.draw(drawing, version) if drawing else []
        answers = iter(drawn)
        samples = [
            next(answers) if self.is_drawn(prompt.index) else self._of_data(*prompt.place.samples) for prompt in prompts
        ]
        measured = lengths_of(drawn) | {"rollout_time": time.perf_counter() - began}
        lines = self._sample_lines(drawing, drawn) if Ranks().is_first else []
        return Rollout(samples, *_all_counted(samples), prompts[-1].place, measured, lines)

    def answers(self, rows: Rows, batch: int, version: int) -> Iterator[Buffer]:
        """Yield the student's likeliest answers to all prompts of `rows`, so many of them at once. Collective."""
        for prompts in prompts_of(rows, batch):
            samples = self.sampler.draw(prompts, version, greedy=True)
            yield Buffer.of(samples, *_all_counted(samples))

    def is_drawn(self, index: int) -> bool:
        """Return whether the student answers the prompt at this place of the endless sequence. The places are spread
        evenly, so that any so many prompts in a row have `share` of them, as whole numbers allow."""
        return (index + 1) * self.share // 1 > index * self.share // 1

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
                "completion": self.sampler.tokenizer.decode(list(sample.ids), skip_special_tokens=True),
                "tokens": len(sample.ids),
                "finish": sample.finish,
            }
            for prompt, sample in zip(prompts, drawn, strict=True)
        ]


def _all_counted(samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Return advantages, counted and trained of samples that all count, and train what was drawn or is marked."""
    every = torch.ones(len(samples), dtype=torch.bool)
    return torch.zeros(len(samples)), every, every


def open_student(method: "OnPolicyDistillMethod", policy: Policy, rows: Rows, run: RunContext) -> StudentCollector:
    """Return the collector of the method's rollouts, to prompts of `rows`, by the native engine. Collective."""
    recipe, section = method.recipe, method.section
    tokenizer = Tokenizer.from_directory(recipe.model.directory)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    engine = NativeEngine(policy, decode=decode, say=run.metrics.say)
    length, seed = recipe.data.max_length, recipe.run.seed
    sampler = CompletionSampler(engine, tokenizer, section.sampling, length, seed, run.ask_stop)
    return StudentCollector(Fraction(str(section.student_share)), method.source.size, sampler, rows)
