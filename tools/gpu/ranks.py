"""Processes with a GPU each, for functions of modules: one set for each number of ranks, started once and kept."""

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

Run = Callable[..., list[Any]]
"""Caller with the arguments of `Ranks.__call__`."""


class Ranks:
    """Processes that are started for the first call of their number and environment, and end where a call fails."""

    def __init__(self) -> None:
        self._sets: dict[tuple, list[tuple[multiprocessing.Process, Connection]]] = {}
        self._folder = tempfile.TemporaryDirectory()
        self._calls = 0

    def __call__(
        self,
        function: Callable[..., Any],
        size: int,
        *args: Any,
        timeout: float = 600.0,
        patience: float = 120.0,
        grouped: bool = True,
        environ: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Return the results of `function(rank, size, *args)` on `size` ranks, `cuda:rank` current in each.

        timeout: seconds that a rank may take; patience: that one waits in a collective. grouped: of several ranks, gloo
        and nccl are up. environ: variables of the ranks' environment. Raises RuntimeError with the traceback of the
        first rank that failed, or which died or gave no result.
        """
        key = (size, *sorted((environ or {}).items()))
        if key not in self._sets:
            self._sets[key] = [_start(rank, size, environ or {}) for rank in range(size)]
        self._calls += 1
        store = str(Path(self._folder.name) / f"store-{self._calls}") if grouped and size > 1 else None
        ranks = {pipe: rank for rank, (_, pipe) in enumerate(self._sets[key])}
        results: dict[int, Any] = {}
        try:
            for pipe in ranks:
                pipe.send((function, args, store, patience))
            while ranks:
                ready = wait(list(ranks), timeout)
                if not ready:
                    raise RuntimeError(f"ranks {sorted(ranks.values())} gave no result within {timeout:.0f} s")
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    rank = ranks.pop(pipe)
                    results[rank] = _answer(pipe, rank)
        finally:
            if len(results) < size:
                self._end(key)
        return [results[rank] for rank in range(size)]

    def close(self) -> None:
        """End all processes."""
        for key in list(self._sets):
            self._end(key)
        self._folder.cleanup()

    def _end(self, key: tuple) -> None:
        for process, pipe in self._sets.pop(key):
            process.kill()
            process.join()
            pipe.close()


def _start(rank: int, size: int, environ: Mapping[str, str]) -> tuple[multiprocessing.Process, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(rank, size, dict(environ), theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours  # type: ignore[return-value]


def _answer(pipe: Connection, rank: int) -> Any:
    try:
        succeeded, value = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise RuntimeError(f"rank {rank} died without a result") from None
    if not succeeded:
        raise RuntimeError(f"rank {rank}:\n{value}")
    return value


def _serve(rank: int, size: int, environ: Mapping[str, str], pipe: Connection) -> None:
    os.environ.update(environ)
    while True:
        try:
            function, args, store, patience = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            join(rank, size, store, patience)
            result = function(rank, size, *args)
            leave()
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def join(rank: int, size: int, store: str | None, patience: float) -> None:
    """Start this process's GPU as a run does, its allocator included, and with a store its process groups."""
    import torch
    import torch.distributed as dist

    from dtrain.launch.devices import start_device
    from dtrain.launch.rank_info import RankInfo
    from dtrain.parallel.mesh import init_process_group

    start_device(torch.device("cuda", rank), RankInfo(rank, rank, size, size, environ=os.environ))
    if store is not None:
        init_process_group("cuda", dist.FileStore(store, size), rank, size, patience)


def leave() -> None:
    """Give up what a call leaves: process groups and cached memory."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    torch.cuda.empty_cache()
