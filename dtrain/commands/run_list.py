"""`dtrain ls --runs`: the runs of a directory with state, last step, loss and size. Imports no torch.

Only the end of each metrics.jsonl is read, so that long runs take no time.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from dtrain.base.errors import UserError
from dtrain.base.json_files import read_json
from dtrain.training.directory import ABOUT, End, is_locked, read_end
from dtrain.training.metrics import records
from dtrain.training.metrics.terminal import printable

METRICS = "metrics.jsonl"
MAX_DEPTH = 3  # `run.name` may contain slashes, and a sweep puts its runs in a directory of their own
TAIL_BYTES = 1 << 18  # the end of metrics.jsonl in which the last training row is looked for
UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))

State = Literal["running", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class ListedRun:
    """A run of the list.

    Attributes:
        name: Path of the run below the listed directory.
        directory: Path of the run.
        state: running: a process has locked the directory. finished: all steps are done. stopped: by a signal, or the
            end is not known. failed: by an error, or the process was killed.
        step: The last step in the metrics. 0 before the first.
        total_steps: Number of steps of the run. None if they are not known yet.
        loss: The loss of the last step. None before the first, and if it is not a number.
        size_bytes: Size of all files.
        updated: Time of the last change, in UTC.
        age_seconds: Seconds since then.
        error: First line of the error that ended the run.
    """

    name: str
    directory: str
    state: State
    step: int
    total_steps: int | None
    loss: float | None
    size_bytes: int
    updated: str
    age_seconds: float
    error: str | None


def list_runs(directory: Path) -> list[ListedRun]:
    """Return the runs in a directory: those that are running first, then by the time of their last change.

    Args:
        directory: A directory with runs, or the directory of a run.

    Raises:
        UserError: If there is no such directory.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory; `dtrain ls --runs DIR` lists the runs in another one")
    runs = [_describe(path, directory) for path in _find_runs(directory, MAX_DEPTH)]
    return sorted(runs, key=lambda run: (run.state != "running", run.age_seconds))


def as_json(runs: Sequence[ListedRun]) -> str:
    """Return the runs as a JSON list, with the attributes of `ListedRun` as keys."""
    return json.dumps([asdict(run) for run in runs], indent=1)


def as_table(runs: Sequence[ListedRun], directory: Path) -> list[str]:
    """Return the lines of a table of the runs."""
    if not runs:
        return [f"there is no run in {directory}"]
    rows = [("run", "state", "step", "loss", "size", "changed")]
    for run in runs:
        total = "" if run.total_steps is None else f"/{run.total_steps}"
        loss = "" if run.loss is None else f"{run.loss:.4g}"
        age = f"{format_age(run.age_seconds)} ago"
        rows.append((printable(run.name), run.state, f"{run.step}{total}", loss, format_size(run.size_bytes), age))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        name, state, *numbers = row
        cells = [f"{name:<{widths[0]}}", f"{state:<{widths[1]}}"]
        cells += [f"{text:>{width}}" for text, width in zip(numbers, widths[2:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    columns = shutil.get_terminal_size((100, 0)).columns
    for run in runs:
        if run.error is not None:
            line = f"{printable(run.name)} failed: {printable(run.error)}"
            lines.append(line if len(line) <= columns else f"{line[: columns - 3]}...")
    return lines


def format_size(size: int) -> str:
    """Format a number of bytes.

    Example:
        >>> format_size(3 << 30), format_size(1536), format_size(12)
        ('3.0 GiB', '1.5 KiB', '12 B')
    """
    for unit, name in UNITS:
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size} B"


def format_age(seconds: float) -> str:
    """Format a time with its largest unit.

    Example:
        >>> format_age(12.3), format_age(150), format_age(7200), format_age(1e6)
        ('12 s', '2 min', '2 h', '11 days')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min"
    if seconds < 2 * 86400:
        return f"{seconds // 3600:.0f} h"
    return f"{seconds // 86400:.0f} days"


def is_run(directory: Path) -> bool:
    """Check whether a directory is the directory of a run."""
    return (directory / "config.yaml").is_file() and ((directory / METRICS).is_file() or (directory / "lock").is_file())


def _find_runs(directory: Path, depth: int) -> Iterator[Path]:
    """Yield the directories of runs in a directory, which may be a run itself."""
    if is_run(directory):
        yield directory
        return
    if depth == 0:
        return
    with suppress(OSError):  # a directory that cannot be read has no run that could be described
        for entry in sorted(directory.iterdir()):
            if entry.is_dir() and not entry.name.startswith("."):
                yield from _find_runs(entry, depth - 1)


def _describe(path: Path, directory: Path) -> ListedRun:
    """Describe a run."""
    row = _last_training_row(path / METRICS)
    step = records.number(row.get("step"))
    loss = records.number(row.get("loss"))
    about: dict[str, Any] = {}
    with suppress(UserError):  # a damaged file, or one that is being replaced
        about = read_json(path / ABOUT, allow_nan=True) if (path / ABOUT).is_file() else {}
    total = about.get("steps")
    size, changed = _size_and_time(path)
    end = read_end(path)
    last_step = int(step) if step is not None else 0
    total_steps = total if isinstance(total, int) else None
    return ListedRun(
        name=path.name if path == directory else str(path.relative_to(directory)),
        directory=str(path),
        state=_state(path, end, last_step, total_steps),
        step=last_step,
        total_steps=total_steps,
        loss=loss if loss is not None and records.is_plottable(loss) else None,
        size_bytes=size,
        updated=datetime.fromtimestamp(changed, UTC).isoformat(timespec="seconds"),
        age_seconds=max(0.0, time.time() - changed),
        error=end.error if end is not None else None,
    )


def _state(path: Path, end: End | None, step: int, total_steps: int | None) -> State:
    """Return the state of a run.

    Args:
        path: The run's directory.
        end: How the run says that it ended. None if it does not say so.
        step: Its last step.
        total_steps: Its number of steps. None if it is not known.
    """
    if is_locked(path):
        return "running"
    if end is not None:
        return end.state
    if total_steps is not None and step >= total_steps:
        return "finished"
    # A run empties its lock when it ends in any way but a kill, so that a name in the lock is of a killed process.
    with suppress(OSError):
        if (path / "lock").stat().st_size > 0:
            return "failed"
    return "stopped"


def _last_training_row(path: Path) -> dict[str, Any]:
    """Return the last row of metrics.jsonl with a loss. Empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        row = records.parse_row(line)
        if row is not None and "loss" in row:
            return row
    return {}


def _size_and_time(path: Path) -> tuple[int, float]:
    """Return the size of all files below a directory, and the time of the newest change of one."""
    size, changed = 0, path.stat().st_mtime
    seen: set[tuple[int, int]] = set()
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # the file may have been deleted
                facts = os.lstat(Path(folder) / name)
                changed = max(changed, facts.st_mtime)
                # Files of a kept checkpoint may be hard links to those of another one.
                if (facts.st_dev, facts.st_ino) not in seen:
                    seen.add((facts.st_dev, facts.st_ino))
                    size += facts.st_size
    return size, changed
