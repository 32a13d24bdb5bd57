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
from dtrain.base.processes import search_path
from dtrain.base.ranges import plural
from dtrain.launch.devices import device_of_all, with_processes
from dtrain.launch.place import RankPlace, find_place, number
from dtrain.launch.rank import PlanBeside, RunJob, Train, run_in_place
from dtrain.recipe import Recipe, redact, redacted_errors, sizes
from dtrain.recipe.world import open_keys
from dtrain.training import recipe_and_problems
from dtrain.training.hub_files import missing_problems, to_copy, with_local_model, with_small_files
from dtrain.training.inputs import RunInputs, World
from dtrain.training.preflight import notes, preflight, redacted
from dtrain.training.setup.code import named_code


def launch(recipe: Recipe | Callable[[], Recipe], train: Train | None = None, plan: PlanBeside | None = None) -> Recipe:
    """Run `recipe`, or what it gives, to its end, in place or in processes of its own, and return it as it was run.
    `train` defaults to `dtrain.training.trainer.train_checked`. plan: computes the run's plan while it runs, if
    metrics.plan asks for one; a function of a module, for workers to import.

    Raises UserError (RecipeError for the recipe's own problems, before anything starts), Stopped after SIGINT, SIGTERM,
    SIGHUP or SIGUSR1, KeyboardInterrupt after a second signal, WorkerFailed when a worker died of anything else.
    """
    place = None
    try:
        recipe = with_processes(recipe() if callable(recipe) else recipe)
        place = find_place(os.environ, recipe.launch.processes)
        recipe = _checked(recipe, place.world_size if place else recipe.launch.processes)
    except UserError as problem:
        place = place or find_place(os.environ, 1)
        if place is not None and place.meets_others:
            from dtrain.launch.meeting import raise_on_all_ranks  # of several hosts only

            raise_on_all_ranks(place, problem)
        raise
    with redacted_errors(recipe):
        _start(recipe, place, train, plan)
    return recipe


def validate(recipe: str | Path | Mapping, overrides: Sequence[str] = (), world_size: int | None = None) -> list[str]:
    """Return lines about a recipe that `launch` would run to its first step; nothing is started.

    world_size: of a world that may be elsewhere, so that this machine's devices play no part; None: `launch.nproc`
    processes here. Raises UserError as `read` does, RecipeError with every problem that is found.
    """
    parsed, problems = recipe_and_problems(recipe, overrides)
    is_here = world_size is None
    small = with_small_files(with_local_model(with_processes(parsed)))
    loaded = small.recipe
    size = loaded.launch.processes if world_size is None else world_size
    device_problems: list[Problem] = []
    device_type = "cpu"
    if is_here:
        try:
            device_type = device_of_all(loaded.launch.device, loaded.train.dtype, max(size, 1), os.environ)
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
    lines = [verdict, str(sizes(result.recipe, size)), *notes(loaded), *result.notes]
    if keys := open_keys(loaded):
        lines.append(f"auto: the run's plan decides {', '.join(keys)} (dtrain plan shows it)")
    lines += [*small.pending_downloads.values(), *to_copy(loaded)]
    return [redact(line, loaded) for line in lines]


def _start(recipe: Recipe, place: RankPlace | None, train: Train | None, plan: PlanBeside | None) -> None:
    _admit_code(recipe, place is None or place.rank == 0)
    if place is None and recipe.launch.processes == 1:
        _note_tasks(os.environ)
    if place is None and recipe.launch.processes > 1:
        from dtrain.launch import processes  # loads torch

        processes.run_workers(RunJob(recipe, _threads(recipe.launch.processes), train, plan), os.environ)
        return
    place = place or RankPlace(environ=os.environ)
    per_task = number(os.environ, "SLURM_CPUS_PER_TASK", 0) if place.started_by == "slurm" else None
    run_in_place(RunJob(recipe, _threads(place.local_world_size, per_task), train, plan), place)


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


def work(directory: str) -> None:
    """Be a process that `processes.run_workers` started. Never returns."""
    place = find_place(os.environ, 1)
    assert place is not None, "its launcher says which rank it is"
    from dtrain.launch import processes

    processes.work(Path(directory), place)


def _threads(processes: int, per_task: int | None = None) -> int | None:
    """CPU threads of each of `processes` on this machine, of which each was given `per_task` cores; None, torch's own
    choice, where OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    return min(num_cores(), per_task) if per_task else max(1, num_cores() // processes)
