"""A run's directory, which may still be written: its recipe, its curves and its answers."""

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
    """The values of a field by step, in the order of the file.

    Attributes:
        steps: The steps.
        values: The values, which may be NaN or infinite.
        points: (step, value) of the values that can be plotted (`records.is_plottable`).
    """

    def __init__(self) -> None:
        self.steps, self.values = array("d"), array("d")
        self.points: list[records.Point] = []

    def add(self, step: float, value: float) -> None:
        """Append a point."""
        self.steps.append(step)
        self.values.append(value)
        if records.is_plottable(value):
            self.points.append((step, value))


class RunFiles:
    """The files of a run's directory. `look` reads what is new.

    Args:
        directory: The run's directory.
        name: Name of the run on the page.

    Attributes:
        samples: Completions of rollouts.
        evals: Answers of evaluations.
        curves: Curves of metrics.jsonl by field.
        recipe: Content of config.yaml, without secrets.
        data: Content of data.json.
        about: Content of about.json.
        damaged: Number of damaged rows of metrics.jsonl.
        is_running: Whether a process is writing the directory. None if this is not known.

    Raises:
        UserError: Also from `look`, if the directory has no run, or if a file is damaged as a whole.
    """

    def __init__(self, directory: Path, name: str):
        self.directory, self.name = directory, name
        self.samples, self.evals = AnswerFile(directory / SAMPLES), AnswerFile(directory / EVALS)
        self.metrics = records.LineFollower(directory / METRICS)
        self._num_restarts = 0  # how often metrics.jsonl was written anew
        self.damaged = 0
        self.curves: dict[str, Curve] = {}
        self.recipe: dict[str, Any] = {}
        self.data: dict[str, Any] = {}
        self.about: dict[str, Any] = {}
        self.is_running: bool | None = None  # None: not known

    def look(self) -> bool:
        """Read what is new in all files. Return whether anything is new."""
        # Not `or`: each of the files must be read.
        return self.refresh_metrics() | self.samples.refresh() | self.evals.refresh()

    def refresh_metrics(self) -> bool:
        """Read what is new in all files but the answers. Return whether anything is new."""
        before = self.recipe, self.data, self.about, self.is_running
        self.recipe = records.read_recipe(self.directory)
        secrets.hide_secrets(self.recipe)
        self.data = self._read_json(DATA)
        self.about = self._read_json(ABOUT)
        self.is_running = is_locked(self.directory)
        return self._read_metrics() or before != (self.recipe, self.data, self.about, self.is_running)

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        return read_json(path, allow_nan=True) if path.is_file() else {}

    def _read_metrics(self) -> bool:
        """Read new rows of metrics.jsonl. Return whether there are any."""
        is_new = False
        for _, line in self.metrics.read_new():
            if self.metrics.num_restarts != self._num_restarts:
                # The file was written anew, so the curves begin again.
                self._num_restarts = self.metrics.num_restarts
                self.damaged = 0
                self.curves = {}
            is_new = True
            row = records.parse_row(line) or {}
            step = finite_number(row.get("step"))
            if step is None:
                self.damaged += 1
                continue
            for field, raw_value in row.items():
                value = records.number(raw_value)
                if field != "step" and value is not None:
                    self.curves.setdefault(field, Curve()).add(step, value)
        return is_new

    def points(self, field: str) -> Sequence[records.Point]:
        """Return the points of a field that can be plotted. Empty if the field was not measured."""
        return self.curves[field].points if field in self.curves else ()

    @property
    def method(self) -> str:
        """The method of the recipe."""
        return str(self.recipe.get("method", next(iter(METHODS))))

    @property
    def step(self) -> int:
        """The last optimizer step in the metrics; 0 before the first."""
        curve = self.curves.get("loss")
        return int(curve.steps[-1]) if curve is not None else 0

    @property
    def total_steps(self) -> int | None:
        """The number of steps of the whole run, if it is known."""
        steps = self.about.get("steps") or self.at("train", "steps")
        return steps if isinstance(steps, int) else None

    @property
    def status(self) -> str:
        """The state of the run as text."""
        if self.total_steps is not None and self.step >= self.total_steps:
            return "done"
        if self.is_running:
            return "running"
        return f"stopped at step {self.step:,}" if self.step else "no step yet"

    def at(self, *keys: str) -> Any:
        """Return a value of the recipe, such as `at("train", "steps")`. None if there is none."""
        return secrets.get_at(self.recipe, keys)

    @property
    def data_files(self) -> list[Any]:
        """The files of `data.train` and of its sources, as the recipe names them."""
        train = self.at("data", "train")
        if not isinstance(train, dict):
            return []
        files = []
        for source in [train, *(train.get("sources") or [])]:
            if isinstance(source, dict):
                path = source.get("path") or []
                files += path if isinstance(path, list) else [path]
        return files

    @property
    def planned_gib(self) -> float | None:
        """The planned peak of a rank, which can be compared with the measured `mem_gib`.

        Without CUDA, `mem_gib` includes the memory of the process before the run, so it is added to the plan.
        """
        size = self.fact("planned")
        if not size:
            return None
        return size / 2**30 + (self.fact("memory_before_gib") or 0.0)

    def fact(self, name: str) -> float | None:
        """Return a number of about.json. None if there is none, or if it is not finite."""
        return finite_number(self.about.get(name))


def finite_number(value: Any) -> float | None:
    """Return a number from a file. None for anything else and for numbers that cannot be plotted."""
    number = records.number(value)
    return number if number is not None and records.is_plottable(number) else None


def open_runs(paths: Sequence[Path]) -> list[RunFiles]:
    """Open and read runs.

    Raises:
        UserError: If a path is not the directory of a run.
    """
    runs = []
    names = [path.resolve().name for path in paths]
    for path, name in zip(paths, names, strict=True):
        if not path.is_dir():
            others = _runs_in(path.parent)
            hint = f"; the runs in {path.parent} are {', '.join(others)}" if others else ""
            raise UserError(f"{path} is not a directory: give the directory of a run, such as runs/sft{hint}")
        if not any((path / file).is_file() for file in (METRICS, "config.yaml", EVALS)):
            inside = _runs_in(path)
            hint = f"; it contains the runs {', '.join(inside)}: name one of them" if inside else ""
            raise UserError(f"{path} is not the directory of a run: it has no {METRICS}{hint}")
        is_name_unique = names.count(name) == 1
        runs.append(RunFiles(path, name if is_name_unique else str(path)))
    for run in runs:
        run.look()
    return runs


def _runs_in(directory: Path) -> list[str]:
    """Return the names of up to 20 runs in a directory."""
    return sorted(file.parent.name for file in directory.glob(f"*/{METRICS}"))[:20]
