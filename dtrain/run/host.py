"""Host of `resolve`: a rank of a run, whose first problem ends the run."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from dtrain import recipe as config
from dtrain.base.ranks import Ranks
from dtrain.parallel.runtime import Runtime
from dtrain.recipe.secrets import masked
from dtrain.run import metrics, resume
from dtrain.run.metrics import Recorder
from dtrain.run.stages import Stage

if TYPE_CHECKING:
    from dtrain.run.spec import RunSpec

T = TypeVar("T")


class Host:
    """A rank that resolves the spec of its run: problems are raised, and what one rank does for all is agreed on."""

    known: Sequence[str] = ()
    awaited: Collection[str] = ()
    stages: Mapping[str, Stage] = MappingProxyType({})  # in place of `spec.STAGES` of the same names

    def __init__(self, runtime: Runtime, stack: ExitStack):
        self.runtime, self._stack = runtime, stack
        self.ranks = Ranks()
        self.recorder: Recorder  # the sinks of the run's metrics, which the stage outputs opens

    def ask(self, act: Callable[..., T], *arguments: Any) -> T | None:
        """Return `act(*arguments)`."""
        return act(*arguments)

    def first(self, act: Callable[[], object]) -> None:
        """Call `act` on the first rank, whose result does not travel; its UserError is raised on every rank.
        Collective: one broadcast."""

        def run() -> None:
            act()

        self.ranks.first(run)

    def note(self, lines: Sequence[str]) -> None:
        """Leave notes on the sizes to the lines with which the run opens."""

    def identify(self, spec: "RunSpec") -> None:
        """Read the digests of what the run reads at its start. Collective."""
        spec.identities = resume.identities(spec.recipe, spec.tokenizer, self.ranks)

    def open_outputs(self, spec: "RunSpec") -> None:
        """Take the run's directory and open the sinks of its metrics. Collective."""
        recipe = spec.recipe
        self.first(lambda: spec.run.hold(tell=print))
        if self.runtime.is_main:
            self._stack.callback(spec.run.release)
        recorder = metrics.build(recipe.metrics, spec.run.path, config.to_yaml(recipe), self.runtime.is_main)
        recorder.hide = partial(masked, secrets=getattr(recipe, "secrets", ()))
        self._stack.callback(recorder.close)
        self.recorder = recorder
