"""Several ranks on this machine: the launcher that starts them with torchrun's elastic agent, and the worker it starts.

The two share a directory, the job's: the recipe goes in, the file `stop` asks the workers to end in order, and each
worker that does not end well leaves a report, so that an error is told once, by the launcher, whoever had it.
"""

import importlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.config import Recipe, hidden, load, to_yaml
from dtrain.errors import Stopped, UserError
from dtrain.launch.rank import (
    STOPPING,
    OutOfMemory,
    Place,
    Train,
    choose_device,
    log_file,
    on_signals,
    resumed,
    run_rank,
    write_to_log,
)
from dtrain.orphans import end_with

if TYPE_CHECKING:
    from dtrain.parallel.runtime import StopFlag

SAVE_SECONDS = 600.0  # how long workers that were asked to stop may take to save
POLL_SECONDS = 0.25
HEARD = {signal.SIGTERM, signal.SIGUSR1}  # by a worker's listening thread
ENDED = 128 + signal.SIGTERM  # exit status of a worker that the launcher ended because another one died


class WorkerFailed(Exception):
    """A process of the run died of something that is not its user's mistake; the message ends with the reason."""


@dataclass(frozen=True)
class Report:
    """How a worker ended. kind: user (a UserError), memory (too little of it), stopped (Stopped), crash (the rest)."""

    rank: int
    attempt: int
    kind: str
    text: str
    time: float
    signum: int = 0  # that it was stopped by


def run_workers(recipe: Recipe, threads: int | None, train: Train | None = None) -> None:
    """Run `recipe` in `launch.nproc` processes. Ends when all of them have; raises as `launch.launch`."""
    nproc = recipe.launch.nproc
    choose_device(recipe.launch.device, Place(world_size=nproc, local_world_size=nproc))
    with tempfile.TemporaryDirectory(prefix="dtrain-") as name:
        job = Path(name)
        target = [train.__module__, train.__qualname__] if train else ["dtrain.trainer", "train"]
        setup = {"launcher": os.getpid(), "target": target, "threads": threads, "path": sys.path}
        _write(job / "recipe.yaml", to_yaml(recipe, plain=True))  # in a directory of this user alone
        _write(job / "job.json", json.dumps(setup))
        asked: list[int] = []
        # Workers that do not get to save are ended the way a second Ctrl-C ends them.
        patience = threading.Timer(SAVE_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
        patience.daemon = True

        def ask(signum: int) -> None:
            asked.append(signum)
            _write(job / "stop", str(int(signum)))
            os.write(2, STOPPING)
            patience.start()

        try:
            with on_signals(ask):
                exits = _start_and_wait(recipe, job)
        finally:
            patience.cancel()
        reports = _reports(job)
    stopped = [report for report in reports if report.kind == "stopped"]
    if any(exits.values()) and not (asked and stopped):
        raise _reason(recipe, reports, exits)
    if stopped:  # nobody asked this process where a batch system signalled the workers alone
        raise Stopped(asked[0] if asked else stopped[0].signum, stopped[0].text)


def _start_and_wait(recipe: Recipe, job: Path) -> dict[int, int]:
    """Start the workers under torchrun's elastic agent; the exit status of each rank that did not end well."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):  # the failures that they tell of are told here, in plain words
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=recipe.launch.nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=recipe.launch.max_restarts,
        monitor_interval=POLL_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=str(job / "agent")),
        signals_to_handle="SIGQUIT",  # SIGINT and SIGTERM are ours: its own answer gives the workers 30 s to save
    )
    # The worker finds dtrain, and whatever else this process could import, wherever it was started.
    start = (
        "import json, sys; sys.path[:] = json.load(open(sys.argv[1] + '/job.json'))['path']; "
        "from dtrain.launch import work; work(sys.argv[1])"
    )
    try:
        elastic_launch(config, sys.executable)("-P", "-c", start, str(job))
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    return {}


def _reason(recipe: Recipe, reports: list[Report], exits: Mapping[int, int]) -> Exception:
    """Of all that the workers said, and how they exited, what began it."""
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
        return WorkerFailed(f"rank {rank} was killed by {name}{why}{_see_log(recipe, rank)}")
    crashes = [report for report in reports if report.kind == "crash"]
    if crashes:
        first = crashes[0]
        last_line = first.text.strip().splitlines()[-1]
        return WorkerFailed(f"{first.text}\nrank {first.rank} failed: {last_line}{_see_log(recipe, first.rank)}")
    rank = min((rank for rank, status in exits.items() if status != ENDED), default=min(exits))
    return WorkerFailed(f"rank {rank} ended with status {exits[rank]} without a word{_see_log(recipe, rank)}")


def _see_log(recipe: Recipe, rank: int) -> str:
    return f"; what it printed is in {log_file(recipe, rank)}" if rank > 0 else ""


def _reports(job: Path) -> list[Report]:
    """The reports of the last attempt, in the order of time."""
    found = [Report(**json.loads(path.read_text())) for path in job.glob("report-*.json")]
    last = max((report.attempt for report in found), default=0)
    return sorted((report for report in found if report.attempt == last), key=lambda report: report.time)


def _write(path: Path, text: str) -> None:
    """The file is whole or absent, for whoever looks."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def work(directory: str, place: Place) -> None:
    """A worker from its first line to its last. Never returns."""
    job, attempt = Path(directory), place.attempt
    setup = json.loads((job / "job.json").read_text())
    end_with(setup["launcher"], ENDED)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):  # before torch is imported: every thread that it starts inherits the mask
        signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
        # A forked helper can be ended; a pre-emption is not its affair.
        os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}))
    from dtrain.parallel.runtime import StopFlag

    stop = StopFlag()
    threading.Thread(target=_listen, args=(job, setup["launcher"], stop), daemon=True).start()
    status, kind, text, signum, recipe = 0, "", "", 0, None
    try:
        recipe = load(job / "recipe.yaml")
        if place.rank > 0:
            write_to_log(recipe, place.rank)
        earlier = _reports(job)
        if attempt and any(report.kind == "user" for report in earlier):
            raise UserError(next(report.text for report in earlier if report.kind == "user"))
        if (job / "stop").exists():
            raise _TooEarly
        train = getattr(importlib.import_module(setup["target"][0]), setup["target"][1])
        recipe = _again(recipe, attempt, earlier, place.rank) if attempt else recipe
        run_rank(recipe, place, stop, setup["threads"], train)
    except _TooEarly:
        status, kind, text = 1, "stopped", "stopped before training began; there was nothing to save"
    except Stopped as error:
        kind, text, signum = "stopped", str(error), error.signum
    except OutOfMemory as error:
        status, kind, text = 1, "memory", str(error)
    except UserError as error:
        status, kind, text = 1, "user", str(error)
    except BaseException:  # the last stop of this process: told by the launcher, in whose hands it is not lost
        status, kind, text = 1, "crash", traceback.format_exc()
    if kind:
        text = hidden(text, recipe) if recipe else text
        report = Report(place.rank, attempt, kind, text, time.time(), signum)
        _write(job / f"report-{attempt}-{place.rank}.json", json.dumps(asdict(report)))
        if place.rank > 0:
            print(text, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a process group that is half up must not hold the process back


class _TooEarly(Exception):
    """The run was asked to stop before this worker had begun."""


def _again(recipe: Recipe, attempt: int, earlier: list[Report], rank: int) -> Recipe:
    """The recipe of another attempt, which goes on from the newest checkpoint."""
    if rank == 0:
        why = earlier[0].text.strip().splitlines()[-1] if earlier else "a process died"
        print(f"starting again ({attempt} of {recipe.launch.max_restarts}) after: {why}", file=sys.stderr)
    return resumed(recipe)


def _listen(job: Path, launcher: int, stop: "StopFlag") -> None:
    """Hear for this worker, in a thread of its own, while its main thread may be deep in a collective. Never returns.

    The launcher asks for an orderly end by the file `stop`; SIGINT is its own to answer. SIGTERM from the launcher
    means that another worker died: this one ends at once. SIGTERM from anyone else (a batch system that signals every
    process), and SIGUSR1, ask for an orderly end.
    """
    wait = getattr(signal, "sigtimedwait", None)
    while True:
        heard = wait(HEARD, POLL_SECONDS) if wait else time.sleep(POLL_SECONDS)
        ended = heard and heard.si_pid == launcher and heard.si_signo == signal.SIGTERM
        if os.getppid() != launcher or ended:
            os._exit(ENDED)
        if not stop.signum and heard:
            stop.request(heard.si_signo)
        if not stop.signum and (job / "stop").exists():
            stop.request(int((job / "stop").read_text()))
