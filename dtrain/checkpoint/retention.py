"""Which saves of a run stay, and which make room. Knows no tensor and imports no torch."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


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
        """The steps to delete, ascending, of those in `measured`: step → the metrics saved with it.

        Of equally good steps the newest stays; a step whose field is missing or not finite is no candidate.
        """
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
