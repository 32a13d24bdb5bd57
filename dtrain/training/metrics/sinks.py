"""Sinks of rows: metrics.jsonl, which has every row, and trackers, which are views of it.

A sink opens its files at the first row, so that a run that fails before leaves no files. `MetricSink` is the interface
of a tracker; trackers.py has those of other projects. Every sink has

    name        its name in messages
    is_view     whether `metrics.every` may leave rows out of it
    failures    the exceptions that mean that the sink is broken. The sink is then left out, and the run goes on
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from dtrain.base.files import atomic_write_bytes
from dtrain.training.metrics.records import parse_row


class JsonlSink:
    """A file of one JSON object per line, in UTF-8, flushed after each row.

    Floats are not rounded, and non-finite numbers are written as NaN and Infinity.
    """

    is_view = False
    failures = (OSError,)

    def __init__(self, path: Path):
        self.name = str(path)
        self._path = path
        self._file: TextIO | None = None

    def resume_at(self, step: int) -> None:
        """Remove the rows after `step` and a last line that was torn by a kill. 0 removes all rows.

        The other lines stay the same byte for byte. A kill in between leaves either the old or the new file.
        """

        def stays(line: bytes) -> bool:
            return step > 0 and line.endswith(b"\n") and _step_of(line) <= step

        self.cut(stays)

    def cut(self, stays: Callable[[bytes], bool]) -> None:
        """Remove the lines for which `stays` returns False."""
        if not self._path.exists():
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if stays(line)]
        if len(kept) < len(lines):
            atomic_write_bytes(self._path, b"".join(kept))

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _step_of(line: bytes) -> float:
    """Return a row's step; infinity for a damaged line, which is then after every step."""
    row = parse_row(line) or {}
    step = row.get("step")
    return step if isinstance(step, int | float) else float("inf")


class MetricSink(Protocol):
    """Interface of the classes that `metrics.sinks` names.

    It is made as `Class(run, **kwargs)` on rank 0, with a `TrackedRun` and the `kwargs` of the recipe, when the run has
    its first row. A run that fails before that leaves nothing in the tracker.
    """

    def resume_at(self, step: int) -> None:
        """Prepare for the rows after `step`. Called once, before the first row. 0: all steps are trained."""

    def write(self, row: Mapping[str, int | float]) -> None:
        """Record a row, which has the fields of a line of metrics.jsonl, such as `step`, `loss` and `lr`."""

    def close(self) -> None:
        """Send or save whatever is not yet stored. Called once, after the last row."""


@dataclass(frozen=True)
class TrackedRun:
    """The run of dtrain that a tracker records.

    Attributes:
        name: `run.name`.
        directory: The run's directory, where a tracker may keep the id of its own run.
        config: The resolved recipe, with `${oc.env:NAME}` in place of values of the environment, and without secrets.
    """

    name: str
    directory: Path
    config: Mapping[str, Any]


class TrackerSink:
    """A tracker of `metrics.sinks`, which is opened at the first row.

    Args:
        name: Its name in messages.
        open_tracker: Makes the tracker.
    """

    is_view = True
    # A tracker that fails must not end the run. The trackers' libraries raise exceptions of their own clients, such as
    # sqlite3's, httpx's and gradio's, which have no common base, and a user's class may raise any.
    failures = (Exception,)

    def __init__(self, name: str, open_tracker: Callable[[], MetricSink]):
        self.name = name
        self._open_tracker = open_tracker
        self._start_step = 0
        self._tracker: MetricSink | None = None

    def resume_at(self, step: int) -> None:
        """Continue after `step`. The tracker itself is called at the first row."""
        self._start_step = step

    def write(self, row: Mapping[str, int | float]) -> None:
        """Record a row."""
        if self._tracker is None:
            tracker = self._open_tracker()
            tracker.resume_at(self._start_step)
            self._tracker = tracker
        self._tracker.write(row)

    def close(self) -> None:
        if self._tracker is not None:
            # Forgotten first, so that a tracker that fails here is not closed twice.
            tracker, self._tracker = self._tracker, None
            tracker.close()


Sink = JsonlSink | TrackerSink
