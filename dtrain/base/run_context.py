"""The part of a run that a method, its engines and its evaluations use."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class RunLog(Protocol):
    """Rows and lines that a run writes down; `dtrain.training.metrics.Recorder` is one."""

    def say(self, text: str) -> None: ...

    def log(self, row: Mapping[str, int | float], step: int) -> None: ...

    def write_beside(self, name: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None: ...

    def drop_answers(self, step: int, name: str) -> None: ...


@dataclass(frozen=True)
class RunContext:
    """The part of a run that a method, its engines and its evaluations use.

    metrics: rows and lines that the run writes down. path: the run's directory. identities: digests of what is read, by
    key, as a resume compares them. stack: closes what is opened here when the run ends. ask_stop: returns whether this
    rank was asked to stop; what takes long between two steps may then raise Interrupted, on every rank, and the run is
    saved as the last step left it.
    """

    metrics: RunLog
    path: Path
    identities: Mapping[str, str]
    stack: ExitStack
    ask_stop: Callable[[], bool]
