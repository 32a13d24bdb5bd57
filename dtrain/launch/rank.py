"""A rank: its device, its process group, its signals, its log; and what running out of memory means."""

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.base.addresses import loopback
from dtrain.base.errors import UserError
from dtrain.base.host_memory import host_memory, total_memory
from dtrain.base.orphans import descendants, kill
from dtrain.launch.consistency import refuse_other_hosts, refuse_other_recipes
from dtrain.launch.devices import DeviceFacts, agree, choose_device, notes, problems, start_device
from dtrain.launch.place import GLOO, NCCL, RankPlace
from dtrain.launch.signals import on_signals
from dtrain.launch.watch import StallTimer, heartbeat, newest_checkpoint
from dtrain.methods import method_of
from dtrain.recipe import Recipe
from dtrain.recipe.automatic import AUTO, COMPILE, as_overrides, changed, open_keys, value_of, with_compile

if TYPE_CHECKING:
    import torch

    from dtrain.parallel.runtime import Runtime, StopFlag


class OutOfMemory(UserError):
    """An allocation failed; every rank that got so far may have one of its own."""


Train = Callable[[Recipe, "Runtime"], None]


PlanBeside = Callable[[Recipe, int, str], AbstractContextManager[Any]]
"""(recipe, world size, device type) -> its plan, worked out beside the run: `commands.plan.beside.PlannedPeak`."""


@dataclass(frozen=True)
class RunJob:
    """A run as its launcher hands it to its ranks.

    threads: CPU threads of each, None: torch's choice. train: in place of `run.trainer.train_checked`. plan: works out
    the run's plan beside it.
    """

    recipe: Recipe
    threads: int | None = None
    train: Train | None = None
    plan: PlanBeside | None = None


STOPPING = b"\nsaving and stopping; press Ctrl-C again to end at once, losing what is not saved\n"


def run_rank(
    job: RunJob, place: RankPlace, device: "torch.device", stop: "StopFlag", terminal: int | None = None
) -> None:
    """Set this rank up on `device`, train, and take its process group down again. A rank of processes that were started
    again goes on from the newest checkpoint.

    `terminal` is a file that a lost rank is told on, beside this process's stderr. Raises what `job.train` raises, a
    UserError where memory ran out, and Unavailable where another rank was lost.
    """
    import torch
    import torch.distributed as dist

    from dtrain.parallel.mesh import init_process_group
    from dtrain.parallel.runtime import Runtime
    from dtrain.run.sizing import CPU, machine_of, sized, sizing_by_plan, sizing_of_cpu

    if job.threads is not None:
        torch.set_num_threads(job.threads)
    recipe = with_compile(resumed(job.recipe) if place.attempt else job.recipe, device.type)
    chosen: tuple[str, ...] = ()
    if device.type == "cuda" and value_of(job.recipe, COMPILE) == AUTO:
        is_compiled = value_of(recipe, COMPILE)
        (value,) = as_overrides({COMPILE: is_compiled})
        why = f"Triton and a C compiler are {'' if is_compiled else 'not both '}installed"
        chosen = (f"{value} (auto): {'run.deterministic=true' if recipe.run.deterministic else why}",)
    with ExitStack() as stack:
        planned = None
        wants_plan = device.type == "cuda" if recipe.metrics.plan == "auto" else recipe.metrics.plan
        has_cuda = torch.cuda.is_initialized()  # of an earlier run in this process: it survives no fork
        is_open, sizing = job.plan is not None and bool(open_keys(recipe)), None
        if is_open and place.rank == 0 and device.type == "cpu":
            machine = machine_of(place.world_size, CPU, total_memory())
            sizing = sizing_of_cpu(recipe, machine, host_memory(place.local_world_size))
        wants_plan = wants_plan or (is_open and sizing is None and recipe.metrics.plan is not False)
        if job.plan is not None and place.rank == 0 and wants_plan and not has_cuda:
            known = changed(recipe, sizing.values) if sizing is not None else recipe
            planned = stack.enter_context(job.plan(known, place.world_size, device.type))
        met = None
        if place.watches:
            watch = importlib.import_module("dtrain.launch.hosts.rendezvous").watch
            met = stack.enter_context(watch(recipe.run.directory, recipe.launch.lost_after, place, stop, terminal))
            recipe = resumed(recipe) if met.attempt > place.attempt else recipe
        if place.is_inside:
            # NCCL's variable counts for the process, which may need a group that reaches beyond this host.
            reaches_out = job.train is not None or method_of(recipe).sends_weights()
            stack.enter_context(loopback_only(place, nccl=device.type == "cuda" and not reaches_out))
        size, store = place.world_size, None
        if size > 1:
            store = met.store if met else dist.FileStore(str(place.file), size)  # in its launcher's private directory
        meeting = place if met is None else replace(place, attempt=max(place.attempt, met.attempt))
        if store is not None:
            refuse_other_recipes(recipe, meeting, store)
        devices: list[DeviceFacts] = []
        if device.type == "cuda":
            start = partial(start_device, device, place)
            agree(start, meeting, store, partial(_unfit_devices, recipe, None if is_open else planned, devices))
        least = min(devices, key=lambda device: device.memory, default=None)
        machine = machine_of(place.world_size, *((least.name, least.memory) if least else (CPU, total_memory())))
        if is_open:
            free = min((device.free for device in devices if device.free is not None), default=None)
            host = host_memory(place.local_world_size)
            decide = partial(sizing_by_plan, recipe, machine, host, planned, least, free)
            recipe, lines = sized(recipe, place.rank, meeting.attempt, store, lambda: sizing or decide())
            chosen += lines
        stack.enter_context(memory_errors(recipe, place, device))
        if recipe.run.deterministic:
            deterministic = importlib.import_module("dtrain.base.deterministic")
            stack.enter_context(deterministic.deterministic_algorithms(place.environ))
        wait = recipe.launch.collective_timeout
        if store is not None:
            init_process_group(device.type, store, place.rank, size, wait)
        if place.watches:
            refuse_other_hosts(recipe)
        peak = planned.peak if planned else None
        runtime = Runtime(
            place.rank, place.local_rank, place.world_size, device, stop, peak, wait, chosen, machine if is_open else {}
        )
        (job.train or importlib.import_module("dtrain.run.trainer").train_checked)(recipe, runtime)
    if place.world_size > 1:
        dist.destroy_process_group()


def _unfit_devices(
    recipe: Recipe, planned: Any, seen: list[DeviceFacts], devices: Sequence[DeviceFacts]
) -> Sequence[str]:
    """Return why the run cannot go on with the GPUs of its ranks, their memory included; remarks go to stderr. seen:
    gets the devices."""
    seen += devices
    reasons = problems(devices, recipe.train.dtype)
    remarks = notes(devices)
    if planned is not None:
        least = min(devices, key=lambda device: device.memory)
        peak = planned.peak_if_too_large(least)
        if peak is not None:  # below the device's memory, how much is usable is an estimate
            (reasons if peak.size > least.memory else remarks).append(peak.too_much)
    for line in [] if reasons else remarks:
        print(f"note: {line}", file=sys.stderr)
    return reasons


@contextmanager
def loopback_only(place: RankPlace, *, nccl: bool) -> Iterator[None]:
    """While the block runs, the sockets of gloo, and of NCCL with `nccl`, listen on the loopback interface alone,
    unless the user has named another. For ranks that are all on this host: nobody outside has any business there."""
    name = loopback()
    named = {GLOO: name, **({NCCL: f"={name}"} if nccl else {})} if name else {}
    missing = {key: value for key, value in named.items() if key not in place.environ}
    place.environ.update(missing)
    try:
        yield
    finally:  # a process may run another recipe, or start processes that reach other hosts
        for key in missing:
            place.environ.pop(key, None)


def run_in_place(job: RunJob, place: RankPlace) -> None:
    """`run_rank` in a process that nobody of ours watches over: it answers signals itself."""
    from dtrain.parallel.runtime import StopFlag

    recipe, terminal = job.recipe, None
    with tell_all_ranks(place):
        device = choose_device(recipe.launch.device, place)
        if place.rank > 0:
            terminal = os.dup(2) if place.local_rank == 0 else None  # one rank of each host tells there
            write_to_log(recipe, place.rank)
    stop = StopFlag()

    def ask(signum: int) -> None:
        stop.request(signum)
        if place.rank == 0:
            os.write(2, STOPPING)

    look = None
    if place.world_size == 1:  # whether one rank of several hangs, or waits for another, it cannot know
        look = partial(_end_if_hung, recipe, stop, threading.get_ident(), StallTimer(recipe.launch.lost_after))
    with on_signals(ask, look=look):
        run_rank(job, place, device, stop, terminal)


def _end_if_hung(recipe: Recipe, stop: "StopFlag", main: int, stalled: StallTimer) -> None:
    """End this process where its `main` thread was asked to stop and gets nothing done."""
    stalled.look(heartbeat(stop, main))
    if stalled.is_over:
        text = f"asked to stop, the run has stood at {stalled.last.place} for {stalled.seconds:.0f} s"
        saved = newest_checkpoint(recipe.run.directory)
        os.write(2, f"dtrain: {text} (launch.lost_after): it ends at once. {saved}\n".encode())
        kill(descendants(os.getpid()))
        os._exit(1)


@contextmanager
def tell_all_ranks(place: RankPlace | None) -> Iterator[None]:
    """Tell the other ranks where the block finds that the run cannot begin (UserError) and `place` is one of several
    hosts: they are not left to wait for this one. Raises UserError with what all have found, or SystemExit where
    another process of this host tells of it.
    """
    try:
        yield
    except UserError as problem:
        if place is None or not place.watches:
            raise
        importlib.import_module("dtrain.launch.hosts.rendezvous").fail_together(place, problem)


def resumed(recipe: Recipe) -> Recipe:
    """`recipe` for processes that were started again: they go on from the newest checkpoint, wherever the first ones
    were told to start."""
    saved = (recipe.run.directory / "checkpoints").glob("step-*")
    if recipe.checkpoint.resume is None or any(saved):
        return replace(recipe, checkpoint=replace(recipe.checkpoint, resume="auto"))
    return recipe


@contextmanager
def memory_errors(recipe: Recipe, place: RankPlace, device: "torch.device") -> Iterator[None]:
    """Turn an allocation that failed into an error with the peak and the keys that lower it."""
    import torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        first = (str(error).splitlines() or ["out of memory"])[0]
        # Of pinned memory CUDA says the last.
        is_host_or_pinned = "can't allocate memory" in first or "CUDA error: out of memory" in first
        if not (isinstance(error, torch.OutOfMemoryError | MemoryError) or is_host_or_pinned):
            raise
        raise OutOfMemory(_memory_advice(recipe, place, device, first)) from error


def _memory_advice(recipe: Recipe, place: RankPlace, device: "torch.device", first: str) -> str:
    import torch

    from dtrain.run.metrics import memory_gib

    is_gpu = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if is_gpu else total_memory()
    micro, kept = recipe.train.micro, recipe.train.activation_checkpointing
    keys = [f"lower train.micro_batch (now {micro})"] if micro > 1 else []
    keys += [f"set train.activation_checkpointing=full (now {kept})"] if kept != "full" else []
    keys += ["set train.tile=all"] if recipe.train.tile != "all" else []
    keys += ["set train.activation_offload=true"] if recipe.train.activation_offload is not True else []
    keys += [
        f"lower data.max_length (now {recipe.data.max_length})",
        f"share the model among more processes (launch.nproc, parallel.dp_shard; now {place.world_size})",
    ]
    return (
        f"out of memory on rank {place.rank} ({device}), at a peak of {memory_gib(device):.2f} GiB of "
        f"{total / 2**30:.2f} GiB. What helps: {'; '.join(keys)}.\n({first})"
    )


def write_to_log(recipe: Recipe, rank: int) -> None:
    """Send what this process prints from here on to its log in the run's directory; rank 0 keeps the terminal."""
    path = log_file(recipe, rank)
    try:
        path.parent.resolve().mkdir(parents=True, exist_ok=True)  # a link may lead where nothing is yet
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise UserError(f"run.dir={recipe.run.dir}: {path} cannot be written: {error.strerror}") from error
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def log_file(recipe: Recipe, rank: int) -> Path:
    return recipe.run.directory / f"log-rank{rank}.txt"
