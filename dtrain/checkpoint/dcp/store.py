"""The checkpoints of one run: `step-N` directories, each whole or absent.

    step-100/
      __0_0.distcp ...   tensors, one file per rank (torch's distributed checkpoint)
      tensors.json       where each tensor's chunks lie (see `pieces`)
      state.json         everything that is not a tensor and the same for all ranks
      rank-0.json ...    what a rank keeps for itself (random number generators)
      adapter/           of a run that trains one, in PEFT's layout
      manifest.json      size and checksum of every other file, and its own checksum; written last

A save goes to `.partial-step-N`, is synced by every rank, and gets its name in one rename; readers look at no other
name. What killed saves leave is deleted by the next save or `clean`, which the run's lock makes safe.

A run may begin from a step of another run (`Origin`). The step is chosen once and identified by its content:
`began.json` in the run's directory, and the state of each of its saves, keep one record for `checkpoint.resume` and one
for `checkpoint.init_from`. If the other run trains on, its path may mean a later step, and the record still means the
first.
"""

import json
import pickle
import re
import shutil
import socket
import time
import warnings
import zlib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial as bound
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException

from dtrain.base.errors import UserError, describe_error, limit_problems
from dtrain.base.files import FileRecord, checksum, publish, set_aside, write_synced
from dtrain.base.json_files import OWN_FILE_BYTES, digest, loads, read_json
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.retention import Retention, format_bytes, free_bytes, save_bytes
from dtrain.checkpoint.dcp.shards import (
    ShardReader,
    ShardWriter,
    TensorShard,
    TensorTable,
    read_full_tensor,
    read_table,
)

MANIFEST = "manifest.json"
STATE = "state.json"
TABLE = "tensors.json"
_FORMAT = 1
_STEP = re.compile(r"step-(0|[1-9]\d*)")
_LEFTOVERS = re.compile(r"\.(partial|discarded)-step-\d+")
_INSIDE = re.compile(r"(adapter/)?(?!\.\.?$)[^/]*")  # a file of a step, or of its folder
SEEN_SECONDS = 5.0  # for what one host has written to be seen by another

TensorSpecs = dict[str, tuple[tuple[int, ...], torch.dtype]]
ExtraFilesWriter = Callable[[Path, TensorSpecs, Callable[[str], Tensor]], Mapping[str, FileRecord]]
"""What rank 0 writes into a step's directory, from the tensors that the step holds: given the directory, their sizes
and dtypes by name, and a function that reads one, it returns the records of its files, by their names there."""

# What torch.load raises for a file that torch.save did not write, beside what the file system does.
_FILE_ERRORS = (OSError, UserError, EOFError, pickle.UnpicklingError)


class DamagedCheckpointError(UserError):
    """A file of a published step is missing, or not as it was saved."""


class CheckpointStore:
    """The steps saved in `directory`. Every rank of `ranks` (default: all) holds a store of the same directory. Methods
    marked collective are called by all of them, with the same arguments but for the tensors' own shards. Their errors
    are UserErrors naming the file, raised on every rank."""

    def __init__(self, directory: str | Path, ranks: Ranks | None = None):
        self.directory = Path(directory)
        self.ranks = ranks or Ranks()

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step}"

    def steps(self) -> list[int]:
        """The steps that are whole, ascending, as this rank's file system shows them. No collective."""
        return [step for step in self.published_steps() if not self.check_files(step)]

    def check_files(self, step: int) -> list[str]:
        """Return what a look at the manifest and the file sizes finds wrong with a step, without reading the data.
        UserError for a manifest that is of another version of dtrain, or that the system does not let us read."""
        try:
            manifest = self._manifest(step)
        except DamagedCheckpointError as error:
            return [str(error)]
        return [fault for name, record in manifest["files"].items() if (fault := self._misfit(step, name, record))]

    def check_contents(self, step: int) -> list[str]:
        """Return what reading every file against its checksum finds wrong with a step; the files are shared out over
        the ranks, which all get the whole list. Collective."""

        def examine() -> list[str]:
            faults = self.check_files(step)
            return faults or self._wrong_checksums(step, self._share(step))

        return list(dict.fromkeys(fault for faults in self.ranks.gather_results(examine) for fault in faults))

    def latest(self) -> int | None:
        """The newest whole step, as rank 0 sees it. Collective."""
        return self.ranks.run_on_first(lambda: max(self.steps(), default=None))

    def clean(self) -> None:
        """Delete what killed saves and deletions left. Acts on rank 0 alone; only the holder of the run may call it."""
        if self.ranks.is_first and self.directory.is_dir():
            for entry in list(self.directory.iterdir()):
                if _LEFTOVERS.fullmatch(entry.name):
                    shutil.rmtree(entry)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any] | None = None,
        write_extra_files: ExtraFilesWriter | None = None,
    ) -> Path:
        """Save a step and publish it; returns its directory. Collective.

        tensors: [any shape], plain (the same on every rank), DTensors or Pieces, under the same names on every rank.
        state: JSON, rank 0's is kept; rank_state: JSON, each rank's is kept. Tuples come back as lists. beside: makes
        more files of what all ranks have written. UserError where the step is already there (it is never written
        again), and for a full disk and the like; then nothing of this save remains and the steps before it stand."""
        pieces = {name: TensorShard.from_tensor(tensor) for name, tensor in tensors.items()}
        state_text, own_text = json.dumps(state), json.dumps(rank_state)
        own_file = f"rank-{self.ranks.rank}.json"
        final, partial = self.path(step), self.directory / f".partial-step-{step}"

        def begin() -> None:
            if final.exists():
                raise UserError(f"{final} is already there, and a saved step is never overwritten: delete or move it")
            self.clean()
            partial.mkdir(parents=True)

        def written() -> dict[str, FileRecord]:
            own = {} if rank_state is None else {own_file: write_synced(partial / own_file, own_text)}
            return writer.records | own

        self.ranks.run_on_first(begin)
        try:
            writer = ShardWriter(partial)
            planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            self._dcp("saved", final, dcp.save, pieces, storage_writer=writer, planner=planner)
            files = {name: record for of_rank in self.ranks.gather_results(written) for name, record in of_rank.items()}
            self.ranks.run_on_first(
                lambda: self._publish(step, partial, writer.table, state_text, files, write_extra_files)
            )
        except UserError as error:  # on every rank
            room = self.ranks.run_on_first(lambda: self._after_failure(partial, save_bytes(pieces)))
            raise UserError(f"{error}\n{room}") from error
        return final

    def _after_failure(self, partial: Path, size: int) -> str:
        """Delete what a failed save of `size` bytes has written, and return the end of its message. No collective."""
        shutil.rmtree(partial, ignore_errors=True)
        last = max(self.steps(), default=None)
        saved = "there is no complete step yet" if last is None else f"the last complete step is {self.path(last)}"
        free = free_bytes(self.directory)
        short = "; make room, or set run.dir to another disk" if free < size else ""
        return f"A save takes {format_bytes(size)}, and {format_bytes(free)} are free there{short}; {saved}"

    def read_state(self, step: int) -> dict[str, Any]:
        """The `state` of a step; no tensor is read. No collective."""
        self._verify(step, [STATE])
        return _read_own_json(self.path(step) / STATE)

    def read_rank_state(self, step: int) -> tuple[dict[str, Any] | None, int]:
        """A `rank_state` for this rank, and which copy of it this is: rank r gets that of rank r % saved, copy
        r // saved. None where the step keeps none. No collective."""
        manifest = self._manifest(step)
        saved = manifest["world_size"]
        name = f"rank-{self.ranks.rank % saved}.json"
        if name not in manifest["files"]:
            return None, 0
        self._verify(step, [name])
        return _read_own_json(self.path(step) / name), self.ranks.rank // saved

    def identity(self, step: int) -> str:
        """A digest of what the tensors of a step hold, by the checksums of their files. No collective."""
        files = self._manifest(step)["files"]
        return digest({name: record for name, record in files.items() if name == TABLE or name.endswith(".distcp")})

    def tensor_specs(self, step: int) -> TensorSpecs:
        """Size and dtype of every tensor of a step, by name. No collective."""
        return self._table(step).sizes

    def load(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        *,
        allow_extra: bool = False,
        verified: bool = False,
        cast: Collection[str] = (),
    ) -> dict[str, Any]:
        """Fill `tensors` [any shape] in place from a step, saved on whatever mesh; returns its `state`. Collective.

        Every file's checksum is verified first, the files shared out over the ranks. Names that are on one side alone,
        other sizes and other dtypes are one UserError that lists them; then nothing has been written to `tensors`.
        allow_extra: names that the step holds beyond `tensors` are no error. verified: `check_contents` has just
        found none, so that
        the checksums need not be taken again. cast: names of tensors that keep their dtype, whatever the step has."""

        def examine() -> tuple[dict[str, TensorShard], TensorTable]:
            if not verified:
                self._verify(step, self._share(step))
            table = self._table(step)
            return self._fitting(step, table, tensors, allow_extra, cast), table

        self._read(step, *self.ranks.run_on_all(examine))
        return self.read_state(step)

    def check_fit(self, step: int, tensors: Mapping[str, Tensor], cast: Collection[str]) -> None:
        """Raise UserError where `load` with allow_extra=True would, for its names, sizes and dtypes; reads no tensor,
        so that
        `tensors`, [any shape], may be on meta. No collective."""
        self._fitting(step, self._table(step), tensors, True, cast)

    def open_step(self, step: int) -> Callable[[Mapping[str, Tensor]], None]:
        """Verify every file of a step, on one process alone, and return a function that fills some of its tensors, [any
        shape], in place, as often as it is called; where memory is short, one tensor at a time."""
        self._verify(step, sorted(self._manifest(step)["files"]))
        table = self._table(step)
        return lambda tensors: self._read(step, self._fitting(step, table, tensors, allow_extra=True), table)

    def prune(self, retention: Retention) -> None:
        """Delete the whole steps that `retention` drops, by the metrics in their state; rank 0 alone, no collective."""
        if retention.keep_last is None or not self.ranks.is_first:
            return
        measured: dict[int, dict[str, float]] = {step: {} for step in self.steps()}
        for step in measured if retention.keep_best else ():
            with suppress(DamagedCheckpointError):  # a state that no longer reads is for a resume to tell of
                measured[step] = self.read_state(step).get("metrics", {})
        for step in retention.steps_to_delete(measured):
            shutil.rmtree(set_aside(self.path(step)))

    def published_steps(self) -> list[int]:
        """The steps that have their name, whole or damaged since, ascending. No collective."""
        if not self.directory.is_dir():
            return []
        steps = (step_of(entry) for entry in self.directory.iterdir() if entry.is_dir())
        return sorted(step for step in steps if step is not None)

    def _publish(
        self,
        step: int,
        partial: Path,
        table: str,
        state: str,
        files: dict[str, FileRecord],
        write_extra_files: ExtraFilesWriter | None,
    ) -> None:
        self._refuse_apart(partial, files)
        if write_extra_files is not None:
            held = read_table(partial / TABLE, table.encode())
            files |= write_extra_files(partial, held.sizes, bound(read_full_tensor, partial, held))
        files[TABLE] = write_synced(partial / TABLE, table)
        files[STATE] = write_synced(partial / STATE, state)
        content = {"format": _FORMAT, "step": step, "world_size": self.ranks.size, "files": files}
        write_synced(partial / MANIFEST, json.dumps({"crc32": _text_checksum(content), "content": content}, indent=1))
        publish(partial, self.path(step))

    def _refuse_apart(self, partial: Path, files: Mapping[str, FileRecord]) -> None:
        """Raise UserError where what other ranks wrote is not here: their hosts have another directory there."""
        until = time.monotonic() + SEEN_SECONDS
        for name, record in files.items():
            path = partial / name
            while not path.is_file() or path.stat().st_size != record["bytes"]:
                if time.monotonic() > until:
                    raise UserError(
                        f"{path}: a rank has written it, and on {socket.gethostname()}, where the step is put "
                        "together, it is not there as it was written: all hosts must share run.dir, under the same path"
                    )
                time.sleep(0.1)

    def _manifest(self, step: int) -> dict[str, Any]:
        path = self.path(step) / MANIFEST
        if path.exists() and not path.is_file():
            raise DamagedCheckpointError(f"{path}: damaged, it is no file")
        try:
            manifest = loads(path.read_bytes())
        except FileNotFoundError as error:
            raise DamagedCheckpointError(describe_error(error)) from error
        except OSError as error:
            raise UserError(describe_error(error)) from error
        except ValueError as error:
            raise DamagedCheckpointError(f"{path}: damaged, it is not JSON ({error})") from error
        try:
            content = manifest["content"]
            if manifest["crc32"] != _text_checksum(content):
                raise DamagedCheckpointError(f"{path}: damaged, its checksum does not match")
            if content["format"] != _FORMAT:
                raise UserError(f"{path}: written in format {content['format']!r}, this dtrain reads {_FORMAT}")
            if content["step"] != step:
                raise UserError(f"{path}: is of step {content['step']}; a checkpoint's directory keeps its name")
            files, ranks = content["files"], content["world_size"]
            files[TABLE], files[STATE]
            sound = [_INSIDE.fullmatch(name) and "bytes" in record.keys() for name, record in files.items()]
            if type(ranks) is not int or ranks < 1 or not all(sound):
                raise DamagedCheckpointError(f"{path}: damaged, or not written by dtrain")
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(f"{path}: damaged, or not written by dtrain") from error
        return content

    def _misfit(self, step: int, name: str, record: FileRecord) -> str | None:
        path = self.path(step) / name
        try:
            size = path.stat().st_size
        except OSError as error:
            return describe_error(error)
        if not path.is_file():
            return f"{path}: damaged, it is no file"
        is_whole = size == record["bytes"]
        return None if is_whole else f"{path}: damaged, it has {size} bytes instead of {record['bytes']}"

    def _share(self, step: int) -> list[str]:
        """The files of a step that this rank verifies for all."""
        return sorted(self._manifest(step)["files"])[self.ranks.rank :: self.ranks.size]

    def _verify(self, step: int, names: list[str]) -> None:
        if wrong := self._wrong_checksums(step, names):
            raise DamagedCheckpointError("\n".join(wrong))

    def _wrong_checksums(self, step: int, names: list[str]) -> list[str]:
        files = self._manifest(step)["files"]
        wrong = []
        for name in names:
            if fault := self._misfit(step, name, files[name]):
                wrong.append(fault)
            elif checksum(self.path(step) / name) != files[name]:
                wrong.append(f"{self.path(step) / name}: damaged, its checksum does not match")
            elif name.endswith(".json"):  # a file may be as it was written, and nothing that dtrain writes
                try:
                    _ = self._table(step) if name == TABLE else _read_own_json(self.path(step) / name)
                except UserError as error:
                    wrong.append(str(error))
        return wrong

    def _table(self, step: int) -> TensorTable:
        path = self.path(step) / TABLE
        try:
            table = read_table(path, path.read_bytes())
        except OSError as error:
            raise UserError(describe_error(error)) from error
        named = {place.relative_path for place in table.places.values()}
        if unlisted := named - self._manifest(step)["files"].keys():
            raise UserError(f"{path}: names files that the checkpoint does not list: {unlisted}")
        return table

    def _fitting(
        self,
        step: int,
        table: TensorTable,
        tensors: Mapping[str, Tensor],
        allow_extra: bool,
        cast: Collection[str] = (),
    ) -> dict[str, TensorShard]:
        """Return the pieces of `tensors`. Raises UserError that lists those that do not fit the step."""
        saved, pieces = table.tensors, {name: TensorShard.from_tensor(tensor) for name, tensor in tensors.items()}
        problems = []
        for name, piece in pieces.items():
            if name not in saved:
                # A tensor without elements leaves no chunk, and so no entry.
                if piece.global_size.numel():
                    problems.append(f"missing in the checkpoint: {name}")
            elif saved[name].size != piece.global_size:
                problems.append(f"{name}: saved as {list(saved[name].size)}, the run has {list(piece.global_size)}")
            elif (dtype := saved[name].properties.dtype) != piece.local.dtype and name not in cast:
                keys = "optimizer.state, train.dtype" if name.startswith("optim.") else "train.dtype, train.masters"
                problems.append(f"{name}: saved in {dtype}, the run has {piece.local.dtype} ({keys})")
        if not allow_extra:
            problems += [f"only in the checkpoint: {name}" for name in saved if name not in pieces]
        if problems:
            raise UserError("\n  ".join([f"{self.path(step)} does not fit this run:", *limit_problems(problems)]))
        return pieces

    def _read(self, step: int, pieces: dict[str, TensorShard], table: TensorTable) -> None:
        wanted, path = {name: piece for name, piece in pieces.items() if name in table.tensors}, self.path(step)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with torch.no_grad():
            self._dcp("read", path, dcp.load, wanted, storage_reader=ShardReader(path, table), planner=planner)

    def _dcp(self, done: str, path: Path, act, tensors: dict[str, TensorShard], **kwargs: Any) -> None:
        try:
            if self.ranks.distributed:
                act(tensors, process_group=self.ranks.group, **kwargs)
            else:
                with warnings.catch_warnings():  # of the whole process: a save in a thread goes the other way
                    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                    act(tensors, no_dist=True, **kwargs)
        except CheckpointException as failure:
            causes = {rank: error for rank, (error, _) in failure.failures.items()}
            if not all(isinstance(error, _FILE_ERRORS) for error in causes.values()):
                raise RuntimeError(f"{path} could not be {done}") from failure
            lines = "\n".join(f"  rank {rank}: {describe_error(error)}" for rank, error in sorted(causes.items()))
            raise UserError(f"{path} could not be {done}:\n{lines}") from failure


def locate_step(path: str | Path, ranks: Ranks | None = None, key: str | None = None) -> tuple[CheckpointStore, int]:
    """Find the store and the step that a user means by a path. Collective over `ranks`.

    Args:
        path: A `step-N` directory, a `checkpoints` directory, or a run's directory. The last two mean the newest step.
        ranks: Default: all.
        key: The recipe's key that has the path, for messages.

    Raises:
        UserError: If there is no whole step.
    """
    given = f"{key}={path}" if key else str(path)
    path = Path(path)
    named = step_of(path.absolute())
    if named is not None:
        store = CheckpointStore(path.absolute().parent, ranks)
        faults = store.ranks.run_on_first(lambda: store.check_files(named))
        if faults:
            raise UserError(f"{given} is no whole checkpoint: {faults[0]}")
        return store, named
    store = CheckpointStore(path / "checkpoints" if (path / "checkpoints").is_dir() else path, ranks)
    newest = store.latest()
    if newest is None:
        raise UserError(f"{given}: no whole checkpoint there (looked for step-N directories in {store.directory})")
    return store, newest


def step_of(path: Path) -> int | None:
    """N for a path whose last part is `step-N`, else None."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def _read_own_json(path: Path) -> dict[str, Any]:
    return read_json(path, max_bytes=OWN_FILE_BYTES, allow_nan=True)


def _text_checksum(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


@dataclass(frozen=True)
class Origin:
    """A step, what its tensors hold (`CheckpointStore.identity`) and its save's own mark, None for old ones.

    path: where it lay, for messages, and to look there where no other path is given.
    """

    path: str
    step: int
    identity: str
    save: str | None

    @classmethod
    def read(cls, record: Any, file: Path) -> "Origin":
        """Read what JSON has in `file`. Raises UserError."""
        kinds = {"path": str, "step": int, "identity": str, "save": str | None}
        is_whole = isinstance(record, dict) and record.keys() == kinds.keys()
        if not is_whole or not all(isinstance(record[key], kind) for key, kind in kinds.items()):
            raise UserError(f"{file} is damaged: it does not say what the run began from; delete it to begin anew")
        return cls(**record)

    @classmethod
    def from_step(cls, store: CheckpointStore, step: int) -> "Origin":
        """Collective."""
        path = str(store.path(step).absolute())
        return store.ranks.run_on_first(
            lambda: cls(path, step, store.identity(step), store.read_state(step).get("save"))
        )

    def find_store(self, path: str | Path, ranks: Ranks) -> CheckpointStore | None:
        """The store that a user means by `path`, if it holds this very step. Collective."""
        try:
            store, _ = locate_step(path, ranks)
        except UserError:  # on every rank
            return None
        if step_of(Path(path).absolute()) not in (None, self.step):
            return None
        same = ranks.run_on_first(
            lambda: not store.check_files(self.step) and store.identity(self.step) == self.identity
        )
        return store if same else None

    def was_at(self, path: str | Path, ranks: Ranks) -> bool:
        """Return whether this step is gone from `path`: the run there trained on, or nothing is left. Collective."""
        place = Path(path).absolute()
        try:
            store, newest = locate_step(path, ranks)
        except UserError:  # on every rank
            return place in [Path(self.path), *Path(self.path).parents][:3]
        save: str | None = ranks.run_on_first(lambda: store.read_state(newest).get("save"))
        if step_of(place) is not None or save is None or self.save is None:
            return False
        return run_id_of_save(save) == run_id_of_save(self.save)

    def require_store(self, key: str, path: str | Path, otherwise: str, ranks: Ranks) -> tuple[CheckpointStore, int]:
        """The store at `path`, which `key` gives, and this step. Collective. UserError where that is gone or another;
        `otherwise` says what may be done beside putting it back."""
        store = self.find_store(path, ranks)
        if store is None:
            raise UserError(
                f"{key}={path}: this run began from step {self.step} there ({self.path}), which is gone or holds "
                f"something else by now: put it back, {otherwise}"
            )
        return store, self.step


def run_id_of_save(save: str) -> str:
    """The mark of a run in that of one of its saves, `RUN-SAVE`."""
    return save.split("-")[0]
