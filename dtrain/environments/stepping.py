"""Environments in one worker process that may hang, crash or be killed without harm to the run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrain.environments.crew import MOST_LATE
from dtrain.environments.episodes import EnvironmentReply, Turn
from dtrain.environments.observations import Observation
from dtrain.errors import UserError
from dtrain.rollout.child import Answer
from dtrain.rollout.process import Lost, UserCodeProcess
from dtrain.rollout.rewards.find import find

GRACE = 5.0  # seconds behind the timeout after which the process itself hangs, in C say, and not one of its threads
KEY = "grpo.environment_timeout"


class Environments:
    """Environments that the function at import path `path` makes, in a process of their own.

    timeout: seconds that making one may take, or one step with its observation. threads: how many are made or stepped
    side by side; with 1 all is done in one thread, in the order of the calls. grace: seconds more until the process is
    killed where it does not give up by itself what takes too long. say: told, once for each cause, what went wrong.

    An environment is lost where it raises, gives something of a wrong type or takes too long; all are where their
    process ends or no longer answers, and it is replaced when others are made. As long as nothing of its kind (a make,
    a step, an observation) has ever worked, that is its user's mistake: a UserError with the end of the traceback. It
    is a UserError, too, where there is no such function or it cannot be loaded. Not for several threads at once.
    """

    def __init__(
        self,
        path: str,
        *,
        timeout: float = 60.0,
        threads: int = 1,
        say: Callable[[str], None] = print,
        grace: float = GRACE,
    ):
        self._path, self._timeout, self._say, self._grace = path, timeout, say, grace
        self._told: set[tuple[str, str]] = set()
        self._has_worked: set[str] = set()
        self._lost: set[int] = set()
        self._count = 0
        self._may_be_stuck = False
        self._worker = UserCodeProcess(
            "dtrain.environments.worker",
            ("load", (*find(path, "environment"), timeout, threads)),
            what=f"the environments of {path}",
            timeout=timeout,
            key=KEY,
        )

    def make(self, given: Sequence[tuple[Mapping[str, Any], int]]) -> None:
        """An environment for each row and seed, numbered from 0; those before are gone."""
        self._worker.run(self._make, given)

    def step(self, turns: Sequence[Turn], encode: Callable[[int, Observation], list[int]]) -> list[EnvironmentReply]:
        """A reply to each turn, in their order; no environment has two. encode: ids of what was observed, from its
        place in `turns`; a UserError that it raises is the environment's. Lost environments are not asked again."""
        return self._worker.run(self._step, turns, encode)

    def forget(self) -> None:
        """Let the environments go, with what they hold."""
        self._worker.run(self._forget)

    def close(self) -> None:
        """End the process, at once even where it computes. May be called again."""
        self._worker.close()

    def __enter__(self) -> "Environments":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self, given: Sequence[tuple[Mapping[str, Any], int]]) -> None:
        self._count = len(given)
        self._lost = set(range(self._count))
        try:
            if not self._worker.is_alive or self._is_stuck():
                self._worker.replace()
                self._may_be_stuck = False
        except Lost as lost:
            self._tell("make", str(lost), f"environment {self._path}: their process {lost}", self._count)
            return
        answers, end = self._call("make", given, self._count)
        failures = _Failures()
        for number in range(self._count):
            answer = answers.get(number)
            if answer is None or answer or end is not None:
                failures.add(*self._failure("make", answer, end))
            else:
                self._lost.discard(number)
        self._judge({"make"} if {} in answers.values() else set(), failures)

    def _step(self, turns: Sequence[Turn], encode: Callable[[int, Observation], list[int]]) -> list[EnvironmentReply]:
        asked = [(turn.number, turn.text, turn.is_last) for turn in turns if turn.number not in self._lost]
        answers, end = self._call("step", asked, len(asked))
        replies, failures, worked = [], _Failures(), set()
        for place, turn in enumerate(turns):
            answer, reply = answers.get(turn.number), EnvironmentReply(is_lost=True)
            is_known = answer is not None and "done" in answer
            is_over = is_known and (answer["done"] or turn.is_last)
            worked |= {"step"} if is_known else set()
            if turn.number in self._lost:
                pass
            elif is_over:
                reply = EnvironmentReply(answer["earned"], answer["done"])
            elif not is_known or end is not None:
                failures.add(*self._failure("step", answer, end))
            else:
                try:
                    reply = EnvironmentReply(answer["earned"], False, encode(place, answer["observation"]))
                    worked.add("observe")
                except UserError as error:
                    failures.add("observe", "encode", f"environment {self._path}: {error}")
            replies.append(reply)
        self._judge(worked, failures)
        self._lost |= {turn.number for turn, reply in zip(turns, replies, strict=True) if reply.is_lost}
        return replies

    def _forget(self) -> None:
        self._lost = set(range(self._count))
        if self._worker.is_alive:
            try:
                self._worker.send("forget", None)
                self._may_be_stuck |= self._worker.answer(self._grace)["stuck"] > 0
            except Lost as lost:
                self._worker.kill()
                self._tell("end", str(lost), f"environment {self._path}: their process {lost} when they were over", 0)

    def _call(self, kind: str, content: Sequence[Any], count: int) -> tuple[dict[int, Answer], str | None]:
        """Replies by number, and what became of the process where it gave less than all."""
        answers: dict[int, Answer] = {}
        if not count:
            return answers, None
        try:
            self._worker.send(kind, content)
            while len(answers) < count:
                answers |= dict(self._worker.answer(self._grace)["replies"])
        except Lost as lost:
            self._worker.kill()
            return answers, str(lost)
        return answers, None

    def _is_stuck(self) -> bool:
        """Whether threads hang in the process, which they would slow down for ever."""
        if self._may_be_stuck:
            try:
                self._worker.send("stuck", None)
                self._may_be_stuck = self._worker.answer(self._grace)["stuck"] > 0
            except Lost:
                pass
        return self._may_be_stuck

    def _failure(self, stage: str, answer: Answer | None, end: str | None) -> tuple[str, str, str]:
        """What went wrong with one, which has `answer` or went with the process: the stage, a word for the cause, and
        all of it."""
        whose = f"environment {self._path}"
        answer = answer or {}
        if "missed" in answer:
            self._may_be_stuck = True
            late = f"{whose}: {stage} took longer than {self._timeout:g} s ({KEY})"
            if answer["missed"] == "untried":
                return stage, "untried", f"{late} {MOST_LATE} times or more in a row: the others were not tried"
            return stage, "late", late
        stage = answer.get("stage", stage)
        if "user" in answer:
            return stage, "user", f"{whose}: {stage} {answer['user']}"
        if "error" in answer:
            return stage, answer["kind"], f"{whose} failed in {stage}:\n{answer['error']}"
        return stage, end, f"{whose}: their process {end} in {stage}"

    def _judge(self, worked: set[str], failures: "_Failures") -> None:
        self._has_worked |= worked
        for (stage, cause), (text, count) in failures.found.items():
            if stage not in self._has_worked:
                raise UserError(text)
            self._tell(stage, cause, text, count)

    def _tell(self, stage: str, cause: str, text: str, count: int) -> None:
        if (stage, cause) not in self._told:
            self._told.add((stage, cause))
            lost = f"\nwhat {count} of {self._count} episodes earned is unknown" if count else ""
            self._say(f"{text}{lost}")


class _Failures:
    """The first text of each cause and how often it was found, by stage and cause."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], tuple[str, int]] = {}

    def add(self, stage: str, cause: str, text: str) -> None:
        first, count = self.found.get((stage, cause), (text, 0))
        self.found[stage, cause] = (first, count + 1)
