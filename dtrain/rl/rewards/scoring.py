"""Completions to rewards, in one worker process that may hang, crash or be killed without harm to the run: `Rewards`
outside, `RewardCalls` inside, from a module's and a function's name to a callable, from a call to checked numbers."""

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
    """Scores of completions. total: the weighted sum of the parts for each; parts: by reward's name. NaN where none is
    known."""

    total: list[float]
    parts: dict[str, list[float]]


class Rewards(Worker):
    """Rewards by name or import path, loaded in a process of their own.

    specs: of a checked recipe, where no `fn` is None. timeout: seconds that one reward may take over one call of
    `score`, and `key` that of the recipe. say: called, once for each cause, with why a reward has no values. Two
    rewards of one name are numbered.

    Raises UserError where a name or path is not there, or a module or class of the user's cannot be loaded. Not for
    several threads at once.
    """

    def __init__(
        self,
        specs: Sequence["Reward"],
        *,
        timeout: float = 60.0,
        say: Callable[[str], None] = print,
        key: str = "grpo.reward_timeout",
    ):
        names = reward_names(specs)
        self._weights = {name: spec.weight for name, spec in zip(names, specs, strict=True)}
        self._paths = {name: str(spec.fn) for name, spec in zip(names, specs, strict=True)}
        where = [(*find(str(spec.fn)), dict(spec.options or {})) for spec in specs]
        super().__init__(
            "dtrain.rl.rewards.scoring:RewardCalls",
            dict(zip(self._weights, where, strict=True)),
            what=f"the rewards ({', '.join(self._weights)})",
            timeout=timeout,
            key=key,
            say=say,
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
        """Return the rewards of N completions; columns: the data's others, a list of N each.

        A reward that takes longer than the timeout, or whose process dies, has no values in this call, and the process
        is replaced. So has one that raises or gives something else than N numbers or None; but as long as this reward
        has never given values, that is its user's mistake, and a UserError with the end of the traceback.
        """
        own = {"prompts": list(prompts), "completions": list(completions)}
        batch = {**columns, **own, "completion_ids": [list(ids) for ids in completion_ids]}
        count = len(own["completions"])
        wrong = {key: len(values) for key, values in batch.items() if len(values) != count}
        if wrong:
            raise ValueError(f"{count} completions, but {wrong}")
        if not count:
            return Scores([], {name: [] for name in self._weights})
        # The answers to their end, and no more than rewards: a process may be lost behind its last one.
        answers = zip(self._answers(batch), self._weights, strict=False)
        parts = {name: self._values(name, answer, count) for answer, name in answers}
        return Scores([self._sum([part[place] for part in parts.values()]) for place in range(count)], parts)

    def _answers(self, batch: Mapping[str, Sequence[Any]]) -> Iterator[Outcome]:
        """Yield the outcome of each reward; where one loses the process, those behind it are computed in another."""
        num_answered = 0
        while num_answered < len(self._weights):
            try:
                self._ensure_running()
                for answer in self.call("score", batch, num_answered):
                    num_answered += 1
                    yield answer
            except WorkerLost as lost:
                num_answered += 1
                yield {"lost": str(lost)}

    def _values(self, name: str, answer: Outcome, count: int) -> list[float]:
        if "value" in answer:
            self._has_worked.add(name)
            if "missed" in answer:
                self._report_once(name, answer["missed"], f"reward {name}: {answer['missed']}")
            return [math.nan if value is None else value for value in answer["value"]]
        if "lost" in answer:
            text = f"reward {name} {answer['lost']}; its values of this rollout are unknown"
            self._report_once(name, answer["lost"], text)
        else:
            path = self._paths[name]
            called = f"reward {name}" if path == name else f"reward {name} ({path})"
            text = answer.get("user") or f"{called} failed:\n{answer['error']}{_hint(answer['error'])}"
            self._report_failure(name, text.splitlines()[-1], text, "\nits values of this rollout are unknown")
        return [math.nan] * count

    def _sum(self, values: Sequence[float]) -> float:
        known = [w * v for w, v in zip(self._weights.values(), values, strict=True) if not math.isnan(v)]
        return math.fsum(known) if known else math.nan


def _hint(error: str) -> str:
    """Return a hint for the traceback of code that was written for TRL, whose completions may be lists of messages; ""
    for any other traceback."""
    of_messages = "TypeError: string indices must be integers", "AttributeError: 'str' object has no attribute 'get'"
    if not error.rpartition("\n")[2].startswith(of_messages):
        return ""
    return "\ncompletions are strings here: write completion where TRL has completion[0]['content']"


def reward_names(specs: Sequence["Reward"]) -> list[str]:
    """Return the names of the rewards: the last word of the path, the second of the same name numbered."""
    names: list[str] = []
    for spec in specs:
        name = str(spec.fn).rsplit(".", 1)[-1]
        taken = sum(other == name or other.startswith(f"{name}#") for other in names)
        names.append(f"{name}#{taken + 1}" if taken else name)
    return names


def pass_at_k_values(samples: int) -> list[int]:
    """Return the k of the pass@k that so many answers to a prompt give: powers of two, and their number."""
    return sorted({*(2**power for power in range(samples.bit_length()) if 2**power <= samples), samples})


def pass_at_k(k: int, samples: int, right: int) -> float:
    """Return the chance that k of `samples` completions, of which `right` pass, have one that does."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


Batch = Mapping[str, Sequence[Any]]  # prompts, completions, completion_ids, and the data's columns


class RewardCalls:
    """Service of the rewards' process, whose methods a `Worker` calls."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}

    def load(self, rewards: Mapping[str, tuple[str, str, Mapping[str, Any]]]) -> list[Outcome]:
        """Load the rewards; yields one outcome. rewards: name -> module, function, options."""
        return [attempt(lambda: self.functions.update({name: load(*where) for name, where in rewards.items()}))]

    def score(self, batch: Batch, first: int) -> Iterator[Outcome]:
        """Yield the values of each reward from the one at place `first` on: numbers and None. A reward with an
        attribute `missed` says there why some of the last values are not known."""
        for name, function in [*self.functions.items()][first:]:
            outcome = attempt(call, name, function, batch)
            missed = getattr(function, "missed", None)
            yield outcome | {"missed": str(missed)} if missed else outcome


def load(module: str, function: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the callable with its options bound; a class is made with them first. Raises UserError for what cannot be
    called or has no signature; whatever the module raises passes."""
    reward = getattr(importlib.import_module(module), function)
    made = reward(**options) if isinstance(reward, type) else partial(reward, **options) if callable(reward) else reward
    read_signature(f"{module}.{function}", made)
    return made


def call(name: str, function: Callable[..., Any], batch: Batch) -> list[float | None]:
    """Return the function's numbers for the completions of `batch`, NaN as None.

    It is called with what its signature takes. Raises UserError where it takes a column that the data does not have, or
    gives something else than one finite number or None for each completion; whatever it raises itself passes.
    """
    takes = read_signature(name, function)
    if missing := [key for key in takes.needs if key not in batch]:
        raise UserError(missing_argument_message(name, missing, batch))
    bound = function.keywords if isinstance(function, partial) else {}
    names = batch if takes.takes_all else {*takes.needs, *takes.may}
    result = function(**{key: values for key, values in batch.items() if key in names and key not in bound})
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    count = len(batch["completions"])
    if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__iter__") or not hasattr(result, "__len__"):
        raise UserError(f"reward {name} gave {shown(result)}; a list of {count} numbers or None is needed")
    if len(result) != count:
        raise UserError(f"reward {name} gave {len(result)} values for {count} completions; one each is needed")
    try:
        return [to_reward(value, " for a completion") for value in result]
    except UserError as error:
        raise UserError(f"reward {name} {error}") from None


async def _awaited(result: Any) -> Any:
    return await result


def nan_to_none(value: Any) -> Any:
    """Return `value` for JSON, with None in place of a NaN; of a mapping, of its values."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, dict):
        return {key: nan_to_none(item) for key, item in value.items()}
    return value
