"""Rows of metrics, sent to the terminal, to metrics.jsonl and to trackers such as TensorBoard and Weights & Biases."""

import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from omegaconf import OmegaConf

from dtrain.base.errors import UserError
from dtrain.base.hardware import peak_flops
from dtrain.base.json_files import loads
from dtrain.recipe.schema import Metrics
from dtrain.training.metrics.records import ROW_ORDER
from dtrain.training.metrics.sinks import JsonlSink, Sink, TrackedRun
from dtrain.training.metrics.terminal import Progress
from dtrain.training.metrics.trackers import is_installed, named_tracker, open_trackers, package_problems

if TYPE_CHECKING:
    import torch

Number = int | float


class Recorder:
    """Writer of a run's rows and lines. It does nothing on ranks other than 0.

    metrics.jsonl has every row. Trackers and the progress bar have only the training rows of each `every`-th
    step and of the last. If a sink fails, a warning is printed, the sink is dropped, and training continues.

    Args:
        sinks: The sinks of the rows.
        progress: The progress bar. None on ranks other than 0.
        every: Steps between the training rows that trackers and the progress bar show.
        choices: A line for each automatic choice, with its reason.
        other_files: Further files of the run by name: "samples" and "evals".

    Attributes:
        choices: A line for each automatic choice, with its reason.
        redact: Removes the recipe's secrets from a line before it is printed.
    """

    def __init__(
        self,
        sinks: list[Sink],
        progress: Progress | None,
        every: int,
        choices: list[str],
        other_files: Mapping[str, JsonlSink] | None = None,
    ):
        self._sinks = list(sinks)
        self._other_files = other_files or {}
        self._total_steps: int | None = None
        self._progress = progress
        self._every = every
        self.choices = choices
        self.redact: Callable[[str], str] = str

    def resume_at(self, step: int) -> None:
        """Remove the rows after `step`, and a torn last line. 0 removes all rows. Call this before the first row."""
        self._to_sinks(lambda sink: sink.resume_at(step))
        for sink in self._other_files.values():
            sink.resume_at(step)

    def start(self, step: int, total_steps: int) -> None:
        """Start the progress bar.

        Args:
            step: Steps that are done.
            total_steps: Steps of the whole run.
        """
        self._total_steps = total_steps
        if self._progress is not None:
            self._progress.start(step, total_steps)

    def train_row(self, step: int, **fields: Number | None) -> None:
        """Write the row of an optimizer step.

        Args:
            step: The step, from 1.
            fields: The row's fields. A field that is None is left out.
        """
        row = _build_row(step, fields)
        is_due = step % self._every == 0 or step == self._total_steps
        if is_due and self._progress is not None:
            self._progress.update(row)
        self._to_sinks(lambda sink: sink.write(row), views=is_due)

    def val_row(self, step: int, **fields: Number | None) -> None:
        """Print and write the row of a validation after `step`: `val_loss` and the method's other metrics."""
        row = _build_row(step, fields)
        text = "  ".join(f"{name} {value:.6g}" for name, value in row.items() if name != "step")
        self.print_line(f"step {step}  {text}")
        self.log(row, step)

    def log(self, row: Mapping[str, Number], step: int) -> None:
        """Write a row to every sink, as it is."""
        row = {"step": step, **row}
        self._to_sinks(lambda sink: sink.write(row))

    def write_rows(self, name: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows to samples.jsonl or evals.jsonl, a line for each.

        Args:
            name: "samples" for completions that `step` is the first to train on, "evals" for the answers of an
                evaluation after `step`.
            step: The step.
            rows: The rows. They are not read on ranks other than 0.
        """
        if name in self._other_files:
            for row in rows:
                self._other_files[name].write({"step": step, **row})

    def drop_answers(self, step: int, name: str) -> None:
        """Remove the answers to one set of `eval` after `step` from evals.jsonl. Call this before the first row.

        Args:
            step: The step.
            name: The name of the set.
        """

        def stays(line: bytes) -> bool:
            row = loads(line)
            return row["step"] != step or row.get("set") != name

        if "evals" in self._other_files:
            self._other_files["evals"].cut(stays)

    def print_line(self, text: str) -> None:
        """Print a line on the terminal, above the progress bar, without the recipe's secrets."""
        if self._progress is not None:
            self._progress.print_line(self.redact(text))

    def end(self) -> None:
        """End the progress bar after the last step. Lines that are printed later come below it."""
        if self._progress is not None:
            self._progress.close()

    def close(self) -> None:
        """Flush and close every sink and the progress bar. May be called twice."""
        if self._progress is not None:
            self._progress.close()
        self._to_sinks(lambda sink: sink.close())
        self._sinks = []
        for sink in self._other_files.values():
            sink.close()

    def _to_sinks(self, act: Callable[[Sink], None], views: bool = True) -> None:
        """Call `act` with every sink. A sink that fails is dropped with a warning.

        Args:
            act: The function.
            views: Whether to call it with the views too, which are all sinks but metrics.jsonl.
        """
        for sink in list(self._sinks):
            if sink.is_view and not views:
                continue
            try:
                act(sink)
            except sink.failures as error:
                self._sinks.remove(sink)
                self.print_line(
                    f"warning: {sink.name} failed and is left out from here on; training goes on. "
                    f"{type(error).__name__}: {error}"
                )


def _build_row(step: int, fields: Mapping[str, Number | None]) -> dict[str, Number]:
    """Return a row with the fields that are not None: those of ROW_ORDER first, then the others in their order."""
    row: dict[str, Number] = {"step": step}
    for name, value in fields.items():
        if value is not None:
            row[name] = value
    ordered = {name: row[name] for name in ROW_ORDER if name in row}
    return ordered | row


def build(section: Metrics, run_dir: Path, config_yaml: str, is_main: bool, stream: TextIO | None = None) -> Recorder:
    """Return the recorder of a run. Files are opened at their first row.

    Args:
        section: The recipe's section `metrics`.
        run_dir: The run's directory.
        config_yaml: The resolved recipe without secrets, which trackers store with the run.
        is_main: Whether this is rank 0. On other ranks the recorder has no sinks.
        stream: The terminal. None: stderr.

    Raises:
        UserError: On every rank, if a package that the recipe needs is not installed.
    """
    choices = []
    tensorboard = section.tensorboard
    if any(entry.name == "tensorboard" for entry in section.sinks):
        tensorboard = False  # `open_trackers` opens it, with its options
    elif tensorboard == "auto":
        tensorboard = is_installed("tensorboard")
        if tensorboard:
            choice = f"{run_dir / 'tensorboard'}, since tensorboard is installed"
        else:
            choice = "off, since tensorboard is not installed (pip install 'dtrain[tensorboard]')"
        choices.append(f"metrics.tensorboard=auto: {choice}")
    problems = package_problems(section)
    if problems:
        raise UserError("\n".join(str(problem) for problem in problems))
    if not is_main:
        return Recorder([], None, section.every, [])
    config: Any = OmegaConf.to_container(OmegaConf.create(config_yaml))
    run = TrackedRun(run_dir.name, run_dir, config)
    sinks: list[Sink] = [JsonlSink(run_dir / "metrics.jsonl")]
    if tensorboard:
        sinks.append(named_tracker("tensorboard", run, {}))
    if section.wandb:
        sinks.append(named_tracker("wandb", run, {"project": section.wandb}))
    sinks += open_trackers(section, run)
    progress = Progress(sys.stderr if stream is None else stream)
    other_files = {name: JsonlSink(run_dir / f"{name}.jsonl") for name in ("samples", "evals")}
    return Recorder(sinks, progress, section.every, choices, other_files)


def model_flops_utilisation(
    flops_per_sec: float, world_size: int, device: "torch.device", compute_dtype: "torch.dtype"
) -> float | None:
    """Return the model FLOPs utilisation: the model's own FLOPs per second divided by the devices' peak.

    Args:
        flops_per_sec: Training FLOPs per second over all ranks, without recomputation.
        world_size: Number of ranks.
        device: This rank's device.
        compute_dtype: Dtype of computation.

    Returns:
        The share. None if the peak is not known: on CPUs, for a device that is not in base/gpus.toml, and for dtypes
        other than bfloat16 and float16.

    Reference:
        PaLM, arXiv:2204.02311, appendix B.
    """
    import torch  # `dtrain report` loads this module without torch

    if device.type != "cuda" or compute_dtype not in (torch.bfloat16, torch.float16):
        return None
    peak = peak_flops(torch.cuda.get_device_name(device), str(compute_dtype).removeprefix("torch."))
    return None if peak is None else flops_per_sec / (peak * world_size)


def memory_gib(device: "torch.device") -> float:
    """Return this rank's peak memory so far, in GiB.

    On CUDA it is the memory that torch has allocated on the device, on a CPU the resident set of the process.
    """
    if device.type == "cuda":
        import torch  # `dtrain report` loads this module without torch

        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss counts bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
