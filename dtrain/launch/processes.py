"""Several ranks on this machine: the launcher, which starts them as torch's elastic agent does, and the worker.

Launcher and workers share a private directory:

    job.json         settings of the workers: threads, sys.path, functions, methods    written by the launcher
    recipe-3.yaml    the recipe for rank 3, with its secrets                           deleted by the worker
    store-0          the file in which the ranks of attempt 0 meet                     a torch.distributed.FileStore
    .../error.json   why a rank ended, if it did not finish                            read by the launcher

So the launcher can show one error, whichever rank had it. The only open ports are those of gloo and NCCL, on the
loopback interface.

An attempt ends when all ranks have ended, or when one has ended with an error. A rank that was asked to stop, and has
saved together with the others, ends with status 0 and a report of the kind "stopped".
"""

import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from dtrain.base.errors import Stopped, StoppedAtStart, UserError
from dtrain.base.orphans import end_with_parent
from dtrain.base.plugins import import_object, import_path_of
from dtrain.launch.devices import choose_device
from dtrain.launch.exits import (
    LAUNCHER_GONE,
    OutOfMemory,
    Report,
    WorkerFailed,
    find_cause,
    on_stop_signals,
    stop_signals_blocked,
    unblock_stop_signals,
)
from dtrain.launch.rank import STOPPING, RunJob, open_log, redirect_output, run_rank
from dtrain.launch.rank_info import WORKER_VARIABLE, RankInfo
from dtrain.models.registry import add_family_rows, family_rows
from dtrain.parallel.mesh import StopFlag
from dtrain.recipe import origins, to_yaml, with_origins_of
from dtrain.training import METHODS, load_recipe, registered_entries

POLL_SECONDS = 0.1
SETTLE_SECONDS = 2  # after one rank has failed, for the others to report why they end too
# A worker takes its launcher's sys.path first, so that it can import what the launcher could, in any directory.
START = (
    "import json, sys; sys.path[:] = json.load(open(sys.argv[1] + '/job.json'))['path']; "
    "from dtrain.launch import work; work(sys.argv[1])"
)


class RankProcesses(SubprocessContext):
    """The processes of one attempt, each in a session of its own."""

    def start(self) -> None:
        """Start the processes, without torch's handlers for signals: the launcher has its own."""
        self._start()

    def statuses(self) -> dict[int, int | None]:
        """Return the exit status of each rank; None while it runs."""
        return {rank: handler.proc.poll() for rank, handler in self.subprocess_handlers.items()}

    def send_signal(self, signum: int) -> None:
        """Send a signal to the running ranks."""
        for handler in self.subprocess_handlers.values():
            handler.proc.send_signal(signum)  # does nothing if the process has ended

    def reports(self) -> list[Report]:
        """Return the reports of the ranks that wrote one."""
        found = []
        for path in self.error_files.values():
            report = Report.read(Path(path))
            if report is not None:
                found.append(report)
        return found


def run_workers(job: RunJob, environ: Mapping[str, str]) -> None:
    """Run `job` in `launch.nproc` processes, started again up to `launch.max_restarts` times. Raises as `launch`."""
    launch = job.recipe.launch
    nproc = launch.num_processes
    # Only checks that there are devices. With a rank of -1 nothing is printed: rank 0 prints the notes on devices.
    choose_device(launch.device, RankInfo(-1, -1, nproc, nproc, environ=dict(environ)))
    signums: list[int] = []

    def on_stop_signal(signum: int) -> None:
        signums.append(signum)
        os.write(2, STOPPING)

    with job_directory() as directory, quiet_agent(environ), on_stop_signals(on_stop_signal):
        for attempt in range(launch.max_restarts + 1):
            failure = _run_attempt(job, directory, attempt, signums)
            if failure is None:
                return
            can_restart = isinstance(failure, WorkerFailed | OutOfMemory) and not signums
            if not can_restart or attempt == launch.max_restarts:
                raise failure
            reason = str(failure).splitlines()[-1]
            print(f"starting again ({attempt + 1} of {launch.max_restarts}) after: {reason}", file=sys.stderr)


def _run_attempt(job: RunJob, directory: Path, attempt: int, signums: list[int]) -> Exception | None:
    """Start all ranks and wait for their end.

    Args:
        job: The run.
        directory: The private directory that launcher and workers share.
        attempt: 0 for the first start.
        signums: Stop signals that the launcher has received so far. Its handler appends to this list.

    Returns:
        The error of the run, which is Stopped if it was stopped. None if the ranks finished.
    """
    size = job.recipe.launch.num_processes
    _write_job(job, directory)
    environments = {}
    for rank in range(size):
        environments[rank] = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            WORKER_VARIABLE: str(directory),
        }
    arguments = dict.fromkeys(range(size), ("-P", "-c", START, str(directory)))
    logs = DefaultLogsSpecs(log_dir=str(directory))
    ranks = RankProcesses("dtrain", sys.executable, arguments, environments, logs)
    try:
        with stop_signals_blocked():
            ranks.start()
        failed = _wait(ranks, signums)
        ranks.close(signal.SIGTERM, SETTLE_SECONDS)
    except BaseException:  # a second signal
        ranks.close(signal.SIGKILL, SETTLE_SECONDS)
        raise
    reports = ranks.reports()
    if failed:
        return find_cause(reports, failed, job.recipe)
    stopped = [report for report in reports if report.kind == "stopped"]
    if not stopped:
        return None
    # A batch system may have sent the signal to the ranks only, and not to this process.
    return Stopped(signums[0] if signums else stopped[0].signum, stopped[0].text)


def _wait(ranks: RankProcesses, signums: list[int]) -> dict[int, int]:
    """Wait until all ranks have ended, or one has failed. Return the exit statuses of the failed ranks by rank."""
    is_forwarded = False
    while True:
        statuses = ranks.statuses()
        failed = {rank: status for rank, status in statuses.items() if status}
        is_any_running = None in statuses.values()
        if failed or not is_any_running:
            return failed
        if signums and not is_forwarded:
            ranks.send_signal(signums[0])
            is_forwarded = True
        time.sleep(POLL_SECONDS)


def _write_job(job: RunJob, directory: Path) -> None:
    """Write the settings of the workers to job.json, and a copy of the recipe for each worker, which deletes it."""
    settings = {
        "launcher": os.getpid(),
        "threads": job.threads,
        "path": sys.path,
        "origins": origins(job.recipe),
        "train": None if job.train is None else import_path_of(job.train, "the function train"),
        "plan": None if job.plan is None else import_path_of(job.plan, "the function plan"),
        # A script may have added methods and families before it called `dtrain.run`.
        "methods": registered_entries(job.recipe.method),
        "families": family_rows(),
    }
    (directory / "job.json").write_text(json.dumps(settings), encoding="utf-8")
    text = to_yaml(job.recipe, with_secrets=True)  # only this user can read the directory
    for rank in range(job.recipe.launch.num_processes):
        (directory / f"recipe-{rank}.yaml").write_text(text, encoding="utf-8")


@contextmanager
def job_directory() -> Iterator[Path]:
    """Create a temporary directory that only this user can read. Raises UserError if it cannot be created."""
    folder = tempfile.gettempdir()
    try:
        directory = tempfile.TemporaryDirectory(prefix="dtrain-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UserError(f"the temporary folder {folder}: {error.strerror}; set TMPDIR to another one") from error
    with directory as name:
        yield Path(name)


@contextmanager
def quiet_agent(environ: Mapping[str, str]) -> Iterator[None]:
    """Keep torch from logging each process that it ends, because the launcher shows one error.

    The variable LOGLEVEL, which torch reads too, switches these logs on again.
    """
    logger = logging.getLogger(SubprocessContext.__module__)

    def is_shown(record: logging.LogRecord) -> bool:
        return "LOGLEVEL" in environ

    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)


def work(directory: Path, rank_info: RankInfo) -> None:
    """Run one rank in this process, and end the process. Never returns.

    The launcher blocks stop signals before it starts this process, so that none ends it before it has handlers.
    """
    settings = json.loads((directory / "job.json").read_text(encoding="utf-8"))
    end_with_parent(settings["launcher"], LAUNCHER_GONE)
    rank_info = replace(rank_info, started_by=None, file=directory / f"store-{rank_info.attempt}")
    stop = StopFlag()
    status = 0
    recipe = None
    with on_stop_signals(stop.request):
        try:
            unblock_stop_signals()
            METHODS.update(settings["methods"])
            add_family_rows(settings["families"])
            copy = directory / f"recipe-{rank_info.rank}.yaml"
            recipe = with_origins_of(load_recipe(copy), settings["origins"])
            copy.unlink()
            if rank_info.rank > 0:
                redirect_output(open_log(recipe, rank_info.rank))
            train, plan = settings["train"], settings["plan"]
            job = RunJob(
                recipe,
                settings["threads"],
                train=import_object(train, "train") if train else None,
                plan=import_object(plan, "plan") if plan else None,
            )
            run_rank(job, rank_info, choose_device(recipe.launch.device, rank_info), stop)
        except BaseException as error:  # the launcher shows it
            # Ranks that stop together end with status 0. Otherwise other ranks may wait for this one: a status other
            # than 0 lets the launcher end them.
            is_orderly = isinstance(error, Stopped) and not isinstance(error, StoppedAtStart)
            status = 0 if is_orderly else 1
            report = Report.of(error, rank_info.rank, recipe)
            report.write(rank_info.environ)
            if rank_info.rank > 0:
                print(report.text, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # a normal exit could wait for a process group that only some ranks have joined
