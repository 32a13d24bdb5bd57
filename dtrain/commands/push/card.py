"""The model card of a run: the model, the data, the results with a picture, and the recipe without secrets."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jinja2 import Template

from dtrain import __version__
from dtrain.base.hub import cached_model_id
from dtrain.base.plugins import split_import_path
from dtrain.commands.report.run_files import RunFiles
from dtrain.data.sources.files import is_dataset_id
from dtrain.recipe import secrets
from dtrain.training import trusted_method_class
from dtrain.training.metrics import records

CURVE = "loss.svg"
WIDTH, HEIGHT = 640, 320  # size of the picture in pixels
LEFT, BELOW, ABOVE = 60, 40, 16  # its margins; the right one is as wide as the one above
MAX_POINTS = 500  # largest number of points of a line. In longer lines, neighbouring points are averaged
# Fields whose last value is in the table of results, if the run has measured them.
RESULTS = ("loss", "val_loss", "reward_mean", "val_reward_mean", "val_accuracy", "accuracy")


@dataclass(frozen=True)
class Run:
    """A run and its export.

    Attributes:
        name: Name of the model.
        files: The run's files.
        step: Step of the export, if it is known.
        is_adapter: Whether the export is an adapter.
        base: Hub id of the base model, if it is known.
    """

    name: str
    files: RunFiles
    step: int | None
    is_adapter: bool
    base: str | None

    @property
    def losses(self) -> tuple[Sequence[records.Point], Sequence[records.Point]]:
        """The training and the validation losses, as points (step, loss)."""
        return self.files.points("loss"), self.files.points("val_loss")


def base_of_recipe(recipe: Mapping[str, Any]) -> str | None:
    """Return the hub id of the base model, if the path in the recipe contains it."""
    path = (recipe.get("model") or {}).get("path")
    return cached_model_id(Path(path)) if isinstance(path, str) else None


def card(run: Run, existing: Mapping[str, Any]) -> str:
    """Return the README.md of the repository on the hub.

    Args:
        run: The run.
        existing: Front matter of the README.md that the repository has. Its other keys are kept.
    """
    recipe = run.files.recipe
    method = str(recipe.get("method"))
    front: dict[str, Any] = {"library_name": "peft" if run.is_adapter else "transformers"}
    if run.base is not None:
        front["base_model"] = run.base
        front["base_model_relation"] = "adapter" if run.is_adapter else "finetune"
    datasets = list(dict.fromkeys(file for file in run.files.data_files if is_dataset_id(file)))
    if datasets:
        front["datasets"] = datasets
    front["pipeline_tag"] = "text-generation"
    front["tags"] = ["dtrain", split_import_path(method)[1]]
    results = {}
    for name in RESULTS:
        if name in run.files.curves:
            results[name] = f"{run.files.curves[name].values[-1]:.4g}"
    as_yaml = partial(yaml.safe_dump, sort_keys=False, allow_unicode=True)
    return _template("card.md").render(
        front=as_yaml({**existing, **front}),
        run=run,
        how=trusted_method_class(method).about or method,
        version=__version__,
        has_license="license" in existing,
        results=results,
        curve=CURVE if any(run.losses) else None,
        data=run.files.data,
        recipe=as_yaml(public_recipe(recipe)),
    )


def _template(name: str) -> Template:
    text = Path(__file__).with_name(f"{name}.jinja").read_text("utf-8")
    return Template(text, trim_blocks=True, keep_trailing_newline=True)


def public_recipe(recipe: Mapping[str, Any]) -> Any:
    """Return a saved recipe without secrets, and without the directories of paths on this machine.

    A path in the cache of the hub becomes the hub id. Other local paths are cut to their last part.
    """

    def public(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): public(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [public(item) for item in value]
        if not isinstance(value, str):
            return value
        if "://" in value:
            return value.partition("?")[0]  # the query of a URL may contain a signature
        if value.startswith(("/", "~", "./", "../")):
            return cached_model_id(Path(value)) or Path(value).name
        return value

    tree = public(recipe)
    secrets.hide_secrets(tree)
    return tree


def svg(train: Sequence[records.Point], val: Sequence[records.Point]) -> str:
    """Draw losses as a small picture (SVG): the training loss as a line, the validation loss as dots.

    Args:
        train: Points (step, loss).
        val: The same of the validation. At least one of the two has a point.
    """
    points = [*train, *val]
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    axis = round_axis([value for _, value in points])
    right, bottom = WIDTH - ABOVE, HEIGHT - BELOW

    def x(step: float) -> str:
        share = (step - first) / (last - first) if last > first else 0.5
        return f"{LEFT + (WIDTH - LEFT - ABOVE) * share:.1f}"

    def y(value: float) -> str:
        share = (value - axis.low) / (axis.high - axis.low)
        return f"{ABOVE + (HEIGHT - ABOVE - BELOW) * (1 - share):.1f}"

    num_intervals = round((axis.high - axis.low) / axis.step)
    grid_values = [axis.low + number * axis.step for number in range(num_intervals + 1)]
    ends = [(first, "start"), (last, "end")] if last > first else [(first, "middle")]
    names = []
    if train:
        names.append(("training loss", "#2a6fbb"))
    if val:
        names.append(("validation loss", "#d1495b"))
    return _template("curve.svg").render(
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=right,
        top=ABOVE,
        bottom=bottom,
        grid=[(y(value), f"{value:.4g}") for value in grid_values],
        ends=[(x(step), f"{step:g}", anchor) for step, anchor in ends],
        train=[f"{x(step)},{y(value)}" for step, value in _thinned(train)],
        val=[(x(step), y(value)) for step, value in _thinned(val)],
        names=names,
    )


class Axis(NamedTuple):
    """The ends of an axis and the distance of its grid lines."""

    low: float
    high: float
    step: float


def round_axis(values: Sequence[float]) -> Axis:
    """Return an axis around the values whose ends and grid lines are round numbers.

    Example:
        >>> round_axis([0.3, 7.9])
        Axis(low=0.0, high=8.0, step=2.0)
    """
    low, high = min(values), max(values)
    if high <= low:
        low, high = low - 0.5, high + 0.5
    # About four intervals, each 1, 2 or 5 times a power of ten.
    smallest_step = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(smallest_step))
    step = 10 * power
    for factor in (1, 2, 5):
        if power * factor >= smallest_step * (1 - 1e-9):
            step = power * factor
            break
    return Axis(math.floor(low / step) * step, math.ceil(high / step) * step, step)


def _thinned(points: Sequence[records.Point]) -> list[records.Point]:
    """Return at most MAX_POINTS points, the means of neighbours."""
    if not points:
        return []
    group_size = math.ceil(len(points) / MAX_POINTS)
    means = []
    for start in range(0, len(points), group_size):
        group = points[start : start + group_size]
        mean_step = sum(step for step, _ in group) / len(group)
        mean_value = sum(value for _, value in group) / len(group)
        means.append((mean_step, mean_value))
    return means
