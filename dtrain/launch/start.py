"""The start of a run: the only reader of the environment.

Three ways to run, told apart by what the environment says:

    torchrun, srun started this process    it is one rank of theirs: in place
    launch.nproc == 1                      in place, without a process group
    launch.nproc > 1                       that many processes of this machine, which `processes` starts
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dtrain.base.errors import Problem, RecipeError, UserError, problems_of_error
from dtrain.base.hardware import num_cores
from dtrain.base.processes import import_search_path
from dtrain.base.ranges import plural
from dtrain.launch.devices import resolve_device_type, resolve_nproc
from dtrain.launch.rank import RunJob, StartPlan, Train, run_in_place
from dtrain.launch.rank_info import RankInfo, number, read_rank_info
from dtrain.recipe import Recipe, derive_sizes, redact, redacted_errors
from dtrain.recipe.world import unresolved_auto_keys
from dtrain.training import recipe_and_problems
from dtrain.training.hub_files import missing_problems, to_copy, with_local_model, with_small_files
from dtrain.training.inputs import RunInputs, World
from dtrain.training.preflight import notes, preflight, redacted
from dtrain.training.setup.code import named_code


def launch(recipe: Recipe | Callable[[], Recipe], train: Train | None = None, plan: StartPlan | None = None) -> Recipe:
    """Run `recipe`, or what it gives, to its end, in place or in processes of its own, and return it as it was run.
    `train` defaults to `dtrain.training.trainer.train_checked`. plan: computes the run's plan while it runs, if
    metrics.plan asks for one; a function of a module, for workers to import.

    Raises UserError (RecipeError for the recipe's own problems, before anything starts), Stopped after SIGINT, SIGTERM,
    SIGHUP or SIGUSR1, KeyboardInterrupt after a second signal, WorkerFailed when a worker died of anything else.
    """
    rank_info = None
    try:
        recipe = resolve_nproc(recipe() if callable(recipe) else recipe)
        rank_info = read_rank_info(os.environ, recipe.launch.num_processes)
        recipe = _checked(recipe, rank_info.world_size if rank_info else recipe.launch.num_processes)
    except UserError as problem:
        rank_info = rank_info or read_rank_info(os.environ, 1)
        if rank_info is not None and rank_info.needs_rendezvous:
            from dtrain.launch.rendezvous import raise_on_all_ranks  # of several hosts only

            raise_on_all_ranks(rank_info, problem)
        raise
    with redacted_errors(recipe):
        _start(recipe, rank_info, train, plan)
    return recipe


def validate(recipe: str | Path | Mapping, overrides: Sequence[str] = (), world_size: int | None = None) -> list[str]:
    """Return lines about a recipe that `launch` would run to its first step; nothing is started.

    world_size: of a world that may be elsewhere, so that this machine's devices play no part; None: `launch.nproc`
    processes here. Raises UserError as `read` does, RecipeError with every problem that is found.
    """
    parsed, problems = recipe_and_problems(recipe, overrides)
    is_here = world_size is None
    small = with_small_files(with_local_model(resolve_nproc(parsed)))
    loaded = small.recipe
    size = loaded.launch.num_processes if world_size is None else world_size
    device_problems: list[Problem] = []
    device_type = "cpu"
    if is_here:
        try:
            device_type = resolve_device_type(loaded.launch.device, loaded.train.dtype, max(size, 1), os.environ)
        except UserError as error:
            device_problems = problems_of_error("launch.device", error)
    from dtrain.training.dry_run import dry_run  # loads torch

    world = World(size, device_type, is_here)
    result = dry_run(loaded, world, pending_downloads=small.pending_downloads, refused=[*problems, *small.problems])
    found = [*device_problems, *result.problems]
    if found:
        raise RecipeError(redacted(problem, loaded) for problem in found)
    steps = f", {result.steps} {plural(result.steps, 'step')}" if result.steps is not None else ""
    verdict = f"ok: {loaded.run.name}, {loaded.method} on {size} {plural(size, 'process')}{steps}"
    lines = [verdict, str(derive_sizes(result.recipe, size)), *notes(loaded), *result.notes]
    if keys := unresolved_auto_keys(loaded):
        lines.append(f"auto: the run's plan decides {', '.join(keys)} (dtrain plan shows it)")
    lines += [*small.pending_downloads.values(), *to_copy(loaded)]
    return [redact(line, loaded) for line in lines]


def _start(recipe: Recipe, rank_info: RankInfo | None, train: Train | None, plan: StartPlan | None) -> None:
    _admit_code(recipe, rank_info is None or rank_info.rank == 0)
    if rank_info is None and recipe.launch.num_processes == 1:
        _note_tasks(os.environ)
    if rank_info is None and recipe.launch.num_processes > 1:
        from dtrain.launch import processes  # loads torch

        processes.run_workers(RunJob(recipe, _threads(recipe.launch.num_processes), train, plan), os.environ)
        return
    rank_info = rank_info or RankInfo(environ=os.environ)
    per_task = number(os.environ, "SLURM_CPUS_PER_TASK", 0) if rank_info.started_by == "slurm" else None
    run_in_place(RunJob(recipe, _threads(rank_info.local_world_size, per_task), train, plan), rank_info)


def _checked(recipe: Recipe, world_size: int) -> Recipe:
    """`recipe` with a model that is here, downloaded perhaps. Raises UserError."""
    recipe = with_local_model(recipe)
    problems = preflight(recipe, world_size)
    if not problems and missing_problems(recipe):
        recipe = with_local_model(recipe, fetch=True)
        problems = preflight(recipe, world_size)
    if problems:
        raise RecipeError(problems)
    return recipe


def _admit_code(recipe: Recipe, tells: bool) -> None:
    """A recipe may come from anyone: what it makes a run import is said before that happens."""
    lines = named_code(RunInputs.of(recipe, World(1)))
    if lines:
        sys.path[:] = import_search_path()
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


def work(directory: str) -> None:
    """Be a process that `processes.run_workers` started. Never returns."""
    rank_info = read_rank_info(os.environ, 1)
    assert rank_info is not None, "its launcher says which rank it is"
    from dtrain.launch import processes

    processes.work(Path(directory), rank_info)


def _threads(processes: int, per_task: int | None = None) -> int | None:
    """CPU threads of each of `processes` on this machine, of which each was given `per_task` cores; None, torch's own
    choice, where OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    return min(num_cores(), per_task) if per_task else max(1, num_cores() // processes)
