"""Inside the environments' process: what is asked of them, checked so that it can travel as JSON.

Each make and each step runs in a thread of a crew, and is given up where it hangs.
"""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.ranges import is_number
from dtrain.rl.child import Outcome, attempt, reward_of, shown
from dtrain.rl.environments.timeout_pool import Missed, TimeoutPool


class EnvironmentCalls:
    """What a `Worker` asks of the environments, which are numbered. The answers are (number, answer), as they come."""

    def load(
        self, module: str, function: str, options: Sequence[Any] | None, timeout: float, threads: int
    ) -> list[Outcome]:
        """options: what the function gives the maker of environments for; None: it is the maker."""
        self.environments: dict[int, Any] = {}
        self.crew: TimeoutPool[Outcome] = TimeoutPool(threads, timeout)
        return [attempt(self._load, module, function, options)]

    def make(self, given: Sequence[tuple[Mapping[str, Any], int]]) -> Iterator[tuple[int, Outcome]]:
        """An environment for each row and seed; those before are gone."""
        self.environments = {}
        tasks = [partial(attempt, self._make, self.environments, place, *one) for place, one in enumerate(given)]
        yield from self._do(range(len(given)), tasks)

    def step(self, asked: Sequence[tuple[int, str, bool]]) -> Iterator[tuple[int, Outcome]]:
        """For number, text and whether that is the last: {"earned", "done"} and, where it goes on, "observation"."""
        tasks = [partial(_step_and_observe, self.environments, *one) for one in asked]
        yield from self._do([number for number, *_ in asked], tasks)

    def end(self, numbers: Sequence[int]) -> Iterator[tuple[int, Outcome]]:
        """As `step`, of those whose episode ends though they were not done, where what they observed finds no room."""
        tasks = [partial(attempt, end, self.environments.pop(number)) for number in numbers]
        yield from self._do(numbers, tasks)

    def stuck(self) -> list[int]:
        """How many threads were given up and hang still."""
        return [self.crew.stuck]

    def forget(self) -> list[None]:
        """Let the environments go, in a thread of the crew: what ends with one may be its thread's alone."""
        list(self.crew.do([partial(attempt, self.environments.clear)]))
        return []

    def _load(self, module: str, function: str, options: Sequence[Any] | None) -> None:
        found = getattr(importlib.import_module(module), function)
        self.maker: Callable[[Any, int], Any] = found if options is None else found(*options)
        if options is not None:
            self.main: Callable[[], None] | None = getattr(self.maker, "main", None)

    def _make(self, environments: dict[int, Any], number: int, row: Mapping[str, Any], seed: int) -> None:
        """One that is late lands among those of its own call."""
        environment = self.maker(row, seed)
        if not callable(getattr(environment, "step", None)):
            raise UserError(f"gave {shown(environment)}, which has no step")
        environments[number] = environment

    def _do(self, numbers: Sequence[int], tasks: Sequence[Callable[[], Outcome]]) -> Iterator[tuple[int, Outcome]]:
        for outcomes in self.crew.do(tasks):
            for place, one in outcomes:
                yield numbers[place], {"missed": one.value} if isinstance(one, Missed) else one


def _step_and_observe(environments: dict[int, Any], number: int, text: str, is_last: bool) -> Outcome:
    """A step and, where that was not the last, an observation. An environment that is over is not kept."""
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
    """What the completion earned, NaN as None, whether that was all, and the numbers of the environment's `metrics`.
    Raises UserError for no number; whatever the environment raises passes, here and below."""
    return _earned(environment, environment.step(text), bool(environment.done))


def end(environment: Any) -> dict[str, Any]:
    """As `step`, of an episode that is cut off. One without `end` earns nothing more."""
    stop = getattr(environment, "end", None)
    return _earned(environment, stop() if callable(stop) else None, False)


def total(*earned: float | None) -> float | None:
    """Their sum; None where all are."""
    known = [one for one in earned if one is not None]
    return sum(known) if known else None


def _earned(environment: Any, earned: Any, done: bool) -> dict[str, Any]:
    earned = reward_of(earned)
    parts = getattr(environment, "metrics", None)
    numbers = {str(name): one for name, one in parts.items()} if isinstance(parts, dict) else {}
    known = {name: float(one) for name, one in numbers.items() if is_number(one)}
    return {"earned": earned, "done": done, "metrics": known}


def observe(environment: Any) -> dict[str, Any]:
    """What is read next. Raises UserError for what is neither a text nor messages, or cannot be JSON."""
    found = environment.observe()
    if isinstance(found, str):
        return {"observation": str(found)}
    is_list = isinstance(found, Sequence) and len(found) > 0
    if not (is_list and all(isinstance(message, dict) and "role" in message for message in found)):
        raise UserError(f"gave {shown(found)}; a text or a list of messages is needed")
    messages = list(found)
    try:
        json.dumps(messages)
    except (TypeError, ValueError) as error:
        raise UserError(f"gave {shown(found)}; messages must be JSON, and: {error}") from None
    return {"observation": messages}
