"""One rank: its device, its process group, its signals, its log; and what running out of memory means."""

import importlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.config import Recipe
from dtrain.errors import UserError

if TYPE_CHECKING:
    import torch

    from dtrain.parallel.runtime import Runtime, StopFlag


class OutOfMemory(UserError):
    """An allocation failed; every rank that got so far may have one of its own."""


Train = Callable[[Recipe, "Runtime"], None]

SAME_SECONDS = 1.0  # two SIGINTs closer than this are one Ctrl-C: `timeout` and torchrun pass on what the group got too
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # the last is how batch systems announce a pre-emption
STOPPING = b"\nsaving and stopping; press Ctrl-C again to end at once, losing what is not saved\n"


@dataclass(frozen=True)
class Place:
    """This process among those of the run.

    started_by  torchrun, or slurm; None: this process is alone, or a launcher
    attempt     restarts of all processes before this one
    master      host and port of the store where ranks meet; rank 0 serves it, or the elastic agent (`agent_store`)
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    started_by: str | None = None
    attempt: int = 0
    master: tuple[str, int] = ("localhost", 0)
    agent_store: bool = False


def run_rank(recipe: Recipe, place: Place, stop: "StopFlag", threads: int | None, train: Train | None = None) -> None:
    """Set this rank up with `threads` CPU threads (None: torch's choice), train, and take its process group down again.

    `train` defaults to `dtrain.trainer.train`. Raises what it raises, and a UserError where memory ran out.
    """
    import torch
    import torch.distributed as dist

    from dtrain.parallel.runtime import Runtime

    if threads is not None:
        torch.set_num_threads(threads)
    device = choose_device(recipe.launch.device, place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with memory_errors(recipe, place, device):
        if place.world_size > 1:
            _join(place, device)
        runtime = Runtime(place.rank, place.local_rank, place.world_size, device, stop)
        (train or importlib.import_module("dtrain.trainer").train)(recipe, runtime)
    if place.world_size > 1:
        dist.destroy_process_group()


def run_in_place(recipe: Recipe, place: Place, threads: int | None, train: Train | None = None) -> None:
    """`run_rank` in a process that nobody of ours watches over: it answers signals itself."""
    from dtrain.parallel.runtime import StopFlag

    if place.rank > 0:
        write_to_log(recipe, place.rank)
    if place.attempt:
        recipe = resumed(recipe)
    stop = StopFlag()

    def ask(signum: int) -> None:
        stop.request(signum)
        if place.rank == 0:
            os.write(2, STOPPING)

    with on_signals(ask):
        run_rank(recipe, place, stop, threads, train)


def resumed(recipe: Recipe) -> Recipe:
    """`recipe` for processes that were started again: they go on from the newest checkpoint, wherever the first ones
    were told to start."""
    saved = (Path(recipe.run.dir) / recipe.run.name / "checkpoints").glob("step-*")
    if recipe.checkpoint.resume is None or any(saved):
        return replace(recipe, checkpoint=replace(recipe.checkpoint, resume="auto"))
    return recipe


def _join(place: Place, device: "torch.device") -> None:
    import torch.distributed as dist

    host, port = place.master
    if place.agent_store:  # the same one over all restarts: what an earlier attempt left there must not be read
        store = dist.PrefixStore(f"attempt-{place.attempt}", dist.TCPStore(host, port, is_master=False))
        where = {"store": store}
    else:
        where = {"init_method": f"tcp://{host}:{port}"}
    backend, device_id = ("cpu:gloo,cuda:nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, rank=place.rank, world_size=place.world_size, device_id=device_id, **where)


def choose_device(wanted: str, place: Place) -> "torch.device":
    """The device of this rank: `launch.device`, auto being cuda where there is one. Raises UserError."""
    import torch

    count = torch.cuda.device_count() if wanted != "cpu" else 0
    if count == 0:
        if wanted == "cuda":
            raise UserError("launch.device=cuda: torch sees no CUDA device here; set launch.device=cpu")
        return torch.device("cpu")
    if count == 1 and place.started_by == "slurm":  # srun --gpus-per-task=1 shows each rank its own
        return torch.device("cuda", 0)
    if place.local_world_size > count:
        raise UserError(
            f"{place.local_world_size} processes on a machine with {count} CUDA device{'s' * (count > 1)}: "
            f"set launch.nproc={count}, or launch.device=cpu"
        )
    return torch.device("cuda", place.local_rank)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def memory_errors(recipe: Recipe, place: Place, device: "torch.device") -> Iterator[None]:
    """Turn an allocation that failed into an error with the peak and the keys that lower it."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        first = (str(error).splitlines() or ["out of memory"])[0]
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in first
        if not is_memory:
            raise
        raise OutOfMemory(_memory_advice(recipe, place, device, first)) from error


def _memory_advice(recipe: Recipe, place: Place, device: "torch.device", first: str) -> str:
    import torch

    if device.type == "cuda":
        peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    train, data = recipe.train, recipe.data
    keys = []
    if train.micro_batch > 1:
        keys.append(f"lower train.micro_batch (now {train.micro_batch})")
    if train.activation_checkpointing != "full":
        keys.append(f"set train.activation_checkpointing=full (now {train.activation_checkpointing})")
    keys.append(f"lower data.max_length (now {data.max_length})")
    keys.append(f"share the model among more processes (launch.nproc, parallel.dp_shard; now {place.world_size})")
    return (
        f"out of memory on rank {place.rank} ({device}), "
        f"at a peak of {peak / 2**30:.2f} GiB of {total / 2**30:.2f} GiB. What helps: {'; '.join(keys)}.\n({first})"
    )


def write_to_log(recipe: Recipe, rank: int) -> None:
    """From here on what this process prints goes to its log in the run's directory; rank 0 keeps the terminal."""
    path = log_file(recipe, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise UserError(f"run.dir={recipe.run.dir}: {path} cannot be written: {error.strerror}") from error
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def log_file(recipe: Recipe, rank: int) -> Path:
    return Path(recipe.run.dir) / recipe.run.name / f"log-rank{rank}.txt"


@contextmanager
def on_signals(ask: Callable[[int], None]) -> Iterator[None]:
    """The first of `STOP_SIGNALS` calls `ask`; a second Ctrl-C raises KeyboardInterrupt. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()
    asked: list[float] = []

    def handle(signum: int, frame: object) -> None:
        if os.getpid() != owner:  # a forked helper: the run's own process decides for both
            if signum == signal.SIGTERM:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
        elif not asked:
            asked.append(time.monotonic())
            ask(signum)
        elif signum == signal.SIGINT and time.monotonic() - asked[0] > SAME_SECONDS:
            raise KeyboardInterrupt

    previous = {signum: signal.signal(signum, handle) for signum in STOP_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
