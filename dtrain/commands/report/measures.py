"""The charts that the fields of the metrics make, and numbers as text."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from dtrain import methods
from dtrain.run.metrics.fields import field_of

LEARNING, EVALUATION, POLICY = "Learning", "Evaluation", "Policy and completions"
OPTIMIZER, SPEED, OTHER = "Optimizer", "Speed and memory", "Other fields"
GROUPS = (LEARNING, EVALUATION, POLICY, OPTIMIZER, SPEED, OTHER)
_NOT_DRAWN = {"step", "epoch"}
_PASS = re.compile(r"eval_(.+)_pass@(\d+)")


@dataclass(frozen=True)
class Chart:
    """A chart. lines: (field, label of the line); unit: of all lines."""

    group: str
    title: str
    lines: tuple[tuple[str, str], ...]
    unit: str = ""


def _chart(group: str, field: str, *lines: tuple[str, str]) -> Chart:
    """Return a chart of `lines`, titled as the table of fields has `field`."""
    known = field_of(field)
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
    return (methods.method_class(method) if method in methods.METHODS else methods.Method).curves


def better_of(field: str, method: str) -> Callable | None:
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


def amount(value: float) -> str:
    """Return a count as text, such as 12.3 M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f} {unit}"
    return f"{value:,.0f}"


def bytes_of(size: float) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def duration(seconds: float) -> str:
    """Return a time as text, such as 1:02:03 h, 2:03 min, 4.2 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    text = str(timedelta(seconds=round(seconds)))
    return f"{text} h" if seconds >= 3600 else f"{text.removeprefix('0:').lstrip('0') or '0'} min"
