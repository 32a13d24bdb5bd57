"""The evaluations of a run: its model's answers to the sets of `eval`, drawn where it trains, and judged.

The native engine draws on the training mesh with the weights of now. Nothing that training reads is touched: draws
depend on `run.seed`, the prompt's and the sample's number alone, and an evaluation leaves weights, optimizer, data and
generators as it found them. A set's row in metrics.jsonl is the sign that its evaluation is done: a resume does again
what has none, and that alone.
"""

import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.ranks import Ranks
from dtrain.inference.native import NativeEngine
from dtrain.methods.method import RunContext
from dtrain.policy import Policy
from dtrain.rl.judging import Questions, Report, ScoredAnswer, evaluate, open_judges
from dtrain.rl.rewards import Rewards
from dtrain.rl.rewards.scoring import known
from dtrain.training.eval_sets import EvalSet, sets
from dtrain.training.metrics import records
from dtrain.training.spec import RunSpec

WIDTH = 72


@dataclass
class _Open:
    """A set of a run. judges: on rank 0 alone. step: of its last evaluation."""

    set: EvalSet
    questions: Questions
    judges: Rewards | None
    step: int | None = None

    def is_its(self, row: Mapping[str, Any]) -> bool:
        return f"{self.set.prefix}completion_len" in row


class Evaluations:
    """Evaluations of a run. Every rank makes the same calls, and gets the same answers; all are collective.

    Raises UserError for sets that cannot be asked, or do not fit into memory.
    """

    def __init__(self, spec: RunSpec, policy: Policy, run: RunContext):
        self._run, self._ranks = run, Ranks()
        self._decode = partial(spec.source.tokenizer.decode, skip_special_tokens=True)
        self._engine = NativeEngine(policy, decode=self._decode, say=run.metrics.say)
        self._sets = [self._open(spec, each) for each in sets(spec.recipe.eval)]

    def _open(self, spec: RunSpec, eval_set: EvalSet) -> _Open:
        opened: list[Rewards] = []

        def open_set() -> Questions:
            questions, rewards = spec.questions[eval_set.name]
            judges, together = open_judges(
                rewards,
                eval_set.section.reward_timeout,
                self._run.metrics.say,
                f"{eval_set.key}.reward_timeout",
            )
            opened.append(self._run.stack.enter_context(judges))
            if not eval_set.section.at_start:
                _try(eval_set, questions, judges)
            return replace(questions, together=together)

        questions = self._ranks.first(open_set)
        try:
            self._engine.check(questions.requests())
        except UserError as error:
            raise UserError(f"{eval_set.key}, with {eval_set.key}.sampling: {error}") from error
        return _Open(eval_set, questions, opened[0] if opened else None)

    def resume_at(self, step: int) -> dict[str, float]:
        """Return what was measured at `step`, where a run goes on, by the record. Answers of an evaluation that a stop
        has cut short are dropped."""
        path = self._run.path / "metrics.jsonl"
        rows = self._ranks.first(
            lambda: [row for row in records.read_rows(path) if row.get("step") == step and "loss" not in row]
        )
        for each in self._sets:
            if any(map(each.is_its, rows)):
                each.step = step
            else:
                self._run.metrics.drop_answers(step, each.set.name)
        left_out = {"step", *(f"{each.set.prefix}time" for each in self._sets)}
        return {name: value for row in rows for name, value in row.items() if name not in left_out}

    def evaluate(self, step: int, is_last: bool) -> Iterator[dict[str, float]]:
        """The fields of each set that is due after `step` and was not evaluated there. Raises Interrupted, on every
        rank, where the run is asked to stop, and UserError for a reward that never worked."""
        for each in self._sets:
            if each.step != step and each.set.is_due(step, is_last):
                fields = self._of(each, step)
                each.step = step
                yield fields

    def _of(self, opened: _Open, step: int) -> dict[str, float]:
        began, metrics = time.perf_counter(), self._run.metrics
        shown: list[str] = []

        def keep(answers: list[ScoredAnswer]) -> None:
            metrics.write_rows("evals", step, (_line(opened, answer) for answer in answers))
            first = [answer for answer in answers if answer.sample == 0][: opened.set.section.show]
            if first:
                shown.extend(["  reward  tokens  answer", *(_shown(answer) for answer in first)])

        report = evaluate(
            opened.questions,
            lambda requests: self._engine.generate(requests, self._run.should_stop),
            self._decode,
            opened.judges,
            keep,
            ranks=self._ranks,
            should_stop=self._run.should_stop,
        )
        fields = {f"{opened.set.prefix}{name}": value for name, value in fields_of(report).items()}
        seconds = time.perf_counter() - began
        metrics.log(fields | {f"{opened.set.prefix}time": seconds}, step)
        for line in [_summary(opened.set.name, step, report, seconds), *shown]:
            metrics.say(line)
        return fields


def fields_of(report: Report) -> dict[str, float]:
    """A report as fields of a row; what is not known is absent."""
    parts = {f"reward/{name}": value for name, value in report.rewards.items()} if len(report.rewards) > 1 else {}
    fields = {
        "reward_mean": report.reward,
        "reward_stderr": report.reward_stderr,
        **parts,
        **{f"pass@{k}": value for k, value in report.passes.items()},
        "completion_len": report.completion_len,
        "truncated_frac": report.truncated_frac,
        "unknown": report.unknown,
    }
    return {name: value for name, value in fields.items() if value == value}


def _try(eval_set: EvalSet, questions: Questions, judges: Rewards) -> None:
    """Check that rewards that have nothing to judge before training starts can do so at all: on an empty answer.
    Raises UserError."""
    if any(reward.fn == "judge" for reward in eval_set.section.rewards):  # it is asked otherwise whether it is there
        return
    prompt = questions.items[0].prompt
    judges.score([prompt.content], [""], [[]], {name: [value] for name, value in prompt.columns.items()})


def _line(opened: _Open, answer: ScoredAnswer) -> dict[str, Any]:
    question = opened.questions.items[answer.index]
    prompt = question.prompt
    images = {"images": [image.entry for image in question.images]} if question.images else {}
    reference = {"answer": prompt.columns["answer"]} if "answer" in prompt.columns else {}
    return {
        "set": opened.set.name,
        "index": answer.index,
        "sample": answer.sample,
        "prompt": prompt.content,
        **images,
        **reference,
        "text": answer.text,
        "reward": known(answer.reward),
        "rewards": known(answer.parts),
        "completion_len": len(answer.completion.ids),
        "truncated": answer.completion.finish == "length",
    }


def _summary(name: str, step: int, report: Report, seconds: float) -> str:
    error = "" if report.reward_stderr != report.reward_stderr else f" ± {report.reward_stderr:.3f}"
    by = f" by {next(iter(report.rewards))}" if len(report.rewards) == 1 else ""
    reward = "no reward known" if report.reward != report.reward else f"reward {report.reward:.3f}{error}{by}"
    passed = "".join(f", pass@{k} {value:.1%}" for k, value in report.passes.items())
    unknown = f", {report.unknown} without reward" if report.unknown else ""
    return (
        f"step {step}  {name}: {reward}{passed}, {report.completion_len:.1f} tokens, "
        f"{report.truncated_frac:.0%} cut off{unknown} ({seconds:.1f} s)"
    )


def _shown(answer: ScoredAnswer) -> str:
    reward = "-" if answer.reward != answer.reward else f"{answer.reward:.3g}"
    text = textwrap.shorten(answer.text, WIDTH, placeholder="...")
    return f"  {reward:>6}  {len(answer.completion.ids):>6}  {text}"
