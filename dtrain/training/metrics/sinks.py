"""Sinks of rows: metrics.jsonl, which has every row, and TensorBoard and Weights & Biases, which are views of it.

A sink opens its files at the first row, so that a run that fails before leaves no files. Every sink has

    name        its name in messages
    is_view     whether `metrics.every` may leave rows out of it
    failures    the exceptions that mean that the sink is broken; any other exception is a bug in dtrain
"""

import json
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dtrain.base.files import atomic_write_bytes
from dtrain.training.metrics.records import parse_row

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class JsonlSink:
    """A file of one JSON object per line, in UTF-8, flushed after each row.

    Floats are not rounded, and non-finite numbers are written as NaN and Infinity.
    """

    is_view = False
    failures = (OSError,)

    def __init__(self, path: Path):
        self.name = str(path)
        self._path = path
        self._file: TextIO | None = None

    def resume_at(self, step: int) -> None:
        """Remove the rows after `step` and a last line that was torn by a kill. 0 removes all rows.

        The other lines stay the same byte for byte. A kill in between leaves either the old or the new file.
        """

        def stays(line: bytes) -> bool:
            return step > 0 and line.endswith(b"\n") and _step_of(line) <= step

        self.cut(stays)

    def cut(self, stays: Callable[[bytes], bool]) -> None:
        """Remove the lines for which `stays` returns False."""
        if not self._path.exists():
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if stays(line)]
        if len(kept) < len(lines):
            atomic_write_bytes(self._path, b"".join(kept))

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _step_of(line: bytes) -> float:
    """Return a row's step; infinity for a damaged line, which is then after every step."""
    row = parse_row(line) or {}
    step = row.get("step")
    return step if isinstance(step, int | float) else float("inf")


class TensorBoardSink:
    """TensorBoard events: scalars `train/<field>`, `val/<field>` and `eval/<field>` by step."""

    name = "TensorBoard"
    is_view = True
    failures = (ImportError, OSError, RuntimeError, ValueError)

    def __init__(self, directory: Path):
        self._directory = directory
        self._purge_step: int | None = None
        self._writer: SummaryWriter | None = None

    def resume_at(self, step: int) -> None:
        """Hide the events after `step`. Their file is not changed: TensorBoard leaves out events from purge_step on."""
        if self._directory.exists():
            self._purge_step = step + 1

    def write(self, row: Mapping[str, int | float]) -> None:
        """Write the scalars of a row."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # optional

            self._writer = SummaryWriter(str(self._directory), purge_step=self._purge_step)
        for name, value in row.items():
            if name != "step":
                self._writer.add_scalar(_tag(name, row), value, row["step"])
        if "loss" not in row:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandbSink:
    """A run of a Weights & Biases project.

    The id of the W&B run is stored in the run's directory, so that a resumed run continues the same W&B run.
    """

    name = "Weights & Biases"
    is_view = True

    def __init__(self, project: str, run_dir: Path, config_yaml: str):
        import wandb  # optional

        self.failures = (wandb.Error, OSError, RuntimeError, ValueError)
        self._wandb = wandb
        self._project = project
        self._run_dir = run_dir
        self._config_yaml = config_yaml
        self._run: Any = None

    def resume_at(self, step: int) -> None:
        """Start a new W&B run if all steps are trained again."""
        if step == 0:
            self._id_file.unlink(missing_ok=True)

    def write(self, row: Mapping[str, int | float]) -> None:
        """Log a row."""
        if self._run is None:
            self._run = self._open()
        # The step is a field with its own axis: W&B's internal counter refuses rows of steps it has seen.
        tagged = {}
        for name, value in row.items():
            tagged[name if name == "step" else _tag(name, row)] = value
        self._run.log(tagged)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    @property
    def _id_file(self) -> Path:
        return self._run_dir / "wandb-id.txt"

    def _open(self) -> Any:
        from omegaconf import OmegaConf

        self._run_dir.mkdir(parents=True, exist_ok=True)
        if not self._id_file.exists():
            self._id_file.write_text(uuid.uuid4().hex[:12])
        run = self._wandb.init(
            project=self._project,
            name=self._run_dir.name,
            dir=str(self._run_dir),
            id=self._id_file.read_text().strip(),
            resume="allow",
            config=OmegaConf.to_container(OmegaConf.create(self._config_yaml)),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run


def _tag(name: str, row: Mapping[str, int | float]) -> str:
    """Return the name of a row's field in a view.

    >>> _tag("eval_math_reward_mean", {}), _tag("lr", {"loss": 2.5}), _tag("val_loss", {})
    ('eval/math_reward_mean', 'train/lr', 'val/loss')
    """
    if name.startswith("eval_"):
        return f"eval/{name.removeprefix('eval_')}"
    return f"train/{name}" if "loss" in row else f"val/{name.removeprefix('val_')}"


Sink = JsonlSink | TensorBoardSink | WandbSink
