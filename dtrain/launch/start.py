"""The start of a run: the only reader of the environment.

Three ways to run, told apart by what the environment says:

    torchrun, srun started this process    it is one rank of theirs: in place
    launch.nproc == 1                      in place, without a process group
    launch.nproc > 1                       that many processes of this machine, which we start and watch (`agent`)
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

from dtrain.config import Recipe, hiding, notes
from dtrain.errors import RecipeError, UserError
from dtrain.launch import agent
from dtrain.launch.rank import RankPlace, Train, run_in_place, told_to_all
from dtrain.preflight import named_code, not_here, preflight, with_local_model
from dtrain.rollout.child import search_path


def launch(recipe: Recipe | Callable[[], Recipe], train: Train | None = None) -> None:
    """Run `recipe`, or what it gives, to its end, in place or in processes of its own. `train` defaults to
    `dtrain.trainer.train`.

    Raises UserError (RecipeError for the recipe's own problems, before anything starts), Stopped after SIGINT, SIGTERM
    or SIGUSR1, KeyboardInterrupt after a second Ctrl-C, agent.WorkerFailed when a worker died of anything else.
    """
    place = None
    try:
        recipe = recipe() if callable(recipe) else recipe
        place = find_place(os.environ, recipe.launch.nproc)
        recipe = _checked(recipe, place.world_size if place else recipe.launch.nproc)
    except UserError:
        with told_to_all(place or find_place(os.environ, 1)):
            raise
    with hiding(recipe):
        _start(recipe, place, train)


def _start(recipe: Recipe, place: RankPlace | None, train: Train | None) -> None:
    _admit_code(recipe, place is None or place.rank == 0)
    if place is None and recipe.launch.nproc == 1:
        _note_tasks(os.environ)
    if place is None and recipe.launch.nproc > 1:
        agent.run_workers(recipe, _threads(recipe.launch.nproc), os.environ, train)
    else:
        place = place or RankPlace(environ=os.environ)
        run = _recorded(run_in_place) if place.started_by == "torchrun" else run_in_place
        per_task = _number(os.environ, "SLURM_CPUS_PER_TASK", 0) if place.started_by == "slurm" else None
        run(recipe, place, _threads(place.local_world_size, per_task), train)


def _checked(recipe: Recipe, world_size: int) -> Recipe:
    """`recipe` with a model that is here, downloaded perhaps. Raises UserError."""
    recipe = with_local_model(recipe)
    problems = preflight(recipe, world_size)
    if problems and problems == not_here(recipe):
        recipe = with_local_model(recipe, fetch=True)
        problems = preflight(recipe, world_size)
    if problems:
        raise RecipeError(problems)
    return recipe


def _admit_code(recipe: Recipe, tells: bool) -> None:
    """A recipe may come from anyone: what it makes a run import is said before that happens."""
    lines = named_code(recipe)
    if lines:
        sys.path[:] = search_path()
        lines = ["the recipe names code, which this run imports:", *(f"  {line}" for line in lines)]
    for line in [*lines, *notes(recipe)] if tells else []:
        print(line, file=sys.stderr)


def _note_tasks(environ: Mapping[str, str]) -> None:
    """A batch script that forgot srun runs on one process of all that it was given."""
    tasks = environ.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ and tasks not in ("0", "1"):
        print(
            f"note: this is one process in a SLURM job of {tasks} tasks; `srun dtrain run ...` starts a rank for each",
            file=sys.stderr,
        )


def work(job: str, beats: str) -> None:
    """The main function of a process that `agent.run_workers` started. Never returns."""
    agent.work(Path(job), int(beats), find_place(os.environ, 1))


def _recorded(run: Callable[..., None]) -> Callable[..., None]:
    """Leave an error where torchrun looks for it: it tells of the first one, whichever rank had it."""
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(run)


def _threads(processes: int, per_task: int | None = None) -> int | None:
    """CPU threads of each of `processes` on this machine, of which each was given `per_task` cores; None, torch's own
    choice, where OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, per_task) if per_task else max(1, cores // processes)


def find_place(environ: MutableMapping[str, str], nproc: int) -> RankPlace | None:
    """Where torchrun or SLURM put this process, or None where nobody started it as one of several ranks.

    Of SLURM's processes srun's tasks are ranks; a batch script and a shell of salloc are none, and neither is a step of
    one task that asks for processes of its own (`nproc` > 1). Raises UserError for an environment that contradicts
    itself.
    """
    if all(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        world = _number(environ, "WORLD_SIZE")
        place = RankPlace(
            rank=_number(environ, "RANK"),
            local_rank=_number(environ, "LOCAL_RANK"),
            world_size=world,
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE", 1 if world == 1 else None),
            started_by="torchrun",
            attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
            master=(environ.get("MASTER_ADDR", "localhost"), _number(environ, "MASTER_PORT", 29500)),
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            environ=environ,
        )
    elif "SLURM_PROCID" in environ and _is_step(environ):
        tasks = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ), "SLURM_NTASKS")
        world = _number(environ, tasks)
        if world == 1 < nproc:
            return None
        place = RankPlace(
            rank=_number(environ, "SLURM_PROCID"),
            local_rank=_number(environ, "SLURM_LOCALID"),
            world_size=world,
            local_world_size=_tasks_here(environ, world),
            started_by="slurm",
            attempt=_number(environ, "SLURM_RESTART_COUNT", 0),
            master=_slurm_master(environ),
            environ=environ,
        )
    else:
        return None
    if not 0 <= place.rank < place.world_size:
        raise UserError(
            f"{place.started_by} started this process as rank {place.rank} of {place.world_size}, says the environment"
        )
    return place


def _number(environ: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environ.get(name)
    if text is None and otherwise is not None:
        return otherwise
    if text is None or not text.isdecimal():
        what = "is not set" if text is None else f"is {text!r}, which is no number"
        raise UserError(f"this process was started as one of several ranks, but {name} {what} in its environment")
    return int(text)


def _is_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process. The shell that salloc opens is a step too, of a number beyond srun's."""
    step = environ.get("SLURM_STEP_ID", "")
    first_special = 0xFFFFFFF0
    return step.isdecimal() and int(step) < first_special


def _tasks_here(environ: Mapping[str, str], world: int) -> int:
    """The step's tasks on this node, from a list such as `2(x3),1`."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    nodes = [
        int(tasks)
        for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", listed)
        for _ in range(int(times or 1))
    ]
    node = _number(environ, "SLURM_NODEID", 0)
    return nodes[node] if node < len(nodes) else max(nodes, default=world)


def _slurm_master(environ: Mapping[str, str]) -> tuple[str, int]:
    """Rank 0's host, the first of the step's node list, and a port that two steps on one machine rarely share.

    A step on one host meets at its loopback. SLURM_LAUNCH_NODE_IPADDR is srun's own host, which may be a login node: it
    counts where no list is given. The port lies below those that systems give to connections (from 32768 on Linux).
    """
    lists = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    nodes = next((environ[name] for name in lists if name in environ), "")
    listed = first_host(nodes) if nodes else environ.get("SLURM_LAUNCH_NODE_IPADDR", "localhost")
    listed = "localhost" if environ.get("SLURM_STEP_NUM_NODES") == "1" else listed
    step = _number(environ, "SLURM_JOB_ID", 0) + 1009 * _number(environ, "SLURM_STEP_ID", 0)
    return environ.get("MASTER_ADDR") or listed, _number(environ, "MASTER_PORT", 20000 + step % 12000)


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list such as `gpu[07-09,12],login1`: scontrol's answer, or our own reading."""
    if not nodes:
        return "localhost"
    if shutil.which("scontrol"):
        shown = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)
        if shown.returncode == 0 and shown.stdout.strip():
            return shown.stdout.split()[0]
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)
