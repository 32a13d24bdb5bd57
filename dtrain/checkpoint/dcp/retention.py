"""Retention of a run's saves, early stopping, and the disk space that saves need.

`Retention` decides which saves are kept. `Patience` ends a run whose metric has not improved for too long. The disk
space is the size of one save times the number of saves that exist at the same time.
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
    """Rules for keeping saves. A save is kept if at least one of them selects it.

    Attributes:
        keep_last: Number of newest saves to keep. None keeps all saves, and the other rules have no effect.
        keep_every: Keep the steps that are multiples of this number. None: no such rule.
        keep_best: Name of a field of the metrics. The step with its best value is kept. None: no such rule.
        better: `min` if lower values of `keep_best` are better, `max` if higher values are.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: str | None = None
    better: Callable[[Iterable[float]], float] = min

    def steps_to_delete(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Return the steps to delete, ascending.

        Args:
            metrics: The metrics that were saved with each step. A step whose field `keep_best` is missing or not finite
                cannot be the best one. If several steps are equally good, the newest counts.

        Example:
            >>> losses = {10: 2.0, 20: 1.5, 30: 1.7, 40: 1.6}
            >>> metrics = {step: {"val_loss": loss} for step, loss in losses.items()}
            >>> Retention(keep_last=1, keep_best="val_loss").steps_to_delete(metrics)
            [10, 30]
        """
        if self.keep_last is None:
            return []
        steps = sorted(metrics)
        kept = set(steps[-self.keep_last :])
        if self.keep_every is not None:
            kept.update(step for step in steps if step % self.keep_every == 0)
        if self.keep_best is not None:
            values = {}
            for step in steps:
                value = metrics[step].get(self.keep_best)
                if value is not None and math.isfinite(value):
                    values[step] = value
            if values:
                best = self.better(values.values())
                kept.add(max(step for step, value in values.items() if value == best))
        return [step for step in steps if step not in kept]


@dataclass
class Patience:
    """Ends a run whose metric has not improved for too long.

    Attributes:
        name: Field of the metrics. None: never ends a run.
        better: `min` if lower values are better, `max` if higher values are.
        max_misses: Number of values in a row, none better than the best one before them, after which the run ends.
            None: never ends a run.
        values: The values so far, in order.

    Example:
        >>> patience = Patience("val_loss", min, max_misses=2)
        >>> for value in (3.0, 2.0, 2.5, 2.1):
        ...     patience.record({"val_loss": value})
        >>> patience.is_exhausted
        True
    """

    name: str | None
    better: Callable[[Iterable[float]], float]
    max_misses: int | None
    values: list[float] = field(default_factory=list)

    def record(self, metrics: Mapping[str, float]) -> None:
        """Add a value from the metrics of a step. The metrics must contain only what was measured at this step."""
        value = metrics.get(self.name or "")
        if value is not None and math.isfinite(value):
            self.values.append(value)

    def read_values(self, metrics_file: Path) -> list[float]:
        """Read all values from a run's metrics.jsonl."""
        if not metrics_file.is_file():
            return []
        values = []
        for line in split_lines(metrics_file.read_text(encoding="utf-8")):
            row = loads(line)
            if self.name in row and math.isfinite(row[self.name]):
                values.append(row[self.name])
        return values

    @property
    def is_exhausted(self) -> bool:
        """True if none of the last `max_misses` values improved on the best value before them."""
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
        shard = TensorShard.from_tensor(tensor)
        total += shard.global_size.numel() * shard.local.element_size()
    return total


def free_bytes(directory: Path) -> int:
    """Return the free space in bytes for this user in `directory`, which need not exist yet."""
    existing = directory.absolute()
    while not existing.is_dir():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def format_bytes(size: int) -> str:
    """Format a number of bytes with its unit.

    >>> format_bytes(3 << 30), format_bytes(1536), format_bytes(12)
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

    Example:
        >>> max_concurrent_saves(Retention(keep_last=2))
        3
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
        size: Approximate size of one save, in bytes.
        keep: The recipe's section `checkpoint`, whose `every` is not null.
        steps: Steps of the run. None if they are not known.
        directory: The directory of the saves, which need not exist yet.
    """
    assert keep.every is not None, "the run saves nothing"
    saves = None if steps is None else -(-steps // keep.every)  # rounded up: the last step is saved too
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
