"""The directory of a run: its files, the lock that keeps other runs out, and the changes that a resume may make.

    runs/<name>/
      lock             locked while a run writes here. The file stays; the lock ends with the process
      config.yaml      the resolved recipe, without its secrets
      data.json        for each split, the numbers of rows, samples and tokens, and the digest of its content
      about.json       facts about the run for its readers: versions, mesh, device, sizes, planned memory
      end.json         how the last process ended, if it was not killed (`End`)
      began.json       the checkpoints that the run began from, if any (`checkpoint.dcp.store.Origin`)
      model/           config.json, tokenizer and chat template of the model, for exports
      metrics.jsonl    a JSON object per line for each step, validation and evaluation
      evals.jsonl      the judged answers of the evaluations, one per line
      checkpoints/     see `checkpoint.dcp.store`
      export/          the trained model in Hugging Face's layout, or an adapter in PEFT's

Imports no torch. Only rank 0 acquires a `RunDirectory`; the other ranks only use its paths.
"""

import errno
import fcntl
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

from dtrain.base.errors import UserError
from dtrain.base.files import NO_LOCKS, atomic_write_text, can_sync_directories, resolve_links
from dtrain.checkpoint.huggingface.model_files import copy_companions

DATA = "data.json"
ABOUT = "about.json"
END = "end.json"
WAIT_SECONDS = 30.0  # for a lock of a process on this host
# If a host has died, a file server keeps its locks until their lease ends (usually 90 s with NFSv4).
AWAY_SECONDS = 120.0
_POLL_SECONDS = 0.2

# A change of these keys and sections makes another run, so a resume refuses it unless `checkpoint.allow_changes` names
# it. `method` is not here, because `resume.compare` never lets it change.
TRAINED_KEYS = ("lora", "train.vision", "train.train_only", "train.freeze")
GUARDED_KEYS = ("model", "tokenizer", "data", "optimizer", "run.seed", *TRAINED_KEYS)
# Keys inside the guarded sections that change the speed or a location, but no number.
UNGUARDED_KEYS = ("data.num_workers", "data.cache_dir", "data.allow_dropped_text")
# Keys that decide which tensors a checkpoint holds, and their dtypes. A resume cannot read other tensors, so it refuses
# a change of these keys in any case.
TENSOR_KEYS = ("optimizer.name", "optimizer.state", "train.masters")


class Difference(NamedTuple):
    """A difference between the saved recipe and the present one.

    Attributes:
        key: The key, for example "optimizer.lr".
        old: The saved value.
        new: The present value.
    """

    key: str
    old: Any
    new: Any


@dataclass(frozen=True)
class TensorMismatch:
    """The reason why a recipe's trained tensors are not those of a checkpoint.

    Attributes:
        keys: The changed keys because of which they differ.
        advice: The last line of the error: what to set.
    """

    keys: tuple[str, ...]
    advice: str


EndState = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class End:
    """End of a run's last process.

    Attributes:
        state: finished: after the last step. stopped: by a signal. failed: by an error.
        error: First line of the error. None without one.
    """

    state: EndState
    error: str | None = None


class RunDirectory:
    """A run's directory.

    Args:
        path: The directory, which need not exist yet.
        use_lock: Whether a lock keeps other runs out (`run.lock`).

    Attributes:
        path: The directory.
        use_lock: Whether a lock keeps other runs out.
        config: The path of config.yaml.
        began: The path of began.json.
        metrics: The path of metrics.jsonl.
        model: The directory of the model's small files.
        checkpoints: The directory of the checkpoints.
        export: The directory of the export.
    """

    def __init__(self, path: str | Path, use_lock: bool = True):
        self.path = Path(path)
        self.use_lock = use_lock
        self.config = self.path / "config.yaml"
        self.began = self.path / "began.json"
        self.metrics = self.path / "metrics.jsonl"
        self.model = self.path / "model"
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "export"
        self._lock: int | None = None  # the descriptor of the locked file

    def acquire(self, wait: float | None = None, print_line: Callable[[str], None] | None = None) -> "RunDirectory":
        """Create the directory and lock it, until `release`.

        The lock is a POSIX record lock: the system drops it when the process ends in any way, and forked workers do not
        inherit it.

        Args:
            wait: Seconds to wait for a run that uses the directory. None: WAIT_SECONDS, or AWAY_SECONDS if that run is
                or was on another host.
            print_line: Prints a line for the user if there is a run to wait for, or if the file system cannot sync
                directories.

        Returns:
            This object.

        Raises:
            UserError: If another run still uses the directory after `wait` seconds, or if it cannot be written.
        """
        try:
            self._create(print_line)
            if not self.use_lock:
                (self.path / END).unlink(missing_ok=True)
                return self
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(f"run.dir: {error.filename}: {error.strerror}") from error
        self._wait_for(lock, wait, print_line)
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0)
        except OSError as error:  # for example, the disk is full
            os.close(lock)
            raise UserError(f"run.dir: {self.path / 'lock'}: {error.strerror}") from error
        self._lock = lock
        (self.path / END).unlink(missing_ok=True)
        return self

    def _create(self, print_line: Callable[[str], None] | None) -> None:
        """Create the directory, and print a note if its file system cannot sync directories."""
        for directory in (self.path, self.checkpoints, self.model):
            _refuse_unwritable(directory)
            # A symbolic link may lead to a directory on another disk that does not exist yet.
            if directory == self.path or directory.is_symlink():
                resolve_links(directory).mkdir(parents=True, exist_ok=True)
        directory_of_saves = self.checkpoints if self.checkpoints.is_dir() else self.path
        if print_line is not None and not can_sync_directories(directory_of_saves):
            print_line(
                f"note: the file system of {self.path} does not sync directories: if its server loses power, the "
                "newest checkpoint may be lost. Earlier checkpoints are safe"
            )

    def _wait_for(self, lock: int, wait: float | None, print_line: Callable[[str], None] | None) -> None:
        """Lock an open file, as `acquire` describes. Closes the file if another run keeps it."""
        began = time.monotonic()
        has_said = False
        while not _try_lock(lock):
            holder = _read_holder(lock)
            if wait is None:
                is_near = holder.host in (None, socket.gethostname())
                wait = WAIT_SECONDS if is_near else AWAY_SECONDS
            if print_line is not None and not has_said:
                print_line(f"{self.path} is in use by {holder.text}; waiting up to {wait:.0f} s")
                has_said = True
            if time.monotonic() - began >= wait:
                os.close(lock)
                raise UserError(self._in_use_by(holder))
            time.sleep(_POLL_SECONDS)

    def check_usable(self) -> None:
        """Raise the UserError that `acquire` would raise, without waiting and without leaving files.

        A process that has acquired the directory must not call this: POSIX drops a process's record locks on a file as
        soon as the process closes any descriptor of that file.
        """
        for directory in (self.path, self.checkpoints, self.model):
            _refuse_unwritable(directory)
        if self.use_lock and (self.path / "lock").is_file():
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                if not _try_lock(lock):
                    raise UserError(self._in_use_by(_read_holder(lock)))
            finally:
                os.close(lock)

    def _in_use_by(self, holder: "_Holder") -> str:
        return (
            f"{self.path} is in use by {holder.text}: another run writes there. Wait for it, stop it, or choose "
            "another run.name"
        )

    def release(self) -> None:
        """Unlock the directory. Does nothing if it is not locked."""
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def record_end(self, end: End) -> None:
        """Write END. A full disk is no error, because the run may end for that reason."""
        with suppress(OSError):
            atomic_write_text(self.path / END, json.dumps(asdict(end), indent=1))

    def write_json(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write DATA or ABOUT, and replace the old file in one step.

        Args:
            name: DATA or ABOUT.
            facts: The content.
        """
        atomic_write_text(self.path / name, json.dumps(facts, indent=1))

    def copy_model_files(self, source: str | Path, chat_template: str | None = None) -> None:
        """Copy the small files of a model, so that an export does not need the model's directory.

        Args:
            source: The model's directory, with config.json, tokenizer and chat template.
            chat_template: The text of another chat template that the run trains with.
        """
        self.model.mkdir(exist_ok=True)
        copy_companions(Path(source), self.model, config=True, chat_template=chat_template)

    @property
    def leftovers(self) -> str | None:
        """The kind of files that an earlier run has left here: "metrics", "checkpoints" or None."""
        if self.metrics.is_file() and self.metrics.stat().st_size > 0:
            return "metrics"
        if self.checkpoints.is_dir() and any(self.checkpoints.glob("step-*")):
            return "checkpoints"
        return None

    def refuse_used(self, resume: str | None, began: str | None = None) -> None:
        """Refuse a directory with metrics or checkpoints of an earlier run, for a run that starts over.

        Args:
            resume: The value of `checkpoint.resume`: null, or the path of another run's checkpoint.
            began: The checkpoint that the earlier run began from, for the message.

        Raises:
            UserError: If there are such files.
        """
        if self.leftovers is not None:
            which = f", which began from {began}" if began else ""
            setting = f"checkpoint.resume={resume or 'null'}"
            raise UserError(
                f"{self.path} holds the {self.leftovers} of an earlier run{which}, and {setting} starts anew: choose "
                "another run.name, delete the directory, or resume with checkpoint.resume=auto"
            )


def _refuse_unwritable(directory: Path) -> None:
    """Raise UserError if a directory cannot be written or created."""
    target = resolve_links(directory)
    existing = target
    while not os.path.lexists(existing):
        existing = existing.parent
    if existing == target and existing.is_dir():
        if not os.access(existing, os.W_OK | os.X_OK):
            raise UserError(f"run.dir: {directory}, which is {target}, cannot be written")
        return
    # Access rights do not show quotas and read-only mounts, so a directory is created as a test and removed again.
    try:
        Path(tempfile.mkdtemp(prefix=".look-", dir=existing)).rmdir()
    except OSError as error:
        raise UserError(f"run.dir: {target} cannot be made: {existing}: {error.strerror}; choose another") from error


def _try_lock(lock: int) -> bool:
    """Lock an open file without waiting. Return False if another process has locked it.

    Raises:
        UserError: If the file system has no locks.
    """
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


class _Holder(NamedTuple):
    """The process that has locked a run's directory.

    Attributes:
        text: The process, for messages.
        host: Its host. None if it is not known.
    """

    text: str
    host: str | None


def _read_holder(lock: int) -> _Holder:
    """Read the process that has locked an open file, which it has written into the file."""
    text = os.pread(lock, 4096, 0)
    try:
        holder = json.loads(text)
        return _Holder(f"process {holder['pid']} on {holder['host']}", holder["host"])
    except (ValueError, KeyError, TypeError):
        return _Holder("another process", None)


def read_end(directory: Path) -> End | None:
    """Read how a run's last process ended. None if it has not ended, was killed, or the file is damaged."""
    try:
        entry = json.loads((directory / END).read_text(encoding="utf-8"))
        state, error = entry["state"], entry.get("error")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if state not in get_args(EndState):
        return None
    return End(state, error if isinstance(error, str) else None)


def is_locked(directory: Path) -> bool | None:
    """Check whether a run is writing to a directory. Must not be called by the process of that run.

    Returns:
        True or False. None if it cannot be found out, because the file system has no locks or the lock cannot be
        opened.
    """
    try:
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        return not _try_lock(lock)
    except UserError:
        return None
    finally:
        os.close(lock)


def check_changes(
    differences: Sequence[Difference],
    allow_changes: Sequence[str],
    same_content: Collection[str] = (),
    models: Sequence[str] = (),
    mismatch: TensorMismatch | None = None,
    details: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[str]:
    """Check the changes that a resume makes to the saved recipe, and return the lines to print, one per change.

    Args:
        differences: The changes. Digests of files have keys of their own, for example "data.fingerprint".
        allow_changes: Keys, or sections above them, that may differ although they are `GUARDED_KEYS`.
        same_content: Keys that name the location of files whose content is the same. They may differ.
        models: Keys of the method's section that name models. They are guarded too.
        mismatch: Set if the saved tensors do not fit the recipe. Its keys are refused whatever `allow_changes` names.
        details: Lines that explain a difference, by its key.

    Raises:
        UserError: For a guarded difference that `allow_changes` does not name, and for one that no resume allows.

    Example:
        >>> changes = [Difference("train.steps", 10, 20), Difference("optimizer.lr", 1e-5, 2e-5)]
        >>> check_changes(changes, allow_changes=["optimizer"])
        ['train.steps: 10 -> 20', 'optimizer.lr: 1e-05 -> 2e-05']
    """
    tensor_keys = set(TENSOR_KEYS)
    for key, old, new in differences:
        if key == "train.dtype" and "float64" in (old, new):
            tensor_keys.add("train.dtype")  # in float64 the saved weights and moments are float64 too
    fixed_keys = set(tensor_keys)
    if mismatch is not None:
        fixed_keys.update(mismatch.keys)
    guarded = (*GUARDED_KEYS, *models)

    def is_allowed(key: str) -> bool:
        if key in fixed_keys:
            return False
        if key in same_content or _is_within(key, UNGUARDED_KEYS) or not _is_within(key, guarded):
            return True
        return _is_within(key, allow_changes)

    refused = [difference for difference in differences if not is_allowed(difference.key)]
    if refused:
        raise UserError(_refusal(refused, tensor_keys, mismatch, details))
    lines = []
    for key, old, new in differences:
        lines.append(f"{key}: {_short(old)} -> {_short(new)}")
        lines += details.get(key, ())
    return lines


def _refusal(
    refused: Sequence[Difference],
    tensor_keys: Collection[str],
    mismatch: TensorMismatch | None,
    details: Mapping[str, Sequence[str]],
) -> str:
    """Return the error for refused differences: each of them, then what to set.

    Args:
        refused: The refused differences.
        tensor_keys: Keys that decide which tensors a checkpoint holds, and their dtypes.
        mismatch: As in `check_changes`.
        details: As in `check_changes`.
    """
    lines = ["the recipe, or the content of the files that it names, is not what this run was saved with:"]
    back = []  # settings that restore the saved tensors
    to_allow = []  # keys that `checkpoint.allow_changes` can name
    mismatch_keys = () if mismatch is None else mismatch.keys
    for key, old, new in refused:
        lines.append(f"  {key}: {_short(old)} -> {_short(new)}")
        lines += [f"    {line}" for line in details.get(key, ())]
        if key in tensor_keys:
            back.append(f"{key}={_short(old)}")
        elif key not in mismatch_keys and key not in to_allow:
            to_allow.append(key)
    if back:
        lines.append(
            f"The saved tensors belong to the old values, and a resume does not convert them: set {' and '.join(back)} "
            "back, or start a new run from the weights only, with checkpoint.init_from and another run.name"
        )
    if mismatch is not None:
        lines.append(mismatch.advice)
    if to_allow:
        lines.append(
            f"To continue with the change, set checkpoint.allow_changes=[{','.join(to_allow)}]. To start a new run, "
            "set another run.name"
        )
    return "\n".join(lines)


def _is_within(key: str, names: Sequence[str]) -> bool:
    """Check whether a key is one of `names`, or is in a section of them.

    >>> _is_within("data.train.path", ["data"]), _is_within("data.train.path", ["data.t"])
    (True, False)
    """
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _short(value: Any) -> str:
    """Return a value of a recipe as text of at most 80 characters."""
    text = "null" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
