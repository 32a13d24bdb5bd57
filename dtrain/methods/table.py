"""What the terminal shows of a rollout: a line of measures, and some completions with their rewards and advantages."""

import time
from collections.abc import Mapping
from typing import Any

from dtrain.methods.collect import Rollout
from dtrain.metrics import Metrics

SECONDS_BETWEEN_TABLES = 20.0
WIDTH = 72


class SampleTable:
    """Shows a rollout now and then: the first, and one when 20 seconds have passed since the last."""

    def __init__(self, metrics: Metrics, rows: int):
        self.metrics, self.rows = metrics, rows
        self._last = float("-inf")

    def show(self, step: int, rollout: Rollout) -> None:
        """`step`: the first that trains on it. Ranks without rows say nothing."""
        if not rollout.rows or not self.rows or time.monotonic() - self._last < SECONDS_BETWEEN_TABLES:
            return
        self._last = time.monotonic()
        for line in table(step, rollout.measured, rollout.rows[: self.rows]):
            self.metrics.say(line)


def table(step: int, measured: Mapping[str, float], rows: list[dict[str, Any]]) -> list[str]:
    """The lines of the table."""
    lines = [
        f"rollout before step {step}: reward {measured['reward_mean']:.3f} ± {measured['reward_std']:.3f}, "
        f"{measured['completion_len']:.1f} tokens, {100 * measured['truncated_frac']:.0f}% cut off, "
        f"{100 * measured['frac_zero_std']:.0f}% of the groups alike",
        "  reward  advantage  tokens  completion",
    ]
    for row in rows:
        reward = "-" if row["reward"] is None else f"{row['reward']:.3g}"
        text = " ".join(row["completion"].split())
        text = text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."
        lines.append(f"  {reward:>6}  {row['advantage']:>9.3f}  {row['tokens']:>6}  {text}")
    return lines
