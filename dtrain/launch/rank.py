"""One rank of a run, from its device to its training. `run_rank` calls the steps below in order.

`run_in_place` is `run_rank` in a process that torchrun or SLURM started, or in the command's own process. Ranks that
`launch.nproc` starts come from `dtrain.launch.processes`.

The ranks first check that they agree on the recipe, the versions and the run's directory. A command is typed, a file is
copied and a directory is mounted on each host separately. If one of them differs, ranks would train different runs
together, or save a checkpoint in parts that never come together. The trainer compares models and data.
"""

import hashlib
import importlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain import __version__, recipe as config
from dtrain.base.errors import UserError
from dtrain.base.hardware import DeviceFacts, free_host_memory, total_memory
from dtrain.launch.devices import (
    check_on_all_ranks,
    choose_device,
    device_notes,
    find_device_problems,
    start_device,
)
from dtrain.launch.exits import OutOfMemory, Report, log_file, on_stop_signals
from dtrain.launch.rank_info import RankInfo
from dtrain.recipe import Recipe
from dtrain.recipe.world import (
    AUTO,
    COMPILE,
    choose_compile,
    format_overrides,
    get_key,
    replace_keys,
    unresolved_auto_keys,
)
from dtrain.training import build_method

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from dtrain.base.ranks import Ranks
    from dtrain.launch.rendezvous import RendezvousResult
    from dtrain.parallel.mesh import Runtime, StopFlag
    from dtrain.training.sizing import BackgroundPlan, Sizing


SEEN_SECONDS = 5.0  # timeout for a new file to become visible on every host

# Keys that may differ between ranks: they change no number, or only one rank reads them.
KEYS_THAT_MAY_DIFFER = ("launch", "metrics", "data.cache_dir", "data.num_workers")

Train = Callable[[Recipe, "Runtime"], None]

StartPlan = Callable[[Recipe, int, str], AbstractContextManager["BackgroundPlan"]]
"""(recipe, world size, device type) -> the run's plan, computed in a process of its own while the run starts.

It is `commands.plan.background.PlannedPeak`."""

STOPPING = b"\nsaving and stopping; press Ctrl-C again to end at once, losing what is not saved\n"


@dataclass(frozen=True)
class RunJob:
    """A run, as its launcher passes it to the ranks.

    Attributes:
        recipe: The recipe.
        threads: CPU threads of each rank. None: torch's choice.
        train: The function that trains. None: `training.trainer.train_checked`.
        plan: Starts the computation of the run's plan. None: there is no plan.
    """

    recipe: Recipe
    threads: int | None = None
    train: Train | None = None
    plan: StartPlan | None = None


@dataclass(frozen=True)
class StartedPlan:
    """Sizes of a run that are known before the ranks meet.

    Attributes:
        is_open: Whether the recipe has keys that are `auto` and that a plan decides.
        sizing: The values of these keys, if they can be chosen without a plan. None on ranks other than 0.
        planned: The plan, which another process computes. None without a plan, and on ranks other than 0.
    """

    is_open: bool
    sizing: "Sizing | None" = None
    planned: "BackgroundPlan | None" = None


@dataclass(frozen=True)
class ResolvedSizes:
    """The sizes of a run, the same on all ranks.

    Attributes:
        recipe: The recipe without `auto` in the keys that a plan decides.
        lines: Lines to print about the decisions.
        machine: Description of the machine that the sizes were chosen for. The run saves it in about.json, so that a
            later start on the same machine can reuse the sizes.
    """

    recipe: Recipe
    lines: tuple[str, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)


def run_rank(
    job: RunJob,
    rank_info: RankInfo,
    device: "torch.device",
    stop: "StopFlag",
    rendezvous: "RendezvousResult | None" = None,
    terminal: int | None = None,
) -> None:
    """Set this rank up on `device`, train, and destroy its process group.

    After a restart the rank continues from the newest checkpoint.

    Args:
        job: The run.
        rank_info: This rank.
        device: Its device.
        stop: Set by a stop signal.
        rendezvous: The rendezvous of ranks that torchrun or SLURM started. None for ranks of `launch.nproc`.
        terminal: A descriptor on which a failure is shown, if this process's stderr goes to its log.

    Raises:
        UserError: If memory ran out, or if another rank was lost (ServiceUnavailable).
        Exception: Whatever `job.train` raises.
    """
    # The order of the steps matters. The plan is computed in a forked process, so it starts before CUDA and before the
    # process group. Recipes are compared before rank 0 chooses values for `auto`, which would hide differences. Devices
    # are checked through the store before NCCL starts, which could hang.
    set_threads(job.threads)
    with ExitStack() as stack:
        attempt = rank_info.attempt if rendezvous is None else rendezvous.attempt
        recipe = with_auto_resume(job.recipe) if attempt else job.recipe
        recipe, lines = resolve_compile(recipe, device)
        plan = start_plan(recipe, job, rank_info, device, stack)
        store = open_store(rank_info, rendezvous)
        use_interfaces(recipe, job, rank_info, device, stack)
        show_failures(recipe, rank_info, rendezvous, terminal, stack)
        if store is not None:
            check_recipes_agree(recipe, replace(rank_info, attempt=attempt), store)
        devices = start_devices(recipe, rank_info, device, attempt, store, plan)
        sizes = choose_sizes(recipe, rank_info, attempt, store, plan, devices)
        recipe = sizes.recipe
        join_process_group(recipe, rank_info, device, store)
        if rendezvous is not None:
            check_hosts_agree(recipe)
        stack.enter_context(memory_errors(recipe, rank_info, device))
        use_deterministic(recipe, rank_info, stack)
        train(job, rank_info, device, stop, plan, replace(sizes, lines=lines + sizes.lines))
    leave_process_group(rank_info)


def set_threads(threads: int | None) -> None:
    """Set the number of torch's CPU threads. None leaves torch's choice."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def resolve_compile(recipe: Recipe, device: "torch.device") -> tuple[Recipe, tuple[str, ...]]:
    """Replace `train.compile=auto` by a value, so that the plan and the trainer agree on it.

    Returns:
        The recipe, and on CUDA a line about the choice and its reason.
    """
    if get_key(recipe, COMPILE) != AUTO:
        return recipe, ()
    choice = choose_compile(recipe, device.type)
    chosen = replace_keys(recipe, {COMPILE: choice.value})
    if device.type != "cuda":
        return chosen, ()
    (setting,) = format_overrides({COMPILE: choice.value})
    return chosen, (f"{setting} (auto): {choice.reason}",)


def start_plan(
    recipe: Recipe, job: RunJob, rank_info: RankInfo, device: "torch.device", stack: ExitStack
) -> StartedPlan:
    """Choose sizes without a plan, or start to compute a plan in another process. Does neither on ranks other than 0.

    The process is forked, so this must be called before the process group and before CUDA are started. `stack` ends the
    process.
    """
    import torch

    from dtrain.training.sizing import CPU, describe_machine, sizing_without_plan

    is_open = job.plan is not None and bool(unresolved_auto_keys(recipe))
    if job.plan is None or rank_info.rank > 0:
        return StartedPlan(is_open)
    sizing = None
    if is_open and device.type == "cpu":
        machine = describe_machine(rank_info.world_size, CPU, total_memory())
        sizing = sizing_without_plan(recipe, machine, free_host_memory(rank_info.local_world_size))
    needs_plan = is_open and sizing is None
    if recipe.metrics.plan == "auto":
        is_planned = device.type == "cuda" or needs_plan
    elif recipe.metrics.plan is False:
        is_planned = False
    else:
        is_planned = bool(recipe.metrics.plan) or needs_plan
    # An earlier run in this process may have started CUDA, which does not survive a fork.
    if not is_planned or torch.cuda.is_initialized():
        return StartedPlan(is_open, sizing)
    sized_recipe = recipe if sizing is None else replace_keys(recipe, sizing.values)
    planned = stack.enter_context(job.plan(sized_recipe, rank_info.world_size, device.type))
    return StartedPlan(is_open, sizing, planned)


def open_store(rank_info: RankInfo, rendezvous: "RendezvousResult | None") -> "dist.Store | None":
    """Return the store of this start; None for a single rank."""
    import torch.distributed as dist

    if rendezvous is not None:
        return rendezvous.store
    if rank_info.world_size == 1:
        return None
    return dist.FileStore(str(rank_info.file), rank_info.world_size)  # in its launcher's private directory


def use_interfaces(recipe: Recipe, job: RunJob, rank_info: RankInfo, device: "torch.device", stack: ExitStack) -> None:
    """Set the network interfaces of the process groups until `stack` closes."""
    from dtrain.launch.rendezvous import network_interface_set

    # NCCL reads its variable once per process. A run that sends weights to a server, or a caller's own training
    # function, may later create a group that reaches beyond this host, so NCCL is then not limited to the loopback.
    may_leave_host = job.train is not None or build_method(recipe).sends_weights()
    stack.enter_context(network_interface_set(rank_info, nccl=device.type == "cuda" and not may_leave_host))


def start_devices(
    recipe: Recipe,
    rank_info: RankInfo,
    device: "torch.device",
    attempt: int,
    store: "dist.Store | None",
    plan: StartedPlan,
) -> list[DeviceFacts]:
    """Start CUDA and check that the run can use the devices of all ranks.

    Returns:
        The devices of all ranks on rank 0. An empty list on other ranks and on CPUs.

    Raises:
        UserError: On every rank, if the run cannot use the devices.

    Collectives:
        Those of `check_on_all_ranks`, through `store`.
    """
    if device.type != "cuda":
        return []
    start = partial(start_device, device, rank_info)
    planned = None if plan.is_open else plan.planned
    find_problems = partial(_find_device_problems, recipe, planned)
    return check_on_all_ranks(start, replace(rank_info, attempt=attempt), store, find_problems)


def choose_sizes(
    recipe: Recipe,
    rank_info: RankInfo,
    attempt: int,
    store: "dist.Store | None",
    plan: StartedPlan,
    devices: Sequence[DeviceFacts],
) -> ResolvedSizes:
    """Choose values for the keys that are `auto`, on rank 0, and share them with all ranks.

    Args:
        recipe: The recipe.
        rank_info: This rank.
        attempt: Number of restarts.
        store: Store of all ranks. None for a single rank.
        plan: Values that are known already, and the plan.
        devices: Devices of all ranks. Empty on CPUs and on ranks other than 0.

    Collectives:
        Through `store`, if the recipe has keys that are `auto`.
    """
    from dtrain.training.sizing import CPU, describe_machine, share_sizing, sizing_with_plan

    if not plan.is_open:
        return ResolvedSizes(recipe)
    smallest = min(devices, key=lambda device: device.memory, default=None)
    if smallest is None:
        machine = describe_machine(rank_info.world_size, CPU, total_memory())
    else:
        machine = describe_machine(rank_info.world_size, smallest.name, smallest.memory)
    free = min((device.free for device in devices if device.free is not None), default=None)
    host = free_host_memory(rank_info.local_world_size)

    def decide() -> "Sizing":
        if plan.sizing is not None:
            return plan.sizing
        return sizing_with_plan(recipe, machine, host, plan.planned, smallest, free)

    recipe, lines = share_sizing(recipe, rank_info.rank, attempt, store, decide)
    return ResolvedSizes(recipe, lines, machine)


def join_process_group(recipe: Recipe, rank_info: RankInfo, device: "torch.device", store: "dist.Store | None") -> None:
    """Start the process group of the run. Collective."""
    from dtrain.launch.rendezvous import allow_open_files
    from dtrain.parallel.mesh import init_process_group

    if store is not None:
        allow_open_files()
        init_process_group(device.type, store, rank_info.rank, rank_info.world_size, recipe.launch.collective_timeout)


def show_failures(
    recipe: Recipe, rank_info: RankInfo, rendezvous: "RendezvousResult | None", terminal: int | None, stack: ExitStack
) -> None:
    """Show the first failure of any rank once on each host, until `stack` closes. Only if there is a rendezvous."""
    from dtrain.launch.rendezvous import first_failure_reported

    if rendezvous is not None:
        stack.enter_context(first_failure_reported(rank_info, rendezvous.store, recipe, terminal))


def use_deterministic(recipe: Recipe, rank_info: RankInfo, stack: ExitStack) -> None:
    """Have torch use deterministic algorithms until `stack` closes, if the recipe asks for them."""
    if recipe.run.deterministic:
        deterministic = importlib.import_module("dtrain.base.torch_functions")
        stack.enter_context(deterministic.deterministic_algorithms(rank_info.environ))


def train(
    job: RunJob, rank_info: RankInfo, device: "torch.device", stop: "StopFlag", plan: StartedPlan, sizes: ResolvedSizes
) -> None:
    """Train, with `job.train` or the trainer."""
    from dtrain.parallel.mesh import Runtime

    runtime = Runtime(
        rank=rank_info.rank,
        local_rank=rank_info.local_rank,
        world_size=rank_info.world_size,
        device=device,
        stop=stop,
        wait_for_plan=plan.planned.peak if plan.planned else None,
        collective_timeout=sizes.recipe.launch.collective_timeout,
        size_notes=sizes.lines,
        machine=sizes.machine,
    )
    act = job.train or importlib.import_module("dtrain.training.trainer").train_checked
    act(sizes.recipe, runtime)


def leave_process_group(rank_info: RankInfo) -> None:
    """Destroy the process group of `join_process_group`."""
    import torch.distributed as dist

    if rank_info.world_size > 1:
        dist.destroy_process_group()


def _find_device_problems(
    recipe: Recipe, planned: "BackgroundPlan | None", devices: Sequence[DeviceFacts]
) -> Sequence[str]:
    """Return the reasons why the run cannot use the GPUs of its ranks. Print notes if there is none.

    Args:
        recipe: The recipe.
        planned: The run's plan, or None.
        devices: The devices of all ranks.
    """
    reasons = find_device_problems(devices, recipe.train.dtype)
    remarks = device_notes(devices)
    if planned is not None:
        smallest = min(devices, key=lambda device: device.memory)
        peak = planned.peak_if_too_large(smallest)
        if peak is not None and peak.too_much is not None:
            # A smaller peak may fit after all: the share of a device's memory that can be used is an estimate.
            if peak.size > smallest.memory:
                reasons.append(peak.too_much)
            else:
                remarks.append(peak.too_much)
    if not reasons:
        for line in remarks:
            print(f"note: {line}", file=sys.stderr)
    return reasons


def run_in_place(job: RunJob, rank_info: RankInfo) -> None:
    """Call `run_rank` in this process, with handlers for stop signals and a report for torch's agent if it fails."""
    from dtrain.parallel.mesh import StopFlag

    stop = StopFlag()

    def on_stop_signal(signum: int) -> None:
        stop.request(signum)
        if rank_info.rank == 0:
            os.write(2, STOPPING)

    with on_stop_signals(on_stop_signal), reported_to_agent(job.recipe, rank_info):
        if not rank_info.needs_rendezvous:
            run_rank(job, rank_info, choose_device(job.recipe.launch.device, rank_info), stop)
            return
        from dtrain.launch.rendezvous import join_rendezvous, raise_on_all_ranks

        try:
            device = choose_device(job.recipe.launch.device, rank_info)
            log = open_log(job.recipe, rank_info.rank) if rank_info.rank > 0 else None
        except UserError as problem:
            raise_on_all_ranks(rank_info, problem)
        terminal = None
        if log is not None and rank_info.local_rank > 0:
            redirect_output(log)
        rendezvous = join_rendezvous(rank_info, stop)  # one process of each host shows the problems of all
        if log is not None and rank_info.local_rank == 0:
            terminal = os.dup(2)
            redirect_output(log)
        run_rank(job, rank_info, device, stop, rendezvous, terminal)


@contextmanager
def reported_to_agent(recipe: Recipe, rank_info: RankInfo) -> Iterator[None]:
    """Write torch's error file if the block raises, so that torchrun prints our message instead of a traceback."""
    try:
        yield
    except BaseException as error:
        is_main = threading.current_thread() is threading.main_thread()
        if rank_info.started_by == "torchrun" and is_main:
            # Once one process has ended, torchrun sends SIGTERM to the others. They may still be writing their reports.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Report.of(error, rank_info.rank, recipe).write(rank_info.environ)
        raise


def with_auto_resume(recipe: Recipe) -> Recipe:
    """Return the recipe of a restarted run, with `checkpoint.resume=auto`.

    A path in `checkpoint.resume` stays if nothing has been saved yet.
    """
    saved = (recipe.run.directory / "checkpoints").glob("step-*")
    if recipe.checkpoint.resume is None or any(saved):
        return replace(recipe, checkpoint=replace(recipe.checkpoint, resume="auto"))
    return recipe


@contextmanager
def memory_errors(recipe: Recipe, rank_info: RankInfo, device: "torch.device") -> Iterator[None]:
    """Turn a failed allocation inside the block into OutOfMemory.

    Raises:
        OutOfMemory: With the peak, and the recipe keys that lower it.
    """
    import torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        first = (str(error).splitlines() or ["out of memory"])[0]
        # torch raises a plain RuntimeError if the host's memory or pinned memory cannot be allocated.
        is_host_memory = "can't allocate memory" in first
        is_pinned_memory = "CUDA error: out of memory" in first
        is_device_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not (is_device_memory or is_host_memory or is_pinned_memory):
            raise
        raise OutOfMemory(_memory_advice(recipe, rank_info, device, first)) from error


def _memory_advice(recipe: Recipe, rank_info: RankInfo, device: "torch.device", first: str) -> str:
    """Return the message for a failed allocation, which ends with `first`, the first line of torch's error."""
    import torch

    from dtrain.training.metrics import memory_gib

    is_gpu = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if is_gpu else total_memory()
    micro_batch = recipe.train.num_micro_batch_rows
    checkpointing = recipe.train.activation_checkpointing
    advice = []
    if micro_batch > 1:
        advice.append(f"lower train.micro_batch (now {micro_batch})")
    if checkpointing != "full":
        advice.append(f"set train.activation_checkpointing=full (now {checkpointing})")
    if recipe.train.tile != "all":
        advice.append("set train.tile=all")
    if recipe.train.activation_offload is not True:
        advice.append("set train.activation_offload=true")
    advice.append(f"lower data.max_length (now {recipe.data.max_length})")
    advice.append(f"share the model among more processes (launch.nproc, parallel.dp_shard; now {rank_info.world_size})")
    return (
        f"out of memory on rank {rank_info.rank} ({device}), at a peak of {memory_gib(device):.2f} GiB of "
        f"{total / 2**30:.2f} GiB. What helps: {'; '.join(advice)}.\n({first})"
    )


def open_log(recipe: Recipe, rank: int) -> int:
    """Open the log of a rank in the run's directory and return its file descriptor.

    Raises:
        UserError: If the log cannot be written.
    """
    path = log_file(recipe, rank)
    try:
        path.parent.resolve().mkdir(parents=True, exist_ok=True)  # the directory may be a link to a missing one
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise UserError(f"run.dir={recipe.run.dir}: {path} cannot be written: {error.strerror}") from error


def redirect_output(log: int) -> None:
    """Redirect stdout and stderr of this process to its log. Rank 0 keeps the terminal."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def check_recipes_agree(recipe: Recipe, rank_info: RankInfo, store: "dist.Store") -> None:
    """Raise UserError, on every rank, if a rank was started with another recipe than rank 0.

    This comes before the process group, and before rank 0 decides the keys that are `auto`. That decision would hide a
    key that another host sets, and a host whose recipe has no `auto` would not take part in it.

    Collectives:
        Through `store`: every rank reads rank 0's recipe, writes its own problem, and reads the result. Rank 0 reads
        the problems of all ranks.
    """
    prefix = f"recipe of attempt {rank_info.attempt}"
    if rank_info.rank == 0:
        salt = secrets.token_hex()
        store.set(prefix, json.dumps([config.to_yaml(recipe), salt, _secret_digests(recipe, salt)]))
    first_yaml, salt, first_digests = json.loads(store.get(prefix))
    problem = _recipe_difference(
        recipe, f"rank {rank_info.rank} on {socket.gethostname()}", first_yaml, salt, first_digests
    )
    store.set(f"{prefix}/{rank_info.rank}", problem)
    if rank_info.rank == 0:
        problems = [store.get(f"{prefix}/{rank}").decode() for rank in range(rank_info.world_size)]
        store.set(f"{prefix}/refusal", "\n".join(problem for problem in problems if problem))
    refusal = store.get(f"{prefix}/refusal").decode()
    if refusal:
        raise UserError(refusal)


def _recipe_difference(recipe: Recipe, name: str, first_yaml: str, salt: str, first_digests: Mapping[str, str]) -> str:
    """Describe how a recipe differs from rank 0's, with a line for each key. Returns "" if the recipes are equal.

    Args:
        recipe: This rank's recipe.
        name: This rank and its host, for the message.
        first_yaml: Rank 0's recipe, without its secrets.
        salt: Random text that the digests were computed with.
        first_digests: Digests of rank 0's secrets by key.
    """
    differences = config.diff_recipes(first_yaml, recipe)
    for key, digest in _secret_digests(recipe, salt).items():
        if digest != first_digests.get(key):
            differences.append((key, "a value that is not shown", "another"))
    lines = []
    for key, first_value, own_value in differences:
        if not _may_differ(key):
            lines.append(f"\n  {key}: {first_value} on rank 0, {own_value} here")
    if not lines:
        return ""
    return f"{name} was started with another recipe than rank 0; start every host with the same{''.join(lines)}"


def _secret_digests(recipe: Recipe, salt: str) -> dict[str, str]:
    """Return salted digests of the recipe's secrets, which its YAML does not show, by key."""
    values = config.redacted_values(recipe)
    return {key: hashlib.sha256(f"{salt}{value}".encode()).hexdigest() for key, value in values.items()}


def _may_differ(key: str) -> bool:
    """Return whether a key may differ between ranks."""
    return any(key == name or key.startswith(f"{name}.") for name in KEYS_THAT_MAY_DIFFER)


def check_hosts_agree(recipe: Recipe) -> None:
    """Raise UserError, on every rank, if hosts have different versions, or do not share the run's directory.

    Collectives:
        Over all ranks, through the process group.
    """
    import torch  # the launcher, which imports this file, starts without it

    from dtrain.base.ranks import Ranks

    ranks = Ranks()
    ranks.check_same(f"dtrain {__version__}, torch {torch.__version__}", "the hosts have different versions")
    _refuse_separate_directories(recipe.run.directory, ranks)


def _refuse_separate_directories(run: Path, ranks: "Ranks") -> None:
    """Raise UserError, on every rank, if a rank does not see a file that rank 0 writes.

    Collectives:
        One broadcast from rank 0, and one all-gather of objects.
    """

    def write() -> Path:
        run.resolve().mkdir(parents=True, exist_ok=True)
        path = run / f".seen-by-all-{secrets.token_hex(8)}"
        path.touch()
        return path

    path = ranks.run_on_first(write)

    def look() -> None:
        until = time.monotonic() + SEEN_SECONDS
        while not path.exists():
            if time.monotonic() > until:
                raise UserError(
                    f"{ranks.description} does not see what rank 0 writes to {run}: set run.dir to a directory that "
                    "all hosts share, under the same path; a checkpoint is written by all ranks"
                )
            time.sleep(0.1)

    try:
        ranks.gather_results(look)
    finally:
        if ranks.is_first:
            path.unlink(missing_ok=True)
