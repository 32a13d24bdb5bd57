"""The model card of a run: what was trained, on what, how it went, with a picture, and the recipe without secrets."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Template

from dtrain import __version__
from dtrain.base.hub import cached_model_id
from dtrain.commands.report.run_files import RunFiles
from dtrain.data.sources.files import is_dataset_id
from dtrain.recipe import secrets
from dtrain.training import METHODS, method_class
from dtrain.training.metrics import records

CURVE = "loss.svg"
WIDTH, HEIGHT, LEFT, BELOW, ABOVE = 640, 320, 60, 40, 16
MAX_POINTS = 500  # points of a line; neighbours are averaged beyond that
# The fields whose last value is in the table of results, if the run has measured them.
RESULTS = ("loss", "val_loss", "reward_mean", "val_reward_mean", "val_accuracy", "accuracy")


@dataclass(frozen=True)
class Run:
    """A run and its export. step: that the export is of; base: the id of the model that it began from on the hub, None
    where that is not known."""

    name: str
    files: RunFiles
    step: int | None
    is_adapter: bool
    base: str | None

    @property
    def losses(self) -> tuple[Sequence[records.Point], Sequence[records.Point]]:
        """The training's and the validation's, by step."""
        return self.files.known("loss"), self.files.known("val_loss")


def base_of_recipe(recipe: Mapping[str, Any]) -> str | None:
    """Return the hub's id of the model that a run began from; None if its path does not contain it."""
    path = (recipe.get("model") or {}).get("path")
    return cached_model_id(Path(path)) if isinstance(path, str) else None


def card(run: Run, theirs: Mapping[str, Any]) -> str:
    """Return README.md of the repository. theirs: the front matter of the one that is there, whose other keys stay."""
    recipe, method = run.files.recipe, str(run.files.recipe.get("method"))
    front: dict[str, Any] = {"library_name": "peft" if run.is_adapter else "transformers"}
    if run.base is not None:
        front |= {"base_model": run.base, "base_model_relation": "adapter" if run.is_adapter else "finetune"}
    if datasets := list(dict.fromkeys(filter(is_dataset_id, run.files.data_files))):  # those on the hub
        front["datasets"] = datasets
    front |= {"pipeline_tag": "text-generation", "tags": ["dtrain", method]}
    as_yaml = partial(yaml.safe_dump, sort_keys=False, allow_unicode=True)
    return _template("card.md").render(
        front=as_yaml({**theirs, **front}),
        run=run,
        how=method_class(method).about if method in METHODS else method,
        version=__version__,
        has_license="license" in theirs,
        results={name: f"{run.files.curves[name].values[-1]:.4g}" for name in RESULTS if name in run.files.curves},
        curve=CURVE if any(run.losses) else None,
        data=run.files.data,
        recipe=as_yaml(public_recipe(recipe)),
    )


def _template(name: str) -> Template:
    text = Path(__file__).with_name(f"{name}.jinja").read_text("utf-8")
    return Template(text, trim_blocks=True, keep_trailing_newline=True)


def public_recipe(recipe: Mapping[str, Any]) -> Any:
    """Return a saved recipe without its secrets, and with the last name alone of paths on this machine."""

    def public(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): public(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [public(item) for item in value]
        if isinstance(value, str) and "://" in value:
            return value.partition("?")[0]  # a query may be a signature
        if not isinstance(value, str) or not value.startswith(("/", "~", "./", "../")):
            return value
        return cached_model_id(Path(value)) or Path(value).name

    tree = public(recipe)
    secrets.hide_secrets(tree)
    return tree


def svg(train: Sequence[records.Point], val: Sequence[records.Point]) -> str:
    """Return the losses as a small picture (SVG), the training's a line, the validation's dots. There is at least one
    point."""
    first, last = (find(step for step, _ in [*train, *val]) for find in (min, max))
    low, high, step = _axis([value for _, value in [*train, *val]])

    def x(at: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - ABOVE) * ((at - first) / (last - first) if last > first else 0.5):.1f}"

    def y(value: float) -> str:
        return f"{ABOVE + (HEIGHT - ABOVE - BELOW) * (1 - (value - low) / (high - low)):.1f}"

    values = [low + number * step for number in range(round((high - low) / step) + 1)]
    ends = [(first, "start"), (last, "end")] if last > first else [(first, "middle")]
    names = [("training loss", "#2a6fbb", train), ("validation loss", "#d1495b", val)]
    sizes = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - ABOVE}
    return _template("curve.svg").render(
        {**sizes, "top": ABOVE, "bottom": HEIGHT - BELOW},
        grid=[(y(value), f"{value:.4g}") for value in values],
        ends=[(x(at), f"{at:g}", anchor) for at, anchor in ends],
        train=[f"{x(at)},{y(value)}" for at, value in _thinned(train)],
        val=[(x(at), y(value)) for at, value in _thinned(val)],
        names=[(name, colour) for name, colour, points in names if points],
    )


def _axis(values: Sequence[float]) -> tuple[float, float, float]:
    """Return round ends around the values, and the distance of the grid lines."""
    low, high = min(values), max(values)
    if high <= low:
        low, high = low - 0.5, high + 0.5
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    return math.floor(low / step) * step, math.ceil(high / step) * step, step


def _thinned(points: Sequence[records.Point]) -> list[records.Point]:
    """Return at most MOST points: the means of neighbours."""
    size = -(-len(points) // MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size or 1)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
