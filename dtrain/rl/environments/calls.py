"""Calls inside the environments' process; their answers are checked so that they can travel as JSON.

Each make and each step runs in a thread of a pool, and is given up where it hangs.
"""

import importlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.ranges import is_number
from dtrain.rl.worker import Outcome, attempt, shown, to_reward


class EnvironmentCalls:
    """Calls of a `Worker` to the environments, which are numbered. The answers are (number, answer), as they come."""

    def load(
        self, module: str, function: str, options: Sequence[Any] | None, timeout: float, threads: int
    ) -> list[Outcome]:
        """Load the maker of environments. options: arguments for which the function gives the maker; None: it is the
        maker."""
        self.environments: dict[int, Any] = {}
        self.pool = TimeoutPool(threads, timeout)
        return [attempt(self._load, module, function, options)]

    def make(self, seeded_rows: Sequence[tuple[Mapping[str, Any], int]]) -> Iterator[tuple[int, Outcome]]:
        """Make an environment for each row and seed; those before are gone."""
        self.environments = {}
        tasks = [
            partial(attempt, self._make, self.environments, number, *pair) for number, pair in enumerate(seeded_rows)
        ]
        yield from self._do(range(len(seeded_rows)), tasks)

    def step(self, turns: Sequence[tuple[int, str, bool]]) -> Iterator[tuple[int, Outcome]]:
        """Step each (number, text, is_last): {"earned", "done"} and, where it goes on, "observation"."""
        tasks = [partial(_step_and_observe, self.environments, *turn) for turn in turns]
        yield from self._do([number for number, *_ in turns], tasks)

    def end(self, numbers: Sequence[int]) -> Iterator[tuple[int, Outcome]]:
        """End episodes that were not done, where the observation leaves no room for a completion; answers as `step`."""
        tasks = [partial(attempt, end, self.environments.pop(number)) for number in numbers]
        yield from self._do(numbers, tasks)

    def stuck(self) -> list[int]:
        """Return the number of threads that were given up and hang still."""
        return [self.pool.stuck]

    def forget(self) -> list[None]:
        """Let the environments go, in a thread of the pool: what ends with one may be its thread's alone."""
        list(self.pool.run([partial(attempt, self.environments.clear)]))
        return []

    def _load(self, module: str, function: str, options: Sequence[Any] | None) -> None:
        maker = getattr(importlib.import_module(module), function)
        self.maker: Callable[[Any, int], Any] = maker if options is None else maker(*options)
        if options is not None:
            self.main: Callable[[], None] | None = getattr(self.maker, "main", None)

    def _make(self, environments: dict[int, Any], number: int, row: Mapping[str, Any], seed: int) -> None:
        """Make an environment and add it to those of its own call, where a late one belongs too."""
        environment = self.maker(row, seed)
        if not callable(getattr(environment, "step", None)):
            raise UserError(f"gave {shown(environment)}, which has no step")
        environments[number] = environment

    def _do(self, numbers: Sequence[int], tasks: Sequence[Callable[[], Outcome]]) -> Iterator[tuple[int, Outcome]]:
        for outcomes in self.pool.run(tasks):
            for index, outcome in outcomes:
                yield numbers[index], outcome


def _step_and_observe(environments: dict[int, Any], number: int, text: str, is_last: bool) -> Outcome:
    """Step an environment and, where that was not the last, observe it. An environment that is over is not kept."""
    environment = environments.pop(number)
    stepped = attempt(step, environment, text)
    if "value" not in stepped or stepped["value"]["done"]:
        return stepped
    if is_last:
        ended = attempt(end, environment)
        if "value" in ended:
            ended["value"]["earned"] = total(stepped["value"]["earned"], ended["value"]["earned"])
        return ended
    seen = attempt(observe, environment)
    if "value" not in seen:
        return {**seen, "stage": "observe"}
    environments[number] = environment
    return {"value": stepped["value"] | seen["value"]}


def step(environment: Any, text: str) -> dict[str, Any]:
    """Return what the completion earned, NaN as None, whether that was all, and the numbers of the environment's
    `metrics`. Raises UserError for no number; whatever the environment raises passes, here and below."""
    return _earned(environment, environment.step(text), bool(environment.done))


def end(environment: Any) -> dict[str, Any]:
    """End an episode that is cut off; returns the same as `step`. An environment without `end` earns nothing more."""
    stop = getattr(environment, "end", None)
    return _earned(environment, stop() if callable(stop) else None, False)


def total(*earned: float | None) -> float | None:
    """Return the sum of what is known; None where nothing is."""
    known = [value for value in earned if value is not None]
    return sum(known) if known else None


def _earned(environment: Any, earned: Any, done: bool) -> dict[str, Any]:
    earned = to_reward(earned)
    parts = getattr(environment, "metrics", None)
    numbers = {str(name): value for name, value in parts.items()} if isinstance(parts, dict) else {}
    known = {name: float(value) for name, value in numbers.items() if is_number(value)}
    return {"earned": earned, "done": done, "metrics": known}


def observe(environment: Any) -> dict[str, Any]:
    """Return the observation that is read next. Raises UserError for what is neither a text nor messages, or cannot be
    JSON."""
    observed = environment.observe()
    if isinstance(observed, str):
        return {"observation": str(observed)}
    is_list = isinstance(observed, Sequence) and len(observed) > 0
    if not (is_list and all(isinstance(message, dict) and "role" in message for message in observed)):
        raise UserError(f"gave {shown(observed)}; a text or a list of messages is needed")
    messages = list(observed)
    try:
        json.dumps(messages)
    except (TypeError, ValueError) as error:
        raise UserError(f"gave {shown(observed)}; messages must be JSON, and: {error}") from None
    return {"observation": messages}


MAX_TIMEOUTS_IN_A_ROW = 4  # tasks in a row; what they call may be down, and each would take its whole time
TIMED_OUT: Outcome = {"missed": "late"}
NOT_TRIED: Outcome = {"missed": "untried"}


class TimeoutPool:
    """Pool of `threads` threads, which live from call to call. timeout: seconds that a task may take.

    One thread does tasks one after another in their order, all calls' tasks, until it is given up and another takes its
    place. A thread that is given up does what hangs to its end, if there is one, and no more. Not for several threads
    at once.
    """

    def __init__(self, threads: int, timeout: float):
        self._threads, self._timeout = threads, min(timeout, threading.TIMEOUT_MAX / 2)
        self._idle: list[ThreadPoolExecutor] = []  # of one thread each: another could not take its place alone
        self._given_up: list[Future[Outcome]] = []

    @property
    def stuck(self) -> int:
        """Tasks that were given up and have not ended, each in a thread of its own."""
        self._given_up = [task for task in self._given_up if not task.done()]
        return len(self._given_up)

    def run(self, tasks: Sequence[Callable[[], Outcome]]) -> Iterator[list[tuple[int, Outcome]]]:
        """Run `tasks`, which raise nothing; yields their indices and outcomes as they come, each index once.

        After MAX_TIMEOUTS_IN_A_ROW or more consecutive timeouts, the tasks that no thread has begun are not tried.
        """
        waiting = deque(enumerate(tasks))
        running: dict[Future[Outcome], tuple[int, ThreadPoolExecutor, float]] = {}  # index, thread, when it is late
        late_in_a_row = 0
        while waiting or running:
            while waiting and len(running) < self._threads:
                index, task = waiting.popleft()
                thread = self._idle.pop() if self._idle else ThreadPoolExecutor(1)
                running[thread.submit(task)] = index, thread, time.monotonic() + self._timeout
            first_due = min(due for _, _, due in running.values())
            done, _ = wait(running, max(0.0, first_due - time.monotonic()), FIRST_COMPLETED)
            late = [future for future, (*_, due) in running.items() if due <= time.monotonic() and not future.done()]
            outcomes = []
            for future in done:
                index, thread, _ = running.pop(future)
                self._idle.append(thread)
                outcomes.append((index, future.result()))
            late_in_a_row = len(late) + (0 if done else late_in_a_row)
            outcomes += [(running.pop(future)[0], TIMED_OUT) for future in late]
            self._given_up += late
            if late_in_a_row >= MAX_TIMEOUTS_IN_A_ROW:
                outcomes += [(index, NOT_TRIED) for index, _ in waiting]
                waiting.clear()
            if outcomes:
                yield outcomes
