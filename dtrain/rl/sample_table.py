"""`SampleTable`: a rollout on the terminal, a line of measures and some completions."""

import time
from collections.abc import Mapping
from typing import Any

from dtrain.base.run_context import RunLog
from dtrain.recipe.rollouts import RolloutSection
from dtrain.rl.collect import Rollout

SECONDS_BETWEEN_TABLES = 20.0
ALIKE = (
    "warning: in every group of the rollout before step {} all rewards are equal, so nothing is learned from it: "
    "samples.jsonl shows whether the prompts are too hard or too easy, or the reward never gives points"
)
WIDTH = 72


class SampleTable:
    """Table of a rollout's samples on the terminal, now and then: of the first rollout, and of the next one when 20
    seconds have passed since the last table. And warnings of rollouts that teach nothing."""

    def __init__(self, metrics: RunLog, section: RolloutSection):
        self.metrics, self.section = metrics, section
        self._last = float("-inf")
        self._alike = 0  # rollouts that taught nothing
        self._is_idle = False

    def show(self, step: int, rollout: Rollout) -> None:
        """Show the rollout where it is time. `step`: the first that trains on it. Ranks without rows say nothing."""
        if rollout.rows and rollout.measured["frac_zero_std"] == 1:
            self._alike += 1
            if self._alike in (1, 10, 100, 1000):
                self.metrics.say(ALIKE.format(step))
        most = self.section.show
        if rollout.rows and most and time.monotonic() - self._last >= SECONDS_BETWEEN_TABLES:
            self._last = time.monotonic()
            for line in _table(step, rollout.measured, rollout.rows[:most]):
                self.metrics.say(line)
        is_idle = not rollout.counted.any()
        if is_idle and not self._is_idle:  # the first of several in a row
            alike = ", or its groups' rewards are alike" if self.section.dynamic_sampling != "none" else ""
            self.metrics.say(f"the rollout before step {step} teaches nothing: none of its rewards is known{alike}")
        self._is_idle = is_idle


def _table(step: int, measured: Mapping[str, float], rows: list[dict[str, Any]]) -> list[str]:
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
