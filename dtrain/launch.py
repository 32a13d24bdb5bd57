"""The start of a run: the only reader of the environment.

Three ways to run, told apart by what the environment says:

    torchrun, SLURM started this process   it is one rank of theirs: in place
    launch.nproc == 1                      in place, without a process group
    launch.nproc > 1                       torchrun's own elastic agent starts that many processes (`agent`)
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping

from dtrain import agent
from dtrain.config import Recipe
from dtrain.errors import RecipeError
from dtrain.preflight import not_here, preflight, with_local_model
from dtrain.rank import Place, Train, run_in_place


def launch(recipe: Recipe, train: Train | None = None) -> None:
    """Run `recipe` to its end, in place or in processes of its own. `train` defaults to `dtrain.trainer.train`.

    Raises UserError (RecipeError for the recipe's own problems, before anything starts), Stopped after SIGINT, SIGTERM
    or SIGUSR1, KeyboardInterrupt after a second Ctrl-C, agent.WorkerFailed when a worker died of anything else.
    """
    recipe = with_local_model(recipe)
    place = find_place(os.environ, recipe.launch.nproc)
    world_size = place.world_size if place else recipe.launch.nproc
    problems = preflight(recipe, world_size)
    if problems and problems == not_here(recipe):
        recipe = with_local_model(recipe, fetch=True)
        problems = preflight(recipe, world_size)
    if problems:
        raise RecipeError(problems)
    if place is None and recipe.launch.nproc > 1:
        agent.run_workers(recipe, _threads(recipe.launch.nproc), train)
    else:
        place = place or Place()
        run = _recorded(run_in_place) if place.started_by == "torchrun" else run_in_place
        run(recipe, place, _threads(place.local_world_size), train)


def work(job: str) -> None:
    """The main function of a process that `agent.run_workers` started. Never returns."""
    agent.work(job, find_place(os.environ, 1))


def _recorded(run: Callable[..., None]) -> Callable[..., None]:
    """Leave an error where torchrun looks for it: it tells of the first one, whichever rank had it."""
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(run)


def _threads(processes: int) -> int | None:
    """CPU threads of each of `processes` on this machine; None, torch's own choice, where OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)


def find_place(environ: Mapping[str, str], nproc: int) -> Place | None:
    """Where torchrun or SLURM put this process, or None where nobody started it as a rank.

    A SLURM batch script that asks for processes of its own (`nproc` > 1) is no rank: srun starts those.
    """
    if all(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        world = int(environ["WORLD_SIZE"])
        local_world = int(environ.get("LOCAL_WORLD_SIZE", world))
        return Place(
            rank=int(environ["RANK"]),
            local_rank=int(environ["LOCAL_RANK"]),
            world_size=world,
            local_world_size=local_world,
            started_by="torchrun",
            attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
            master=(environ.get("MASTER_ADDR", "localhost"), int(environ.get("MASTER_PORT", 29500))),
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    if not all(name in environ for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")):
        return None
    if nproc > 1 and "SLURM_STEP_ID" not in environ and "SLURM_JOB_ID" in environ:
        return None
    world = int(environ["SLURM_NTASKS"])
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(world)
    return Place(
        rank=int(environ["SLURM_PROCID"]),
        local_rank=int(environ["SLURM_LOCALID"]),
        world_size=world,
        local_world_size=int(re.match(r"\d+", per_node)[0]),
        started_by="slurm",
        attempt=int(environ.get("SLURM_RESTART_COUNT", 0)),
        master=_slurm_master(environ),
    )


def _slurm_master(environ: Mapping[str, str]) -> tuple[str, int]:
    """Rank 0's host, the first of the step's node list, and a port that two steps on one machine rarely share.

    SLURM_LAUNCH_NODE_IPADDR is srun's own host, which may be a login node: it counts where no list is given. The port
    lies below those that systems give to connections (from 32768 on Linux).
    """
    lists = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    nodes = next((environ[name] for name in lists if name in environ), "")
    listed = first_host(nodes) if nodes else environ.get("SLURM_LAUNCH_NODE_IPADDR", "localhost")
    step = int(environ.get("SLURM_JOB_ID", 0)) + 1009 * int(environ.get("SLURM_STEP_ID", 0))
    host, port = environ.get("MASTER_ADDR") or listed, environ.get("MASTER_PORT") or 20000 + step % 12000
    return host, int(port)


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list such as `gpu[07-09,12],login1`: scontrol's answer, or our own reading."""
    if not nodes:
        return "localhost"
    if shutil.which("scontrol"):
        shown = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)
        if shown.returncode == 0 and shown.stdout.strip():
            return shown.stdout.split()[0]
    first = re.match(r"[^,\[]+(\[[^\]]*\][^,\[]*)*", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)
