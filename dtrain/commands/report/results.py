"""The tables that the page and the terminal share: the runs, the differences of their recipes, and their results."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median
from typing import Any

from dtrain.commands.report.charts import EVALUATION, best_function, charts_of, learning_curves, shown, step_of_value
from dtrain.commands.report.run_files import RunFiles, finite_number
from dtrain.recipe import secrets
from dtrain.training import METHODS, SECTIONS
from dtrain.training.metrics import records

LONGEST = 200  # maximum characters of a value in a table
MESH = ("dp_replicate", "dp_shard", "cp", "tp")
_NEVER_COMPARED = ("run.name", "run.dir")  # these keys differ between any two runs


@dataclass(frozen=True)
class Row:
    """A row of a table with a column for each run.

    Attributes:
        label: Name of the row.
        texts: A text for each run, "" if the run has no value.
        best: Indices of the runs with the best value, if the values can be compared.
    """

    label: str
    texts: list[str]
    best: tuple[int, ...] = ()


def cut(text: str, max_length: int) -> str:
    """Cut `text` to `max_length` characters and append how many are missing.

    Example:
        >>> cut("0123456789", 4)
        '0123 … [6 more characters]'
    """
    if len(text) <= max_length:
        return text
    return f"{text[:max_length]} … [{len(text) - max_length:,} more characters]"


def format_count(value: float) -> str:
    """Format a count with a unit.

    Example:
        >>> format_count(1234), format_count(56_789), format_count(1_235_814_400)
        ('1,234', '56.8 k', '1.2 B')
    """
    if value >= 1e12:
        return f"{value / 1e12:.1f} T"
    if value >= 1e9:
        return f"{value / 1e9:.1f} B"
    if value >= 1e6:
        return f"{value / 1e6:.1f} M"
    if value >= 1e4:
        return f"{value / 1e3:.1f} k"
    return f"{value:,.0f}"


def format_duration(seconds: float) -> str:
    """Format a time.

    Example:
        >>> format_duration(4.2), format_duration(123), format_duration(3723)
        ('4.2 s', '2:03 min', '1:02:03 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    text = str(timedelta(seconds=round(seconds)))  # such as 0:02:03
    if seconds >= 3600:
        return f"{text} h"
    minutes = text.removeprefix("0:").lstrip("0")
    return f"{minutes or '0'} min"


def identity_rows(runs: Sequence[RunFiles]) -> list[Row]:
    """Return each run's status, method, model, data, mesh, batch, steps, time and versions.

    Rows that are empty for all runs are left out.
    """
    columns = [_identity(run) for run in runs]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    rows = []
    for label in labels:
        texts = [cut(column.get(label) or "", LONGEST) for column in columns]
        if any(texts):
            rows.append(Row(label, texts))
    return rows


def _identity(run: RunFiles) -> dict[str, str]:
    """Return the texts of a run's column by label."""
    about, at = run.about, run.at
    seconds = math.fsum(value for _, value in run.points("step_time"))
    tokens = math.fsum(value for _, value in run.points("tokens"))
    total = f" of {run.total_steps:,}" if run.total_steps else ""
    epochs = run.points("epoch")
    epochs_so_far = f", {epochs[-1][1]:.3g} epochs" if epochs else ""
    time_in_steps = f"{format_duration(seconds)} in steps" if seconds else ""
    versions = [f"{name} {about[name]}" for name in ("dtrain", "torch") if name in about]
    return {
        "status": run.status,
        "method": run.method if at("lora") is None else f"{run.method} with an adapter",
        "model": f"{at('model', 'path') or ''}{_model_size(run)}",
        "data": _data(run),
        "mesh": describe_mesh(run),
        "batch": _batch(run),
        "steps": f"{run.step:,}{total}{epochs_so_far}",
        "time": time_in_steps + _start_time(run),
        "tokens": format_count(tokens) if tokens else "",
        "computes in": str(about.get("compute") or at("train", "dtype") or ""),
        "versions": ", ".join(versions),
        "directory": str(run.directory),
    }


def _model_size(run: RunFiles) -> str:
    """Return the number of parameters as text, such as ", 1.2 B parameters, 5.6 M of them trained (0.5%)"."""
    parameters, trained = run.fact("parameters"), run.fact("trained")
    if not parameters:
        return ""
    size = f", {format_count(parameters)} parameters"
    if trained is not None and trained < parameters:
        size += f", {format_count(trained)} of them trained ({trained / parameters:.1%})"
    return size


def _data(run: RunFiles) -> str:
    """Return the files of the training data, and the number of rows and tokens if they are known."""
    texts = [" + ".join(str(file) for file in run.data_files)]
    train = run.data.get("train")
    if isinstance(train, dict):
        for name in ("rows", "tokens"):
            count = finite_number(train.get(name))
            if count:
                texts.append(f"{count:,.0f} {name}")
    return ", ".join(texts)


def _batch(run: RunFiles) -> str:
    batch = run.about.get("batch")
    if isinstance(batch, dict):
        return f"{batch.get('global_batch')}, micro batch {batch.get('micro_batch')}"
    return str(run.at("train", "global_batch") or "")


def _start_time(run: RunFiles) -> str:
    started = run.fact("started")
    if not started or not 0 < started < 1e11:
        return ""
    return f", started {time.strftime('%Y-%m-%d %H:%M', time.localtime(started))}"


def mesh_of(run: RunFiles) -> dict[str, int] | None:
    """Return the sizes of the mesh by dimension, or None if the run's files do not have them."""
    mesh = run.about.get("mesh")
    if not isinstance(mesh, dict):
        return None
    sizes: dict[str, Any] = {name: mesh.get(name) for name in MESH}
    # The file may be damaged. `type` because True is an int.
    are_valid = all(type(size) is int and 0 < size < 1 << 20 for size in sizes.values())
    return sizes if are_valid else None


def describe_mesh(run: RunFiles) -> str:
    """Return the mesh as text, such as "8 processes: dp_shard 4 × tp 2, cuda". "" if it is not known."""
    sizes, device = mesh_of(run), run.about.get("device")
    if sizes is None:
        return ""
    num_processes = math.prod(sizes.values())
    if num_processes > 1:
        dimensions = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        words = f"{num_processes:,} processes: {dimensions}"
    else:
        words = "one process"
    experts = run.about["mesh"].get("ep")
    if isinstance(experts, int) and experts > 1:
        words += f", including ep {experts}"
    return f"{words}, {device}" if device else words


def differences(runs: Sequence[RunFiles]) -> list[Row]:
    """Return the recipe keys whose values differ, with each run's value. At least two runs must have a recipe."""
    values_by_run = []
    for recipe in _comparable_recipes(runs):
        values_by_run.append({secrets.dotted_key(path): value for path, value in secrets.iterate_leaves(recipe)})
    if sum(bool(values) for values in values_by_run) < 2:
        return []
    keys = dict.fromkeys(key for values in values_by_run for key in values if key not in _NEVER_COMPARED)
    rows = []
    for key in keys:
        texts = []
        distinct = set()
        for values in values_by_run:
            text = _text(values.get(key, "—")) if values else "no recipe"
            texts.append(cut(text, LONGEST))
            if values:
                distinct.add(text)
        if len(distinct) > 1:
            rows.append(Row(key, texts))
    return rows


def _comparable_recipes(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Return the recipes of runs with the same set of method sections, so that their keys can be compared.

    The sections are those of all methods that the runs use. A recipe without one of these sections gets the section's
    defaults. Sections of other methods are removed, because no run has read them.
    """
    methods = {run.method for run in runs}
    defaults = {name: asdict(SECTIONS[name]()) for name in METHODS if name in methods}
    recipes = []
    for run in runs:
        recipe = {key: value for key, value in run.recipe.items() if key not in METHODS or key in methods}
        if recipe:
            for name, section in defaults.items():
                recipe.setdefault(name, section)
        recipes.append(recipe)
    return recipes


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def results(runs: Sequence[RunFiles]) -> list[Row]:
    """Return the first, last and best values of each learning curve, and each run's speed and memory."""
    names: dict[str, str] = {}
    for run in runs:
        names |= learning_curves(run.method)
    fields = dict.fromkeys(field for run in runs for field in run.curves)
    for chart in charts_of(fields):
        if chart.group != EVALUATION:
            continue
        for field, _ in chart.lines:
            if best_function(field, ""):
                names[field] = field.removeprefix("eval_").replace("_", " ")
    rows = [_result(runs, field, name) for field, name in names.items() if field in fields]
    speeds = [_reduce(median, run, "tokens_per_sec") for run in runs]
    peaks = [_reduce(max, run, "mem_gib") for run in runs]
    rows.append(_number_row("tokens/s, median", speeds, shown, best=max))
    rows.append(_number_row("peak memory", peaks, "{:.2f} GiB".format, best=min))
    rows.append(_number_row("planned memory", [run.planned_gib for run in runs], "{:.2f} GiB".format))
    return [row for row in rows if any(row.texts)]


def _result(runs: Sequence[RunFiles], field: str, name: str) -> Row:
    """Return the first, last and best value of a curve for each run."""
    texts: list[str] = []
    compared: list[float | None] = []  # the value of each run that decides which run is the best
    for run in runs:
        points = run.points(field)
        if not points:
            texts.append("")
            compared.append(None)
            continue
        values = [value for _, value in points]
        summary = records.summarize_curve(field, values)
        text = shown(summary.last)
        if len(points) > 1:
            text = f"{shown(summary.first)} → {text}"
        best_of = best_function(field, run.method)
        value = summary.last
        if best_of is not None and field.startswith(("val_", "eval_")):
            # Runs are compared by the best value of a validation curve, because its checkpoint can be used.
            value = best_of(values)
            if value != summary.last:
                text += f", best {shown(value)} at step {step_of_value(points, value):,.0f}"
        texts.append(text)
        compared.append(value)
    methods = {run.method for run in runs}
    # The loss of one method cannot be compared with that of another.
    best_of = best_function(field, methods.pop()) if len(methods) == 1 else None
    return Row(name, texts, _best_indices(compared, best_of))


def _best_indices(values: Sequence[float | None], best_of: Callable | None) -> tuple[int, ...]:
    """Return the indices of the best value, if several values differ by more than rounding."""
    # Values that agree in four digits count as equal.
    rounded: list[float | None] = []
    for value in values:
        rounded.append(None if value is None else float(f"{value:.4g}"))
    known = [value for value in rounded if value is not None]
    if best_of is None or len(known) < 2 or min(known) == max(known):
        return ()
    best = best_of(known)
    return tuple(index for index, value in enumerate(rounded) if value == best)


def _reduce(function: Callable, run: RunFiles, field: str) -> float | None:
    """Return `function` of all values of a field, or None if the run has none."""
    values = [value for _, value in run.points(field)]
    return function(values) if values else None


def _number_row(
    label: str, values: Sequence[float | None], format_value: Callable, best: Callable | None = None
) -> Row:
    texts = ["" if value is None else format_value(value) for value in values]
    return Row(label, texts, _best_indices(values, best))
