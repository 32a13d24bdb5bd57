"""Charts of the metrics, as plain values for JSON: curves for plotly, and histograms of completion lengths.

A line with more than MAX_POINTS points is thinned. From each bucket of neighbouring points, the smallest and the
largest value are kept, so that no extreme is lost. A note on the page reports this. A value that is not finite is a
gap.
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
_REWARD = re.compile(r"eval_(.+)_reward_mean")
MAX_POINTS = 1000  # points of a line
DASHES = ("solid", "dash", "dot", "dashdot")
BINS = 24


@dataclass(frozen=True)
class Chart:
    """A chart of one or more fields.

    Attributes:
        group: Section of the page, one of GROUPS.
        title: Title.
        lines: (field, label) of each line.
        unit: Unit of all lines.
    """

    group: str
    title: str
    lines: tuple[tuple[str, str], ...]
    unit: str = ""


def _chart(group: str, field: str, *lines: tuple[str, str]) -> Chart:
    """Return a chart of `lines` with the title and the unit of `field` in the table of fields."""
    known = find_field(field)
    if known is None:
        return Chart(group, field, lines)
    return Chart(group, known.title, lines, known.unit)


def _single_charts(group: str, *fields: str) -> list[Chart]:
    """Return a chart for each field."""
    return [_chart(group, field, (field, "training")) for field in fields]


_KNOWN = (
    *_single_charts(LEARNING, "loss", "token_accuracy", "reward_mean", "accuracy"),
    Chart(LEARNING, "Rewards of the pairs", (("rewards_chosen", "chosen"), ("rewards_rejected", "rejected"))),
    *_single_charts(LEARNING, "rewards_margin", "reward_std", "frac_zero_std"),
    *_single_charts(POLICY, "completion_len", "truncated_frac", "kl", "entropy"),
    Chart(POLICY, "Clipped tokens", (("clip_frac", "all"), ("clip_low", "low"), ("clip_high", "high")), "share"),
    *_single_charts(POLICY, "mismatch_kl"),
    *_single_charts(OPTIMIZER, "grad_norm", "lr"),
    *_single_charts(SPEED, "tokens_per_sec"),
    _chart(SPEED, "mem_gib", ("mem_gib", "measured")),
    Chart(
        SPEED,
        "Time of a step",
        (("step_time", "step"), ("data_time", "data"), ("rollout_time", "rollout"), ("train_time", "training")),
        "s",
    ),
    *_single_charts(SPEED, "mfu", "tokens"),
)


def charts_of(fields: Iterable[str]) -> list[Chart]:
    """Return the charts of measured fields, in the order of the page.

    Each field is in exactly one chart. A validation field `val_x` is in the chart of `x`.
    """
    remaining = dict.fromkeys(field for field in fields if field not in _NOT_DRAWN)
    charts = []
    for chart in _KNOWN:
        lines = [line for line in chart.lines if line[0] in remaining]
        lines += [(f"val_{field}", "validation") for field, _ in chart.lines if f"val_{field}" in remaining]
        if lines:
            charts.append(Chart(chart.group, chart.title, tuple(lines), chart.unit))
            for field, _ in lines:
                del remaining[field]
    charts += _charts_of_unlisted(remaining)
    return sorted(charts, key=lambda chart: GROUPS.index(chart.group))


def _charts_of_unlisted(fields: Iterable[str]) -> list[Chart]:
    """Return the charts of fields that _KNOWN does not list, such as those of rewards and evaluations by name."""
    lines_by_chart: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for field in fields:
        pass_match = _PASS.fullmatch(field)
        reward_match = _REWARD.fullmatch(field)
        if field.startswith("reward/"):
            chart, label = (LEARNING, "Rewards by function"), field.removeprefix("reward/")
        elif pass_match:
            chart, label = (EVALUATION, f"{pass_match[1]}: pass@k"), f"pass@{pass_match[2]}"
        elif reward_match:
            chart, label = (EVALUATION, f"{reward_match[1]}: reward"), "evaluation"
        elif field.startswith("eval_"):
            chart, label = (EVALUATION, field.removeprefix("eval_")), "evaluation"
        else:
            training_field = field.removeprefix("val_")
            chart, label = (OTHER, training_field), "training" if field == training_field else "validation"
        lines_by_chart.setdefault(chart, []).append((field, label))
    charts = []
    for (group, title), lines in lines_by_chart.items():
        if group == OTHER:
            charts.append(_chart(group, title, *lines))
        else:
            charts.append(Chart(group, title, tuple(lines)))
    return charts


def learning_curves(method: str) -> Mapping[str, str]:
    """Return the labels of the fields that show what a run of a method learned."""
    return training.trusted_method_class(method).curves


def best_function(field: str, method: str) -> Callable | None:
    """Return the function that selects the best value of a field: `min` or `max`.

    Returns:
        The function. None if values cannot be ranked. For example, a lower loss of GRPO is not better.
    """
    if field.startswith("eval_"):
        return max if field.endswith("_reward_mean") or _PASS.fullmatch(field) else None
    if field not in learning_curves(method):
        return None
    return min if field.removeprefix("val_") == "loss" else max


def shown(value: float) -> str:
    """Format a number with four significant digits, or with commas if it has more digits.

    Example:
        >>> shown(0.123456), shown(1234567)
        ('0.1235', '1,234,567')
    """
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def thinned(steps: Sequence[float], values: Sequence[float | None]) -> tuple[list, list]:
    """Return about MAX_POINTS points of a line.

    The first and the last point are kept. From each bucket of neighbouring points, the smallest value, the largest
    value and one gap are kept.

    Args:
        steps: x values.
        values: y values. None is a gap.
    """
    count = len(steps)
    if count <= MAX_POINTS:
        return list(steps), list(values)
    num_buckets = MAX_POINTS // 2 - 1
    bucket_size = math.ceil((count - 2) / num_buckets)
    kept = [0]
    for start in range(1, count - 1, bucket_size):
        kept += _kept_in_bucket(values, start, min(start + bucket_size, count - 1))
    kept.append(count - 1)
    return [steps[index] for index in kept], [values[index] for index in kept]


def _kept_in_bucket(values: Sequence[float | None], start: int, end: int) -> list[int]:
    """Return the indices of the smallest value, the largest value and the first gap of a bucket, in order.

    Example:
        >>> _kept_in_bucket([0.5, 0.9, None, 0.2, 0.4], 0, 5)
        [1, 2, 3]
    """
    finite = []
    gap_starts = []
    for index in range(start, end):
        value = values[index]
        if value is not None:
            finite.append((value, index))
        elif index == start or values[index - 1] is not None:
            gap_starts.append(index)
    kept = set(gap_starts[:1])
    if finite:
        kept |= {min(finite)[1], max(finite)[1]}
    return sorted(kept)


def chart_data(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Return the curves of all runs for the page's script.

    The entry "axes" has each run's tokens and hours so far, by step, for the other x axes.
    """
    charts = charts_of(dict.fromkeys(field for run in runs for field in run.curves))
    return {
        "runs": [run.name for run in runs],
        "axes": [_axes(run) for run in runs],
        "charts": [_draw_chart(f"chart-{number}", chart, runs) for number, chart in enumerate(charts)],
    }


def _draw_chart(id: str, chart: Chart, runs: Sequence[RunFiles]) -> dict[str, Any]:
    lines, levels, notes = [], [], []
    for number, run in enumerate(runs):
        for line_index, (field, name) in enumerate(chart.lines):
            curve = run.curves.get(field)
            if curve is None:
                continue
            values: list[float | None] = []
            for value in curve.values:
                values.append(value if records.is_plottable(value) else None)  # None interrupts the line
            x, y = thinned(curve.steps, values)
            lines.append(
                {
                    "run": number,
                    "field": field,
                    "name": name,
                    "dash": DASHES[line_index % len(DASHES)],
                    # Validations and evaluations are rare, so their points are marked.
                    "dots": name in ("validation", "evaluation") or field.startswith("eval_"),
                    "x": x,
                    "y": y,
                    "points": len(curve.steps),
                }
            )
            summary = _summary(curve, best_function(field, run.method))
            if summary:
                notes.append({"run": number, "name": name, "text": summary})
        has_memory = any(field == "mem_gib" for field, _ in chart.lines)
        planned = run.planned_gib
        if has_memory and planned is not None:
            levels.append({"run": number, "name": "planned", "y": planned})
            notes.append({"run": number, "name": "planned", "text": f"{planned:.2f} GiB"})
    head = {"id": id, "group": chart.group, "title": chart.title, "unit": chart.unit}
    return {**head, "lines": lines, "levels": levels, "notes": notes}


def _summary(curve: Curve, best_of: Callable | None) -> str:
    """Return the curve as text: its last value, and its best value or its range."""
    points = curve.points
    if not points:
        return "no finite value"
    values = [value for _, value in points]
    text = f"last {shown(values[-1])}"
    if best_of is not None and len(points) > 1:
        best = best_of(values)
        kind = "lowest" if best_of is min else "highest"
        text += f", {kind} {shown(best)} at step {step_of_value(points, best):,.0f}"
    elif len(points) > 1 and min(values) < max(values):
        text += f", from {shown(min(values))} to {shown(max(values))}"
    num_not_finite = len(curve.values) - len(points)
    if num_not_finite:
        text += f"; {num_not_finite:,} not finite"
    return text


def step_of_value(points: Sequence[records.Point], value: float) -> float:
    """Return the first step with a value that the curve has."""
    for step, point_value in points:
        if point_value == value:
            return step
    raise ValueError(f"the curve has no value {value}")


def _axes(run: RunFiles) -> dict[str, list[float]]:
    """Return the tokens and the hours of all steps so far, and the steps at which they are known."""
    axes: dict[str, list[float]] = {}
    for name, field, unit in (("tokens", "tokens", 1.0), ("hours", "step_time", 3600.0)):
        points = run.points(field)
        if points:
            totals = list(accumulate(value / unit for _, value in points))
            axes[f"{name}_steps"], axes[name] = thinned([step for step, _ in points], totals)
    return axes


def histogram(id: str, title: str, unit: str, samples: Sequence[tuple[int, str, Sequence[float]]]) -> dict[str, Any]:
    """Return a chart of several distributions over the same bins, each as shares of its values.

    Args:
        id: Id of the chart on the page.
        title: Title.
        unit: Unit of the values.
        samples: (run, name, values) of each distribution.
    """
    all_values = [value for _, _, values in samples for value in values]
    low, high = min(all_values), max(all_values)
    width = max(1, math.ceil((high - low + 1) / BINS))
    first = math.floor(low)
    num_bins = max(1, math.ceil((high - first + 1) / width))
    lines, notes = [], []
    num_lines_of_run: Counter[int] = Counter()
    for run, name, values in samples:
        counts = Counter(int((value - first) // width) for value in values)
        # plotly draws steps between the edges of the bins, so the last bin is repeated at the right edge.
        edges = [first + width * index for index in range(num_bins + 1)]
        shares = [counts[min(index, num_bins - 1)] / len(values) for index in range(num_bins + 1)]
        lines.append(
            {
                "run": run,
                "field": "",
                "name": name,
                "dash": DASHES[num_lines_of_run[run] % len(DASHES)],
                "dots": False,
                "points": len(values),
                "x": edges,
                "y": shares,
            }
        )
        num_lines_of_run[run] += 1
        text = f"mean {shown(sum(values) / len(values))}, longest {shown(max(values))}"
        notes.append({"run": run, "name": name, "text": text})
    head = {"id": id, "group": "", "title": title, "unit": "share", "steps_of": unit}
    return {**head, "lines": lines, "levels": [], "notes": notes}


def length_histograms(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Return histograms of completion lengths for the first and the last rollout and evaluation of each run."""
    files = (
        ("samples", "Completions of rollouts", [run.samples for run in runs]),
        ("evals", "Answers of evaluations", [run.evals for run in runs]),
    )
    charts = []
    for name, title, answer_files in files:
        samples = []
        for number, answers in enumerate(answer_files):
            if not answers.steps:
                continue
            for step in sorted({min(answers.steps), max(answers.steps)}):
                lengths = _lengths(answers, step)
                if lengths:
                    samples.append((number, f"step {step}", lengths))
        if samples:
            charts.append(histogram(f"lengths-{name}", title, "tokens", samples))
    return charts


def _lengths(answers: AnswerFile, step: int) -> list[int]:
    """Return the numbers of tokens of the answers of a step, as far as they are known."""
    return [answer.tokens for answer in answers.read_step(step) if answer.tokens is not None and answer.tokens >= 0]
