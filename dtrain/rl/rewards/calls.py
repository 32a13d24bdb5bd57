"""The inside of the rewards' process: from a module's and a function's name to a callable, from a call to checked
numbers."""

import asyncio
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from dtrain.base.errors import UserError
from dtrain.rl.child import Outcome, attempt, reward_of, shown
from dtrain.rl.rewards.columns import Signature, takes_more
from dtrain.rl.rewards.find import NO_REWARD

Batch = Mapping[str, Sequence[Any]]  # prompts, completions, completion_ids, and the data's columns


class RewardCalls:
    """Service of the rewards' process, whose methods a `Worker` calls."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}

    def load(self, rewards: Mapping[str, tuple[str, str, Mapping[str, Any]]]) -> list[Outcome]:
        """Load the rewards; yields one outcome. rewards: name -> module, function, options."""
        return [attempt(self._load, rewards)]

    def score(self, batch: Batch, first: int) -> Iterator[Outcome]:
        """Yield the values of each reward from the one at place `first` on: numbers and None. A reward with an
        attribute `missed` says there why some of the last values are not known."""
        for name, function in [*self.functions.items()][first:]:
            outcome = attempt(call, name, function, batch)
            missed = getattr(function, "missed", None)
            yield outcome | {"missed": str(missed)} if missed else outcome

    def _load(self, rewards: Mapping[str, tuple[str, str, Mapping[str, Any]]]) -> None:
        self.functions = {name: load(*where) for name, where in rewards.items()}


class Look:
    """Service that reads the signatures of one reward before a run: of what it is made and called with. It neither
    makes nor calls it."""

    def load(self, module: str, function: str) -> list[Outcome]:
        return [attempt(self._load, module, function)]

    def signatures(self) -> list[tuple[dict[str, Any] | None, dict[str, Any]]]:
        return [self._signatures]

    def _load(self, module: str, function: str) -> None:
        path = f"{module}.{function}"
        self._signatures: tuple[dict[str, Any] | None, dict[str, Any]]
        reward = getattr(importlib.import_module(module), function)
        if not isinstance(reward, type):
            self._signatures = None, asdict(_signature(path, reward))
        elif any("__call__" in vars(base) for base in reward.__mro__):
            made_with, called_with = _signature(path, reward), _signature(path, reward.__call__, skip=1)
            self._signatures = asdict(made_with), asdict(called_with)
        else:
            raise UserError(f"reward {path} is a class without __call__, {NO_REWARD}")


def _signature(path: str, function: Any, skip: int = 0) -> Signature:
    """Return the signature of a callable. skip: how many parameters to leave out at the beginning. Raises UserError for
    what has no signature."""
    try:
        parameters = [*inspect.signature(function).parameters.values()][skip:]
    except (TypeError, ValueError) as error:
        raise UserError(f"reward {path} cannot be called by names ({error}), {NO_REWARD}") from None
    bare = [p for p in parameters if p.default is p.empty]
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return Signature(
        needs=[p.name for p in bare if p.kind in by_name],
        may=[p.name for p in parameters if p.default is not p.empty and p.kind in by_name],
        by_place=[p.name for p in bare if p.kind is p.POSITIONAL_ONLY],
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def load(module: str, function: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the callable with its options bound; a class is made with them first. Raises UserError for what cannot be
    called or has no signature; whatever the module raises passes."""
    reward = getattr(importlib.import_module(module), function)
    made = reward(**options) if isinstance(reward, type) else partial(reward, **options) if callable(reward) else reward
    _signature(f"{module}.{function}", made)
    return made


def call(name: str, function: Callable[..., Any], batch: Batch) -> list[float | None]:
    """Return the function's numbers for the completions of `batch`, NaN as None.

    It is called with what its signature takes. Raises UserError where it takes a column that the data does not have, or
    gives something else than one finite number or None for each completion; whatever it raises itself passes.
    """
    result = function(**_arguments(name, function, batch))
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    count = len(batch["completions"])
    if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__iter__") or not hasattr(result, "__len__"):
        raise UserError(f"reward {name} gave {shown(result)}; a list of {count} numbers or None is needed")
    if len(result) != count:
        raise UserError(f"reward {name} gave {len(result)} values for {count} completions; one each is needed")
    return [_number(name, value) for value in result]


def _arguments(name: str, function: Callable[..., Any], batch: Batch) -> dict[str, Any]:
    takes = _signature(name, function)
    if missing := [key for key in takes.needs if key not in batch]:
        raise UserError(takes_more(name, missing, batch))
    bound = function.keywords if isinstance(function, partial) else {}
    names = batch if takes.takes_all else {*takes.needs, *takes.may}
    return {key: values for key, values in batch.items() if key in names and key not in bound}


async def _awaited(result: Any) -> Any:
    return await result


def _number(name: str, value: Any) -> float | None:
    try:
        return reward_of(value, " for a completion")
    except UserError as error:
        raise UserError(f"reward {name} {error}") from None
