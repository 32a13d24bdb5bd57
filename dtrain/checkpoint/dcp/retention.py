"""Retention of a run's saves, and patience: when a run has not got better for too long. Knows no tensor and
imports no torch."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dtrain.base.json_files import loads, split_lines


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

    def dropped(self, measured: Mapping[int, Mapping[str, float]]) -> list[int]:
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
    most: int | None
    values: list[float] = field(default_factory=list)

    def see(self, measured: Mapping[str, float]) -> None:
        """Take what was measured after a step; only what was measured anew."""
        value = measured.get(self.name or "")
        if value is not None and math.isfinite(value):
            self.values.append(value)

    def read(self, record: Path) -> list[float]:
        """The values in a run's metrics.jsonl."""
        if not record.is_file():
            return []
        rows = map(loads, split_lines(record.read_text(encoding="utf-8")))
        return [row[self.name] for row in rows if self.name in row and math.isfinite(row[self.name])]

    @property
    def is_over(self) -> bool:
        if self.most is None or not self.values:
            return False
        best = self.values.index(self.better(self.values))
        return len(self.values) - 1 - best >= self.most
