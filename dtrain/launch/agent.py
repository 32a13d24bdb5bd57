"""Several ranks on this machine: the launcher that starts and watches them, and the worker it starts.

The two share a directory, the job's: the recipe goes in, the ranks meet in a file of it (`store`), and each worker that
does not end well leaves a report, so that an error is told once, by the launcher, whoever had it. No port is opened but
those of gloo and NCCL, at the loopback.
"""

import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.base.errors import Stopped, UserError
from dtrain.base.files import replace_text
from dtrain.base.orphans import end_with
from dtrain.launch.devices import choose_device
from dtrain.launch.job import job_directory
from dtrain.launch.rank import STOPPING, OutOfMemory, RankPlace, RunJob, log_file, run_rank, write_to_log
from dtrain.launch.signals import on_signals
from dtrain.launch.watch import LOOK_SECONDS, SETTLE_SECONDS, RankProcess, heartbeat, lost_text, newest_checkpoint
from dtrain.methods import load_recipe
from dtrain.recipe import origins, redact, to_yaml, with_origins_of

if TYPE_CHECKING:
    from dtrain.parallel.runtime import StopFlag

ALIKE_LOOKS = 3  # between the last beats of ranks that were lost at the same time
ENDED = 128 + signal.SIGTERM  # exit status of a worker whose launcher is gone
# The worker finds dtrain, and whatever else its launcher could import, wherever it was started.
START = (
    "import json, sys; sys.path[:] = json.load(open(sys.argv[1] + '/job.json'))['path']; "
    "from dtrain.launch import work; work(sys.argv[1], sys.argv[2])"
)
KINDS = {"stopped": Stopped, "memory": OutOfMemory, "user": UserError, "crash": BaseException}  # of reports


class WorkerFailed(Exception):
    """A process of the run died of something that is not its user's mistake; the message ends with the reason."""


@dataclass(frozen=True)
class ExitReport:
    """The end of a worker, by one of KINDS."""

    rank: int
    attempt: int
    kind: str
    text: str
    time: float
    signum: int = 0  # that it was stopped by


def run_workers(job: RunJob, environ: Mapping[str, str]) -> None:
    """Run `job` in `launch.nproc` processes. Ends when all of them have; raises as `launch.launch`."""
    recipe, nproc = job.recipe, job.recipe.launch.processes
    # Of no rank's number: rank 0 tells itself what is only noted.
    choose_device(recipe.launch.device, RankPlace(-1, -1, nproc, nproc, environ=dict(environ)))
    with job_directory() as directory:
        setup = {"launcher": os.getpid(), "threads": job.threads, "path": sys.path, "origins": origins(recipe)}
        for name, act in (("train", job.train), ("plan", job.plan)):
            setup[name] = act and [act.__module__, act.__qualname__]
        (directory / "recipe.yaml").write_text(to_yaml(recipe, plain=True), encoding="utf-8")  # for this user alone
        (directory / "job.json").write_text(json.dumps(setup), encoding="utf-8")
        signums: list[int] = []

        def ask(signum: int) -> None:
            signums.append(signum)
            os.write(2, STOPPING)

        with on_signals(ask):
            for attempt in range(recipe.launch.max_restarts + 1):
                failure, reports, is_asked = _attempt(job, directory, attempt, environ, signums)
                is_hopeless = is_asked or any(report.kind in ("user", "stopped") for report in reports)
                if failure is None or is_hopeless or attempt == recipe.launch.max_restarts:
                    break
                why = (reports[0].text if reports else str(failure)).strip().splitlines()[-1]
                left = f"{attempt + 1} of {recipe.launch.max_restarts}"
                print(f"starting again ({left}) after: {why}", file=sys.stderr)
    if failure is not None:
        raise failure
    stopped = [report for report in reports if report.kind == "stopped"]
    if stopped:  # nobody asked this process where a batch system signalled the workers alone
        raise Stopped(signums[0] if signums else stopped[0].signum, stopped[0].text)


def _attempt(
    job: RunJob, directory: Path, attempt: int, environ: Mapping[str, str], signums: list[int]
) -> tuple[Exception | None, list[ExitReport], bool]:
    """Start all ranks and see to their end: what went wrong, what they said, and whether the run was asked to stop, by
    whomever."""
    launch, size = job.recipe.launch, job.recipe.launch.processes
    command = [sys.executable, "-P", "-c", START, str(directory)]
    with ExitStack() as stack:
        workers = []
        for rank in range(size):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            place["TORCHELASTIC_RESTART_COUNT"] = attempt
            environment = {**environ, **{name: str(value) for name, value in place.items()}}
            workers.append(RankProcess(rank, command, environment, launch.lost_after))
            stack.callback(workers[-1].end)
        if lost := _watch(job, workers, signums):
            return WorkerFailed(lost), _reports(directory, attempt), _is_asked(workers, signums)
        exits = {worker.rank: worker.status for worker in workers if worker.status is not None}
        stood = "".join(f"; {worker.stood}" for worker in workers if worker.stood)
    reports = _reports(directory, attempt)
    is_well = not any(exits.values()) or (signums and any(report.kind == "stopped" for report in reports))
    return None if is_well else _reason(job, reports, exits, stood), reports, bool(signums)


def _is_asked(workers: list[RankProcess], signums: list[int]) -> bool:
    """Return whether this process or a worker was asked to stop; a batch system may signal the workers alone."""
    return bool(signums) or any(worker.stalled.last.signum for worker in workers)


def _watch(job: RunJob, workers: list[RankProcess], signums: list[int]) -> str | None:
    """Until all have ended, or one did not end well; or what is wrong with those that have not."""
    is_asked, num_done = False, 0
    while any(worker.status is None for worker in workers) and not any(worker.status for worker in workers):
        time.sleep(LOOK_SECONDS)
        for worker in workers:
            worker.look()
            if signums:
                worker.ask(signums[0])
        if any(worker.lost() for worker in workers):
            lost = [how for worker in workers if (how := worker.lost(ALIKE_LOOKS))]
            return lost_text(job.recipe.run.directory, "; ".join(lost))
        was_asked, were_done = is_asked, num_done
        is_asked = is_asked or _is_asked(workers, signums)
        living = [worker for worker in workers if worker.status is None]
        num_done = sum(worker.status == 0 for worker in workers)
        if (is_asked and not was_asked) or num_done > were_done:  # those that waited for a rank's end get on now
            for worker in workers:
                worker.stalled.seconds = 0.0
        if is_asked and living and all(worker.stalled.is_over for worker in living):
            stood = "; ".join(how for worker in living if (how := worker.stood))
            text = f"the run was asked to stop, and no rank gets on (launch.lost_after): {stood}; it was ended at once"
            return f"{text}. {newest_checkpoint(job.recipe.run.directory)}"
    until = time.monotonic() + SETTLE_SECONDS
    while any(worker.status is None for worker in workers) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS / 5)
    return None


def _reason(job: RunJob, reports: list[ExitReport], exits: Mapping[int, int], stood: str = "") -> Exception:
    """Return the first cause among the workers' reports and exit statuses. stood: whose main thread had hung before."""
    mistakes = list(dict.fromkeys(report.text for report in reports if report.kind == "user"))
    if mistakes:
        return UserError("\n".join(mistakes))
    starved = [report.text for report in reports if report.kind == "memory"]
    if starved:
        return OutOfMemory(starved[0])
    killed = [rank for rank, status in exits.items() if status < 0 and -status not in (signal.SIGTERM, signal.SIGABRT)]
    if killed:
        rank = min(killed)
        name = signal.Signals(-exits[rank]).name
        why = ", as the system does when memory runs out (see dmesg)" if name == "SIGKILL" else ""
        return WorkerFailed(f"rank {rank} was killed by {name}{why}{_see_log(job, rank)}")
    crashes = [report for report in reports if report.kind == "crash"]
    if crashes:
        first = crashes[0]
        last_line = first.text.strip().splitlines()[-1]
        return WorkerFailed(f"{first.text}\nrank {first.rank} failed: {last_line}{_see_log(job, first.rank)}{stood}")
    rank = min((rank for rank, status in exits.items() if status != ENDED), default=min(exits))
    return WorkerFailed(f"rank {rank} ended with status {exits[rank]} without a word{_see_log(job, rank)}")


def _see_log(job: RunJob, rank: int) -> str:
    return f"; what it printed is in {log_file(job.recipe, rank)}" if rank > 0 else ""


def _reports(directory: Path, attempt: int) -> list[ExitReport]:
    """Return the reports of an attempt in the order of time."""
    reports = [ExitReport(**json.loads(path.read_text())) for path in directory.glob(f"report-{attempt}-*.json")]
    return sorted(reports, key=lambda report: report.time)


def work(directory: Path, fd: int, place: RankPlace) -> None:
    """A worker from its first line to its last. Never returns. fd: of its socket.

    Its launcher asks for an orderly end by that socket; SIGINT is the launcher's own to answer. SIGTERM (a batch system
    that signals every process) and SIGUSR1 ask for an orderly end too.
    """
    link = socket.socket(fileno=fd)
    link.set_inheritable(False)
    setup = json.loads((directory / "job.json").read_text(encoding="utf-8"))
    end_with(setup["launcher"], ENDED)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signums: list[int] = []
    place = replace(place, started_by=None, file=directory / f"store-{place.attempt}")
    status, recipe = 0, None
    with on_signals(signums.append, (signal.SIGTERM, signal.SIGUSR1)):
        try:
            from dtrain.parallel.runtime import StopFlag  # loads torch

            stop = StopFlag()
            threading.Thread(target=_listen, args=(link, signums, stop, threading.get_ident()), daemon=True).start()
            recipe = with_origins_of(load_recipe(directory / "recipe.yaml"), setup["origins"])
            if place.rank > 0:
                write_to_log(recipe, place.rank)
            job = RunJob(recipe, setup["threads"], _imported(setup["train"]), _imported(setup["plan"]))
            device = choose_device(recipe.launch.device, place)
            if signums:
                status = 1  # for the others, which may wait for this one
                raise Stopped(signums[0], "stopped before training began; there was nothing to save")
            run_rank(job, place, device, stop)
        except BaseException as error:  # told by the launcher, in whose hands it is not lost
            kind = next(kind for kind, of in KINDS.items() if isinstance(error, of))
            status = status if kind == "stopped" else 1
            text = traceback.format_exc() if kind == "crash" else str(error)
            text = redact(text, recipe) if recipe else text
            report = ExitReport(place.rank, place.attempt, kind, text, time.time(), getattr(error, "signum", 0))
            replace_text(directory / f"report-{place.attempt}-{place.rank}.json", json.dumps(asdict(report)))
            if place.rank > 0:
                print(text, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # a process group that is half up must not hold the process back


def _imported(target: Sequence[str] | None) -> Any:
    """Return the function that (module, name) is, or None."""
    return None if target is None else getattr(importlib.import_module(target[0]), target[1])


def _listen(link: socket.socket, signums: list[int], stop: "StopFlag", main: int) -> None:
    """Hear the launcher, and tell it that this worker lives, in a thread beside `main`, which may be deep in a
    collective. Never returns."""
    link.settimeout(LOOK_SECONDS)
    while True:
        try:
            signums.append(int(link.recv(64)))
        except TimeoutError:  # it has said nothing
            pass
        except (OSError, ValueError):  # it has ended
            os._exit(ENDED)
        if signums:
            stop.request(signums[0])
        with suppress(OSError):  # a launcher that is stopped does not read
            link.send(json.dumps(astuple(heartbeat(stop, main))).encode() + b"\n")
