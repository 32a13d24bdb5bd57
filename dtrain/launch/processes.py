"""Several ranks on this machine: the launcher, which starts them as torch's elastic agent does, and the worker.

The two share a private directory. The recipe goes in, the ranks meet in a file of it (`torch.distributed.FileStore`),
and a rank that does not end well leaves a report, so that the launcher shows one error, whichever rank had it. No port
is opened but those of gloo and NCCL, on the loopback interface.

An attempt ends when all ranks have ended, or when one has ended with an error. A rank that was asked to stop, and has
saved together with the others, ends with status 0 and a report of the kind "stopped".
"""

import importlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from dtrain.base.errors import Stopped, StoppedAtStart, UserError
from dtrain.base.orphans import end_with
from dtrain.launch.devices import choose_device
from dtrain.launch.place import RankPlace
from dtrain.launch.rank import STOPPING, RunJob, open_log, redirect_to, run_rank
from dtrain.launch.reports import ENDED, OutOfMemory, Report, WorkerFailed, cause_of
from dtrain.launch.signals import held_back, let_through, on_signals
from dtrain.parallel.runtime import StopFlag
from dtrain.recipe import origins, to_yaml, with_origins_of
from dtrain.training import load_recipe

LOOK_SECONDS = 0.1
SETTLE_SECONDS = 2  # after one rank has failed, for the others to say why they end too
# The worker finds dtrain, and whatever else its launcher could import, wherever it was started.
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

    def forward(self, signum: int) -> None:
        """Ask the living ranks to stop."""
        for handler in self.subprocess_handlers.values():
            handler.proc.send_signal(signum)  # does nothing if the process has ended

    def reports(self) -> list[Report]:
        found = [Report.read(Path(path)) for path in self.error_files.values()]
        return [report for report in found if report is not None]


def run_workers(job: RunJob, environ: Mapping[str, str]) -> None:
    """Run `job` in `launch.nproc` processes, started again up to `launch.max_restarts` times. Raises as `launch`."""
    launch, nproc = job.recipe.launch, job.recipe.launch.processes
    # As a rank of no number: rank 0 prints the notes on devices itself.
    choose_device(launch.device, RankPlace(-1, -1, nproc, nproc, environ=dict(environ)))
    signums: list[int] = []

    def ask(signum: int) -> None:
        signums.append(signum)
        os.write(2, STOPPING)

    with job_directory() as directory, quiet_agent(environ), on_signals(ask):
        for attempt in range(launch.max_restarts + 1):
            failure = _run_attempt(job, directory, attempt, signums)
            if failure is None:
                return
            may_help = isinstance(failure, WorkerFailed | OutOfMemory) and not signums
            if not may_help or attempt == launch.max_restarts:
                raise failure
            reason = str(failure).splitlines()[-1]
            print(f"starting again ({attempt + 1} of {launch.max_restarts}) after: {reason}", file=sys.stderr)


def _run_attempt(job: RunJob, directory: Path, attempt: int, signums: list[int]) -> Exception | None:
    """Start all ranks and wait for their end. Returns what they failed with, Stopped included."""
    size = job.recipe.launch.processes
    _write_job(job, directory)
    environments = {}
    for rank in range(size):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        place["TORCHELASTIC_RESTART_COUNT"] = attempt
        environments[rank] = {name: str(value) for name, value in place.items()}
    arguments = dict.fromkeys(range(size), ("-P", "-c", START, str(directory)))
    logs = DefaultLogsSpecs(log_dir=str(directory))
    ranks = RankProcesses("dtrain", sys.executable, arguments, environments, logs)
    try:
        with held_back():
            ranks.start()
        failed = _wait(ranks, signums)
        ranks.close(signal.SIGTERM, SETTLE_SECONDS)
    except BaseException:  # a second signal
        ranks.close(signal.SIGKILL, SETTLE_SECONDS)
        raise
    reports = ranks.reports()
    if failed:
        return cause_of(reports, failed, job.recipe)
    stopped = [report for report in reports if report.kind == "stopped"]
    if not stopped:
        return None
    # A batch system may have signalled the ranks only, and not this process.
    return Stopped(signums[0] if signums else stopped[0].signum, stopped[0].text)


def _wait(ranks: RankProcesses, signums: list[int]) -> dict[int, int]:
    """Wait until all ranks have ended, or one has failed. Returns the statuses of those that have failed by then."""
    is_forwarded = False
    while True:
        statuses = ranks.statuses()
        failed = {rank: status for rank, status in statuses.items() if status}
        if failed or None not in statuses.values():
            return failed
        if signums and not is_forwarded:
            ranks.forward(signums[0])
            is_forwarded = True
        time.sleep(LOOK_SECONDS)


def _write_job(job: RunJob, directory: Path) -> None:
    """Write what the workers need: settings in job.json, and for each a copy of the recipe, which it deletes."""
    functions = {"train": job.train, "plan": job.plan}
    named = {name: act and [act.__module__, act.__qualname__] for name, act in functions.items()}
    setup = {"launcher": os.getpid(), "threads": job.threads, "path": sys.path, "origins": origins(job.recipe), **named}
    (directory / "job.json").write_text(json.dumps(setup), encoding="utf-8")
    text = to_yaml(job.recipe, plain=True)  # with secrets, for this user only
    for rank in range(job.recipe.launch.processes):
        (directory / f"recipe-{rank}.yaml").write_text(text, encoding="utf-8")


@contextmanager
def job_directory() -> Iterator[Path]:
    """Make a directory of mode 0700 for the time of the block. Raises UserError if there can be none."""
    folder = tempfile.gettempdir()
    try:
        directory = tempfile.TemporaryDirectory(prefix="dtrain-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UserError(f"the temporary folder {folder}: {error.strerror}; set TMPDIR to another one") from error
    with directory as name:
        yield Path(name)


@contextmanager
def quiet_agent(environ: Mapping[str, str]) -> Iterator[None]:
    """Keep torch from logging each process that it ends: the launcher shows one error. LOGLEVEL, if set, counts."""
    logger = logging.getLogger(SubprocessContext.__module__)

    def is_shown(record: logging.LogRecord) -> bool:
        return "LOGLEVEL" in environ

    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)


def work(directory: Path, place: RankPlace) -> None:
    """Be a worker from its first line to its last. Never returns.

    Stop signals are blocked since the launcher started this process, so that none ends it before it has handlers.
    """
    setup = json.loads((directory / "job.json").read_text(encoding="utf-8"))
    end_with(setup["launcher"], ENDED)
    place = replace(place, started_by=None, file=directory / f"store-{place.attempt}")
    stop = StopFlag()
    status, recipe = 0, None
    with on_signals(stop.request):
        try:
            let_through()
            copy = directory / f"recipe-{place.rank}.yaml"
            recipe = with_origins_of(load_recipe(copy), setup["origins"])
            copy.unlink()
            if place.rank > 0:
                redirect_to(open_log(recipe, place.rank))
            job = RunJob(recipe, setup["threads"], _imported(setup["train"]), _imported(setup["plan"]))
            run_rank(job, place, choose_device(recipe.launch.device, place), stop)
        except BaseException as error:  # the launcher shows it
            # Ranks that stop together end well. Any other end has to end the ranks that wait for this one.
            is_orderly = isinstance(error, Stopped) and not isinstance(error, StoppedAtStart)
            status = 0 if is_orderly else 1
            report = Report.of(error, place.rank, recipe)
            report.write(place.environ)
            if place.rank > 0:
                print(report.text, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # a process group that is half up must not hold the process back


def _imported(target: Sequence[str] | None) -> Any:
    """Return the function that (module, name) is, or None."""
    return None if target is None else getattr(importlib.import_module(target[0]), target[1])
