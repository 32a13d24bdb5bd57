"""Scoring of completions by rewards, which run in a process of their own.

`Rewards` is the side of the run. `RewardCalls` is the service in the process: it imports each reward and calls it. For
example, with the rewards `math_exact` (weight 1) and `my.short` (weight 0.1) and two completions,

    RewardCalls.score    yields  {"value": [1.0, None]}  and then  {"value": [0.5, 0.2]}
    Rewards.score        returns Scores(total=[1.05, 0.02], parts={"math_exact": [1.0, nan], "short": [0.5, 0.2]})
"""

import asyncio
import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dtrain.base.errors import UserError
from dtrain.rl.rewards.catalog import find
from dtrain.rl.rewards.columns import missing_argument_message, read_signature
from dtrain.rl.worker import Outcome, Worker, WorkerLost, attempt, shown, to_reward

if TYPE_CHECKING:
    from dtrain.recipe.rollouts import Reward


@dataclass(frozen=True)
class Scores:
    """Rewards of N completions.

    Attributes:
        total: Weighted total of the parts that are known, [N]. NaN if none is.
        parts: Values of each reward by its name, [N] each, NaN if unknown.
    """

    total: list[float]
    parts: dict[str, list[float]]


class Rewards(Worker):
    """Rewards by name or import path, loaded in a process of their own. Only one thread may use them.

    Args:
        specs: Rewards of a checked recipe, so that none lacks its `fn`. Rewards of the same name are numbered.
        timeout: Seconds that one reward may take for one call of `score`.
        print_line: Prints a line. Called once for each cause of a failure.
        key: The recipe key of the timeout, for messages.

    Raises:
        UserError: If a reward does not exist or cannot be loaded.
    """

    def __init__(
        self,
        specs: Sequence["Reward"],
        *,
        timeout: float = 60.0,
        print_line: Callable[[str], None] = print,
        key: str = "grpo.reward_timeout",
    ):
        names = reward_names(specs)
        self._weights = {name: spec.weight for name, spec in zip(names, specs, strict=True)}
        self._paths = {name: str(spec.fn) for name, spec in zip(names, specs, strict=True)}
        sources = {}  # name -> module, function, options
        for name, spec in zip(names, specs, strict=True):
            module, function = find(str(spec.fn))
            sources[name] = (module, function, dict(spec.options or {}))
        super().__init__(
            "dtrain.rl.rewards.scoring:RewardCalls",
            sources,
            what=f"the rewards ({', '.join(self._weights)})",
            timeout=timeout,
            key=key,
            print_line=print_line,
        )

    @property
    def names(self) -> list[str]:
        """The names of the parts, in the order of the specs."""
        return list(self._weights)

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> Scores:
        """Score N completions.

        A reward has no values in this call if it takes longer than the timeout or its process dies. The process is
        then replaced. The same holds for a reward that raises an exception or does not return N numbers, unless that
        reward has never worked.

        Args:
            prompts: The prompt of each completion.
            completions: Completions as text.
            completion_ids: Token ids of the completions.
            columns: The other columns of the data, a list of N values each.

        Raises:
            UserError: If a reward fails that has never worked. The message has the end of the traceback.
        """
        batch = {
            **columns,
            "prompts": list(prompts),
            "completions": list(completions),
            "completion_ids": [list(ids) for ids in completion_ids],
        }
        count = len(batch["completions"])
        wrong = {key: len(values) for key, values in batch.items() if len(values) != count}
        if wrong:
            raise ValueError(f"{count} completions, but {wrong}")
        if not count:
            return Scores([], {name: [] for name in self._weights})
        parts: dict[str, list[float]] = {}
        for index, outcome in enumerate(self._outcomes(batch)):
            # If the process is lost after the last reward's values, one more outcome follows. It belongs to no reward.
            if index < len(self.names):
                name = self.names[index]
                parts[name] = self._values(name, outcome, count)
        total = [self._weighted_sum([part[index] for part in parts.values()]) for index in range(count)]
        return Scores(total, parts)

    def _outcomes(self, batch: Mapping[str, Sequence[Any]]) -> Iterator[Outcome]:
        """Yield the outcome of each reward.

        If a reward loses the process, the rewards after it are computed in another process.
        """
        num_done = 0
        while num_done < len(self._weights):
            try:
                self._ensure_running()
                for outcome in self.call("score", batch, num_done):
                    num_done += 1
                    yield outcome
            except WorkerLost as lost:
                num_done += 1
                yield {"lost": str(lost)}

    def _values(self, name: str, outcome: Outcome, count: int) -> list[float]:
        """Return the values of a reward, NaN if unknown, and report a failure."""
        if "value" in outcome:
            self._has_worked.add(name)
            if "missed" in outcome:
                self._report_once(name, outcome["missed"], f"reward {name}: {outcome['missed']}")
            return [math.nan if value is None else value for value in outcome["value"]]
        if "lost" in outcome:
            text = f"reward {name} {outcome['lost']}; its values of this rollout are unknown"
            self._report_once(name, outcome["lost"], text)
        else:
            path = self._paths[name]
            label = f"reward {name}" if path == name else f"reward {name} ({path})"
            text = outcome.get("user") or f"{label} failed:\n{outcome['error']}{_trl_hint(outcome['error'])}"
            self._report_failure(name, text.splitlines()[-1], text, "\nits values of this rollout are unknown")
        return [math.nan] * count

    def _weighted_sum(self, values: Sequence[float]) -> float:
        known = [w * v for w, v in zip(self._weights.values(), values, strict=True) if not math.isnan(v)]
        return math.fsum(known) if known else math.nan


def _trl_hint(error: str) -> str:
    """Return a hint if a traceback is that of a reward written for TRL, whose completions may be lists of messages."""
    last_line = error.rpartition("\n")[2]
    of_messages = "TypeError: string indices must be integers", "AttributeError: 'str' object has no attribute 'get'"
    if not last_line.startswith(of_messages):
        return ""
    return "\ncompletions are strings here: write completion where TRL has completion[0]['content']"


def reward_names(specs: Sequence["Reward"]) -> list[str]:
    """Return the names of rewards: the last part of the path. Repeated names are numbered.

    Example:
        >>> from dtrain.recipe.rollouts import Reward
        >>> reward_names([Reward("math_exact"), Reward("my.short"), Reward("other.short")])
        ['math_exact', 'short', 'short#2']
    """
    names: list[str] = []
    for spec in specs:
        name = str(spec.fn).rsplit(".", 1)[-1]
        num_same = sum(other == name or other.startswith(f"{name}#") for other in names)
        names.append(f"{name}#{num_same + 1}" if num_same else name)
    return names


def pass_at_k_values(samples: int) -> list[int]:
    """Return the k for which pass@k is reported: the powers of two up to `samples`, and `samples`.

    Example:
        >>> pass_at_k_values(6)
        [1, 2, 4, 6]
    """
    powers = [2**exponent for exponent in range(samples.bit_length()) if 2**exponent <= samples]
    return sorted({*powers, samples})


def pass_at_k(k: int, samples: int, right: int) -> float:
    """Return the probability that at least one of k completions passes.

    Args:
        k: Number of completions, chosen from `samples` without replacement.
        samples: Number of completions.
        right: How many of them pass.

    Example:
        >>> pass_at_k(1, samples=4, right=1)
        0.25
        >>> pass_at_k(2, samples=4, right=1)
        0.5

    Reference:
        Chen et al., arXiv:2107.03374, section 2.1.
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


Batch = Mapping[str, Sequence[Any]]
"""prompts, completions, completion_ids and the columns of the data: N values each."""


class RewardCalls:
    """The service in the rewards' process. A `Worker` calls its methods."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}

    def load(self, rewards: Mapping[str, tuple[str, str, Mapping[str, Any]]]) -> list[Outcome]:
        """Load the rewards.

        Args:
            rewards: Name -> (module, function, options).
        """

        def load_all() -> None:
            functions = {}
            for name, (module, function, options) in rewards.items():
                functions[name] = load(module, function, options)
            self.functions.update(functions)

        return [attempt(load_all)]

    def score(self, batch: Batch, first: int) -> Iterator[Outcome]:
        """Yield the values of each reward, numbers and None, beginning with reward number `first`.

        A reward may have an attribute `missed`, which says why some of its last values are unknown.
        """
        for name, function in list(self.functions.items())[first:]:
            outcome = attempt(call, name, function, batch)
            missed = getattr(function, "missed", None)
            if missed:
                outcome["missed"] = str(missed)
            yield outcome


def load(module: str, function: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Import a reward and bind its options. A class is instantiated with them.

    Raises:
        UserError: If the reward cannot be called or has no signature.
        Exception: Whatever the module raises.
    """
    reward = getattr(importlib.import_module(module), function)
    if isinstance(reward, type):
        reward = reward(**options)
    elif callable(reward):
        reward = partial(reward, **options)
    read_signature(f"{module}.{function}", reward)
    return reward


def call(name: str, function: Callable[..., Any], batch: Batch) -> list[float | None]:
    """Call a reward with the arguments of its signature.

    Args:
        name: The reward's name, for messages.
        function: The reward, sync or async.
        batch: All values that it may get, N each.

    Returns:
        A number or None for each completion, [N]. NaN becomes None.

    Raises:
        UserError: If the reward takes a column that the data does not have, or does not return N finite numbers.
        Exception: Whatever the reward raises.
    """
    signature = read_signature(name, function)
    missing = [key for key in signature.required if key not in batch]
    if missing:
        raise UserError(missing_argument_message(name, missing, batch))
    bound_options = function.keywords if isinstance(function, partial) else {}
    accepted = batch.keys() if signature.has_kwargs else {*signature.required, *signature.optional}
    arguments = {key: values for key, values in batch.items() if key in accepted and key not in bound_options}
    result = function(**arguments)
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    count = len(batch["completions"])
    is_sized_iterable = hasattr(result, "__iter__") and hasattr(result, "__len__")
    if isinstance(result, str | bytes | Mapping) or not is_sized_iterable:
        raise UserError(f"reward {name} returned {shown(result)}. It must return a list of {count} numbers or None")
    if len(result) != count:
        raise UserError(
            f"reward {name} returned {len(result)} values for {count} completions. It must return one for each"
        )
    try:
        return [to_reward(value, " for a completion") for value in result]
    except UserError as error:
        raise UserError(f"reward {name} {error}") from None


async def _awaited(result: Any) -> Any:
    """Await any awaitable: `asyncio.run` accepts only coroutines."""
    return await result


def nan_to_none(value: Any) -> Any:
    """Replace NaN by None, which JSON can express, also in the values of nested dicts.

    Example:
        >>> nan_to_none({"a": float("nan"), "b": {"c": 1.5}})
        {'a': None, 'b': {'c': 1.5}}
    """
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, dict):
        return {key: nan_to_none(item) for key, item in value.items()}
    return value
