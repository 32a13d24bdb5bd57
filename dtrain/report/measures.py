"""Which fields of the metrics make which chart, and numbers for people."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from dtrain.methods.facts import SECTIONS, Facts, facts_by_name

LEARNING, EVALUATION, POLICY = "Learning", "Evaluation", "Policy and completions"
OPTIMIZER, SPEED, OTHER = "Optimizer", "Speed and memory", "Other fields"
GROUPS = (LEARNING, EVALUATION, POLICY, OPTIMIZER, SPEED, OTHER)
_NOT_DRAWN = {"step", "epoch"}
_PASS = re.compile(r"eval_(.+)_pass@(\d+)")


@dataclass(frozen=True)
class Chart:
    """One picture. lines: (field, what the line is called); unit: of all of them."""

    group: str
    title: str
    lines: tuple[tuple[str, str], ...]
    unit: str = ""


_KNOWN = (
    Chart(LEARNING, "Loss", (("loss", "training"),)),
    Chart(LEARNING, "Reward", (("reward_mean", "training"),)),
    Chart(LEARNING, "Accuracy", (("accuracy", "training"),)),
    Chart(LEARNING, "Rewards of the pairs", (("rewards_chosen", "chosen"), ("rewards_rejected", "rejected"))),
    Chart(LEARNING, "Reward margin", (("rewards_margin", "training"),)),
    Chart(LEARNING, "Reward spread in a group", (("reward_std", "training"),)),
    Chart(LEARNING, "Groups that are all alike", (("frac_zero_std", "training"),), "share"),
    Chart(POLICY, "Completion length", (("completion_len", "training"),), "tokens"),
    Chart(POLICY, "Completions cut off", (("truncated_frac", "training"),), "share"),
    Chart(POLICY, "KL to the reference", (("kl", "training"),), "nats"),
    Chart(POLICY, "Entropy", (("entropy", "training"),), "nats"),
    Chart(POLICY, "Clipped tokens", (("clip_frac", "all"), ("clip_low", "low"), ("clip_high", "high")), "share"),
    Chart(POLICY, "Engine against trainer, KL", (("mismatch_kl", "training"),), "nats"),
    Chart(OPTIMIZER, "Gradient norm", (("grad_norm", "training"),)),
    Chart(OPTIMIZER, "Learning rate", (("lr", "training"),)),
    Chart(SPEED, "Tokens per second", (("tokens_per_sec", "training"),), "tokens/s"),
    Chart(SPEED, "Peak memory of rank 0", (("mem_gib", "measured"),), "GiB"),
    Chart(
        SPEED,
        "Time of a step",
        (("step_time", "step"), ("data_time", "data"), ("rollout_time", "rollout"), ("train_time", "training")),
        "s",
    ),
    Chart(SPEED, "Model FLOPs utilisation", (("mfu", "training"),), "share"),
    Chart(SPEED, "Tokens of a step", (("tokens", "training"),), "tokens"),
)


def charts_of(fields: Iterable[str]) -> list[Chart]:
    """The charts of the fields that runs measured, in the order of the page. Each field is in one, `val_x` in that of
    `x`."""
    left = dict.fromkeys(field for field in fields if field not in _NOT_DRAWN)
    found = []
    for chart in _KNOWN:
        lines = [line for line in chart.lines if line[0] in left]
        lines += [(f"val_{field}", "validation") for field, _ in chart.lines if f"val_{field}" in left]
        if lines:
            found.append(Chart(chart.group, chart.title, tuple(lines), chart.unit))
            for field, _ in lines:
                del left[field]
    parts = tuple((field, field.removeprefix("reward/")) for field in left if field.startswith("reward/"))
    if parts:
        found.append(Chart(LEARNING, "Rewards by function", parts))
    joined: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for field in left:
        if field.startswith("reward/"):
            continue
        if passed := _PASS.fullmatch(field):
            joined.setdefault((EVALUATION, f"{passed[1]}: pass@k"), []).append((field, f"pass@{passed[2]}"))
        elif judged := re.fullmatch(r"eval_(.+)_reward_mean", field):
            joined.setdefault((EVALUATION, f"{judged[1]}: reward"), []).append((field, "evaluation"))
        elif field.startswith("eval_"):
            joined.setdefault((EVALUATION, field.removeprefix("eval_")), []).append((field, "evaluation"))
        else:
            base = field.removeprefix("val_")
            joined.setdefault((OTHER, base), []).append((field, "training" if base == field else "validation"))
    found += [Chart(group, title, tuple(lines)) for (group, title), lines in joined.items()]
    return sorted(found, key=lambda chart: GROUPS.index(chart.group))


def told_by(method: str) -> Mapping[str, str]:
    """The fields that tell what a run of the method learned, with their names for a reader."""
    return (facts_by_name(method) if method in SECTIONS else Facts()).curves


def better_of(field: str, method: str) -> Callable | None:
    """`min` or `max`, whichever of two values of the field is better; None where neither is, as of GRPO's loss."""
    if field.startswith("eval_"):
        return max if field.endswith("_reward_mean") or _PASS.fullmatch(field) else None
    if field not in told_by(method):
        return None
    return min if field.removeprefix("val_") == "loss" else max


def shown(value: float) -> str:
    """A number for people: four digits that count, thousands with commas."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def amount(value: float) -> str:
    """A count, such as 12.3 M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f} {unit}"
    return f"{value:,.0f}"


def bytes_of(size: float) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


def duration(seconds: float) -> str:
    """Such as 1:02:03 h, 2:03 min, 4.2 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    text = str(timedelta(seconds=round(seconds)))
    return f"{text} h" if seconds >= 3600 else f"{text.removeprefix('0:').lstrip('0') or '0'} min"
