"""The directory of a run: who holds it, its config.yaml, and what a resume may change.

    runs/<name>/
      lock             locked while a run writes here; the file stays, its lock ends with the process
      config.yaml      the resolved recipe, without its secrets
      data.json        of each split, how many rows, samples and tokens it has, and its identity
      about.json       versions, mesh, device, sizes, the planned memory: what a reader of the run wants to know
      began.json       the checkpoints that the run began from, if it did (see `origin`)
      model/           config.json, tokenizer and chat template of the model, for exports
      metrics.jsonl    one JSON object a line
      evals.jsonl      judged answers of the evaluations, so too
      checkpoints/     see `store`
      export/          Hugging Face layout, of an adapter PEFT's

Imports no torch. Only rank 0 opens a `RunDirectory`; the others need its path alone.
"""

import errno
import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.files import NO_LOCKS, can_sync_directories, real, replace_text
from dtrain.checkpoint.huggingface.model_files import copy_companions

DATA = "data.json"
ABOUT = "about.json"
WAIT_SECONDS = 30.0
# Where a host has died, a file server keeps its locks until their lease ends (90 s is usual with NFSv4).
AWAY_SECONDS = 120.0
_POLL_SECONDS = 0.2

# Changes of these make another run; the rest of a recipe may change between a save and a resume. `method` is not among
# them: `resume.compare` never lets it change.
TRAINED_KEYS = ("lora", "train.vision", "train.train_only", "train.freeze")
GUARDED_KEYS = ("model", "tokenizer", "data", "optimizer", "run.seed", *TRAINED_KEYS)
# Of those, what changes speed or place and no number.
UNGUARDED_KEYS = ("data.num_workers", "data.cache_dir", "data.allow_dropped_text")
# What decides which tensors a save holds, and their dtype: a resume cannot read others, whatever is allowed.
TENSOR_KEYS = ("optimizer.name", "optimizer.state", "train.masters")

Difference = tuple[str, Any, Any]


@dataclass(frozen=True)
class Misfit:
    """Keys of a recipe by which its trained tensors are not those of a checkpoint, and what to do about it."""

    keys: tuple[str, ...]
    advice: str


class RunDirectory:
    """A run's directory, held from `acquire` to `release`.

    locks: Whether a lock keeps other runs out (`run.lock`).
    """

    def __init__(self, path: str | Path, locks: bool = True):
        self.path, self.locks = Path(path), locks
        self.config, self.began, self.metrics = map(self.path.joinpath, ("config.yaml", "began.json", "metrics.jsonl"))
        self.model, self.checkpoints, self.export = map(self.path.joinpath, ("model", "checkpoints", "export"))
        self._lock: int | None = None

    def acquire(self, wait: float | None = None, tell: Callable[[str], None] | None = None) -> "RunDirectory":
        """Create the directory and take its lock; after `wait` seconds a UserError names the holder's host and process
        (None: WAIT_SECONDS, or AWAY_SECONDS where the holder is, or was, on another host).

        tell: called with a line for the user, when there is someone to wait for, and where the file system does less
        for a save than others. The lock is a POSIX record lock:
        the system drops it with the process, however that ends, and forked workers do not inherit it.
        """
        try:
            for directory in (self.path, self.checkpoints, self.model):
                _refuse_unwritable(directory)
                if directory == self.path or directory.is_symlink():  # to a disk where nothing is yet, perhaps
                    real(directory).mkdir(parents=True, exist_ok=True)
            saves = self.checkpoints if self.checkpoints.is_dir() else self.path  # a link may lead to another disk
            if tell is not None and not can_sync_directories(saves):
                tell(
                    f"note: the file system of {self.path} does not sync directories: if its server loses power, the "
                    "newest checkpoint may be lost with it. Checkpoints before it stay whole"
                )
            if not self.locks:
                return self
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(f"run.dir: {error.filename}: {error.strerror}") from error
        begun = time.monotonic()
        while not _try(lock):
            holder, host = _holder(lock)
            if wait is None:
                wait = WAIT_SECONDS if host in (None, socket.gethostname()) else AWAY_SECONDS
            if tell is not None:
                tell(f"{self.path} is held by {holder}; waiting up to {wait:.0f} s")
                tell = None
            if time.monotonic() - begun >= wait:
                os.close(lock)
                raise UserError(self._taken(holder))
            time.sleep(_POLL_SECONDS)
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)
        except OSError as error:  # the disk is full
            os.close(lock)
            raise UserError(f"run.dir: {self.path / 'lock'}: {error.strerror}") from error
        self._lock = lock
        return self

    def check_usable(self) -> None:
        """Raise the UserError that `acquire` would raise, without waiting and without leaving files.

        A process that has acquired the directory must not call this: POSIX drops a process's record locks on a file as
        soon as the process closes any descriptor of that file.
        """
        for directory in (self.path, self.checkpoints, self.model):
            _refuse_unwritable(directory)
        if self.locks and (self.path / "lock").is_file():
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                if not _try(lock):
                    raise UserError(self._taken(_holder(lock)[0]))
            finally:
                os.close(lock)

    def _taken(self, holder: str) -> str:
        return (
            f"{self.path} is held by {holder}: another run writes there. Wait for it, stop it, or choose another "
            "run.name"
        )

    def release(self) -> None:
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def write_json(self, name: str, facts: Mapping[str, Any]) -> None:
        """Put DATA, what is known of the data, or ABOUT, of the run, in their file, in one step."""
        replace_text(self.path / name, json.dumps(facts, indent=1))

    def copy_model_files(self, source: str | Path, chat_template: str | None = None) -> None:
        """Copy config.json, tokenizer and chat template of `source`, so that exports do without it; `chat_template` is
        the text of another one that the run trains with."""
        self.model.mkdir(exist_ok=True)
        copy_companions(Path(source), self.model, config=True, chat_template=chat_template)

    @property
    def leftovers(self) -> str | None:
        """Kind of files that an earlier run has left here: metrics, checkpoints, or None."""
        if self.metrics.is_file() and self.metrics.stat().st_size > 0:
            return "metrics"
        return "checkpoints" if self.checkpoints.is_dir() and any(self.checkpoints.glob("step-*")) else None

    def refuse_used(self, resume: str | None, began: str | None = None) -> None:
        """Raise UserError where an earlier run has left metrics or checkpoints, for a `checkpoint.resume` that starts
        anew here (null, or another run's checkpoint). began: the checkpoint that it began from."""
        if self.leftovers is not None:
            which = f", which began from {began}" if began else ""
            setting = f"checkpoint.resume={resume or 'null'}"
            raise UserError(
                f"{self.path} holds the {self.leftovers} of an earlier run{which}, and {setting} starts anew: choose "
                "another run.name, delete the directory, or resume with checkpoint.resume=auto"
            )


def _refuse_unwritable(directory: Path) -> None:
    """Raise UserError where the directory, or the nearest one above it that is there, cannot be written."""
    place = real(directory)
    there = next(path for path in (place, *place.parents) if os.path.lexists(path))
    if there == place and there.is_dir():
        if not os.access(there, os.W_OK | os.X_OK):
            raise UserError(f"run.dir: {directory}, which is {place}, cannot be written")
        return
    try:  # rights do not tell all: one is made for a moment
        Path(tempfile.mkdtemp(prefix=".look-", dir=there)).rmdir()
    except OSError as error:
        raise UserError(f"run.dir: {place} cannot be made: {there}: {error.strerror}; choose another") from error


def _try(lock: int) -> bool:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in NO_LOCKS:
            raise
        raise UserError(
            f"run.dir: this file system has no file locks ({error.strerror}), which keep two runs from writing to one "
            "directory. Set run.lock=false and start each run once, or choose a run.dir on another file system"
        ) from error
    return True


def guard(
    differences: Iterable[Difference],
    allow_changes: Sequence[str],
    known: Collection[str] = (),
    models: Sequence[str] = (),
    misfit: "Misfit | None" = None,
    details: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[str]:
    """Return the lines to print for a resume with a changed recipe, one per difference.

    Args:
        differences: Key, saved value and new value. Digests of files have keys of their own, "data.fingerprint" for
            example.
        allow_changes: Keys, or sections above them, that may differ although they are `GUARDED_KEYS`.
        known: Keys that name only the place of a file whose content is the same.
        models: Keys of the method's section that name models. They are guarded too.
        misfit: Set if the saved tensors do not fit the recipe. Its keys are refused whatever `allow_changes` names.
        details: Lines that explain a difference, by its key.

    Raises:
        UserError: For a guarded difference that `allow_changes` does not name, and for one that no resume allows.
    """
    differences = list(differences)
    kept_in = set(TENSOR_KEYS)
    if any(key == "train.dtype" and "float64" in (old, new) for key, old, new in differences):
        kept_in.add("train.dtype")  # in float64 the weights and moments are float64 too
    fixed = kept_in | {*(misfit.keys if misfit else ())}
    refused = []
    for key, old, new in differences:
        is_guarded = _within(key, (*GUARDED_KEYS, *models)) and key not in known and not _within(key, UNGUARDED_KEYS)
        if key in fixed or (is_guarded and not _within(key, allow_changes)):
            refused.append((key, old, new))
    if refused:
        lines = []
        for key, old, new in refused:
            lines.append(f"  {key}: {_short(old)} -> {_short(new)}")
            lines += [f"    {line}" for line in details.get(key, ())]
        keys = ",".join(dict.fromkeys(key for key, _, _ in refused if key not in fixed))
        back = " and ".join(f"{key}={_short(old)}" for key, old, _ in refused if key in kept_in)
        if back:
            lines.append(
                f"The saved tensors are those of the old values, and no resume converts them: set {back} back, or "
                "start from the weights alone, by checkpoint.init_from and another run.name"
            )
        if misfit is not None:
            lines.append(misfit.advice)
        if keys:
            lines.append(
                f"To go on with the change, name it: checkpoint.allow_changes=[{keys}]; for a new run, choose another "
                "run.name"
            )
        raise UserError(
            "the recipe, or what the files that it names hold, is not what this run was saved with:\n"
            + "\n".join(lines)
        )
    printed = []
    for key, old, new in differences:
        printed.append(f"{key}: {_short(old)} -> {_short(new)}")
        printed += details.get(key, ())
    return printed


def _within(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _short(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def is_locked(directory: Path) -> bool | None:
    """Return whether a run writes in `directory` now; None where that cannot be told. Not for a process that holds
    it."""
    try:
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        return not _try(lock)
    except UserError:  # there are no locks
        return None
    finally:
        os.close(lock)


def _holder(lock: int) -> tuple[str, str | None]:
    """The holder in words, and its host."""
    text = os.pread(lock, 4096, 0)
    try:
        holder = json.loads(text)
        return f"process {holder['pid']} on {holder['host']}", holder["host"]
    except (ValueError, KeyError, TypeError):
        return "another process", None
