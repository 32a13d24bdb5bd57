"""The part of a run that a method, its engines and its evaluations use."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dtrain.data.model_directory import ModelDirectory


class RunLog(Protocol):
    """Rows and lines that a run writes; `dtrain.training.metrics.Recorder` is one."""

    def say(self, text: str) -> None: ...

    def log(self, row: Mapping[str, int | float], step: int) -> None: ...

    def write_beside(self, name: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None: ...

    def drop_answers(self, step: int, name: str) -> None: ...


@dataclass(frozen=True)
class RunContext:
    """The part of a run that a method, its engines and its evaluations use.

    Attributes:
        metrics: Writes rows and lines.
        path: The run's directory.
        identities: Digests of everything that the run reads at its start, by the keys that a resume compares.
        source: The directory of model.path, with the run's tokenizer and chat template.
        others: The directories of the method's other models, by key.
        stack: Closes what is opened for the run when the run ends.
        ask_stop: Returns whether this rank was asked to stop. Work that takes long between two steps may then raise
            Interrupted, on every rank, and the run is saved as the last step left it.
    """

    metrics: RunLog
    path: Path
    identities: Mapping[str, str]
    source: ModelDirectory
    others: Mapping[str, ModelDirectory]
    stack: ExitStack
    ask_stop: Callable[[], bool]
