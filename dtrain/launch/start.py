"""The start of a run. This is the only module that reads the environment.

A recipe runs in one of three ways:

    started by torchrun or srun    this process is one of several ranks, and the run happens in this process
    launch.nproc == 1              in this process, without a process group
    launch.nproc > 1               in `launch.nproc` processes on this machine, which `processes` starts
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
from dtrain.launch.rank_info import WORKER_VARIABLE, RankInfo, read_number, read_rank_info
from dtrain.recipe import Recipe, derive_sizes, redact, redacted_errors
from dtrain.recipe.world import unresolved_auto_keys
from dtrain.training import recipe_and_problems
from dtrain.training.hub_files import missing_problems, to_copy, with_local_model, with_small_files
from dtrain.training.inputs import RunInputs, World
from dtrain.training.preflight import notes, preflight, print_origin, redacted, refuse_text
from dtrain.training.setup.code import named_code


def launch(recipe: Recipe | Callable[[], Recipe], train: Train | None = None, plan: StartPlan | None = None) -> Recipe:
    """Run a recipe to its end, in this process or in processes that it starts.

    Args:
        recipe: The recipe, or a function that loads it.
        train: Function that trains, `train(recipe, runtime)`, called on every rank. It may have its own data, so
            `data` and `train.steps` are not required then. None: `dtrain.training.trainer.train_checked`.
        plan: Starts the computation of the run's plan in the background, if metrics.plan asks for one. Must be a
            module-level function, because worker processes import it.

    Returns:
        The recipe as it was run, with defaults filled in.

    Raises:
        UserError: If the run cannot go on. RecipeError (before anything starts) for mistakes in the recipe.
        Stopped: After SIGINT, SIGTERM, SIGHUP or SIGUSR1, once the run has saved.
        KeyboardInterrupt: After a second signal.
        WorkerFailed: If a worker process died of anything else.
    """
    if WORKER_VARIABLE in os.environ:
        raise UserError(
            "a process of this run imported a script that starts a run. Put its call of dtrain.run below "
            '`if __name__ == "__main__":`, so that only the script itself starts the run'
        )
    rank_info = None
    try:
        recipe = resolve_nproc(recipe() if callable(recipe) else recipe)
        rank_info = read_rank_info(os.environ, recipe.launch.num_processes)
        world_size = rank_info.world_size if rank_info else recipe.launch.num_processes
        if rank_info is None or rank_info.rank == 0:
            print_origin(recipe)
        recipe = _with_checked_model(recipe, world_size, has_own_loop=train is not None)
    except UserError as problem:
        # Other ranks may be waiting for this one, so the problem is raised on all of them.
        rank_info = rank_info or read_rank_info(os.environ, 1)
        if rank_info is not None and rank_info.needs_rendezvous:
            from dtrain.launch.rendezvous import raise_on_all_ranks  # loads torch

            raise_on_all_ranks(rank_info, problem)
        raise
    with redacted_errors(recipe):
        _start(recipe, rank_info, train, plan)
    return recipe


def validate(recipe: str | Path | Mapping, overrides: Sequence[str] = (), world_size: int | None = None) -> list[str]:
    """Check a recipe as `launch` would up to its first step, without starting anything.

    Args:
        recipe: File, name or content of the recipe.
        overrides: Changes such as "optimizer.lr=1e-5".
        world_size: Number of ranks of a run that may be on other machines. The devices of this machine are then not
            checked. None: `launch.nproc` processes on this machine.

    Returns:
        Lines that describe the run.

    Raises:
        UserError: If the recipe cannot be read.
        RecipeError: With all problems of the recipe's text, and its values out of range, if the text has problems.
            Otherwise with all problems that the checks of values, models and data find.
    """
    parsed, problems = recipe_and_problems(recipe, overrides)
    refuse_text(parsed, problems)
    print_origin(parsed)
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
    result = dry_run(loaded, world, pending_downloads=small.pending_downloads, refused=small.problems)
    found = [*device_problems, *result.problems]
    if found:
        raise RecipeError(redacted(problem, loaded) for problem in found)
    steps = "" if result.steps is None else f", {result.steps} {plural(result.steps, 'step')}"
    verdict = f"ok: {loaded.run.name}, {loaded.method} on {size} {plural(size, 'process')}{steps}"
    lines = [verdict, str(derive_sizes(result.recipe, size)), *notes(loaded), *result.notes]
    auto_keys = unresolved_auto_keys(loaded)
    if auto_keys:
        lines.append(f"auto: {', '.join(auto_keys)} are chosen when the run starts (`dtrain plan` shows the values)")
    lines += [*small.pending_downloads.values(), *to_copy(loaded)]
    return [redact(line, loaded) for line in lines]


def _start(recipe: Recipe, rank_info: RankInfo | None, train: Train | None, plan: StartPlan | None) -> None:
    """Run a checked recipe in this process or in worker processes."""
    num_processes = recipe.launch.num_processes
    _print_imported_code(recipe, is_printed=rank_info is None or rank_info.rank == 0)
    if rank_info is None and num_processes > 1:
        from dtrain.launch import processes  # loads torch

        processes.run_workers(RunJob(recipe, _num_threads(num_processes), train, plan), os.environ)
        return
    if rank_info is None:
        _note_missing_srun(os.environ)
        rank_info = RankInfo(environ=os.environ)
    cores_per_task = None
    if rank_info.started_by == "slurm":
        cores_per_task = read_number(os.environ, "SLURM_CPUS_PER_TASK", default=0)
    run_in_place(RunJob(recipe, _num_threads(rank_info.local_world_size, cores_per_task), train, plan), rank_info)


def _with_checked_model(recipe: Recipe, world_size: int, has_own_loop: bool) -> Recipe:
    """Check a recipe, and download its model if necessary. Return the recipe with the path of the local model.

    Args:
        recipe: The recipe.
        world_size: Number of processes.
        has_own_loop: Whether a function of the user trains. It reads the model and the mesh of the recipe. The checks
            leave out the data and the length of the run.

    Raises:
        RecipeError: With all problems of the recipe.
    """
    recipe = with_local_model(recipe)
    problems = _find_problems(recipe, world_size, has_own_loop)
    if not problems and missing_problems(recipe):
        recipe = with_local_model(recipe, fetch=True)
        problems = _find_problems(recipe, world_size, has_own_loop)
    if problems:
        raise RecipeError(problems)
    return recipe


def _find_problems(recipe: Recipe, world_size: int, has_own_loop: bool) -> list[Problem]:
    """Return the problems of a recipe. Arguments are those of `_with_checked_model`."""
    if not has_own_loop:
        return preflight(recipe, world_size)
    problems = preflight(recipe, world_size, until="models")
    return [problem for problem in problems if not problem.is_missing or problem.key == "model.path"]


def _print_imported_code(recipe: Recipe, is_printed: bool) -> None:
    """Print the user code that the recipe makes this run import, and notes.

    A recipe may come from a stranger, so the user should see which code it runs.
    """
    lines = named_code(RunInputs.of(recipe, World(1)))
    if lines:
        sys.path[:] = import_search_path()
        lines = ["the recipe names code, which this run imports:", *(f"  {line}" for line in lines)]
    if is_printed:
        for line in [*lines, *notes(recipe)]:
            print(line, file=sys.stderr)


def _note_missing_srun(environ: Mapping[str, str]) -> None:
    """Print a note if a SLURM batch script calls `dtrain run` without srun, which uses only one of its tasks."""
    tasks = environ.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ and tasks not in ("0", "1"):
        print(
            f"note: this is one process in a SLURM job of {tasks} tasks; `srun dtrain run ...` starts a rank for each",
            file=sys.stderr,
        )


def work(directory: str) -> None:
    """Run as a worker process that `processes.run_workers` started. Never returns.

    Args:
        directory: Private directory that the launcher and its workers share.
    """
    rank_info = read_rank_info(os.environ, 1)
    assert rank_info is not None, "the launcher sets RANK and WORLD_SIZE"
    from dtrain.launch import processes

    processes.work(Path(directory), rank_info)


def _num_threads(num_processes: int, cores_per_task: int | None = None) -> int | None:
    """Return the number of CPU threads per process. None leaves it to torch, which reads OMP_NUM_THREADS.

    Args:
        num_processes: Processes of the run on this machine.
        cores_per_task: Cores that SLURM assigned to this process, if it says so.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return None
    if cores_per_task:
        return min(num_cores(), cores_per_task)
    return max(1, num_cores() // num_processes)
