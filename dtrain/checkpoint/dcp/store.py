"""The checkpoints of one run: `step-N` directories, each complete or absent.

    checkpoints/step-100/
      __0_0.distcp ...   tensors, one file per rank (torch's distributed checkpoint, DCP)
      tensors.json       where each tensor's shards are stored (see `shards`)
      state.json         everything that is not a tensor and is the same for all ranks
      rank-0.json ...    what each rank has for itself (random number generators)
      adapter/           in runs that train an adapter: a copy in PEFT's layout
      manifest.json      size and checksum of every other file, and its own checksum; written last

How a save of step 100 on two ranks becomes visible:

    1. rank 0      creates .partial-step-100
    2. every rank  writes and syncs its tensors and its rank-N.json there
    3. rank 0      waits until it sees the files of all ranks, then writes adapter/, tensors.json, state.json
    4. rank 0      writes manifest.json, and renames .partial-step-100 to step-100

Readers look only at `step-N`, so a run that is killed at any moment leaves either the complete step or none. What it
leaves of `.partial-step-100` is deleted by the next save. This is safe because the run's lock allows only one writer.

How a run resumes on four ranks:

    store, step = locate_step("runs/my")              # the newest complete step: (store, 100)
    state = store.read_state(step)                    # state.json
    restore_optimizer(model, optimizer, state[...])   # allocates the optimizer's tensors (`training_state`)
    store.load(step, training_tensors(model, optimizer))
    rank_state, copy = store.read_rank_state(step)    # ranks 0 and 1 get their own, copy 0
                                                      # ranks 2 and 3 get those of ranks 0 and 1, copy 1

`load` first compares every file with its checksum, then names, shapes and dtypes of the saved tensors with the run's
tensors. It changes tensors only after all comparisons have succeeded.

A run may begin from a step of another run. The step is chosen once, when the run starts, and recorded as an `Origin`
with a digest of its tensors. A restarted run reads this record, from `began.json` in its directory or from the state of
its newest save, and does not choose again. For example, a run with `checkpoint.init_from=runs/base` began from step 100
of runs/base. If runs/base has since reached step 200, its path now means step 200, but the restarted run still uses
step 100. There is one record for `checkpoint.resume`, and one for `checkpoint.init_from`.
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
from typing import Any, NamedTuple

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
_FILE_NAME = re.compile(r"(adapter/)?(?!\.\.?$)[^/]*")  # names that a manifest may list, none outside of the step

SEEN_SECONDS = 5.0
"""Seconds that rank 0 waits for files which another host has written to a shared file system."""

TensorSpecs = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of tensors, by name."""

ExtraFilesWriter = Callable[[Path, TensorSpecs, Callable[[str], Tensor]], Mapping[str, FileRecord]]
"""`write(directory, specs, read) -> records`: writes further files into the directory of a step, on rank 0.

`specs` lists the tensors of the step, and `read(name)` returns one of them, unsharded. The result has the size and
checksum of each file that was written, by its name in the directory.
"""

# Exceptions of torch.load for a file that torch.save did not write, and those of the file system.
_FILE_ERRORS = (OSError, UserError, EOFError, pickle.UnpicklingError)


class DamagedCheckpointError(UserError):
    """A file of a published step is missing, or is not as it was saved."""


class RankState(NamedTuple):
    """State that a rank saved for itself.

    Attributes:
        state: The state, or None if the step has none.
        copy: Number of the copy: 0 for the first rank that gets this state.
    """

    state: dict[str, Any] | None
    copy: int


class CheckpointStore:
    """The steps that are saved in a directory.

    Every rank creates a store of the same directory. All ranks call the methods that have collectives, with the same
    arguments except for their own shards of tensors. Errors are UserErrors that name the file, raised on every rank.

    Args:
        directory: The directory, usually `checkpoints/` of a run. It need not exist.
        ranks: The ranks that save and load together. None: all ranks.

    Attributes:
        directory: The directory.
        ranks: The ranks.
    """

    def __init__(self, directory: str | Path, ranks: Ranks | None = None):
        self.directory = Path(directory)
        self.ranks = ranks or Ranks()

    def path(self, step: int) -> Path:
        """Return the directory of a step.

        >>> CheckpointStore("runs/my/checkpoints", Ranks(single_process=True)).path(100).name
        'step-100'
        """
        return self.directory / f"step-{step}"

    def steps(self) -> list[int]:
        """Return the complete steps, ascending, as this rank's file system shows them. No collective."""
        return [step for step in self.published_steps() if not self.check_files(step)]

    def published_steps(self) -> list[int]:
        """Return all published steps, ascending, including steps that were damaged later. No collective."""
        if not self.directory.is_dir():
            return []
        steps = []
        for entry in self.directory.iterdir():
            step = step_of(entry) if entry.is_dir() else None
            if step is not None:
                steps.append(step)
        return sorted(steps)

    def check_files(self, step: int) -> list[str]:
        """Check the manifest of a step, and the sizes of its files. Their content is not read. No collective.

        Returns:
            The errors; empty for a complete step.

        Raises:
            UserError: If the manifest is of an incompatible version of dtrain, or cannot be read for another reason
                than damage.
        """
        try:
            manifest = self._manifest(step)
        except DamagedCheckpointError as damage:
            return [str(damage)]
        errors: list[str] = []
        for name, record in manifest["files"].items():
            error = self._size_error(step, name, record)
            if error is not None:
                errors.append(error)
        return errors

    def check_contents(self, step: int) -> list[str]:
        """Compare every file of a step with its checksum. The ranks divide the files among themselves.

        Returns:
            The errors of all ranks; empty for an undamaged step.

        Collectives:
            One all-gather of objects.
        """

        def check_on_this_rank() -> list[str]:
            errors = self.check_files(step)
            return errors or self._checksum_errors(step, self._files_of_this_rank(step))

        unique: dict[str, None] = {}  # a set in order of appearance
        for errors in self.ranks.gather_results(check_on_this_rank):
            unique.update(dict.fromkeys(errors))
        return list(unique)

    def latest(self) -> int | None:
        """Return the newest complete step as rank 0 sees it, or None. One broadcast of an object."""
        return self.ranks.run_on_first(lambda: max(self.steps(), default=None))

    def clean(self) -> None:
        """Delete what killed saves and deletions have left, on rank 0. The caller must have the lock of the run."""
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
        """Save a step and publish it. The module's docstring shows the order of the writes.

        Args:
            step: Number of the step. A step that exists is never overwritten.
            tensors: Tensors of any shape: plain (the same on every rank), DTensors or `TensorShard`s, under the same
                names on every rank.
            state: JSON. That of rank 0 is saved. Tuples come back as lists.
            rank_state: JSON of each rank.
            write_extra_files: Writes further files into the step on rank 0, after all ranks have written their tensors.

        Returns:
            The directory of the step.

        Raises:
            UserError: If the step exists, for a full disk and the like. Then nothing of this save remains, and earlier
                steps are untouched.

        Collectives:
            Those of DCP's `save`, one all-gather and two or three broadcasts of objects.
        """
        # Serialise first: a state that is no JSON is a bug of the caller, and fails here before a file is written.
        shards = {name: TensorShard.from_tensor(tensor) for name, tensor in tensors.items()}
        state_text, rank_state_text = json.dumps(state), json.dumps(rank_state)
        rank_file = f"rank-{self.ranks.rank}.json"
        final, partial = self.path(step), self.directory / f".partial-step-{step}"

        def begin() -> None:
            if final.exists():
                raise UserError(f"{final} is already there, and a saved step is never overwritten: delete or move it")
            self.clean()
            partial.mkdir(parents=True)

        def records_of_this_rank() -> dict[str, FileRecord]:
            records = dict(writer.records)
            if rank_state is not None:
                records[rank_file] = write_synced(partial / rank_file, rank_state_text)
            return records

        self.ranks.run_on_first(begin)
        try:
            writer = ShardWriter(partial)
            planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            self._call_dcp("saved", final, dcp.save, shards, storage_writer=writer, planner=planner)
            files: dict[str, FileRecord] = {}
            for records in self.ranks.gather_results(records_of_this_rank):
                files.update(records)
            self.ranks.run_on_first(
                lambda: self._publish(step, partial, writer.table, state_text, files, write_extra_files)
            )
        except UserError as error:  # raised on every rank
            space = self.ranks.run_on_first(lambda: self._discard_failed_save(partial, save_bytes(shards)))
            raise UserError(f"{error}\n{space}") from error
        return final

    def _discard_failed_save(self, partial: Path, size: int) -> str:
        """Delete what a failed save of `size` bytes has written, and return the end of its error. No collective."""
        shutil.rmtree(partial, ignore_errors=True)
        last = max(self.steps(), default=None)
        saved = "there is no complete step yet" if last is None else f"the last complete step is {self.path(last)}"
        free = free_bytes(self.directory)
        advice = "; make room, or set run.dir to another disk" if free < size else ""
        return f"A save takes {format_bytes(size)}, and {format_bytes(free)} are free there{advice}; {saved}"

    def read_state(self, step: int) -> dict[str, Any]:
        """Read the `state` of a step, but no tensor. No collective."""
        self._verify(step, [STATE])
        return _read_json(self.path(step) / STATE)

    def read_rank_state(self, step: int) -> RankState:
        """Read the state that a rank saved for itself. No collective.

        If the step was saved on fewer ranks, rank r gets the state of rank r % saved, as copy number r // saved. For
        example, if 2 ranks saved a state, rank 3 gets the state of rank 1 as copy 1.
        """
        manifest = self._manifest(step)
        num_saved = manifest["world_size"]
        name = f"rank-{self.ranks.rank % num_saved}.json"
        if name not in manifest["files"]:
            return RankState(None, 0)
        self._verify(step, [name])
        return RankState(_read_json(self.path(step) / name), self.ranks.rank // num_saved)

    def identity(self, step: int) -> str:
        """Return a digest of the content of a step's tensors, from the checksums of their files. No collective."""
        files = self._manifest(step)["files"]
        return digest({name: record for name, record in files.items() if name == TABLE or name.endswith(".distcp")})

    def tensor_specs(self, step: int) -> TensorSpecs:
        """Return shape and dtype of every tensor of a step, by name. No collective."""
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
        """Fill tensors in place from a step that was saved on any mesh.

        Args:
            step: Number of the step.
            tensors: Tensors of any shape, by their names in the checkpoint: plain, DTensors or `TensorShard`s.
            allow_extra: Whether the step may have tensors that are not in `tensors`.
            verified: Whether `check_contents` has just found no error, so that checksums are not compared again.
            cast: Names of tensors whose dtype may differ from the saved one. The saved values are cast to their dtype.

        Returns:
            The `state` of the step.

        Raises:
            UserError: For damaged files. One error that lists all names on one side only, all other shapes and other
                dtypes. Then no tensor has been changed.

        Collectives:
            One all-gather of objects, and those of DCP's `load`. The ranks divide the comparison of checksums.
        """

        def check() -> tuple[dict[str, TensorShard], TensorTable]:
            if not verified:
                self._verify(step, self._files_of_this_rank(step))
            table = self._table(step)
            return self._matching_shards(step, table, tensors, allow_extra, cast), table

        shards, table = self.ranks.run_on_all(check)
        self._read(step, shards, table)
        return self.read_state(step)

    def check_fit(self, step: int, tensors: Mapping[str, Tensor], cast: Collection[str]) -> None:
        """Check that names, shapes and dtypes of tensors fit a step, as `load` with `allow_extra` does. No collective.

        No tensor is read, so `tensors` may be on the meta device.

        Args:
            step: Number of the step.
            tensors: As in `load`.
            cast: As in `load`.

        Raises:
            UserError: If a tensor is missing in the step, or has another shape or dtype there.
        """
        self._matching_shards(step, self._table(step), tensors, True, cast)

    def open_step(self, step: int) -> Callable[[Mapping[str, Tensor]], None]:
        """Verify every file of a step in one process.

        Returns:
            A function that fills some of the step's tensors in place. It may be called several times, for one tensor at
            a time if memory is short.
        """
        self._verify(step, sorted(self._manifest(step)["files"]))
        table = self._table(step)

        def fill(tensors: Mapping[str, Tensor]) -> None:
            self._read(step, self._matching_shards(step, table, tensors, allow_extra=True), table)

        return fill

    def prune(self, retention: Retention) -> None:
        """Delete the complete steps that `retention` does not keep, by the metrics in their state.

        Only rank 0 does so. No collective.
        """
        if retention.keep_last is None or not self.ranks.is_first:
            return
        metrics: dict[int, dict[str, float]] = {step: {} for step in self.steps()}
        if retention.keep_best:
            for step in metrics:
                with suppress(DamagedCheckpointError):  # reported by a resume
                    metrics[step] = self.read_state(step).get("metrics", {})
        for step in retention.steps_to_delete(metrics):
            # Renamed first: a deletion that is killed leaves no half of a step.
            shutil.rmtree(set_aside(self.path(step)))

    def _publish(
        self,
        step: int,
        partial: Path,
        table: str,
        state: str,
        files: dict[str, FileRecord],
        write_extra_files: ExtraFilesWriter | None,
    ) -> None:
        """Write the files of rank 0, the manifest last, and rename the directory. See the module's docstring."""
        self._wait_for_files(partial, files)
        if write_extra_files is not None:
            tensors = read_table(partial / TABLE, table.encode())
            read = bound(read_full_tensor, partial, tensors)
            files |= write_extra_files(partial, tensors.sizes, read)
        files[TABLE] = write_synced(partial / TABLE, table)
        files[STATE] = write_synced(partial / STATE, state)
        content = {"format": _FORMAT, "step": step, "world_size": self.ranks.size, "files": files}
        write_synced(partial / MANIFEST, json.dumps({"crc32": _text_checksum(content), "content": content}, indent=1))
        publish(partial, self.path(step))

    def _wait_for_files(self, partial: Path, files: Mapping[str, FileRecord]) -> None:
        """Wait until this host sees the files of all ranks.

        Raises UserError after `SEEN_SECONDS`: then `run.dir` is another directory on another host.
        """
        deadline = time.monotonic() + SEEN_SECONDS
        for name, record in files.items():
            path = partial / name
            while not path.is_file() or path.stat().st_size != record["bytes"]:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{path}: a rank has written this file, but {socket.gethostname()}, which completes the step, "
                        "does not see it: all hosts must share run.dir, under the same path"
                    )
                time.sleep(0.1)

    def _manifest(self, step: int) -> dict[str, Any]:
        """Read and check the manifest of a step."""
        path = self.path(step) / MANIFEST
        if path.exists() and not path.is_file():
            raise DamagedCheckpointError(f"{path}: damaged, it is not a file")
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
                raise UserError(f"{path} is of step {content['step']}: a checkpoint's directory must keep its name")
            is_valid = _is_valid_manifest(content)
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(f"{path}: damaged, or not written by dtrain") from error
        if not is_valid:
            raise DamagedCheckpointError(f"{path}: damaged, or not written by dtrain")
        return content

    def _size_error(self, step: int, name: str, record: FileRecord) -> str | None:
        path = self.path(step) / name
        try:
            size = path.stat().st_size
        except OSError as error:
            return describe_error(error)
        if not path.is_file():
            return f"{path}: damaged, it is not a file"
        if size != record["bytes"]:
            return f"{path}: damaged, it has {size} bytes instead of {record['bytes']}"
        return None

    def _files_of_this_rank(self, step: int) -> list[str]:
        """Return the files of a step that this rank verifies for all."""
        return sorted(self._manifest(step)["files"])[self.ranks.rank :: self.ranks.size]

    def _verify(self, step: int, names: list[str]) -> None:
        """Raise `DamagedCheckpointError` that lists all of these files that are damaged."""
        errors = self._checksum_errors(step, names)
        if errors:
            raise DamagedCheckpointError("\n".join(errors))

    def _checksum_errors(self, step: int, names: list[str]) -> list[str]:
        """Compare files of a step with the manifest's sizes and checksums, and check that JSON files are readable."""
        files = self._manifest(step)["files"]
        errors = []
        for name in names:
            size_error = self._size_error(step, name, files[name])
            if size_error is not None:
                errors.append(size_error)
            elif checksum(self.path(step) / name) != files[name]:
                errors.append(f"{self.path(step) / name}: damaged, its checksum does not match")
            elif name.endswith(".json"):
                # A checksum proves only that the file is unchanged, not that dtrain wrote it.
                try:
                    if name == TABLE:
                        self._table(step)
                    else:
                        _read_json(self.path(step) / name)
                except UserError as error:
                    errors.append(str(error))
        return errors

    def _table(self, step: int) -> TensorTable:
        """Read and check the table of a step's tensors."""
        path = self.path(step) / TABLE
        try:
            table = read_table(path, path.read_bytes())
        except OSError as error:
            raise UserError(describe_error(error)) from error
        file_names = {location.relative_path for location in table.locations.values()}
        unlisted = file_names - self._manifest(step)["files"].keys()
        if unlisted:
            raise UserError(f"{path}: names files that the checkpoint does not list: {unlisted}")
        return table

    def _matching_shards(
        self,
        step: int,
        table: TensorTable,
        tensors: Mapping[str, Tensor],
        allow_extra: bool,
        cast: Collection[str] = (),
    ) -> dict[str, TensorShard]:
        """Return the shards of `tensors`. Raises one UserError that lists everything that does not fit the step."""
        shards = {name: TensorShard.from_tensor(tensor) for name, tensor in tensors.items()}
        problems = []
        for name, shard in shards.items():
            if name not in table.tensors:
                # A tensor without elements leaves no chunk, and so no entry.
                if shard.global_size.numel():
                    problems.append(f"missing in the checkpoint: {name}")
                continue
            saved = table.tensors[name]
            dtype = saved.properties.dtype
            if saved.size != shard.global_size:
                problems.append(f"{name}: saved as {list(saved.size)}, the run has {list(shard.global_size)}")
            elif dtype != shard.local.dtype and name not in cast:
                keys = "optimizer.state, train.dtype" if name.startswith("optim.") else "train.dtype, train.masters"
                problems.append(f"{name}: saved in {dtype}, the run has {shard.local.dtype} ({keys})")
        if not allow_extra:
            problems += [f"only in the checkpoint: {name}" for name in table.tensors if name not in shards]
        if problems:
            raise UserError("\n  ".join([f"{self.path(step)} does not fit this run:", *limit_problems(problems)]))
        return shards

    def _read(self, step: int, shards: dict[str, TensorShard], table: TensorTable) -> None:
        """Fill the shards from the files of a step."""
        path = self.path(step)
        stored = {name: shard for name, shard in shards.items() if name in table.tensors}
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with torch.no_grad():
            self._call_dcp("read", path, dcp.load, stored, storage_reader=ShardReader(path, table), planner=planner)

    def _call_dcp(
        self, verb: str, path: Path, function: Callable[..., Any], shards: dict[str, TensorShard], **kwargs: Any
    ) -> None:
        """Call `dcp.save` or `dcp.load`, and turn its errors about files into one UserError.

        Args:
            verb: Past participle for the message, such as "saved".
            path: The step, for the message.
            function: The function of DCP.
            shards: Its first argument.
            kwargs: Its further arguments.
        """
        try:
            if self.ranks.distributed:
                function(shards, process_group=self.ranks.group, **kwargs)
            else:
                # `catch_warnings` changes the filters of all threads. Saves in background threads are always
                # distributed, so this branch runs only in the main thread.
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                    function(shards, no_dist=True, **kwargs)
        except CheckpointException as failure:
            causes = {rank: error for rank, (error, _) in failure.failures.items()}
            if not all(isinstance(error, _FILE_ERRORS) for error in causes.values()):
                raise RuntimeError(f"{path} could not be {verb}") from failure
            lines = "\n".join(f"  rank {rank}: {describe_error(error)}" for rank, error in sorted(causes.items()))
            raise UserError(f"{path} could not be {verb}:\n{lines}") from failure


class LocatedStep(NamedTuple):
    """A step that was found by a path.

    Attributes:
        store: The store that has it.
        step: Its number.
    """

    store: CheckpointStore
    step: int


def locate_step(path: str | Path, ranks: Ranks | None = None, key: str | None = None) -> LocatedStep:
    """Find the store and the step that a user means by a path.

    Args:
        path: A `step-N` directory, a `checkpoints` directory, or a run's directory. The last two mean the newest step.
        ranks: The ranks of the store. None: all ranks.
        key: The recipe's key that has the path, for messages.

    Raises:
        UserError: If there is no complete step.

    Collectives:
        One broadcast of an object over `ranks`.
    """
    source = f"{key}={path}" if key else str(path)
    path = Path(path)
    step = step_of(path.absolute())
    if step is not None:
        store = CheckpointStore(path.absolute().parent, ranks)
        errors = store.ranks.run_on_first(lambda: store.check_files(step))
        if errors:
            raise UserError(f"{source} is not a complete checkpoint: {errors[0]}")
        return LocatedStep(store, step)
    store = CheckpointStore(path / "checkpoints" if (path / "checkpoints").is_dir() else path, ranks)
    newest = store.latest()
    if newest is None:
        raise UserError(f"{source} has no complete checkpoint (looked for step-N directories in {store.directory})")
    return LocatedStep(store, newest)


def step_of(path: Path) -> int | None:
    """Return N for a path whose last part is `step-N`, otherwise None.

    >>> step_of(Path("runs/my/checkpoints/step-100")), step_of(Path("runs/my"))
    (100, None)
    """
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def _is_valid_manifest(content: dict[str, Any]) -> bool:
    """Check the fields of a manifest. Raises KeyError, TypeError or AttributeError for other JSON."""
    files, num_ranks = content["files"], content["world_size"]
    if TABLE not in files or STATE not in files:
        return False
    for name, record in files.items():
        if not _FILE_NAME.fullmatch(name) or "bytes" not in record.keys():
            return False
    return type(num_ranks) is int and num_ranks >= 1


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, max_bytes=OWN_FILE_BYTES, allow_nan=True)


def _text_checksum(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


@dataclass(frozen=True)
class Origin:
    """The step of another run from which a run began.

    Attributes:
        path: Absolute path of the step's directory when the run began.
        step: Number of the step.
        identity: Digest of the step's tensors (`CheckpointStore.identity`).
        save: Mark of the save: the id of the run, a dash and random digits. None for steps of early versions.
    """

    path: str
    step: int
    identity: str
    save: str | None

    @classmethod
    def read(cls, record: Any, file: Path) -> "Origin":
        """Check and read a record.

        Args:
            record: The record, a JSON value.
            file: The file that contains the record, for messages.

        Raises:
            UserError: If the record does not have exactly the fields of this class.
        """
        types = {"path": str, "step": int, "identity": str, "save": str | None}
        has_fields = isinstance(record, dict) and record.keys() == types.keys()
        if not has_fields or not all(isinstance(record[key], of_type) for key, of_type in types.items()):
            raise UserError(
                f"{file} is damaged: it should contain the checkpoint from which the run began. Delete it to start over"
            )
        return cls(**record)

    @classmethod
    def from_step(cls, store: CheckpointStore, step: int) -> "Origin":
        """Return the record of a step. One broadcast of an object."""
        path = str(store.path(step).absolute())
        return store.ranks.run_on_first(
            lambda: cls(path, step, store.identity(step), store.read_state(step).get("save"))
        )

    def find_store(self, path: str | Path, ranks: Ranks) -> CheckpointStore | None:
        """Return the store at a path if it still has the recorded step, with unchanged tensors.

        Args:
            path: As in `locate_step`.
            ranks: The ranks of the store.

        Returns:
            The store. None if the path has no complete step, or not the recorded one.

        Collectives:
            One or two broadcasts of objects over `ranks`.
        """
        try:
            store, _ = locate_step(path, ranks)
        except UserError:  # on every rank
            return None
        # The path of a `step-N` directory means only this step. A run's directory means its newest step, but may still
        # contain the recorded one.
        if step_of(Path(path).absolute()) not in (None, self.step):
            return None

        def is_this_step() -> bool:
            return not store.check_files(self.step) and store.identity(self.step) == self.identity

        is_same = ranks.run_on_first(is_this_step)
        return store if is_same else None

    def was_at(self, path: str | Path, ranks: Ranks) -> bool:
        """Check whether the recorded step was once at a path where `find_store` does not find it any more.

        This is so if the path has later steps of the same run (the step was deleted while the run trained on), or if it
        was the path of the step and nothing is left there.

        Args:
            path: As in `locate_step`.
            ranks: The ranks of the store.

        Collectives:
            One or two broadcasts of objects over `ranks`.
        """
        directory = Path(path).absolute()
        try:
            store, newest = locate_step(path, ranks)
        except UserError:  # on every rank
            # The path may be the step, `checkpoints/` or the run.
            return directory in [Path(self.path), *Path(self.path).parents][:3]
        save: str | None = ranks.run_on_first(lambda: store.read_state(newest).get("save"))
        # The path has a complete step. If the path is a run's directory, the marks of the saves show whether it is a
        # later step of the same run, or another run that was written to this directory.
        if step_of(directory) is not None or save is None or self.save is None:
            return False
        return run_id_of_save(save) == run_id_of_save(self.save)

    def require_store(self, key: str, path: str | Path, alternative: str, ranks: Ranks) -> LocatedStep:
        """Return the store at `path`, which must have this step.

        Args:
            key: The recipe's key that has the path.
            path: The path.
            alternative: What the user can do instead of putting the step back, for the message.
            ranks: The ranks of the store.

        Raises:
            UserError: If the step is gone, or another one is there.

        Collectives:
            Those of `find_store`.
        """
        store = self.find_store(path, ranks)
        if store is None:
            raise UserError(
                f"{key}={path}: this run began from step {self.step} there ({self.path}), which is gone or has changed "
                f"since: put it back, {alternative}"
            )
        return LocatedStep(store, self.step)


def run_id_of_save(save: str) -> str:
    """Return the id of a run from the mark of one of its saves.

    Example:
        >>> run_id_of_save("1f2e3d4c-7")
        '1f2e3d4c'
    """
    return save.split("-")[0]
