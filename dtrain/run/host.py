"""Hosts of `resolve`: a rank of a run, whose first problem ends the run, and the dry run of `dtrain validate`, which
collects problems.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dtrain import recipe as config
from dtrain.base.errors import UserError, in_words
from dtrain.base.ranks import Ranks
from dtrain.parallel.runtime import Runtime
from dtrain.run import metrics
from dtrain.run.metrics import Recorder
from dtrain.run.preflight import has_urls

if TYPE_CHECKING:
    from dtrain.run.spec import RunSpec

T = TypeVar("T")


class Host:
    """A rank that resolves the spec of its run: problems are raised, and what one rank does for all is agreed on."""

    known: Sequence[str] = ()
    awaited: Collection[str] = ()

    def __init__(self, runtime: Runtime, stack: ExitStack):
        self.runtime, self._stack = runtime, stack
        self.ranks = Ranks()
        self._recorder: Recorder | None = None

    @property
    def recorder(self) -> Recorder:
        """The sinks of the run's metrics, which the stage outputs opens."""
        assert self._recorder is not None
        return self._recorder

    def ask(self, act: Callable[..., T], *arguments: Any) -> T | None:
        """Return `act(*arguments)`."""
        return act(*arguments)

    def first(self, act: Callable[[], None]) -> None:
        """Call `act` on the first rank; its UserError is raised on every rank. Collective: one broadcast."""
        self.ranks.first(act)

    def say(self, line: str) -> None:
        """Print a line on the first rank's terminal."""
        self.recorder.say(line)

    def note(self, lines: Sequence[str]) -> None:
        """Leave notes on the sizes to the lines with which the run opens."""

    def cache_dir(self, spec: "RunSpec") -> Path | None:
        """Return where tokenised rows and copies of URLs are kept."""
        return spec.recipe.cache

    def open_outputs(self, spec: "RunSpec") -> None:
        """Take the run's directory and open the sinks of its metrics. Collective."""
        recipe = spec.recipe

        def hold() -> None:
            spec.run.hold(tell=print)

        self.first(hold)
        if self.runtime.is_main:
            self._stack.callback(spec.run.release)
        recorder = metrics.build(recipe.metrics, spec.run.path, config.to_yaml(recipe), self.runtime.is_main)
        recorder.hide = lambda text: config.redact(text, recipe)
        self._stack.callback(recorder.close)
        self._recorder = recorder


class DryHost(Host):
    """`dtrain validate`: problems are collected, one process stands for all, and no file stays behind.

    known: what is known to be wrong; with that only what stands by itself is looked at. awaited: keys of what the run
    downloads first: weights that are not looked at, or data. notes: lines for the user.
    """

    def __init__(self, known: Sequence[str] = (), awaited: Collection[str] = ()):
        self.known, self.awaited = known, awaited
        self.ranks = Ranks(alone=True)
        self.problems: list[str] = []
        self.notes: list[str] = []

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
        """Drop what a run would say while it reads."""

    def note(self, lines: Sequence[str]) -> None:
        """Keep lines for the user."""
        self.notes += lines

    def cache_dir(self, spec: "RunSpec") -> Path | None:
        """Return where copies of URLs are; rows are kept nowhere."""
        return spec.recipe.cache if has_urls(spec.recipe) else None

    def open_outputs(self, spec: "RunSpec") -> None:
        """Look whether the run's directory could be taken and its metrics' packages are there."""
        self.problems += metrics.lacking(spec.recipe.metrics)
        self.ask(spec.run.look)
