"""The service in the environments' process: making, stepping and ending environments.

Each call runs in a thread of a `TimeoutPool` and is abandoned if it takes too long. Results are checked here, so that
they can be sent as JSON. For example, a call `step([(0, "2 + 2 = 5", False)])` yields

    (0, {"value": {"earned": 0.0, "done": False, "metrics": {}, "observation": "Wrong. Try again."}})

In all these messages, "earned" is the reward of the step.
"""

import importlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

from dtrain.base.errors import UserError
from dtrain.base.ranges import is_number
from dtrain.rl.worker import Outcome, attempt, shown, to_reward


class EnvironmentCalls:
    """Calls of a `Worker` to numbered environments. Results are (number, outcome), in the order of completion."""

    def load(
        self, module: str, function: str, options: Sequence[Any] | None, timeout: float, threads: int
    ) -> list[Outcome]:
        """Load the maker of environments.

        Args:
            module: The module of the function.
            function: The maker, or with `options` a function that returns the maker.
            options: Arguments of such a function. None: `function` is the maker.
            timeout: Seconds that a call may take.
            threads: Number of calls at the same time.
        """
        self.environments: dict[int, Any] = {}
        self.pool = TimeoutPool(threads, timeout)
        return [attempt(self._load, module, function, options)]

    def make(self, seeded_rows: Sequence[tuple[Mapping[str, Any], int]]) -> Iterator[tuple[int, Outcome]]:
        """Make an environment for each row and seed, and discard the previous ones."""
        self.environments = {}
        tasks = []
        for number, (row, seed) in enumerate(seeded_rows):
            # A task that is late must add its environment to those of its own call, not to a later call's.
            tasks.append(partial(attempt, self._make, self.environments, number, row, seed))
        yield from self._run(range(len(seeded_rows)), tasks)

    def step(self, turns: Sequence[tuple[int, str, bool]]) -> Iterator[tuple[int, Outcome]]:
        """Step environments.

        Args:
            turns: (number of the environment, completion, whether it is the model's last turn) each.

        Returns:
            (number, outcome) each. The value of an outcome is that of the function `step`, with "observation" if the
            episode continues.
        """
        tasks = [partial(_step_and_observe, self.environments, *turn) for turn in turns]
        yield from self._run([number for number, _, _ in turns], tasks)

    def end(self, numbers: Sequence[int]) -> Iterator[tuple[int, Outcome]]:
        """End episodes whose observation leaves no room for another completion. Yields outcomes like `step`."""
        tasks = [partial(attempt, end, self.environments.pop(number)) for number in numbers]
        yield from self._run(numbers, tasks)

    def stuck(self) -> list[int]:
        """Return the number of abandoned tasks that still run."""
        return [self.pool.stuck]

    def forget(self) -> list[None]:
        """Discard the environments.

        This happens in a thread of the pool, because some resources must be released by the thread that made them.
        """
        for _ in self.pool.run([partial(attempt, self.environments.clear)]):
            pass
        return []

    def _load(self, module: str, function: str, options: Sequence[Any] | None) -> None:
        maker = getattr(importlib.import_module(module), function)
        self.maker: Callable[[Any, int], Any] = maker if options is None else maker(*options)
        if options is not None:
            self.main: Callable[[], None] | None = getattr(self.maker, "main", None)

    def _make(self, environments: dict[int, Any], number: int, row: Mapping[str, Any], seed: int) -> None:
        environment = self.maker(row, seed)
        if not callable(getattr(environment, "step", None)):
            raise UserError(f"returned {shown(environment)}, which has no method step")
        environments[number] = environment

    def _run(self, numbers: Sequence[int], tasks: Sequence[Callable[[], Outcome]]) -> Iterator[tuple[int, Outcome]]:
        for outcomes in self.pool.run(tasks):
            for index, outcome in outcomes:
                yield numbers[index], outcome


def _step_and_observe(environments: dict[int, Any], number: int, text: str, is_last: bool) -> Outcome:
    """Step an environment, and observe it if the episode continues. Discard it if the episode is over."""
    environment = environments.pop(number)
    stepped = attempt(step, environment, text)
    if "value" not in stepped or stepped["value"]["done"]:
        return stepped
    if is_last:
        ended = attempt(end, environment)
        if "value" in ended:
            ended["value"]["earned"] = total(stepped["value"]["earned"], ended["value"]["earned"])
        return ended
    observed = attempt(observe, environment)
    if "value" not in observed:
        return {**observed, "stage": "observe"}
    environments[number] = environment
    return {"value": stepped["value"] | observed["value"]}


def step(environment: Any, text: str) -> dict[str, Any]:
    """Pass a completion to an environment.

    Returns:
        {"earned": the step's reward or None, "done": bool, "metrics": the numbers of the environment's `metrics`}.

    Raises:
        UserError: If the reward is not a number.
        Exception: Whatever the environment raises.
    """
    reward = environment.step(text)
    return _step_result(environment, reward, bool(environment.done))


def end(environment: Any) -> dict[str, Any]:
    """Call an environment's `end`, if it has one, because its episode is cut off. Returns and raises as `step`."""
    end_method = getattr(environment, "end", None)
    reward = end_method() if callable(end_method) else None
    return _step_result(environment, reward, False)


def total(*earned: float | None) -> float | None:
    """Return the total of the values that are not None, or None if all are.

    Example:
        >>> total(0.5, None, 1.0), total(None, None)
        (1.5, None)
    """
    known = [value for value in earned if value is not None]
    return sum(known) if known else None


def _step_result(environment: Any, reward: Any, done: bool) -> dict[str, Any]:
    earned = to_reward(reward)
    metrics = getattr(environment, "metrics", None)
    numbers = {}
    if isinstance(metrics, dict):
        for name, value in metrics.items():
            if is_number(value):
                numbers[str(name)] = float(value)
    return {"earned": earned, "done": done, "metrics": numbers}


def observe(environment: Any) -> dict[str, Any]:
    """Return {"observation": a text or a list of messages}, what the model reads next.

    Raises:
        UserError: If the observation is neither a text nor messages, or is not JSON.
        Exception: Whatever the environment raises.
    """
    observed = environment.observe()
    if isinstance(observed, str):
        return {"observation": str(observed)}
    is_non_empty_list = isinstance(observed, Sequence) and len(observed) > 0
    if not is_non_empty_list or not all(isinstance(message, dict) and "role" in message for message in observed):
        raise UserError(f"returned {shown(observed)}. It must return a text or a list of messages")
    messages = list(observed)
    try:
        json.dumps(messages)
    except (TypeError, ValueError) as error:
        raise UserError(f"returned {shown(observed)}. Messages must be JSON: {error}") from None
    return {"observation": messages}


# After this number of consecutive timeouts, a service that the environments call is probably down. Each further task
# would only time out as well.
MAX_TIMEOUTS_IN_A_ROW = 4
TIMED_OUT: Outcome = {"missed": "late"}
NOT_TRIED: Outcome = {"missed": "untried"}


class _RunningTask(NamedTuple):
    task_index: int
    thread: ThreadPoolExecutor
    due: float  # time at which the task has timed out


class TimeoutPool:
    """Pool of threads that run tasks with a time limit each. Only one thread may call it.

    Python cannot end a thread. A task that takes too long is abandoned: its thread continues, and another takes its
    place. Otherwise threads are kept from call to call, and with one thread all tasks run in it, one after another.

    Args:
        threads: Number of tasks at the same time.
        timeout: Seconds that a task may take.
    """

    def __init__(self, threads: int, timeout: float):
        self._num_threads = threads
        self._timeout = min(timeout, threading.TIMEOUT_MAX / 2)
        self._idle: list[ThreadPoolExecutor] = []  # of one thread each, so that each can be replaced
        self._abandoned: list[Future[Outcome]] = []

    @property
    def stuck(self) -> int:
        """Number of abandoned tasks that still run, each in its own thread."""
        self._abandoned = [task for task in self._abandoned if not task.done()]
        return len(self._abandoned)

    def run(self, tasks: Sequence[Callable[[], Outcome]]) -> Iterator[list[tuple[int, Outcome]]]:
        """Run tasks, and yield lists of (index, outcome) as tasks end. Each task is yielded once.

        After MAX_TIMEOUTS_IN_A_ROW or more consecutive timeouts, the tasks that no thread has begun are not tried.

        Args:
            tasks: Functions that must not raise.
        """
        waiting = deque(enumerate(tasks))
        running: dict[Future[Outcome], _RunningTask] = {}
        timeouts_in_a_row = 0
        while waiting or running:
            while waiting and len(running) < self._num_threads:
                index, task = waiting.popleft()
                thread = self._idle.pop() if self._idle else ThreadPoolExecutor(1)
                future = thread.submit(task)
                running[future] = _RunningTask(index, thread, time.monotonic() + self._timeout)
            first_due = min(task.due for task in running.values())
            done, _ = wait(running, max(0.0, first_due - time.monotonic()), FIRST_COMPLETED)
            # A task that ended after `wait` returned is not late. The next round collects it.
            late = [future for future, task in running.items() if task.due <= time.monotonic() and not future.done()]
            outcomes = []
            for future in done:
                ended = running.pop(future)
                self._idle.append(ended.thread)
                outcomes.append((ended.task_index, future.result()))
            if done:
                timeouts_in_a_row = 0
            timeouts_in_a_row += len(late)
            for future in late:
                outcomes.append((running.pop(future).task_index, TIMED_OUT))
            self._abandoned += late
            if timeouts_in_a_row >= MAX_TIMEOUTS_IN_A_ROW:
                outcomes += [(index, NOT_TRIED) for index, _ in waiting]
                waiting.clear()
            if outcomes:
                yield outcomes
