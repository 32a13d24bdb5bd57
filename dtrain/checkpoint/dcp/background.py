"""Saves that training does not wait for: it stalls for a copy to host memory; a thread writes the copy.

The thread's ranks meet in a gloo process group of their own, since a group serves one thread at a time. One save is in
flight at most. `dcp.async_save` is not used: its staging copies by shape and loses a Piece's place.
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
    """Saves the steps of one run into `directory`, one after the other, and deletes those that `retention` drops.

    background: let training go on while a save is written. Pinned memory for the copies of CUDA tensors is kept from
    save to save. beside: as of `CheckpointStore.save`. Made by every rank alike: one new process group (collective). As
    a context manager it ends the save in flight in order, whatever ends the block, except for a KeyboardInterrupt: who
    presses Ctrl-C twice does not want to wait."""

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
        self._flying: Future[None] | None = None
        self._pinned: dict[str, Tensor] = {}

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.finish()
        elif issubclass(kind, Exception) and self._flying is not None:
            self._flying.exception()

    @property
    def has_failed(self) -> bool:
        """Return whether the save in flight has failed by now, on this rank. No collective."""
        return self._flying is not None and self._flying.done() and self._flying.exception() is not None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        rank_state: Mapping[str, Any] | None = None,
        *,
        wait: bool = False,
    ) -> None:
        """`CheckpointStore.save`, then the retention; in the background the tensors [any shape] may change as soon as
        this returns. wait: return when the step is published. Raises the failure of the save in flight. Collective."""
        self.finish()
        if wait or not self.background:
            self._write(step, tensors, state, rank_state)
            return
        arguments = step, self._copies(tensors), json.loads(json.dumps(state)), json.loads(json.dumps(rank_state))
        self._flying = Future()
        threading.Thread(target=self._fly, args=(self._flying, *arguments), name=f"save-{step}", daemon=True).start()

    def finish(self) -> None:
        """Wait for the save in flight, if there is one; raises what it failed with (UserErrors on every rank)."""
        flying, self._flying = self._flying, None
        if flying is not None:
            flying.result()

    def _fly(self, flying: Future, *arguments: Any) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a new thread's device is 0, where it would take memory
            self._write(*arguments)
            flying.set_result(None)
        except BaseException as error:  # raised in the training's thread, which asks at every step
            flying.set_exception(error)

    def _write(self, step: int, tensors: Mapping[str, Tensor], state: Any, rank_state: Any) -> None:
        self.store.save(step, tensors, state, rank_state, self.write_extra_files)
        self.store.ranks.run_on_first(lambda: self.store.prune(self.retention))

    def _copies(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorShard]:
        copies = {}
        for name, tensor in tensors.items():
            piece = TensorShard.from_tensor(tensor)
            copies[name] = TensorShard.from_offsets(self._copy(name, piece.local), piece.global_size, piece.offsets)
        if self._pinned:
            torch.cuda.current_stream(self.device).synchronize()
        return copies

    def _copy(self, name: str, local: Tensor) -> Tensor:
        if local.device.type != "cuda":
            return local.clone()
        kept = self._pinned.get(name)
        if kept is None or kept.shape != local.shape or kept.dtype != local.dtype:
            kept = self._pinned[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=True)
        return kept.copy_(local, non_blocking=True)
