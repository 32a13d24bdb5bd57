"""Inside the rewards' process: from a module's and a function's name to a callable, from a call to checked numbers."""

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
    """What a `Worker` asks of the rewards."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}

    def load(self, rewards: Mapping[str, tuple[str, str, Mapping[str, Any]]]) -> list[Outcome]:
        """rewards: name -> module, function, options."""
        return [attempt(self._load, rewards)]

    def score(self, batch: Batch, first: int) -> Iterator[Outcome]:
        """The values of each reward from the one at place `first` on: numbers and None. One that has an attribute
        `missed` says there why some of the last values are not known."""
        for name, function in [*self.functions.items()][first:]:
            found = attempt(call, name, function, batch)
            missed = getattr(function, "missed", None)
            yield found | {"missed": str(missed)} if missed else found

    def _load(self, rewards: Mapping[str, tuple[str, str, Mapping[str, Any]]]) -> None:
        self.functions = {name: load(*where) for name, where in rewards.items()}


class Look:
    """Asked of one reward before a run: what it is made and called with. Nothing is made or called."""

    def load(self, module: str, function: str) -> list[Outcome]:
        return [attempt(self._load, module, function)]

    def signatures(self) -> list[tuple[dict[str, Any] | None, dict[str, Any]]]:
        return [self._found]

    def _load(self, module: str, function: str) -> None:
        path = f"{module}.{function}"
        self._found: tuple[dict[str, Any] | None, dict[str, Any]]
        found = getattr(importlib.import_module(module), function)
        if not isinstance(found, type):
            self._found = None, asdict(_signature(path, found, skip=0))
        elif any("__call__" in vars(one) for one in found.__mro__):
            self._found = asdict(_signature(path, found, skip=0)), asdict(_signature(path, found.__call__, skip=1))
        else:
            raise UserError(f"reward {path} is a class without __call__, {NO_REWARD}")


def _signature(path: str, function: Any, skip: int) -> Signature:
    """skip: how many parameters to leave out at the beginning. Raises UserError for what has no signature."""
    try:
        takes = [*inspect.signature(function).parameters.values()][skip:]
    except (TypeError, ValueError) as error:
        raise UserError(f"reward {path} cannot be called by names ({error}), {NO_REWARD}") from None
    bare = [one for one in takes if one.default is one.empty]
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return Signature(
        needs=[one.name for one in bare if one.kind in by_name],
        may=[one.name for one in takes if one.default is not one.empty and one.kind in by_name],
        by_place=[one.name for one in bare if one.kind is one.POSITIONAL_ONLY],
        takes_all=any(one.kind is one.VAR_KEYWORD for one in takes),
    )


def load(module: str, function: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The callable with its options given; a class is made with them first. Raises UserError for what cannot be called
    or has no signature; whatever the module raises passes."""
    found = getattr(importlib.import_module(module), function)
    made = found(**options) if isinstance(found, type) else partial(found, **options) if callable(found) else found
    try:
        inspect.signature(made)
    except (TypeError, ValueError) as error:
        raise UserError(f"reward {module}.{function} cannot be called by names ({error}), {NO_REWARD}") from None
    return made


def call(name: str, function: Callable[..., Any], batch: Batch) -> list[float | None]:
    """The function's numbers for the completions of `batch`, NaN as None.

    It is given what its signature takes. Raises UserError where it takes a column that the data does not have, or gives
    something else than one finite number or None for each completion; whatever it raises itself passes.
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
    given = function.keywords if isinstance(function, partial) else {}
    parameters = inspect.signature(function).parameters.values()
    takes = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    missing = [key for key, p in takes.items() if p.default is p.empty and key not in batch and key not in given]
    if missing:
        raise UserError(takes_more(name, missing, batch))
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return {key: values for key, values in batch.items() if key not in given and (takes_all or key in takes)}


async def _awaited(result: Any) -> Any:
    return await result


def _number(name: str, value: Any) -> float | None:
    try:
        return reward_of(value, " for a completion")
    except UserError as error:
        raise UserError(f"reward {name} {error}") from None
