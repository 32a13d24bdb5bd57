"""The data of the page's charts, as plain values for JSON: curves, thinned, and histograms of lengths.

A line with more than MOST points is thinned by buckets of neighbours that keep the smallest and the largest value of
each, so that no extreme is lost; the page says so. A value that is not finite is a gap.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from dtrain.commands.report.measures import Chart, better_of, charts_of, shown
from dtrain.commands.report.run_files import Curve, RunFiles
from dtrain.run.metrics import records

MOST = 1000  # points of a line
DASHES = ("solid", "dash", "dot", "dashdot")
BINS = 24


def thinned(steps: Sequence[float], values: Sequence[float | None]) -> tuple[list, list]:
    """Return about MOST of the points: the first, the last, and of each bucket the smallest, the largest and one
    gap."""
    count = len(steps)
    if count <= MOST:
        return list(steps), list(values)
    size = -(-(count - 2) // (MOST // 2 - 1))
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
        "charts": [_chart(f"chart-{number}", chart, runs) for number, chart in enumerate(charts)],
    }


def _chart(id: str, chart: Chart, runs: Sequence[RunFiles]) -> dict[str, Any]:
    lines, levels, notes = [], [], []
    for number, run in enumerate(runs):
        for at, (field, name) in enumerate(chart.lines):
            if (curve := run.curves.get(field)) is None:
                continue
            is_rare = name in ("validation", "evaluation") or field.startswith("eval_")
            dash = DASHES[at % len(DASHES)]
            x, y = thinned(curve.steps, [value if records.is_sound(value) else None for value in curve.values])
            points = len(curve.steps)
            lines.append(dict(run=number, field=field, name=name, dash=dash, dots=is_rare, x=x, y=y, points=points))
            if text := _summary(curve, better_of(field, run.method)):
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
            index: records.Answers = getattr(run, files)
            for step in sorted({min(index.steps), max(index.steps)} if index.steps else ()):
                tokens = (answer.tokens for answer in index.of_step(step))
                if values := [count for count in tokens if count is not None and count >= 0]:
                    counted.append((number, f"step {step}", values))
        if counted:
            charts.append(histogram(f"lengths-{files}", title, "tokens", counted))
    return charts
