"""Processes for tests: `run_world` runs a function on n gloo ranks and hands back its results, `fork` starts one child.

A fork from a parent that has imported torch (and `torch._dynamo`, which FSDP2 imports lazily) costs 30 to 130 ms a
world; torchrun costs seconds. As soon as one rank raises, the others are killed: they would wait in a collective.
"""

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor

from dtrain.base.orphans import end_with_parent

# Before any kernel has run: a fork does not take OpenMP's threads along, and the child's first large kernel would wait
# for them without end.
torch.set_num_threads(1)

JOINED, DONE, FAILED = "joined", "done", "failed"  # what a rank says
STARTS = 3  # of a world whose ranks do not join
FRAMES = 10  # of a stack that torch notes
JOIN_SECONDS = 40.0  # less than gloo's own minute


def fork(function: Callable[..., None], *args: Any) -> multiprocessing.Process:
    """`function(*args)` in a process forked from this one, which ends with this one."""
    # A process group that the parent dropped must not be collected in a child: its threads exist in the parent only.
    gc.collect()
    return _fork(function, *args)


def _fork(function, *args):
    process = multiprocessing.get_context("fork").Process(target=_child_main, args=(os.getpid(), function, args))
    process.start()
    return process


def _child_main(parent, function, args):
    end_with_parent(parent)
    gc.freeze()
    function(*args)


def join_gloo(rank: int, world_size: int, store_path: str) -> None:
    store = dist.FileStore(store_path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))


def _rank_main(fn, rank, world_size, store_path, args, pipe, join, end):
    end_of_all, parents_end = end
    os.close(parents_end)
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    sys.tracebacklimit = FRAMES  # DTensor notes the stack, pytest's frames too, wherever it propagates shapes
    try:
        join(rank, world_size, store_path)
        pipe.send((JOINED, None))
        pipe.send((DONE, fn(rank, *args)))
        os.read(end_of_all, 1)  # a rank that ended while others still connect to it would fail them
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        pipe.send((FAILED, traceback.format_exc(limit=1000)))
    finally:
        pipe.close()
        os._exit(0)


def run_world(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 90.0,
    join: Callable[[int, int, str], None] = join_gloo,
) -> list[Any]:
    """Run `fn(rank, *args)` on `world_size` forked ranks with a gloo process group up.

    join(rank, world_size, path of a store): brings up other groups.
    Returns the ranks' results in order: picklable, and no tensors, whose memory would go with their rank.
    Raises AssertionError with the traceback of the first rank that failed, or the names of ranks that hung, whose
    stacks then stand on stderr.

    A fork takes along a lock that another thread of this process holds just then, of the resolver say, and the child
    waits for it without end. Where ranks do not join in time, the world is started again: no line of `fn` has run.
    """
    for _ in range(STARTS):
        results = _run_once(fn, world_size, args, timeout, join)
        if results is not None:
            return results
    raise AssertionError(f"{world_size} ranks did not join in {STARTS} starts")


def _run_once(fn, world_size, args, timeout, join) -> list[Any] | None:
    """Return the results of `run_world`; None where a rank has not joined in JOIN_SECONDS."""
    gc.collect()  # as `fork` does, once for all ranks: it takes longer than a fork
    end_of_all, parents_end = os.pipe()  # its closing tells the ranks that all have given their results
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        stack.callback(os.close, end_of_all)
        ends = stack.enter_context(open(parents_end, "wb"))
        store_path = os.path.join(directory, "store")
        pipes, processes = {}, []
        for rank in range(world_size):
            receiver, sender = multiprocessing.Pipe(duplex=False)
            process = _fork(_rank_main, fn, rank, world_size, store_path, args, sender, join, (end_of_all, parents_end))
            sender.close()
            pipes[receiver] = rank
            processes.append(process)
        results: dict[int, Any] = {}
        absent, until = set(range(world_size)), time.monotonic() + JOIN_SECONDS
        failure, is_late = None, False
        while pipes and failure is None and not is_late:
            ready = wait(list(pipes), max(until - time.monotonic(), 0.0) if absent else timeout)
            if not ready:
                failure = f"ranks {sorted(pipes.values())} of {world_size} gave no result within {timeout} s"
                is_late = bool(absent)
                for rank in absent or pipes.values():
                    os.kill(processes[rank].pid, signal.SIGUSR1)  # where it hangs, on stderr
                time.sleep(1)
            for pipe in ready:
                rank = pipes[pipe]
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    failure = f"rank {rank} of {world_size} died without a result"
                    break
                if kind == FAILED:
                    failure = f"rank {rank} of {world_size} failed:\n{value}"
                    break
                absent.discard(rank)
                if kind == DONE:
                    results[rank] = value
                    del pipes[pipe]
        ends.close()
        for process in processes:
            if failure is not None:
                process.kill()
            process.join()
    if is_late:
        return None
    assert failure is None, failure
    return [results[rank] for rank in range(world_size)]
