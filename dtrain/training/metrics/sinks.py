"""Sinks of rows: metrics.jsonl, which is the record, and TensorBoard and Weights & Biases, which are views of it.

A sink opens its files at the first row, so that a run which fails before leaves none. is_view: whether rows may be left
out of it (`metrics.every`). failures: the exceptions that mean "this sink is broken", as against a bug in dtrain.
"""

import json
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dtrain.base.files import replace
from dtrain.training.metrics.records import parse_row

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class JsonlSink:
    """File of one JSON object per line, floats unrounded, flushed at once. Non-finite numbers are NaN and Infinity.
    Text stays as it is, in UTF-8."""

    is_view = False
    failures = (OSError,)

    def __init__(self, path: Path):
        self.name = str(path)
        self._path = path
        self._file: TextIO | None = None

    def resume_at(self, step: int) -> None:
        """Cut the rows beyond `step`, with 0 those of step 0 too, and a last line that a kill tore; the rest stays byte
        for byte. A kill in the middle leaves the old file or the new one."""
        self.cut(lambda line: line.endswith(b"\n") and _step_of(line) <= step if step else False)

    def cut(self, stays: Callable[[bytes], bool]) -> None:
        """Leave the lines that stay."""
        if not self._path.exists():
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if stays(line)]
        if len(kept) < len(lines):
            replace(self._path, b"".join(kept))

    def write(self, row: Mapping[str, Any]) -> None:
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
    """The row's step; infinity where the line is no row, so that it goes."""
    step = (parse_row(line) or {}).get("step")
    return step if isinstance(step, int | float) else float("inf")


class TensorBoardSink:
    """Scalars `train/<field>`, `val/<field>` and `eval/<field>` by step."""

    name = "TensorBoard"
    is_view = True
    failures = (ImportError, OSError, RuntimeError, ValueError)

    def __init__(self, directory: Path):
        self._directory = directory
        self._purge_step: int | None = None
        self._writer: SummaryWriter | None = None

    def resume_at(self, step: int) -> None:
        # Events of a run that was cut stay in their file; TensorBoard leaves out those from purge_step on.
        if self._directory.exists():
            self._purge_step = step + 1

    def write(self, row: Mapping[str, int | float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

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
    """A run of a W&B project; a resumed run goes on in the same one, whose id lies in the run directory."""

    name = "Weights & Biases"
    is_view = True

    def __init__(self, project: str, run_dir: Path, config_yaml: str):
        import wandb

        self.failures = (wandb.Error, OSError, RuntimeError, ValueError)
        self._wandb = wandb
        self._project = project
        self._run_dir = run_dir
        self._config_yaml = config_yaml
        self._run: Any = None

    def resume_at(self, step: int) -> None:
        if step == 0:
            self._id_file.unlink(missing_ok=True)

    def write(self, row: Mapping[str, int | float]) -> None:
        if self._run is None:
            self._run = self._open()
        # The step is a field with its own axis: W&B's internal counter refuses rows of steps it has seen.
        self._run.log({_tag(name, row) if name != "step" else name: value for name, value in row.items()})

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
    if name.startswith("eval_"):
        return f"eval/{name.removeprefix('eval_')}"
    return f"train/{name}" if "loss" in row else f"val/{name.removeprefix('val_')}"


Sink = JsonlSink | TensorBoardSink | WandbSink
