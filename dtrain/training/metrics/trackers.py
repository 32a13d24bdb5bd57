"""Trackers by name: TensorBoard, Weights & Biases, trackio, MLflow and SwanLab, and the entries of `metrics.sinks`.

Each class follows `sinks.MetricSink`, as a user's class does. The libraries are optional, so each is imported where it
is used. A tracker that gives its run an id or a name keeps it in the run's directory, and a resumed run continues the
same run of the tracker:

    tracker           kept in                  rows that are trained again after a resume
    TensorBoard       tensorboard/             hide the old ones
    Weights & Biases  wandb-id.txt             are logged a second time, under the same value of the axis `step`
    trackio           trackio-name.txt         are left out (in a project on this machine)
    MLflow            mlflow-id.txt            are left out
    SwanLab           swanlab-id.txt           are left out by SwanLab itself
"""

import importlib.util
import inspect
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.base.errors import Problem, UserError
from dtrain.base.plugins import import_object, registered_path
from dtrain.base.ranges import closest_name
from dtrain.recipe.saved import flatten
from dtrain.recipe.schema import Metrics, MetricSinkEntry
from dtrain.training.metrics.sinks import MetricSink, TrackedRun, TrackerSink

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SINKS_KEY = "metrics.sinks"
Row = Mapping[str, int | float]


class TensorBoard:
    """TensorBoard events: scalars `train/<field>`, `val/<field>` and `eval/<field>` by step.

    Args:
        run: The run.
        options: Arguments of torch's SummaryWriter. `log_dir` is `tensorboard/` in the run's directory by default.
    """

    def __init__(self, run: TrackedRun, **options: Any):
        self._directory = Path(options.pop("log_dir", run.directory / "tensorboard"))
        self._options = options
        self._writer: SummaryWriter

    def resume_at(self, step: int) -> None:
        """Hide the events after `step`. Their file is not changed: TensorBoard leaves out events from purge_step on."""
        from torch.utils.tensorboard import SummaryWriter  # optional

        purge_step = step + 1 if self._directory.exists() else None
        self._writer = SummaryWriter(str(self._directory), purge_step=purge_step, **self._options)

    def write(self, row: Row) -> None:
        """Write the scalars of a row."""
        for name, value in tagged(row).items():
            self._writer.add_scalar(name, value, row["step"])
        if "loss" not in row:
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of a Weights & Biases project.

    Args:
        run: The run.
        options: Arguments of wandb.init, such as `project`, `entity`, `tags` and `mode`.
    """

    def __init__(self, run: TrackedRun, **options: Any):
        self._tracked = run
        self._options = options
        self._run: Any = None

    def resume_at(self, step: int) -> None:
        """Continue the W&B run, or start a new one if all steps are trained again."""
        import wandb  # optional

        run_id = _read_or_write_id(self._tracked.directory / "wandb-id.txt", step, uuid.uuid4().hex[:12])
        defaults = {"name": self._tracked.name, "dir": str(self._tracked.directory)}
        self._run = wandb.init(**defaults | self._options, id=run_id, resume="allow", config=dict(self._tracked.config))
        # The step is a field with its own axis: W&B's internal counter refuses rows of steps it has seen.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Row) -> None:
        """Log a row."""
        self._run.log({"step": row["step"], **tagged(row)})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of a trackio project, on this machine or in a Space of the Hugging Face hub.

    Args:
        run: The run.
        options: Arguments of trackio.init, such as `project` ("dtrain" by default), `space_id` and `group`.
    """

    def __init__(self, run: TrackedRun, **options: Any):
        self._tracked = run
        self._options = {"project": "dtrain", "name": run.name} | options
        self._is_local = not {"space_id", "server_url"} & options.keys()
        self._run: Any = None
        self._logged: AbstractSet[tuple[str, int]] = frozenset()

    def resume_at(self, step: int) -> None:
        """Continue the run, or start a new one if all steps are trained again."""
        import trackio  # optional
        from trackio.sqlite_storage import SQLiteStorage  # the storage of projects on this machine

        new_name = self._options["name"]
        if self._is_local and new_name in SQLiteStorage.get_runs(self._options["project"]):
            # trackio continues the newest run of a name, so each run gets a name of its own within the project.
            new_name = f"{new_name}-{uuid.uuid4().hex[:6]}"
        name = _read_or_write_id(self._tracked.directory / "trackio-name.txt", step, new_name)
        resume = "allow" if step else "never"
        self._run = trackio.init(**self._options | {"name": name}, resume=resume, config=dict(self._tracked.config))
        if step and self._is_local:
            logged: set[tuple[str, int]] = set()
            for row in SQLiteStorage.get_logs(self._options["project"], name, run_id=self._run.id):
                logged.update((field, row["step"]) for field in row if row["step"] > step)
            self._logged = logged

    def write(self, row: Row) -> None:
        """Log a row."""
        values = _without_logged(tagged(row), int(row["step"]), self._logged)
        if values:
            self._run.log(values, step=int(row["step"]))

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run of an MLflow experiment. The recipe's keys are its parameters.

    Args:
        run: The run.
        tracking_uri: The tracking server or database, such as `http://localhost:5000`. None: MLflow's own default,
            which the environment variable MLFLOW_TRACKING_URI sets.
        experiment: Name of the experiment.
        run_name: Name of the run. None: `run.name`.
        tags: Tags of the run.
    """

    MAX_PARAMS = 100  # parameters of one request, MLflow's limit
    MAX_PARAM_LENGTH = 6000  # characters, MLflow's limit

    def __init__(
        self,
        run: TrackedRun,
        tracking_uri: str | None = None,
        experiment: str = "dtrain",
        run_name: str | None = None,
        tags: Mapping[str, Any] | None = None,
    ):
        self._tracked = run
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._run_name = run_name or run.name
        self._tags = dict(tags or {})
        self._client: Any = None
        self._run_id = ""
        self._logged: AbstractSet[tuple[str, int]] = frozenset()

    def resume_at(self, step: int) -> None:
        """Continue the MLflow run, or start a new one if all steps are trained again."""
        from mlflow import MlflowClient  # optional

        # A client has no global active run, unlike mlflow.start_run, so it cannot meet one of the user's.
        self._client = MlflowClient(tracking_uri=self._tracking_uri)
        # MLflow itself chooses the id of a run.
        id_file = self._tracked.directory / "mlflow-id.txt"
        if step and id_file.exists():
            self._run_id = id_file.read_text().strip()
            self._client.update_run(self._run_id, status="RUNNING")
            self._logged = self._steps_after(step)
            return
        self._run_id = self._create_run()
        id_file.parent.mkdir(parents=True, exist_ok=True)
        id_file.write_text(self._run_id)

    def _create_run(self) -> str:
        """Create a run with the recipe's keys as parameters. Return its id."""
        from mlflow.entities import Param  # optional

        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            experiment_id = self._client.create_experiment(self._experiment)
        else:
            experiment_id = experiment.experiment_id
        run_id = self._client.create_run(experiment_id, run_name=self._run_name, tags=self._tags).info.run_id
        params = []
        for key, value in flatten(self._tracked.config).items():
            params.append(Param(_mlflow_name(key), str(value)[: self.MAX_PARAM_LENGTH]))
        for first in range(0, len(params), self.MAX_PARAMS):
            self._client.log_batch(run_id, params=params[first : first + self.MAX_PARAMS])
        return run_id

    def _steps_after(self, step: int) -> AbstractSet[tuple[str, int]]:
        """Return name and step of the values after `step` that the MLflow run has."""
        logged = set()
        for name in self._client.get_run(self._run_id).data.metrics:
            for metric in self._client.get_metric_history(self._run_id, name):
                if metric.step > step:
                    logged.add((name, metric.step))
        return logged

    def write(self, row: Row) -> None:
        """Log a row."""
        from mlflow.entities import Metric  # optional

        step = int(row["step"])
        named = {_mlflow_name(name): value for name, value in tagged(row).items()}
        milliseconds = int(time.time() * 1000)
        metrics = []
        for name, value in _without_logged(named, step, self._logged).items():
            metrics.append(Metric(name, float(value), milliseconds, step))
        if metrics:
            self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class SwanLab:
    """A run of a SwanLab project.

    Args:
        run: The run.
        options: Arguments of swanlab.init, such as `project` ("dtrain" by default), `workspace` and `mode`.
    """

    def __init__(self, run: TrackedRun, **options: Any):
        self._tracked = run
        self._options = {"project": "dtrain", "name": run.name, "log_dir": str(run.directory / "swanlab")} | options
        self._run: Any = None

    def resume_at(self, step: int) -> None:
        """Continue the SwanLab run, or start a new one if all steps are trained again."""
        import swanlab  # optional

        run_id = _read_or_write_id(self._tracked.directory / "swanlab-id.txt", step, uuid.uuid4().hex[:21])
        handler = signal.getsignal(signal.SIGINT)
        self._run = swanlab.init(
            **self._options,
            id=run_id,
            resume="allow",
            config=dict(self._tracked.config),
            # Without it, swanlab asks for a key on the terminal, and the run waits.
            settings=swanlab.Settings(interactive=False),
        )
        # swanlab handles SIGINT itself: it ends its run. dtrain saves a checkpoint and goes on logging until then.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)

    def write(self, row: Row) -> None:
        """Log a row."""
        self._run.log(tagged(row), step=int(row["step"]))

    def close(self) -> None:
        self._run.finish()


@dataclass(frozen=True)
class _Library:
    """A tracker that `metrics.sinks` has a name for.

    Attributes:
        title: Its name in messages.
        tracker: Its class.
        package: The package that must be installed. Its extra has the same name.
        options_of: Import path of the function whose arguments `kwargs` may have.
        reserved: Arguments of this function that dtrain sets.
    """

    title: str
    tracker: Callable[..., MetricSink]
    package: str
    options_of: str
    reserved: Collection[str]


_RUN_ARGUMENTS = ("id", "resume", "config", "settings")
LIBRARIES: Mapping[str, _Library] = {
    "tensorboard": _Library(
        "TensorBoard", TensorBoard, "tensorboard", "torch.utils.tensorboard:SummaryWriter", ("purge_step",)
    ),
    "wandb": _Library("Weights & Biases", WeightsAndBiases, "wandb", "wandb:init", _RUN_ARGUMENTS),
    "trackio": _Library("trackio", Trackio, "trackio", "trackio:init", _RUN_ARGUMENTS),
    "mlflow": _Library("MLflow", Mlflow, "mlflow", f"{__name__}:Mlflow", ()),
    "swanlab": _Library("SwanLab", SwanLab, "swanlab", "swanlab:init", (*_RUN_ARGUMENTS, "reinit", "callbacks")),
}


def named_tracker(name: str, run: TrackedRun, options: Mapping[str, Any]) -> TrackerSink:
    """Return the sink of a tracker of LIBRARIES.

    Args:
        name: Its name, such as "trackio".
        run: The run.
        options: Arguments of its class.
    """
    library = LIBRARIES[name]
    return TrackerSink(library.title, lambda: library.tracker(run, **options))


def open_trackers(section: Metrics, run: TrackedRun) -> list[TrackerSink]:
    """Return a sink for each entry of `metrics.sinks`. Nothing is imported before the first row."""
    sinks = []
    for index, entry in enumerate(section.sinks):
        name = str(entry.name)
        if name in LIBRARIES:
            sinks.append(named_tracker(name, run, entry.kwargs))
        else:
            sinks.append(_own_tracker(entry, f"{SINKS_KEY}[{index}].name", run))
    return sinks


def _own_tracker(entry: MetricSinkEntry, key: str, run: TrackedRun) -> TrackerSink:
    """Return the sink of a user's class.

    Args:
        entry: The entry of the recipe.
        key: The key of its name.
        run: The run.
    """
    path = str(entry.name)
    return TrackerSink(path, lambda: import_object(path, SINKS_KEY, LIBRARIES)(run, **entry.kwargs))


def package_problems(section: Metrics) -> list[Problem]:
    """Check names of trackers, and that their packages are installed. Imports nothing."""
    problems = []
    is_requested = {"tensorboard": section.tensorboard not in ("auto", False, None), "wandb": bool(section.wandb)}
    for name, is_needed in is_requested.items():
        if is_needed and not is_installed(name):
            key = f"metrics.{name}"
            text = f"{key}={getattr(section, name)} needs a package that is not installed"
            problems.append(Problem(key, text, f"Run pip install 'dtrain[{name}]', or set {key}=null"))
    seen = {f"metrics.{name}": name for name, is_needed in is_requested.items() if is_needed}
    for index, entry in enumerate(section.sinks):
        key = f"{SINKS_KEY}[{index}]"
        problems += _entry_problems(entry, key, seen)
        if entry.name is not None:
            seen[key] = entry.name
    return problems


def _entry_problems(entry: MetricSinkEntry, key: str, seen: Mapping[str, str]) -> list[Problem]:
    """Check the name of an entry of `metrics.sinks`, and that its package is installed.

    Args:
        entry: The entry.
        key: Its key.
        seen: The name of each tracker that the recipe has before, by the key that names it.
    """
    if entry.name is None:
        fix = f"Set it to {', '.join(LIBRARIES)}, or an import path such as package.module:Name"
        return [Problem(f"{key}.name", f"{key}.name is missing", fix, is_missing=True)]
    if entry.name not in LIBRARIES:
        return []  # `option_problems` imports it
    for other_key, name in seen.items():
        if name == entry.name:
            # Both would continue the same run of the tracker.
            return [Problem(key, f"{key}: {other_key} names {entry.name} already", "Remove one of them")]
    package = LIBRARIES[entry.name].package
    if not is_installed(package):
        text = f"{key}.name={entry.name} needs a package that is not installed"
        return [Problem(f"{key}.name", text, f"Run pip install 'dtrain[{package}]', or remove the entry")]
    return []


def option_problems(section: Metrics) -> list[Problem]:
    """Check the user's classes and the `kwargs` of all trackers whose packages are installed. Imports them."""
    problems = []
    for index, entry in enumerate(section.sinks):
        key = f"{SINKS_KEY}[{index}]"
        if entry.name is None:
            continue  # reported by `package_problems`
        library = LIBRARIES.get(entry.name)
        if library is None:
            problems += _own_class_problems(entry, key)
        elif is_installed(library.package):
            problems += _named_option_problems(entry, key, library)
    return problems


def _named_option_problems(entry: MetricSinkEntry, key: str, library: _Library) -> list[Problem]:
    """Check the `kwargs` of a tracker of LIBRARIES."""
    known = []
    for name, parameter in inspect.signature(import_object(library.options_of, SINKS_KEY)).parameters.items():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and name not in ("run", *library.reserved):
            known.append(name)
    problems = []
    for name in entry.kwargs:
        if name not in known:
            problems.append(_unknown_option(f"{key}.kwargs.{name}", name, str(entry.name), known))
    return problems


def _unknown_option(key: str, name: str, owner: str, known: Collection[str]) -> Problem:
    """Return the problem of an argument that a tracker does not have, or that dtrain sets."""
    near = closest_name(name, known)
    fix = f"Did you mean {near}?" if near else f"It takes {', '.join(known)}"
    return Problem(key, f"{key} is not an option of {owner}", fix)


def _own_class_problems(entry: MetricSinkEntry, key: str) -> list[Problem]:
    """Check that a user's class can be imported, has the methods of a sink, and takes `kwargs`."""
    path = str(entry.name)
    name_key = f"{key}.name"
    try:
        sink_class = import_object(registered_path(path, SINKS_KEY), name_key, LIBRARIES)
    except UserError as error:
        return [Problem(name_key, str(error))]
    missing = [name for name in ("resume_at", "write", "close") if not callable(getattr(sink_class, name, None))]
    if missing:
        text = f"{key}.name={path} cannot be a sink, because it has no method {' and no method '.join(missing)}"
        return [Problem(f"{key}.name", text, "docs/trackers.md shows such a class")]
    try:
        inspect.signature(sink_class).bind("run", **entry.kwargs)
    except TypeError as error:
        text = f"{key}: {path} is called as {path.rpartition(':')[2]}(run, **kwargs), and {error}"
        return [Problem(f"{key}.kwargs", text)]
    return []


def is_installed(package: str) -> bool:
    """Check whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def tagged(row: Row) -> dict[str, int | float]:
    """Return the fields of a row but `step`, by the names that trackers show.

    Example:
        >>> tagged({"step": 3, "loss": 2.5, "lr": 1e-5, "eval_math_reward_mean": 0.5})
        {'train/loss': 2.5, 'train/lr': 1e-05, 'eval/math_reward_mean': 0.5}
        >>> tagged({"step": 3, "val_loss": 2.5})
        {'val/loss': 2.5}
    """
    values = {}
    for name, value in row.items():
        if name == "step":
            continue
        if name.startswith("eval_"):
            values[f"eval/{name.removeprefix('eval_')}"] = value
        elif "loss" in row:
            values[f"train/{name}"] = value
        else:
            values[f"val/{name.removeprefix('val_')}"] = value
    return values


def _read_or_write_id(file: Path, step: int, new_id: str) -> str:
    """Return the id in a file. If there is none, or all steps are trained again, write `new_id` to it first."""
    if step == 0 or not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(new_id)
    return file.read_text().strip()


def _without_logged(values: Row, step: int, logged: AbstractSet[tuple[str, int]]) -> dict[str, int | float]:
    """Return the values that a tracker does not have for this step yet."""
    return {name: value for name, value in values.items() if (name, step) not in logged}


def _mlflow_name(name: str) -> str:
    """Return a name with the characters that MLflow allows.

    Example:
        >>> _mlflow_name("eval/math_pass@1")
        'eval/math_pass_1'
    """
    return re.sub(r"[^\w\-. /:]", "_", name)
