"""The charts that the fields of the metrics make, and their data as plain values for JSON: curves, thinned, and
histograms of lengths.

A line with more than MAX_POINTS points is thinned by buckets of neighbours that keep the smallest and the largest value
of each, so that no extreme is lost; the page says so. A value that is not finite is a gap.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from dtrain import training
from dtrain.commands.report.run_files import Curve, RunFiles
from dtrain.training.metrics import records
from dtrain.training.metrics.records import AnswerFile, find_field

LEARNING, EVALUATION, POLICY = "Learning", "Evaluation", "Policy and completions"
OPTIMIZER, SPEED, OTHER = "Optimizer", "Speed and memory", "Other fields"
GROUPS = (LEARNING, EVALUATION, POLICY, OPTIMIZER, SPEED, OTHER)
_NOT_DRAWN = {"step", "epoch"}
_PASS = re.compile(r"eval_(.+)_pass@(\d+)")
MAX_POINTS = 1000  # points of a line
DASHES = ("solid", "dash", "dot", "dashdot")
BINS = 24


@dataclass(frozen=True)
class Chart:
    """A chart. lines: (field, label of the line); unit: of all lines."""

    group: str
    title: str
    lines: tuple[tuple[str, str], ...]
    unit: str = ""


def _chart(group: str, field: str, *lines: tuple[str, str]) -> Chart:
    """Return a chart of `lines`, titled as the table of fields has `field`."""
    known = find_field(field)
    return Chart(group, known.title if known else field, lines, known.unit if known else "")


def _alone(group: str, *fields: str) -> list[Chart]:
    return [_chart(group, field, (field, "training")) for field in fields]


_KNOWN = (
    *_alone(LEARNING, "loss", "token_accuracy", "reward_mean", "accuracy"),
    Chart(LEARNING, "Rewards of the pairs", (("rewards_chosen", "chosen"), ("rewards_rejected", "rejected"))),
    *_alone(LEARNING, "rewards_margin", "reward_std", "frac_zero_std"),
    *_alone(POLICY, "completion_len", "truncated_frac", "kl", "entropy"),
    Chart(POLICY, "Clipped tokens", (("clip_frac", "all"), ("clip_low", "low"), ("clip_high", "high")), "share"),
    *_alone(POLICY, "mismatch_kl"),
    *_alone(OPTIMIZER, "grad_norm", "lr"),
    *_alone(SPEED, "tokens_per_sec"),
    _chart(SPEED, "mem_gib", ("mem_gib", "measured")),
    Chart(
        SPEED,
        "Time of a step",
        (("step_time", "step"), ("data_time", "data"), ("rollout_time", "rollout"), ("train_time", "training")),
        "s",
    ),
    *_alone(SPEED, "mfu", "tokens"),
)


def charts_of(fields: Iterable[str]) -> list[Chart]:
    """Return the charts of the fields that runs measured, in the order of the page. Each field is in one, `val_x` in
    that of `x`."""
    left = dict.fromkeys(field for field in fields if field not in _NOT_DRAWN)
    charts = []
    for chart in _KNOWN:
        lines = [line for line in chart.lines if line[0] in left]
        lines += [(f"val_{field}", "validation") for field, _ in chart.lines if f"val_{field}" in left]
        if lines:
            charts.append(Chart(chart.group, chart.title, tuple(lines), chart.unit))
            for field, _ in lines:
                del left[field]
    joined: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for field in left:
        if field.startswith("reward/"):
            joined.setdefault((LEARNING, "Rewards by function"), []).append((field, field.removeprefix("reward/")))
        elif passed := _PASS.fullmatch(field):
            joined.setdefault((EVALUATION, f"{passed[1]}: pass@k"), []).append((field, f"pass@{passed[2]}"))
        elif judged := re.fullmatch(r"eval_(.+)_reward_mean", field):
            joined.setdefault((EVALUATION, f"{judged[1]}: reward"), []).append((field, "evaluation"))
        elif field.startswith("eval_"):
            joined.setdefault((EVALUATION, field.removeprefix("eval_")), []).append((field, "evaluation"))
        else:
            base = field.removeprefix("val_")
            joined.setdefault((OTHER, base), []).append((field, "training" if base == field else "validation"))
    for (group, title), lines in joined.items():
        charts.append(_chart(group, title, *lines) if group == OTHER else Chart(group, title, tuple(lines)))
    return sorted(charts, key=lambda chart: GROUPS.index(chart.group))


def learning_curves(method: str) -> Mapping[str, str]:
    """Return the fields that show what a run of the method learned, with their labels."""
    from dtrain.methods import Method  # loads torch

    known = training.method_class(method) if method in training.METHODS else Method
    return known.curves


def best_function(field: str, method: str) -> Callable | None:
    """Return `min` or `max`, whichever gives the better of two values of the field; None if neither does, as for GRPO's
    loss."""
    if field.startswith("eval_"):
        return max if field.endswith("_reward_mean") or _PASS.fullmatch(field) else None
    if field not in learning_curves(method):
        return None
    return min if field.removeprefix("val_") == "loss" else max


def shown(value: float) -> str:
    """Return a number as text: four significant digits, thousands with commas."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def thinned(steps: Sequence[float], values: Sequence[float | None]) -> tuple[list, list]:
    """Return about MAX_POINTS of the points: the first, the last, and of each bucket the smallest, the largest and one
    gap."""
    count = len(steps)
    if count <= MAX_POINTS:
        return list(steps), list(values)
    size = -(-(count - 2) // (MAX_POINTS // 2 - 1))
    kept = [0]
    for start in range(1, count - 1, size):
        bucket = range(start, min(start + size, count - 1))
        known = [(values[at], at) for at in bucket if values[at] is not None]
        chosen = {at for at in bucket if values[at] is None and (at == start or values[at - 1] is not None)}
        chosen = {min(chosen)} if chosen else set()
        kept += sorted(chosen | ({min(known)[1], max(known)[1]} if known else set()))
    kept.append(count - 1)
    return [steps[at] for at in kept], [values[at] for at in kept]


def drawn(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Return the curves of all runs. `axes`: each run's tokens and hours so far, by step."""
    charts = charts_of(dict.fromkeys(field for run in runs for field in run.curves))
    return {
        "runs": [run.name for run in runs],
        "axes": [_axes(run) for run in runs],
        "charts": [_drawn(f"chart-{number}", chart, runs) for number, chart in enumerate(charts)],
    }


def _drawn(id: str, chart: Chart, runs: Sequence[RunFiles]) -> dict[str, Any]:
    lines, levels, notes = [], [], []
    for number, run in enumerate(runs):
        for at, (field, name) in enumerate(chart.lines):
            if (curve := run.curves.get(field)) is None:
                continue
            is_rare = name in ("validation", "evaluation") or field.startswith("eval_")
            dash = DASHES[at % len(DASHES)]
            x, y = thinned(curve.steps, [value if records.is_plottable(value) else None for value in curve.values])
            points = len(curve.steps)
            lines.append(dict(run=number, field=field, name=name, dash=dash, dots=is_rare, x=x, y=y, points=points))
            if text := _summary(curve, best_function(field, run.method)):
                notes.append({"run": number, "name": name, "text": text})
        if any(field == "mem_gib" for field, _ in chart.lines) and (planned := run.planned_gib) is not None:
            levels.append({"run": number, "name": "planned", "y": planned})
            notes.append({"run": number, "name": "planned", "text": f"{planned:.2f} GiB"})
    head = {"id": id, "group": chart.group, "title": chart.title, "unit": chart.unit}
    return {**head, "lines": lines, "levels": levels, "told": notes}


def _summary(curve: Curve, better: Callable | None) -> str:
    """Return the curve as text: its last value, and its best or its range."""
    known = curve.known
    if not known:
        return "no finite value"
    values = [value for _, value in known]
    text = f"last {shown(values[-1])}"
    if better is not None and len(known) > 1:
        best = better(values)
        step = next(step for step, value in known if value == best)
        text += f", {'lowest' if better is min else 'highest'} {shown(best)} at step {step:,.0f}"
    elif len(known) > 1 and min(values) < max(values):
        text += f", from {shown(min(values))} to {shown(max(values))}"
    broken = len(curve.values) - len(known)
    return text + (f"; {broken:,} not finite" if broken else "")


def _axes(run: RunFiles) -> dict[str, list[float]]:
    """Return the steps, and for each the tokens and the hours of all steps so far."""
    axes: dict[str, list[float]] = {}
    for name, field, unit in (("tokens", "tokens", 1.0), ("hours", "step_time", 3600.0)):
        if known := run.known(field):
            sums = list(accumulate(value / unit for _, value in known))
            axes[f"{name}_steps"], axes[name] = thinned([step for step, _ in known], sums)
    return axes


def histogram(id: str, title: str, unit: str, counted: Sequence[tuple[int, str, Sequence[float]]]) -> dict[str, Any]:
    """Return a chart of several distributions over the same bins, each as shares. counted: (run, name, values)."""
    every = [value for _, _, values in counted for value in values]
    low, high = min(every), max(every)
    width = max(1, math.ceil((high - low + 1) / BINS))
    first = math.floor(low)
    bins = max(1, math.ceil((high - first + 1) / width))
    lines, notes = [], []
    for number, (run, name, values) in enumerate(counted):
        counts = Counter(int((value - first) // width) for value in values)
        x, points = [first + width * at for at in range(bins + 1)], len(values)
        y = [counts[min(at, bins - 1)] / points for at in range(bins + 1)]
        dash = DASHES[sum(entry[0] == run for entry in counted[:number]) % len(DASHES)]
        lines.append(dict(run=run, field="", name=name, dash=dash, dots=False, points=points, x=x, y=y))
        text = f"mean {shown(sum(values) / points)}, longest {shown(max(values))}"
        notes.append({"run": run, "name": name, "text": text})
    head = {"id": id, "group": "", "title": title, "unit": "share", "steps_of": unit}
    return {**head, "lines": lines, "levels": [], "told": notes}


def lengths(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Return histograms of the tokens of completions: in the first and the last rollout, and the first and the last
    evaluation, of each run."""
    charts = []
    for title, files in (("Completions of rollouts", "samples"), ("Answers of evaluations", "evals")):
        counted = []
        for number, run in enumerate(runs):
            index: AnswerFile = getattr(run, files)
            for step in sorted({min(index.steps), max(index.steps)} if index.steps else ()):
                tokens = (answer.tokens for answer in index.read_step(step))
                if values := [count for count in tokens if count is not None and count >= 0]:
                    counted.append((number, f"step {step}", values))
        if counted:
            charts.append(histogram(f"lengths-{files}", title, "tokens", counted))
    return charts
