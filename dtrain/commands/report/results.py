"""The tables that page and terminal share: the runs, the differences of their recipes, and their results."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median
from typing import Any

from dtrain.commands.report.charts import EVALUATION, best_function, charts_of, learning_curves, shown
from dtrain.commands.report.run_files import RunFiles, finite_number
from dtrain.recipe import secrets
from dtrain.training import METHODS, SECTIONS
from dtrain.training.metrics import records

LONGEST = 200  # characters of a value in a table
MESH = ("dp_replicate", "dp_shard", "cp", "tp")
_OWN = ("run.name", "run.dir")  # of every run another


@dataclass(frozen=True)
class Row:
    """A label and a text for each run; `best`: the runs whose value is the best, where they can be compared."""

    label: str
    texts: list[str]
    best: tuple[int, ...] = ()


def cut(text: str, most: int) -> str:
    """Return `text` with at most `most` characters, and how many more there are."""
    return text if len(text) <= most else f"{text[:most]} … [{len(text) - most:,} more characters]"


def _amount(value: float) -> str:
    """Return a count as text, such as 12.3 M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f} {unit}"
    return f"{value:,.0f}"


def _duration(seconds: float) -> str:
    """Return a time as text, such as 1:02:03 h, 2:03 min, 4.2 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    text = str(timedelta(seconds=round(seconds)))
    return f"{text} h" if seconds >= 3600 else f"{text.removeprefix('0:').lstrip('0') or '0'} min"


def identity_rows(runs: Sequence[RunFiles]) -> list[Row]:
    """Return each run's status, method, model, data, mesh, batch, steps, time, versions. Rows that no run has are left
    out."""
    columns = [_identity(run) for run in runs]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    rows = [Row(label, [cut(column.get(label) or "", LONGEST) for column in columns]) for label in labels]
    return [row for row in rows if any(row.texts)]


def _identity(run: RunFiles) -> dict[str, str]:
    about, at = run.about, run.at
    parameters, trained = run.fact("parameters"), run.fact("trained")
    size = f", {_amount(parameters)} parameters" if parameters else ""
    if parameters and trained is not None and trained < parameters:
        size += f", {_amount(trained)} of them trained ({trained / parameters:.1%})"
    train = run.data.get("train")
    counted = train if isinstance(train, dict) else {}
    counts = [f"{count:,.0f} {name}" for name in ("rows", "tokens") if (count := finite_number(counted.get(name)))]
    seconds, tokens = (math.fsum(value for _, value in run.known(name)) for name in ("step_time", "tokens"))
    epochs = run.known("epoch")
    total = f" of {run.total_steps:,}" if run.total_steps else ""
    started = run.fact("started")
    when = ""
    if started and 0 < started < 1e11:
        when = f", started {time.strftime('%Y-%m-%d %H:%M', time.localtime(started))}"
    versions = [f"{name} {about[name]}" for name in ("dtrain", "torch") if name in about]
    batch = about.get("batch")
    return {
        "status": run.status,
        "method": run.method if at("lora") is None else f"{run.method} with an adapter",
        "model": f"{at('model', 'path') or ''}{size}",
        "data": ", ".join([" + ".join(map(str, run.data_files)), *counts]),
        "mesh": describe_mesh(run),
        "batch": f"{batch.get('global_batch')}, micro batch {batch.get('micro_batch')}"
        if isinstance(batch, dict)
        else str(at("train", "global_batch") or ""),
        "steps": f"{run.step:,}{total}" + (f", {epochs[-1][1]:.3g} epochs" if epochs else ""),
        "time": (f"{_duration(seconds)} in steps" if seconds else "") + when,
        "tokens": _amount(tokens) if tokens else "",
        "computes in": str(about.get("compute") or at("train", "dtype") or ""),
        "versions": ", ".join(versions),
        "directory": str(run.directory),
    }


def mesh_of(run: RunFiles) -> dict[str, int] | None:
    """Return the sizes of the mesh by name; None if the run's files do not have them."""
    mesh = run.about.get("mesh")
    sizes: dict[str, Any] = {name: mesh.get(name) for name in MESH} if isinstance(mesh, dict) else {}
    return sizes if sizes and all(type(size) is int and 0 < size < 1 << 20 for size in sizes.values()) else None


def describe_mesh(run: RunFiles) -> str:
    sizes, device = mesh_of(run), run.about.get("device")
    if sizes is None:
        return ""
    count = math.prod(sizes.values())
    axes = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    words = f"{count:,} processes: {axes}" if count > 1 else "one process"
    experts = run.about["mesh"].get("ep")
    words += f", ep {experts} among them" if isinstance(experts, int) and experts > 1 else ""
    return f"{words}, {device}" if device else words


def differences(runs: Sequence[RunFiles]) -> list[Row]:
    """Return the keys whose values differ, with each run's value; of the runs that have a recipe."""
    trees = _comparable_recipes(runs)
    flats = [{secrets.dotted_key(path): value for path, value in secrets.iterate_leaves(tree)} for tree in trees]
    if sum(map(bool, flats)) < 2:
        return []
    keys = dict.fromkeys(key for flat in flats for key in flat if key not in _OWN)
    rows = []
    for key in keys:
        values = [flat.get(key, "—") if flat else "no recipe" for flat in flats]
        known = {_text(value) for value, flat in zip(values, flats, strict=True) if flat}
        if len(known) > 1:
            rows.append(Row(key, [cut(_text(value), LONGEST) for value in values]))
    return rows


def _comparable_recipes(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Return the recipes, each with the sections of the methods of all runs and no others: a section that is not there
    has its defaults, and one of another method was read by nobody."""
    methods = {run.method for run in runs}
    defaults = {name: asdict(SECTIONS[name]()) for name in METHODS if name in methods}
    own = [
        {key: tree[key] for key in tree if key not in METHODS or key in methods} for tree in (r.recipe for r in runs)
    ]
    return [tree and tree | {name: defaults[name] for name in defaults if name not in tree} for tree in own]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def results(runs: Sequence[RunFiles]) -> list[Row]:
    """Return the first, last and best values of each learning curve, and each run's speed and memory."""
    names: dict[str, str] = {}
    for run in runs:
        names |= learning_curves(run.method)
    fields = dict.fromkeys(field for run in runs for field in run.curves)
    measured = [line for chart in charts_of(fields) if chart.group == EVALUATION for line in chart.lines]
    names |= {field: field.removeprefix("eval_").replace("_", " ") for field, _ in measured if best_function(field, "")}
    rows = [_result(runs, field, name) for field, name in names.items() if field in fields]
    rows.append(_measured("tokens/s, median", [_of_all(median, run, "tokens_per_sec") for run in runs], shown, max))
    rows.append(_measured("peak memory", [_of_all(max, run, "mem_gib") for run in runs], "{:.2f} GiB".format, min))
    rows.append(_measured("planned memory", [run.planned_gib for run in runs], "{:.2f} GiB".format))
    return [row for row in rows if any(row.texts)]


def _result(runs: Sequence[RunFiles], field: str, name: str) -> Row:
    texts: list[str] = []
    values: list[float | None] = []
    for run in runs:
        known, better = run.known(field), best_function(field, run.method)
        if not known:
            texts.append("")
            values.append(None)
            continue
        first, last, _ = records.summarize_curve(field, [value for _, value in known])
        text, compared = f"{shown(first)} → {shown(last)}" if len(known) > 1 else shown(last), last
        if better is not None and field.startswith(("val_", "eval_")):
            compared = better(value for _, value in known)
            step = next(step for step, value in known if value == compared)
            text += f", best {shown(compared)} at step {step:,.0f}" if compared != last else ""
        texts.append(text)
        values.append(compared)
    methods = {run.method for run in runs}
    return Row(name, texts, _bests(values, best_function(field, methods.pop()) if len(methods) == 1 else None))


def _bests(values: Sequence[float | None], better: Callable | None) -> tuple[int, ...]:
    """Return the indices of the best value, if there are several to compare and they differ by more than rounding."""
    values = [None if value is None else float(f"{value:.4g}") for value in values]
    known = [value for value in values if value is not None]
    if better is None or len(known) < 2 or min(known) == max(known):
        return ()
    return tuple(index for index, value in enumerate(values) if value == better(known))


def _of_all(act: Callable, run: RunFiles, field: str) -> float | None:
    known = [value for _, value in run.known(field)]
    return act(known) if known else None


def _measured(label: str, values: Sequence[float | None], text: Callable, better: Callable | None = None) -> Row:
    return Row(label, ["" if value is None else text(value) for value in values], _bests(values, better))
