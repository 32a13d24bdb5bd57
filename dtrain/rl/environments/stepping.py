"""Environments in one worker process, which may hang, crash or be killed without harm to the run.

`Environments` is the side of the run. The service in the process is `calls.EnvironmentCalls`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dtrain.base.errors import UserError
from dtrain.data.text.tool_calls import ERROR_PREFIX
from dtrain.rl.environments.calls import MAX_TIMEOUTS_IN_A_ROW, total
from dtrain.rl.rewards.catalog import find
from dtrain.rl.worker import Outcome, Worker, WorkerLost

GRACE = 5.0  # seconds after the timeout, in which the process itself should have abandoned the call
KEY = "grpo.environment_timeout"

Observation = str | Sequence[dict[str, Any]]
"""The observation of an environment: a text, or messages."""
Failures = dict[tuple[str, str], list[str]]
"""Messages of the failures, one for each environment, by stage ("make", "step", "observe", "end") and cause."""


@dataclass(frozen=True)
class Turn:
    """A completion for an environment.

    Attributes:
        number: The environment's number.
        text: The completion.
        is_last: Whether the model gets no further turn, whatever the environment says.
        room: Tokens that are left of the sequence after the completion.
    """

    number: int
    text: str
    is_last: bool
    room: float = math.inf


@dataclass(frozen=True)
class EnvironmentReply:
    """Reply of an environment to a completion.

    Attributes:
        earned: Reward of the step. None if it has none.
        done: Whether the environment has ended.
        ids: Token ids of the observation. Empty after the last turn.
        is_lost: Whether the environment failed. Nothing else is known then.
        calls: Number of tool answers in the observation.
        failures: Number of them that report a failed call.
        metrics: The environment's metrics.
    """

    earned: float | None = None
    done: bool = False
    ids: Sequence[int] = ()
    is_lost: bool = False
    calls: int = 0
    failures: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environments(Worker):
    """Environments in a process of their own. Only one thread may use them.

    An environment is lost if it raises, returns a wrong type or takes too long. All are lost if the process ends or
    does not answer. The process is replaced when the next environments are made. If a stage (make, step, observe) has
    never worked, its failure ends the run with a UserError instead.

    Args:
        path: Import path of the function that makes an environment, `make(row, seed)`.
        options: Arguments with which the function at `path` returns the maker. None: the function is the maker.
        whose: Recipe key of the environments, for messages. None: `path`.
        timeout: Seconds for making an environment, and for a step with its observation.
        threads: Number of environments that are made or stepped at the same time. With 1, one thread makes all calls
            in order.
        print_line: Prints a line. Called once for each cause of a failure.
        grace: Seconds after the timeout until the process is killed.

    Raises:
        UserError: If the function does not exist or cannot be loaded.
    """

    def __init__(
        self,
        path: str,
        *,
        options: Sequence[Any] | None = None,
        whose: str | None = None,
        timeout: float = 60.0,
        threads: int = 1,
        print_line: Callable[[str], None] = print,
        grace: float = GRACE,
    ):
        self._label = whose or f"environment {path}"  # first words of messages
        self._grace = grace
        self._live: set[int] = set()  # numbers of the environments that are not lost
        self._count = 0  # environments of the last `make`
        super().__init__(
            "dtrain.rl.environments.calls:EnvironmentCalls",
            *find(path, "environment"),
            options,
            timeout,
            threads,
            what=whose or f"the environments of {path}",
            timeout=timeout,
            key=KEY,
            print_line=print_line,
        )

    def make(self, seeded_rows: Sequence[tuple[Mapping[str, Any], int]]) -> None:
        """Make an environment for each (row, seed), numbered from 0, and discard the previous ones."""
        self._count = len(seeded_rows)
        self._live.clear()
        try:
            self._renew()
        except WorkerLost as lost:
            self._report_once("make", str(lost), f"{self._lost_text(lost)}{self._loss(self._count)}")
            return
        outcomes = self._outcomes("make", range(self._count), seeded_rows)
        failures: Failures = defaultdict(list)
        for number, outcome in outcomes.items():
            if "value" in outcome:
                self._has_worked.add("make")
            if _is_success(outcome):
                self._live.add(number)
            else:
                self._add_failure(failures, "make", outcome)
        self._report_failures(failures)

    def step(self, turns: Sequence[Turn], encode: Callable[[int, Observation], list[int]]) -> list[EnvironmentReply]:
        """Pass completions to environments. Lost environments are not called again.

        Args:
            turns: The completions, at most one for each environment.
            encode: Encodes the observation that follows the turn with an index in `turns`. A UserError of it counts as
                a failure of the environment.

        Returns:
            The replies, in the order of `turns`.

        Raises:
            UserError: If an environment fails in a stage that has never worked.
        """
        live_turns = [turn for turn in turns if turn.number in self._live]
        outcomes = self._outcomes(
            "step",
            [turn.number for turn in live_turns],
            [(turn.number, turn.text, turn.is_last) for turn in live_turns],
        )
        failures: Failures = defaultdict(list)
        replies = []
        full: list[int] = []  # indices of turns after which the observation leaves no room for a completion
        for index, turn in enumerate(turns):
            if turn.number not in self._live:
                replies.append(EnvironmentReply(is_lost=True))
                continue
            reply = self._reply(turn, outcomes[turn.number], partial(encode, index), failures)
            replies.append(reply)
            continues = not (reply.is_lost or reply.done or turn.is_last)
            if continues and len(reply.ids) >= turn.room:
                full.append(index)
        self._end_full(turns, full, replies, failures)
        self._report_failures(failures)
        for turn, reply in zip(turns, replies, strict=True):
            if reply.is_lost:
                self._live.discard(turn.number)
        return replies

    def _reply(
        self, turn: Turn, outcome: Outcome, encode: Callable[[Observation], list[int]], failures: Failures
    ) -> EnvironmentReply:
        """Return the reply to a turn. A failure is added to `failures`.

        Args:
            turn: The turn.
            outcome: The outcome of the step.
            encode: Encodes the observation.
            failures: Failures of this round of steps.
        """
        value = outcome.get("value")
        if value is None:
            self._add_failure(failures, "step", outcome)
            return EnvironmentReply(is_lost=True)
        self._has_worked.add("step")
        if value["done"] or turn.is_last:
            # The result is complete even if the process was lost afterwards.
            return EnvironmentReply(value["earned"], value["done"], metrics=value["metrics"])
        if not _is_success(outcome):
            self._add_failure(failures, "step", outcome)
            return EnvironmentReply(is_lost=True)
        observation = value["observation"]
        num_calls, num_failures = count_tool_answers(observation)
        try:
            ids = encode(observation)
        except UserError as error:
            failures["observe", "encode"].append(f"{self._label}: {error}")
            return EnvironmentReply(is_lost=True)
        self._has_worked.add("observe")
        return EnvironmentReply(
            value["earned"], ids=ids, calls=num_calls, failures=num_failures, metrics=value["metrics"]
        )

    def _end_full(
        self, turns: Sequence[Turn], full: Sequence[int], replies: list[EnvironmentReply], failures: Failures
    ) -> None:
        """End the episodes of the turns with the indices `full`, and add what they earn to their replies."""
        numbers = [turns[index].number for index in full]
        outcomes = self._outcomes("end", numbers, numbers)
        for index, number in zip(full, numbers, strict=True):
            outcome = outcomes[number]
            if not _is_success(outcome):
                self._add_failure(failures, "end", outcome)
                replies[index] = EnvironmentReply(is_lost=True)
                continue
            self._has_worked.add("end")
            value = outcome["value"]
            earned = total(replies[index].earned, value["earned"])
            replies[index] = replace(replies[index], earned=earned, metrics=value["metrics"])

    def forget(self) -> None:
        """Discard the environments."""
        self._live.clear()
        if not self._is_alive:
            return
        try:
            for _ in self.call("forget", grace=self._grace):
                pass
        except WorkerLost as lost:
            self._report_once("end", str(lost), f"{self._lost_text(lost)} after the episodes had ended")

    def _renew(self) -> None:
        """Make sure that a fresh process runs.

        The process is replaced if it has ended, or if it has abandoned threads that still run, because these would slow
        down all later steps.
        """
        if self._is_alive:
            with suppress(WorkerLost):
                (num_stuck,) = self.call("stuck", grace=self._grace)
                if num_stuck:
                    self._kill()
        self._ensure_running()

    def _outcomes(self, method: str, numbers: Sequence[int], content: Sequence[Any]) -> dict[int, Outcome]:
        """Call a method of the service. If the process is lost, every outcome has "lost".

        Args:
            method: Name of the method.
            numbers: Numbers of the environments.
            content: The method's argument, one entry for each number. Nothing is called if it is empty.

        Returns:
            Number -> outcome, in the order of `numbers`.
        """
        outcomes: dict[int, Outcome] = {number: {} for number in numbers}
        if not content:
            return outcomes
        try:
            for number, outcome in self.call(method, content, grace=self._grace):
                outcomes[number] = outcome
        except WorkerLost as lost:
            for outcome in outcomes.values():
                outcome["lost"] = str(lost)
        return outcomes

    def _add_failure(self, failures: Failures, stage: str, outcome: Outcome) -> None:
        """Add the message for a failed outcome to `failures`."""
        stage = outcome.get("stage", stage)
        late = f"{self._label}: {stage} took longer than {self._timeout:g} s ({KEY})"
        if outcome.get("missed") == "untried":
            cause = "untried"
            text = f"{late} {MAX_TIMEOUTS_IN_A_ROW} or more times in a row, so the remaining ones were not tried"
        elif "missed" in outcome:
            cause = "late"
            text = late
        elif "user" in outcome:
            cause = "user"
            text = f"{self._label}: {stage} {outcome['user']}"
        elif "error" in outcome:
            cause = outcome["kind"]
            text = f"{self._label} failed in {stage}:\n{outcome['error']}"
        else:
            cause = outcome["lost"]
            text = f"{self._lost_text(outcome['lost'])} in {stage}"
        failures[stage, cause].append(text)

    def _report_failures(self, failures: Failures) -> None:
        """Print one message for each stage and cause. Raises UserError as `Worker._report_failure`."""
        for (stage, cause), texts in failures.items():
            self._report_failure(stage, cause, texts[0], self._loss(len(texts)))

    def _lost_text(self, reason: object) -> str:
        """Return the message for a lost process. `reason` is a verb phrase, as in `WorkerLost`."""
        return f"{self._label}: the process of the environments {reason}"

    def _loss(self, count: int) -> str:
        return f"\nThe rewards of {count} of {self._count} episodes are unknown"


def _is_success(outcome: Outcome) -> bool:
    """Check that the call succeeded and its environment still exists."""
    return "value" in outcome and "lost" not in outcome


def count_tool_answers(observation: Observation) -> tuple[int, int]:
    """Return the number of tool answers in an observation, and how many of them report a failed call.

    Example:
        >>> count_tool_answers([{"role": "tool", "content": "4"}, {"role": "tool", "content": "error: no such tool"}])
        (2, 1)
    """
    messages = [] if isinstance(observation, str) else observation
    answers = [str(message.get("content")) for message in messages if message["role"] == "tool"]
    return len(answers), sum(text.startswith(ERROR_PREFIX) for text in answers)
