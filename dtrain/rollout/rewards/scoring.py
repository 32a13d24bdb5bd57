"""Completions to rewards, in one worker process that may hang, crash or be killed without harm to the run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dtrain.errors import UserError
from dtrain.rollout.process import Lost, UserCodeProcess
from dtrain.rollout.rewards.find import find


class Spec(Protocol):
    """A reward of a recipe: `config.schema.Reward`, or anything alike."""

    fn: str
    weight: float
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Scores:
    """total: the weighted sum of the parts for each completion; parts: by reward's name. NaN where none is known."""

    total: list[float]
    parts: dict[str, list[float]]


class Rewards:
    """Rewards by name or import path, loaded in a process of their own.

    specs: each with fn, weight and kwargs. timeout: seconds that one reward may take over one call of `score`. say:
    told, once for each cause, why a reward has no values. Two rewards of one name are told apart by a number.

    Raises UserError where a name or path is not there, or a module or class of the user's cannot be loaded. Not for
    several threads at once.
    """

    def __init__(self, specs: Sequence[Spec], *, timeout: float = 60.0, say: Callable[[str], None] = print):
        self._weights = {name: spec.weight for name, spec in zip(reward_names(specs), specs, strict=True)}
        found = [find(spec.fn) for spec in specs]
        loads = [
            (name, *where, dict(spec.kwargs or {}))
            for name, where, spec in zip(self._weights, found, specs, strict=True)
        ]
        self._say = say
        self._told: set[str] = set()
        self._has_worked: set[str] = set()
        self._worker = UserCodeProcess(
            "dtrain.rollout.rewards.worker",
            ("load", loads),
            what=f"the rewards ({', '.join(self._weights)})",
            timeout=timeout,
            key="grpo.reward_timeout",
        )

    @property
    def names(self) -> list[str]:
        """The parts' names, in the order of the specs."""
        return list(self._weights)

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> Scores:
        """The rewards of N completions; columns: the data's others, a list of N each.

        A reward that takes longer than the timeout, or whose process dies, has no values in this call, and the process
        is replaced. So has one that raises or gives something else than N numbers or None, except in its first call of
        all: that is its user's mistake, and a UserError with the end of the traceback.
        """
        own = {"prompts": list(prompts), "completions": list(completions)}
        batch = {**columns, **own, "completion_ids": [list(ids) for ids in completion_ids]}
        wrong = {key: len(values) for key, values in batch.items() if len(values) != len(own["completions"])}
        if wrong:
            raise ValueError(f"{len(own['completions'])} completions, but {wrong}")
        if not own["completions"]:
            return Scores([], {name: [] for name in self._weights})
        return self._worker.run(self._score, batch)

    def close(self) -> None:
        """End the worker, at once even where it computes. May be called again."""
        self._worker.close()

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _score(self, batch: Mapping[str, Sequence[Any]]) -> Scores:
        count = len(batch["completions"])
        parts = {name: [math.nan] * count for name in self._weights}
        has_batch = False
        for index, name in enumerate(self._weights):
            try:
                if not self._worker.is_alive:
                    self._worker.replace()
                    has_batch = False
                if not has_batch:
                    self._worker.send("batch", batch)
                    has_batch = True
                self._worker.send("call", index)
                answer = self._worker.answer()
            except Lost as lost:
                self._worker.kill()
                self._tell(name, str(lost), f"reward {name} {lost}; its values of this rollout are unknown")
                continue
            if "values" in answer:
                self._has_worked.add(name)
                parts[name] = [math.nan if value is None else value for value in answer["values"]]
                continue
            text = answer.get("user") or f"reward {name} failed:\n{answer['error']}"
            if name not in self._has_worked:
                raise UserError(text)
            self._tell(name, text.splitlines()[-1], f"{text}\nits values of this rollout are unknown")
        return Scores([self._sum([part[i] for part in parts.values()]) for i in range(count)], parts)

    def _sum(self, values: Sequence[float]) -> float:
        known = [w * v for w, v in zip(self._weights.values(), values, strict=True) if not math.isnan(v)]
        return math.fsum(known) if known else math.nan

    def _tell(self, name: str, cause: str, text: str) -> None:
        if f"{name}: {cause}" not in self._told:
            self._told.add(f"{name}: {cause}")
            self._say(text)


def reward_names(specs: Sequence[Spec]) -> list[str]:
    """What the rewards are called: the last word of the path, the second of one name numbered."""
    names: list[str] = []
    for spec in specs:
        name = spec.fn.rsplit(".", 1)[-1]
        taken = sum(other == name or other.startswith(f"{name}#") for other in names)
        names.append(f"{name}#{taken + 1}" if taken else name)
    return names
