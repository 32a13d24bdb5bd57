"""Retention of a run's saves, its patience, and the disk space that its saves need.

Retention decides which saves stay. Patience ends a run whose metric has not improved for too long. The disk space is
the size of one save times the number that the retention keeps.
"""

import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from dtrain.base.json_files import loads, split_lines
from dtrain.checkpoint.dcp.shards import TensorShard
from dtrain.recipe.schema import Checkpoint


@dataclass(frozen=True)
class Retention:
    """A save stays if any of the three asks for it; None asks for nothing, but `keep_last` None keeps all.

    keep_last   the newest so many
    keep_every  the steps that this divides
    keep_best   the step at which this field of the metrics was best: the lowest, or with `better=max` the highest value
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: str | None = None
    better: Callable[[Iterable[float]], float] = min

    def steps_to_delete(self, measured: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The steps to delete, ascending, of those in `measured`: step → the metrics saved with it. Of equally good
        steps the newest stays; a step whose field is missing or not finite is no candidate."""
        if self.keep_last is None:
            return []
        steps = sorted(measured)
        kept = set(steps[-self.keep_last :])
        if self.keep_every is not None:
            kept.update(step for step in steps if step % self.keep_every == 0)
        fields = {step: measured[step].get(self.keep_best) for step in steps if self.keep_best is not None}
        values = {step: value for step, value in fields.items() if value is not None and math.isfinite(value)}
        if values:
            best = self.better(values.values())
            kept.add(max(step for step, value in values.items() if value == best))
        return [step for step in steps if step not in kept]


@dataclass
class Patience:
    """Patience of a run without a better value of the field `name` of its metrics. most: measures in a row that are
    not better than the best before them; None, for either, is for ever. values: those so far, in order."""

    name: str | None
    better: Callable[[Iterable[float]], float]
    max_misses: int | None
    values: list[float] = field(default_factory=list)

    def record(self, measured: Mapping[str, float]) -> None:
        """Take what was measured after a step; only what was measured anew."""
        value = measured.get(self.name or "")
        if value is not None and math.isfinite(value):
            self.values.append(value)

    def read_values(self, metrics_file: Path) -> list[float]:
        """The values in a run's metrics.jsonl."""
        if not metrics_file.is_file():
            return []
        rows = map(loads, split_lines(metrics_file.read_text(encoding="utf-8")))
        return [row[self.name] for row in rows if self.name in row and math.isfinite(row[self.name])]

    @property
    def is_exhausted(self) -> bool:
        if self.max_misses is None or not self.values:
            return False
        best = self.values.index(self.better(self.values))
        return len(self.values) - 1 - best >= self.max_misses


def save_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the size in bytes of a save of `tensors` by all ranks, without its small files. No collective.

    Args:
        tensors: This rank's tensors. A DTensor counts with its global size.
    """
    total = 0
    for tensor in tensors.values():
        piece = TensorShard.from_tensor(tensor)
        total += piece.global_size.numel() * piece.local.element_size()
    return total


def free_bytes(directory: Path) -> int:
    """Return the free space in bytes for this user in `directory`, which need not exist yet."""
    existing = directory.absolute()
    while not existing.is_dir():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def format_bytes(size: int) -> str:
    """Format a number of bytes with its unit.

    >>> shown_bytes(3 << 30), shown_bytes(1536), shown_bytes(12)
    ('3.0 GiB', '1.5 KiB', '12 bytes')
    """
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size} bytes"


def max_concurrent_saves(retention: Retention, saves: int | None = None) -> int | None:
    """Return the largest number of saves that exist at the same time. None if the retention sets no limit.

    A save is deleted only after the next one is complete, so there is one more than `keep_last` for a moment.

    Args:
        retention: Which saves are kept.
        saves: The number of saves that the run makes. None if it is not known.
    """
    if retention.keep_last is None or retention.keep_every is not None:
        return saves
    largest = retention.keep_last + 1
    if retention.keep_best is not None:
        largest += 1
    return largest if saves is None else min(largest, saves)


def planned_saves_line(size: int, keep: Checkpoint, steps: int | None, directory: Path) -> str:
    """Return a line about the saves that a run will write, and the free space in their directory.

    Args:
        size: Bytes of one save, about.
        keep: The recipe's section `checkpoint`, whose `every` is not null.
        steps: Steps of the run. None if they are not known.
        directory: The directory of the saves, which need not exist yet.
    """
    assert keep.every is not None, "the run saves nothing"
    saves = None if steps is None else -(-steps // keep.every)
    line = space_line(size, Retention(keep.keep_last, keep.keep_every, keep.keep_best), saves)
    return f"{line}; {format_bytes(free_bytes(directory))} are free in {directory}"


def space_line(size: int, retention: Retention, saves: int | None) -> str:
    """Return a line for the terminal about the disk space of a run's saves.

    For example: "3.0 GiB each, at most 3 at a time (checkpoint.keep_last=2): 9.0 GiB".

    Args:
        size: Bytes of one save.
        retention: Which saves are kept.
        saves: The number of saves that the run makes. None if it is not known.
    """
    values = {"keep_last": retention.keep_last, "keep_every": retention.keep_every, "keep_best": retention.keep_best}
    settings = ", ".join(f"checkpoint.{key}={value}" for key, value in values.items() if value is not None)
    if not settings:
        settings = "checkpoint.keep_last=null"
    largest = max_concurrent_saves(retention, saves)
    if largest is None:
        return f"{format_bytes(size)} each, and {settings} sets no limit to their number"
    return f"{format_bytes(size)} each, at most {largest} at a time ({settings}): {format_bytes(size * largest)}"
