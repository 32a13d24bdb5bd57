"""The evaluations of a run: the model's answers to the sets of `eval`, and their rewards.

The native engine samples the answers on the training mesh with the current weights. An evaluation does not change the
weights, the optimizer, the position in the data or the random number generators, so training continues as without it.
The answers depend only on the weights, on `run.seed`, and on the numbers of the prompt and the sample.

A set's row in metrics.jsonl is written last and shows that its evaluation is complete. A resumed run repeats the
evaluations of its step that have no row.
"""

import math
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.ranks import Ranks
from dtrain.inference.native import NativeEngine
from dtrain.inference.request import Completion, Request
from dtrain.methods.method import RunContext
from dtrain.policy import Policy
from dtrain.rl.evaluation import Questions, Report, ScoredAnswer, evaluate, open_judges
from dtrain.rl.rewards import Rewards
from dtrain.rl.rewards.scoring import nan_to_none
from dtrain.training.eval_sets import EvalSet, list_eval_sets
from dtrain.training.metrics import records
from dtrain.training.spec import RunSpec

ANSWER_CHARS = 72  # characters of an answer on the terminal


@dataclass
class _OpenSet:
    """A set of `eval` with its questions and its open judges.

    Attributes:
        set: The set.
        questions: Its questions, on every rank.
        judges: Its rewards, in a process of their own. Rank 0 only.
        step: The step of its last evaluation. None before the first.
    """

    set: EvalSet
    questions: Questions
    judges: Rewards | None
    step: int | None = None

    def wrote(self, row: Mapping[str, Any]) -> bool:
        """Check whether a row of metrics.jsonl belongs to an evaluation of this set."""
        return f"{self.set.prefix}completion_len" in row


class Evaluations:
    """The evaluations of a run. All methods are collective, and every rank gets the same results."""

    def __init__(self, spec: RunSpec, policy: Policy, run: RunContext):
        """Open the judges of every set, and check that its questions fit into the engine. Collective.

        Args:
            spec: The run's spec.
            policy: The model that answers.
            run: Writes rows and lines, and closes the judges.

        Raises:
            UserError: If a set's rewards do not work, or if its prompts do not fit into memory.
        """
        self._run = run
        self._ranks = Ranks()
        self._decode = partial(spec.source.tokenizer.decode, skip_special_tokens=True)
        self._engine = NativeEngine(policy, decode=self._decode, print_line=run.metrics.print_line)
        self._sets = [self._open(spec, eval_set) for eval_set in list_eval_sets(spec.recipe.eval)]

    def _open(self, spec: RunSpec, eval_set: EvalSet) -> _OpenSet:
        """Open a set's judges on rank 0, and send its questions to the other ranks."""
        opened: list[Rewards] = []  # rank 0's judges, which are not sent

        def open_on_first_rank() -> Questions:
            questions, rewards = spec.questions[eval_set.name]
            timeout, timeout_key = eval_set.section.reward_timeout, f"{eval_set.key}.reward_timeout"
            judges, judge_batch_size = open_judges(rewards, timeout, self._run.metrics.print_line, timeout_key)
            opened.append(self._run.stack.enter_context(judges))
            if not eval_set.section.at_start:
                _try_rewards(eval_set, questions, judges)
            return replace(questions, judge_batch_size=judge_batch_size)

        questions = self._ranks.run_on_first(open_on_first_rank)
        try:
            self._engine.check(questions.requests())
        except UserError as error:
            raise UserError(f"{eval_set.key}, with {eval_set.key}.sampling: {error}") from error
        return _OpenSet(eval_set, questions, opened[0] if opened else None)

    def resume_at(self, step: int) -> dict[str, float]:
        """Find the evaluations that are complete at the step of a resume, and drop the answers of the others.

        Args:
            step: The step that the run resumes from.

        Returns:
            The fields of the step's rows in metrics.jsonl, of validations and evaluations.
        """
        path = self._run.path / "metrics.jsonl"

        def read_rows_of_step() -> list[dict[str, Any]]:
            rows = records.read_rows(path)
            return [row for row in rows if row.get("step") == step and "loss" not in row]

        rows = self._ranks.run_on_first(read_rows_of_step)
        for opened in self._sets:
            if any(opened.wrote(row) for row in rows):
                opened.step = step
            else:
                self._run.metrics.drop_answers(step, opened.set.name)
        no_metrics = {"step"}
        for opened in self._sets:
            no_metrics.add(f"{opened.set.prefix}time")
        fields = {}
        for row in rows:
            for name, value in row.items():
                if name not in no_metrics:
                    fields[name] = value
        return fields

    def evaluate(self, step: int, is_last: bool) -> Iterator[dict[str, float]]:
        """Evaluate each set that is due after `step` and not done yet, and yield its fields of metrics.jsonl.

        Args:
            step: The step.
            is_last: Whether it is the last step of the run.

        Raises:
            Interrupted: On every rank, if the run is asked to stop.
            UserError: If a reward has never worked.
        """
        for opened in self._sets:
            if opened.step != step and opened.set.is_due(step, is_last):
                fields = self._evaluate_set(opened, step)
                opened.step = step
                yield fields

    def _evaluate_set(self, opened: _OpenSet, step: int) -> dict[str, float]:
        """Evaluate a set, write its answers and its row, and print the results. Return its fields."""
        began = time.perf_counter()
        metrics, should_stop = self._run.metrics, self._run.should_stop
        table: list[str] = []  # lines with the first answers, on rank 0

        def generate(requests: Sequence[Request]) -> Sequence[Completion]:
            return self._engine.generate(requests, should_stop)

        def keep(answers: list[ScoredAnswer]) -> None:
            metrics.write_rows("evals", step, (_answer_row(opened, answer) for answer in answers))
            first_samples = [answer for answer in answers if answer.sample == 0]
            to_show = first_samples[: opened.set.section.show]
            if to_show:
                table.append("  reward  tokens  answer")
                table.extend(_answer_line(answer) for answer in to_show)

        report = evaluate(
            opened.questions, generate, self._decode, opened.judges, keep, ranks=self._ranks, should_stop=should_stop
        )
        prefix = opened.set.prefix
        fields = {f"{prefix}{name}": value for name, value in fields_of(report).items()}
        seconds = time.perf_counter() - began
        metrics.log(fields | {f"{prefix}time": seconds}, step)
        for line in [_summary(opened.set.name, step, report, seconds), *table]:
            metrics.print_line(line)
        return fields


def fields_of(report: Report) -> dict[str, float]:
    """Return a report as the fields of a row, without a set's prefix. Unknown values (NaN) are left out."""
    fields: dict[str, float] = {"reward_mean": report.reward, "reward_stderr": report.reward_stderr}
    if len(report.rewards) > 1:
        for name, value in report.rewards.items():
            fields[f"reward/{name}"] = value
    for k, value in report.passes.items():
        fields[f"pass@{k}"] = value
    fields["completion_len"] = report.completion_len
    fields["truncated_frac"] = report.truncated_frac
    fields["unknown"] = report.unknown
    return {name: value for name, value in fields.items() if not math.isnan(value)}


def _try_rewards(eval_set: EvalSet, questions: Questions, judges: Rewards) -> None:
    """Score an empty answer, so that rewards that cannot work at all end the run before it trains.

    This is for sets whose first evaluation comes only after some steps.

    Raises:
        UserError: If a reward fails.
    """
    # The checks of the recipe have queried the server of a judge already (`setup.evals`).
    if any(reward.fn == "judge" for reward in eval_set.section.rewards):
        return
    prompt = questions.items[0].prompt
    columns = {name: [value] for name, value in prompt.columns.items()}
    judges.score([prompt.content], [""], [[]], columns)


def _answer_row(opened: _OpenSet, answer: ScoredAnswer) -> dict[str, Any]:
    """Return the row of an answer in evals.jsonl, without its step."""
    question = opened.questions.items[answer.index]
    prompt = question.prompt
    row: dict[str, Any] = {
        "set": opened.set.name,
        "index": answer.index,
        "sample": answer.sample,
        "prompt": prompt.content,
    }
    if question.images:
        row["images"] = [image.entry for image in question.images]
    if "answer" in prompt.columns:
        row["answer"] = prompt.columns["answer"]
    row["text"] = answer.text
    row["reward"] = nan_to_none(answer.reward)
    row["rewards"] = nan_to_none(answer.parts)
    row["completion_len"] = len(answer.completion.ids)
    row["truncated"] = answer.completion.finish == "length"
    return row


def _summary(name: str, step: int, report: Report, seconds: float) -> str:
    """Return the line of an evaluation on the terminal.

    For example:

        step 20  math: reward 0.412 ± 0.031 by math_exact, 87.5 tokens, 3% cut off (4.2 s)
    """
    if math.isnan(report.reward):
        reward = "no reward known"
    else:
        reward = f"reward {report.reward:.3f}"
        if not math.isnan(report.reward_stderr):
            reward += f" ± {report.reward_stderr:.3f}"
        if len(report.rewards) == 1:
            (only_name,) = report.rewards
            reward += f" by {only_name}"
    passed = "".join(f", pass@{k} {value:.1%}" for k, value in report.passes.items())
    unknown = f", {report.unknown} without reward" if report.unknown else ""
    return (
        f"step {step}  {name}: {reward}{passed}, {report.completion_len:.1f} tokens, "
        f"{report.truncated_frac:.0%} cut off{unknown} ({seconds:.1f} s)"
    )


def _answer_line(answer: ScoredAnswer) -> str:
    """Return the line of an answer in the table on the terminal."""
    reward = "-" if math.isnan(answer.reward) else f"{answer.reward:.3g}"
    text = textwrap.shorten(answer.text, ANSWER_CHARS, placeholder="...")
    return f"  {reward:>6}  {len(answer.completion.ids):>6}  {text}"
