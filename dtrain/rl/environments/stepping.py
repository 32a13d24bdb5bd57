"""Environments in one worker process that may hang, crash or be killed without harm to the run."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from dtrain.base.errors import UserError
from dtrain.data.text.tool_calls import ERROR_PREFIX
from dtrain.rl.environments.calls import MAX_TIMEOUTS_IN_A_ROW, total
from dtrain.rl.rewards.catalog import find
from dtrain.rl.worker import Outcome, Worker, WorkerLost

GRACE = 5.0  # seconds behind the timeout after which the process itself hangs, in C say, and not one of its threads
KEY = "grpo.environment_timeout"

Observation = str | Sequence[dict[str, Any]]
Failures = dict[tuple[str, str], list[str]]  # by stage and cause: what went wrong, of each environment


@dataclass(frozen=True)
class Turn:
    """Input of environment `number`: a completion's text, and whether nothing is read after it. room: tokens that are
    left of the sequence behind it."""

    number: int
    text: str
    is_last: bool
    room: float = math.inf


@dataclass(frozen=True)
class EnvironmentReply:
    """Reply of an environment to one completion: what it earned, whether that was all, the ids that are read next
    (none after the last), with how many answers of tools and failures among them. is_lost: nothing of that is known, or
    there will be no more. metrics: the environment's."""

    earned: float | None = None
    done: bool = False
    ids: Sequence[int] = ()
    is_lost: bool = False
    calls: int = 0
    failures: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environments(Worker):
    """Environments that the function at import path `path` makes, in a process of their own; or, with `options`, what
    it gives for these, under the recipe's key for that, `whose`.

    timeout: seconds that making one may take, or one step with its observation. threads: how many are made or stepped
    side by side; with 1 all is done in one thread, in the order of the calls. grace: seconds more until the process is
    killed where it does not give up by itself what takes too long. say: gets what went wrong, once for each cause.

    An environment is lost where it raises, gives something of a wrong type or takes too long; all are where their
    process ends or no longer answers, and it is replaced when others are made. As long as nothing of its kind (a make,
    a step, an observation) has ever worked, that is its user's mistake: a UserError with the end of the traceback. It
    is a UserError, too, where there is no such function or it cannot be loaded. Not for several threads at once.
    """

    def __init__(
        self,
        path: str,
        *,
        options: Sequence[Any] | None = None,
        whose: str | None = None,
        timeout: float = 60.0,
        threads: int = 1,
        say: Callable[[str], None] = print,
        grace: float = GRACE,
    ):
        self._whose, self._grace = whose or f"environment {path}", grace
        self._live: set[int] = set()
        self._count = 0
        super().__init__(
            "dtrain.rl.environments.calls:EnvironmentCalls",
            *find(path, "environment"),
            options,
            timeout,
            threads,
            what=whose or f"the environments of {path}",
            timeout=timeout,
            key=KEY,
            say=say,
        )

    def make(self, seeded_rows: Sequence[tuple[Mapping[str, Any], int]]) -> None:
        """Make an environment for each row and seed, numbered from 0; those before are gone."""
        self._count = len(seeded_rows)
        self._live.clear()
        try:
            self._renew()
        except WorkerLost as lost:
            self._report_once("make", str(lost), f"{self._whose}: their process {lost}{self._loss(self._count)}")
            return
        answers = self._answers("make", range(self._count), seeded_rows)
        failures: Failures = defaultdict(list)
        for number, answer in answers.items():
            if "value" in answer:
                self._has_worked.add("make")
            if "value" in answer and "lost" not in answer:
                self._live.add(number)
            else:
                self._add(failures, "make", answer)
        self._report_failures(failures)

    def step(self, turns: Sequence[Turn], encode: Callable[[int, Observation], list[int]]) -> list[EnvironmentReply]:
        """Return a reply to each turn, in their order; no environment has two. encode: ids of an observation, from its
        index in `turns`; a UserError that it raises is the environment's. Lost environments are
        not asked again."""
        content = [(turn.number, turn.text, turn.is_last) for turn in turns if turn.number in self._live]
        answers = self._answers("step", [number for number, *_ in content], content)
        failures: Failures = defaultdict(list)
        replies = []
        full: list[int] = []  # indices of turns whose observation leaves no room for a completion
        for index, turn in enumerate(turns):
            reply = EnvironmentReply(is_lost=True)
            if turn.number in self._live:
                answer = answers[turn.number]
                value = answer.get("value")
                if value is not None:
                    self._has_worked.add("step")
                if value is not None and (value["done"] or turn.is_last):
                    reply = EnvironmentReply(value["earned"], value["done"], metrics=value["metrics"])
                elif value is None or "lost" in answer:
                    self._add(failures, "step", answer)
                else:
                    try:
                        observation = value["observation"]
                        calls, failed = count_tool_answers(observation)
                        ids = encode(index, observation)
                        reply = EnvironmentReply(value["earned"], False, ids, False, calls, failed, value["metrics"])
                        if len(ids) >= turn.room:
                            full.append(index)
                        self._has_worked.add("observe")
                    except UserError as error:
                        failures["observe", "encode"].append(f"{self._whose}: {error}")
            replies.append(reply)
        numbers = [turns[index].number for index in full]
        for index, answer in zip(full, self._answers("end", numbers, numbers).values(), strict=True):
            value = answer.get("value")
            if value is None or "lost" in answer:
                self._add(failures, "end", answer)
                replies[index] = EnvironmentReply(is_lost=True)
            else:
                self._has_worked.add("end")
                earned = total(replies[index].earned, value["earned"])
                replies[index] = replace(replies[index], earned=earned, metrics=value["metrics"])
        self._report_failures(failures)
        self._live -= {turn.number for turn, reply in zip(turns, replies, strict=True) if reply.is_lost}
        return replies

    def forget(self) -> None:
        """Let the environments go, with what they hold."""
        self._live.clear()
        if self._is_alive:
            try:
                list(self.call("forget", grace=self._grace))
            except WorkerLost as lost:
                self._report_once("end", str(lost), f"{self._whose}: their process {lost} when they were over")

    def _renew(self) -> None:
        """Start another process where this one is gone, or has threads that hang and slow it down for ever."""
        if self._is_alive:
            with suppress(WorkerLost):
                (stuck,) = self.call("stuck", grace=self._grace)
                if stuck:
                    self._kill()
        self._ensure_running()

    def _answers(self, method: str, numbers: Sequence[int], content: Sequence[Any]) -> dict[int, Outcome]:
        """Return an answer for each number; where the process is lost, each says so."""
        answers: dict[int, Outcome] = {number: {} for number in numbers}
        if content:
            try:
                for number, answer in self.call(method, content, grace=self._grace):
                    answers[number] = answer
            except WorkerLost as lost:
                for answer in answers.values():
                    answer["lost"] = str(lost)
        return answers

    def _add(self, failures: Failures, stage: str, answer: Outcome) -> None:
        stage, late = answer.get("stage", stage), f"took longer than {self._timeout:g} s ({KEY})"
        if answer.get("missed") == "untried":
            many = f"{MAX_TIMEOUTS_IN_A_ROW} times or more in a row: the others were not tried"
            cause, text = "untried", f"{self._whose}: {stage} {late} {many}"
        elif "missed" in answer:
            cause, text = "late", f"{self._whose}: {stage} {late}"
        elif "user" in answer:
            cause, text = "user", f"{self._whose}: {stage} {answer['user']}"
        elif "error" in answer:
            cause, text = answer["kind"], f"{self._whose} failed in {stage}:\n{answer['error']}"
        else:
            cause, text = answer["lost"], f"{self._whose}: their process {answer['lost']} in {stage}"
        failures[stage, cause].append(text)

    def _report_failures(self, failures: Failures) -> None:
        for (stage, cause), texts in failures.items():
            self._report_failure(stage, cause, texts[0], self._loss(len(texts)))

    def _loss(self, count: int) -> str:
        return f"\nwhat {count} of {self._count} episodes earned is unknown"


def count_tool_answers(observation: Observation) -> tuple[int, int]:
    """Return the number of tools' answers in an observation, and of those that say that a call failed."""
    messages = [] if isinstance(observation, str) else observation
    answers = [str(message.get("content")) for message in messages if message["role"] == "tool"]
    return len(answers), sum(text.startswith(ERROR_PREFIX) for text in answers)
