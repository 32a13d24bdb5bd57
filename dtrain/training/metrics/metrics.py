"""Metrics: the rows of a run, handed to every sink and the terminal; the fields of a row and their order."""

import importlib.util
import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dtrain.base.errors import Problem, UserError
from dtrain.base.hardware import peak_flops
from dtrain.base.json_files import loads
from dtrain.recipe.schema import Metrics
from dtrain.training.metrics.records import ROW_ORDER
from dtrain.training.metrics.sinks import JsonlSink, Sink, TensorBoardSink, WandbSink
from dtrain.training.metrics.terminal import Progress

if TYPE_CHECKING:
    import torch

Number = int | float


class Recorder:
    """Hands rows to its sinks. A sink that fails is warned of once and left out; training goes on.

    The record has every row; its views and the progress bar have the training rows of each `every`th step and the
    last. `choices` holds one line per automatic choice, with its reason. beside: files beside the record, by name.
    """

    def __init__(
        self,
        sinks: list[Sink],
        progress: Progress | None,
        every: int,
        choices: list[str],
        beside: Mapping[str, JsonlSink] | None = None,
    ):
        self._sinks = list(sinks)
        self._beside = beside or {}
        self._total_steps: int | None = None
        self._progress = progress
        self._every = every
        self.choices = choices
        self.redact: Callable[[str], str] = str  # what is said, without what is not for others

    def resume_at(self, step: int) -> None:
        """Rows beyond `step` and a torn last line go; 0 starts over. Before the first row."""
        self._to_sinks(lambda sink: sink.resume_at(step))
        for sink in self._beside.values():
            sink.resume_at(step)

    def start(self, step: int, total_steps: int) -> None:
        """Show progress from `step` (done so far) to `total_steps`."""
        self._total_steps = total_steps
        if self._progress is not None:
            self._progress.start(step, total_steps)

    def train_row(self, step: int, **fields: Number | None) -> None:
        """The row of optimizer step `step` (from 1). None: the field does not apply."""
        row = _row(step, fields)
        due = step % self._every == 0 or step == self._total_steps
        if due and self._progress is not None:
            self._progress.update(row)
        self._to_sinks(lambda sink: sink.write(row), views=due)

    def val_row(self, step: int, **fields: Number | None) -> None:
        """A validation after step `step`: `val_loss` and what else was measured."""
        row = _row(step, fields)
        shown = "  ".join(f"{name} {value:.6g}" for name, value in row.items() if name != "step")
        self.say(f"step {step}  {shown}")
        self.log(row, step)

    def log(self, row: Mapping[str, Number], step: int) -> None:
        """Write a row to every sink, as it is."""
        row = {"step": step, **row}
        self._to_sinks(lambda sink: sink.write(row))

    def write_rows(self, name: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows to a file beside the record, a line each. samples: completions that `step` is the first to train
        on; evals: judged answers of an evaluation after it."""
        if name in self._beside:
            for row in rows:
                self._beside[name].write({"step": step, **row})

    def drop_answers(self, step: int, name: str) -> None:
        """Take the answers of one set after `step` out of evals.jsonl again. Before the first row."""
        if "evals" in self._beside:
            self._beside["evals"].cut(lambda line: (row := loads(line))["step"] != step or row.get("set") != name)

    def say(self, text: str) -> None:
        """A line on the terminal, above the progress bar. Silent on other ranks than 0."""
        if self._progress is not None:
            self._progress.say(self.redact(text))

    def end(self) -> None:
        """The last step is done: what is said from here on stands below the bar."""
        if self._progress is not None:
            self._progress.close()

    def close(self) -> None:
        """Flush and close every sink and the bar. Twice does no harm."""
        if self._progress is not None:
            self._progress.close()
        self._to_sinks(lambda sink: sink.close())
        self._sinks = []
        for sink in self._beside.values():
            sink.close()

    def _to_sinks(self, act: Callable[[Sink], None], views: bool = True) -> None:
        for sink in list(self._sinks):
            if sink.is_view and not views:
                continue
            try:
                act(sink)
            except sink.failures as error:
                self._sinks.remove(sink)
                self.say(
                    f"warning: {sink.name} failed and is left out from here on; training goes on. "
                    f"{type(error).__name__}: {error}"
                )


def _row(step: int, fields: Mapping[str, Number | None]) -> dict[str, Number]:
    row = {"step": step, **{name: value for name, value in fields.items() if value is not None}}
    known = {name: row[name] for name in ROW_ORDER if name in row}
    return known | row


def build(section, run_dir: Path, config_yaml: str, is_main: bool, stream: TextIO | None = None) -> Recorder:
    """Return the recorder of a run, from the recipe's `metrics` section (every, tensorboard, wandb).

    Files open at their first row. config_yaml: the resolved recipe, kept with the W&B run. stream: the terminal
    (default: stderr). On ranks other than 0 the same object without sinks. No collective.

    Raises UserError, on every rank alike, where a package that the recipe asks for is not installed.
    """
    choices = []
    tensorboard = section.tensorboard
    if tensorboard == "auto":
        tensorboard = _installed("tensorboard")
        choices.append(
            f"metrics.tensorboard=auto: {run_dir / 'tensorboard'}, since tensorboard is installed"
            if tensorboard
            else "metrics.tensorboard=auto: off, since tensorboard is not installed (pip install 'dtrain[tensorboard]')"
        )
    problems = package_problems(section)
    if problems:
        raise UserError("\n".join(map(str, problems)))
    if not is_main:
        return Recorder([], None, section.every, [])
    sinks: list[Sink] = [JsonlSink(run_dir / "metrics.jsonl")]
    if tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tensorboard"))
    if section.wandb:
        sinks.append(WandbSink(section.wandb, run_dir, config_yaml))
    progress = Progress(stream if stream is not None else sys.stderr)
    beside = {name: JsonlSink(run_dir / f"{name}.jsonl") for name in ("samples", "evals")}
    return Recorder(sinks, progress, section.every, choices, beside)


def package_problems(section: Metrics) -> list[Problem]:
    """Check that the packages for the recipe's `metrics` section are installed."""
    wanted = {"tensorboard": section.tensorboard not in ("auto", False, None), "wandb": bool(section.wandb)}
    problems = []
    for name, is_wanted in wanted.items():
        if is_wanted and not _installed(name):
            key = f"metrics.{name}"
            text = f"{key}={getattr(section, name)} needs a package that is not installed"
            problems.append(Problem(key, text, f"Run pip install 'dtrain[{name}]', or set {key}=null"))
    return problems


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def model_flops_utilisation(
    flops_per_sec: float, world_size: int, device: "torch.device", compute_dtype: "torch.dtype"
) -> float | None:
    """Return the share of the devices' peak that the model's own arithmetic takes (PaLM, arXiv:2204.02311, appendix B).

    flops_per_sec: training FLOPs over all ranks, recomputation not counted. None where no peak is known: off CUDA, for
    a device that is not in the table (base/gpus.toml), for dtypes other than bfloat16 and float16.
    """
    import torch

    if device.type != "cuda" or compute_dtype not in (torch.bfloat16, torch.float16):
        return None
    peak = peak_flops(torch.cuda.get_device_name(device), str(compute_dtype).removeprefix("torch."))
    return None if peak is None else flops_per_sec / (peak * world_size)


def memory_gib(device: "torch.device") -> float:
    """Return this rank's peak memory so far, in GiB: allocated on the device for CUDA, else the resident set."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss counts bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
