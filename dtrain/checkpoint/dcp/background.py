"""Saves in the background: training waits only for a copy of the tensors to host memory.

    training thread     copy | step 101 | step 102 | step 103 | ...
    save thread                write step 100 ............ publish, prune

A thread per rank writes the copy. The threads communicate over a gloo process group of their own, because a group may
serve only one thread at a time. At most one save is in flight: the next one waits until it has ended.

`dcp.async_save` is not used. It copies tensors by their shapes, and a `TensorShard` would lose its offsets.
"""

import json
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.retention import Retention
from dtrain.checkpoint.dcp.shards import TensorShard
from dtrain.checkpoint.dcp.store import CheckpointStore, ExtraFilesWriter
from dtrain.parallel.mesh import new_host_group


class Saver:
    """Saves the steps of one run, one after the other, and deletes the steps that the retention does not keep.

    As a context manager it waits at its end for the save in flight, also after an error. After a KeyboardInterrupt it
    does not: a user who presses Ctrl-C twice does not want to wait.

    Args:
        directory: The directory of the steps.
        retention: Which steps are kept.
        device: Device of the tensors. Pinned memory for the copies of CUDA tensors is kept from save to save.
        background: Let training go on while a save is written.
        write_extra_files: As in `CheckpointStore.save`.
        collective_timeout: Timeout in seconds of the save threads' collectives.

    Attributes:
        store: The store of the steps, with the save threads' process group.

    Collectives:
        One new process group if `background`. Every rank creates a saver with the same arguments.
    """

    def __init__(
        self,
        directory: Path,
        retention: Retention,
        device: torch.device,
        *,
        background: bool,
        write_extra_files: ExtraFilesWriter | None = None,
        collective_timeout: float | None = None,
    ):
        self.background = background
        self.write_extra_files = write_extra_files
        self.retention = retention
        self.device = device
        self.store = CheckpointStore(directory, Ranks(new_host_group(collective_timeout) if background else None))
        self._save_in_flight: Future[None] | None = None
        self._pinned: dict[str, Tensor] = {}  # memory for the copies, by the tensor's name

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.finish()
        elif issubclass(kind, Exception) and self._save_in_flight is not None:
            self._save_in_flight.exception()

    @property
    def has_failed(self) -> bool:
        """True if the save in flight has already failed on this rank. No collective."""
        save = self._save_in_flight
        return save is not None and save.done() and save.exception() is not None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any] | None = None,
        *,
        wait: bool = False,
    ) -> None:
        """Save a step, and delete the steps that the retention does not keep.

        In the background, the tensors may change as soon as this returns.

        Args:
            step: Number of the step.
            tensors: As in `CheckpointStore.save`.
            state: As in `CheckpointStore.save`.
            rank_state: As in `CheckpointStore.save`.
            wait: Return only when the step is published.

        Raises:
            UserError: For the failure of this save, or of the save in flight before it.

        Collectives:
            Those of `CheckpointStore.save`, and one broadcast of an object after the steps were deleted, on this thread
            or on the save thread.
        """
        self.finish()
        if wait or not self.background:
            self._write(step, tensors, state, rank_state)
            return
        copies = self._copy_to_host(tensors)
        # Copied as JSON, because the caller may change these objects too.
        state_copy, rank_state_copy = json.loads(json.dumps(state)), json.loads(json.dumps(rank_state))
        save: Future[None] = Future()
        self._save_in_flight = save
        arguments = (save, step, copies, state_copy, rank_state_copy)
        threading.Thread(target=self._run_thread, args=arguments, name=f"save-{step}", daemon=True).start()

    def finish(self) -> None:
        """Wait for the save in flight, if there is one, and raise its failure. A UserError is raised on every rank."""
        save = self._save_in_flight
        self._save_in_flight = None
        if save is not None:
            save.result()

    def _run_thread(self, save: Future[None], *arguments: Any) -> None:
        try:
            if self.device.type == "cuda":
                # A new thread's device is number 0, on which it would allocate memory.
                torch.cuda.set_device(self.device)
            self._write(*arguments)
            save.set_result(None)
        except BaseException as error:  # raised in the training thread, which checks for it at every step
            save.set_exception(error)

    def _write(self, step: int, tensors: Mapping[str, Tensor], state: Any, rank_state: Any) -> None:
        self.store.save(step, tensors, state, rank_state, self.write_extra_files)
        self.store.ranks.run_on_first(lambda: self.store.prune(self.retention))

    def _copy_to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorShard]:
        copies = {}
        for name, tensor in tensors.items():
            shard = TensorShard.from_tensor(tensor)
            copy = self._copy(name, shard.local)
            copies[name] = TensorShard.from_offsets(copy, shard.global_size, shard.offsets)
        if self._pinned:
            torch.cuda.current_stream(self.device).synchronize()
        return copies

    def _copy(self, name: str, local: Tensor) -> Tensor:
        """Copy a local tensor to the host, from CUDA without waiting."""
        if local.device.type != "cuda":
            return local.clone()
        pinned = self._pinned.get(name)
        if pinned is None or pinned.shape != local.shape or pinned.dtype != local.dtype:
            pinned = torch.empty(local.shape, dtype=local.dtype, pin_memory=True)
            self._pinned[name] = pinned
        return pinned.copy_(local, non_blocking=True)
