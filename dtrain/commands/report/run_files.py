"""A run's directory, read while the run may still go: its recipe, its curves, its answers."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.json_files import read_json
from dtrain.recipe import secrets
from dtrain.training import METHODS
from dtrain.training.directory import ABOUT, DATA, is_locked
from dtrain.training.metrics import records
from dtrain.training.metrics.records import AnswerFile

METRICS, SAMPLES, EVALS = "metrics.jsonl", "samples.jsonl", "evals.jsonl"


class Curve:
    """The values of a field by step, in the order of the file; not finite ones among them. known: the points whose
    value is sound (`records.is_plottable`)."""

    def __init__(self) -> None:
        self.steps, self.values = array("d"), array("d")
        self.known: list[records.Point] = []

    def add(self, step: float, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)
        if records.is_plottable(value):
            self.known.append((step, value))


class RunFiles:
    """The files of a run's directory; `look` reads what is new. name: of the run beside others.

    Raises UserError, also from `look`, for files that are damaged as a whole, and for a directory that holds no run.
    """

    def __init__(self, directory: Path, name: str):
        self.directory, self.name = directory, name
        self.samples, self.evals = AnswerFile(directory / SAMPLES), AnswerFile(directory / EVALS)
        self.metrics = records.LineFollower(directory / METRICS)
        self._times = self.damaged = 0
        self.curves: dict[str, Curve] = {}
        self.recipe: dict[str, Any] = {}
        self.data: dict[str, Any] = {}
        self.about: dict[str, Any] = {}
        self.is_running: bool | None = None  # None: not known

    def look(self) -> bool:
        """Read what is new. Return whether anything is new."""
        return self.refresh_metrics() | self.samples.refresh() | self.evals.refresh()

    def refresh_metrics(self) -> bool:
        """Read what is new, without the answers. Return whether anything is new."""
        before = self.recipe, self.data, self.about, self.is_running
        self.recipe = records.read_recipe(self.directory)
        secrets.hide_secrets(self.recipe)
        paths = [self.directory / name for name in (DATA, ABOUT)]
        self.data, self.about = (read_json(path, allow_nan=True) if path.is_file() else {} for path in paths)
        self.is_running = is_locked(self.directory)
        return self._read_metrics() or before != (self.recipe, self.data, self.about, self.is_running)

    def _read_metrics(self) -> bool:
        is_new = False
        for _, line in self.metrics.read_new():
            if self.metrics.num_restarts != self._times:
                self._times, self.damaged, self.curves = self.metrics.num_restarts, 0, {}
            is_new = True
            row = records.parse_row(line) or {}
            if (step := finite_number(row.get("step"))) is None:
                self.damaged += 1
                continue
            for field, raw in row.items():
                if field != "step" and (value := records.number(raw)) is not None:
                    self.curves.setdefault(field, Curve()).add(step, value)
        return is_new

    def known(self, field: str) -> Sequence[records.Point]:
        """Return the field's values by step that are sound; none where it was not measured."""
        return self.curves[field].known if field in self.curves else ()

    @property
    def method(self) -> str:
        return str(self.recipe.get("method", next(iter(METHODS))))

    @property
    def step(self) -> int:
        """The last optimizer step in the metrics; 0 before the first."""
        curve = self.curves.get("loss")
        return int(curve.steps[-1]) if curve is not None else 0

    @property
    def total_steps(self) -> int | None:
        steps = self.about.get("steps") or self.at("train", "steps")
        return steps if isinstance(steps, int) else None

    @property
    def status(self) -> str:
        if self.total_steps is not None and self.step >= self.total_steps:
            return "done"
        return "running" if self.is_running else f"stopped at step {self.step:,}" if self.step else "no step yet"

    def at(self, *keys: str) -> Any:
        """Return a value of the recipe; None if there is none."""
        return secrets.get_at(self.recipe, keys)

    @property
    def data_files(self) -> list[Any]:
        """The files of `data.train` and of its sources, as the recipe names them."""
        train = self.at("data", "train")
        sources = [train, *(train.get("sources") or [])] if isinstance(train, dict) else []
        paths = [source.get("path") or [] for source in sources if isinstance(source, dict)]
        return [file for path in paths for file in (path if isinstance(path, list) else [path])]

    @property
    def planned_gib(self) -> float | None:
        """The planned peak of a rank, comparable with what `mem_gib` measures: where there is no CUDA, with what the
        process held before."""
        size, before = (self.fact(name) for name in ("planned", "memory_before_gib"))
        return size / 2**30 + (before or 0.0) if size else None

    def fact(self, name: str) -> float | None:
        """Return a number of about.json; None if there is none that is sound."""
        return finite_number(self.about.get(name))


def finite_number(value: Any) -> float | None:
    """Return a number of a file; None for anything else, and for one that is not sound (`records.is_plottable`)."""
    known = records.number(value)
    return known if known is not None and records.is_plottable(known) else None


def open_runs(paths: Sequence[Path]) -> list[RunFiles]:
    """Open and read the runs. Raises UserError for a path that holds none."""
    runs = []
    names = [path.resolve().name for path in paths]
    for path, name in zip(paths, names, strict=True):
        if not path.is_dir():
            others = sorted(file.parent.name for file in path.parent.glob(f"*/{METRICS}"))[:20]
            known = f"; {path.parent} has {', '.join(others)}" if others else ""
            raise UserError(f"{path} is no directory: give a run's, such as runs/sft{known}")
        if not any((path / file).is_file() for file in (METRICS, "config.yaml", EVALS)):
            inside = sorted(file.parent.name for file in path.glob(f"*/{METRICS}"))[:20]
            known = f"; in it are the runs {', '.join(inside)}: name one" if inside else ""
            raise UserError(f"{path} holds no run: it has no {METRICS}{known}")
        is_double = names.count(name) > 1
        runs.append(RunFiles(path, str(path) if is_double else name))
    for run in runs:
        run.look()
    return runs
