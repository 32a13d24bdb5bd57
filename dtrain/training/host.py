"""Hosts of `resolve`: a rank of a run, whose first problem ends the run; and a dry run, which collects every problem.

What differs between `dtrain run` and `dtrain validate` is here, and in what the stages ask `is_dry` about: a dry run
keeps no file, and reads large data and weights in part. `run.spec` says which command has which host. `resolve` calls
`check`, once; the stages call the rest. These hosts are no machines.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from dtrain import recipe as config
from dtrain.base.errors import UserError, in_words
from dtrain.base.ranks import Ranks
from dtrain.recipe.secrets import masked
from dtrain.training import metrics

if TYPE_CHECKING:
    from dtrain.parallel.runtime import Runtime
    from dtrain.training.metrics import Recorder
    from dtrain.training.spec import RunSpec

DEPTHS = ("keys", "models", "files")
"""What checks read: the recipe alone; also each model's config.json; also weights' headers, tokenizers, first rows."""

T = TypeVar("T")


class Host:
    """A rank that resolves the spec of its run: problems are raised, and what one rank does for all is agreed on."""

    is_dry = False
    known: Sequence[str] = ()  # problems that the checks have found
    awaited: Collection[str] = ()
    stages: Collection[str] | None = None  # names of those that are resolved; None: all

    def __init__(self, runtime: "Runtime", stack: ExitStack):
        self.runtime, self._stack = runtime, stack
        self.ranks = Ranks()
        self.recorder: Recorder  # the sinks of the run's metrics, which the stage outputs opens

    def check(self, spec: "RunSpec", stages: Iterable[ModuleType], until: str) -> bool:
        """Return whether the stages are to be resolved: its launcher has checked them."""
        return True

    def ask(self, act: Callable[..., T], *arguments: Any) -> T | None:
        """Return `act(*arguments)`."""
        return act(*arguments)

    def first(self, act: Callable[[], None]) -> None:
        """Call `act`, which gives nothing, on the first rank; its UserError is raised on every rank.
        Collective: one broadcast."""
        self.ranks.first(act)

    def say(self, line: str) -> None:
        """Tell what is read."""
        self.recorder.say(line)

    def open_outputs(self, spec: "RunSpec") -> None:
        """Take the run's directory and open the sinks of its metrics. Collective."""
        recipe = spec.recipe

        def hold() -> None:
            spec.run.hold(tell=print)

        self.first(hold)
        if self.runtime.is_main:
            self._stack.callback(spec.run.release)
        recorder = metrics.build(recipe.metrics, spec.run.path, config.to_yaml(recipe), self.runtime.is_main)
        recorder.hide = partial(masked, secrets=getattr(recipe, "secrets", ()))
        self._stack.callback(recorder.close)
        self.recorder = recorder


class DryHost(Host):
    """Host of `dtrain validate`, one process for all ranks: problems are collected, and no file stays behind.

    awaited: keys of what the run downloads first: weights that are not looked at, or data. refused: problems of the
    recipe's text, which the checks need not tell again.
    """

    is_dry = True

    def __init__(self, awaited: Collection[str] = (), refused: Sequence[str] = ()):
        self.awaited, self.known = awaited, refused
        self.ranks = Ranks(alone=True)
        self.problems: list[str] = []

    def check(self, spec: "RunSpec", stages: Iterable[ModuleType], until: str) -> bool:
        """Call the stages' checks, depth by depth. With problems that they find, only what stands by itself is
        resolved."""
        stages, problems = list(stages), []
        for depth in DEPTHS[: DEPTHS.index(until) + 1] if until in DEPTHS else DEPTHS:
            for stage in stages:
                problems += problems_of(getattr(stage, f"check_{depth}", None), spec)
        self.known = together(self.known, problems)
        self.problems += self.known
        return until not in DEPTHS

    def ask(self, act: Callable[..., T], *arguments: Any) -> T | None:
        """Return `act(*arguments)`; or None, and what it refuses is one of the problems."""
        try:
            return act(*arguments)
        except (OSError, UserError) as error:
            self.problems.append(in_words(error))
            return None

    def first(self, act: Callable[[], None]) -> None:
        """Do as `ask`."""
        self.ask(act)

    def say(self, line: str) -> None:
        """Tell nothing."""

    def open_outputs(self, spec: "RunSpec") -> None:
        """Look whether the run's directory could be taken and its metrics' packages are there."""
        self.problems += metrics.lacking(spec.recipe.metrics)
        self.ask(spec.run.look)


def problems_of(check: Callable[..., Any] | None, *arguments: Any) -> list[str]:
    """Return the list of problems that `check(*arguments)` gives, or the one problem that it raises. A check may be
    absent, and what gives no list has none."""
    try:
        problems = check and check(*arguments)
    except UserError as error:
        return [str(error)]
    except OSError as error:  # a directory on the way that this user may not enter, a name that is too long
        return [f"{in_words(error)}: let this user read it, or name another place in the recipe"]
    return problems if isinstance(problems, list) else []


def together(refused: Sequence[str], problems: Sequence[str]) -> list[str]:
    """Problems of a recipe's text and of what is left of it, each once. What was `refused` is not missing too."""
    keys = [re.split(r"[=:]", problem)[0] for problem in refused]

    def follows(problem: str) -> bool:
        missing = re.match(r"(\S+)(?: or (\S+))? is missing", problem)
        named = [key for key in missing.groups() if key] if missing else []
        emptied = re.match(r"([\w.]+)=\[\]", problem)
        return any(f"{name}.".startswith(f"{key}.") for key in keys for name in named) or bool(
            emptied and any(key.startswith(f"{emptied[1]}[") for key in keys)
        )

    left = [problem for problem in problems if not follows(problem)]
    return list(dict.fromkeys([*refused, *left]))
