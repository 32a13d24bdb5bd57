"""Processes with a GPU each, for functions of modules. A process that hangs or dies is told, and ends the others."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

Run = Callable[..., list[Any]]


def run(
    function: Callable[..., Any], size: int, *args: Any, timeout: float = 600.0, patience: float = 120.0
) -> list[Any]:
    """`function(rank, size, *args)` on `size` new processes, `cuda:rank` current in each; of several, gloo and nccl up.

    timeout: seconds that a rank may take; patience: that one waits in a collective. Raises RuntimeError with the
    traceback of the first that failed, or which died or gave no result.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store, pipes, processes = os.path.join(folder, "store"), {}, []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(function, rank, size, store, patience, args, sender))
            process.start()
            sender.close()
            pipes[receiver] = rank
            processes.append(process)
        results: dict[int, Any] = {}
        try:
            while pipes:
                ready = wait(list(pipes), timeout)
                if not ready:
                    raise RuntimeError(f"ranks {sorted(pipes.values())} gave no result within {timeout:.0f} s")
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    rank = pipes.pop(pipe)
                    results[rank] = _answer(pipe, rank)
        finally:
            for process in processes:
                if len(results) < size:
                    process.kill()
                process.join()
    return [results[rank] for rank in range(size)]


def _answer(pipe: Connection, rank: int) -> Any:
    try:
        succeeded, value = pipe.recv()
    except EOFError:
        raise RuntimeError(f"rank {rank} died without a result") from None
    if not succeeded:
        raise RuntimeError(f"rank {rank}:\n{value}")
    return value


def _rank(
    function: Callable[..., Any],
    rank: int,
    size: int,
    store: str,
    patience: float,
    args: tuple[Any, ...],
    pipe: Connection,
) -> None:
    try:
        join(rank, size, store, patience)
        pipe.send((True, function(rank, size, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # groups whose other ranks are gone would be waited for


def join(rank: int, size: int, store: str, patience: float) -> None:
    """This process's GPU and its process groups."""
    import torch
    import torch.distributed as dist

    from dtrain.parallel.mesh import init_process_group

    torch.cuda.set_device(rank)
    if size > 1:
        init_process_group("cuda", dist.FileStore(store, size), rank, size, patience)
