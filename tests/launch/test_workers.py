"""The launcher's watch over its ranks: stopped ones, hung ones, and how soon a run ends that was told to.

And the private directory that launcher and ranks share.
"""

import os
import re
import signal
import time

from dtrain.launch.watch import LOOK_SECONDS, SAVE_SECONDS, START_SECONDS, Heartbeat, RankProcess, StallTimer
from tests.launch.processes import Launched, wait_until_gone

LOST = 5  # seconds


def launched(directory, training, nproc=2, *overrides):
    directory.mkdir(exist_ok=True)
    return Launched(directory, training, f"launch.nproc={nproc}", f"launch.lost_after={LOST}", *overrides)


def test_a_stopped_rank_is_lost_by_name_and_ends_the_run(tmp_path):
    """The run may have been told to stop meanwhile, or not."""
    runs = [launched(tmp_path / name, "reduces", 3, "train.global_batch=12") for name in ("left", "asked")]
    pids = [run.pids(3) for run in runs]
    time.sleep(2)  # for the first heartbeats: silence counts from the start of a process
    began = time.monotonic()
    for ranks in pids:
        os.kill(ranks[1], signal.SIGSTOP)
    os.kill(runs[1].process.pid, signal.SIGTERM)
    for run, ranks in zip(runs, pids, strict=True):
        status, _, err = run.end()
        silent = f"rank 1 (process {ranks[1]}) is lost: it is stopped, no sign of life for {LOST} s (launch.lost_after)"
        assert status == 1 and f"{silent}; " in err and "No checkpoint was saved yet" in err
        assert time.monotonic() - began > LOST - 1
        wait_until_gone(ranks)


def test_a_run_whose_ranks_are_all_stopped_ends_with_all_that_they_started(tmp_path):
    run = launched(tmp_path, "hangs_with_children")
    pids = run.pids(2)
    others = [int(pid) for path in run.runs.glob("children-*") for pid in path.read_text().split()]
    assert len(others) == 4
    for pid in [*pids, *others]:
        os.kill(pid, signal.SIGSTOP)
    status, _, err = run.end()
    assert status == 1 and "rank 0 (" in err and "rank 1 (" in err
    wait_until_gone([*pids, *others])


def test_a_job_that_is_suspended_as_a_whole_goes_on(tmp_path):
    run = launched(tmp_path, "waits")
    pids = [run.process.pid, *run.pids(2)]
    for signum in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, signum)
        time.sleep(LOST + 2)
    assert run.process.poll() is None
    run.ctrl_c()
    assert run.end()[0] == 130


def test_a_lost_rank_is_started_again_where_the_recipe_says_so(tmp_path):
    run = launched(tmp_path, "waits", 2, "launch.max_restarts=1")
    first = run.pids(2)
    os.kill(first[0], signal.SIGSTOP)
    wait_until_gone(first)
    while run.pids(2) == first or len(set(run.pids(2)) & set(first)):
        time.sleep(0.1)
    run.ctrl_c()
    status, _, err = run.end()
    assert status == 130 and f"starting again (1 of 1) after: rank 0 (process {first[0]}) is lost: it is stopped" in err


def test_a_hung_main_thread_that_was_told_to_stop_is_named_with_its_place(tmp_path):
    runs = {nproc: launched(tmp_path / str(nproc), "spins", nproc) for nproc in (1, 2)}
    pids = {nproc: run.pids(nproc) for nproc, run in runs.items()}
    time.sleep(LOST + 1)  # unasked, nobody ends it
    assert all(run.process.poll() is None for run in runs.values())
    began = time.monotonic()
    for run in runs.values():
        os.kill(run.process.pid, signal.SIGTERM)
    for nproc, run in runs.items():
        status, _, err = run.end()
        assert status == 1 and "launched.py:" in err and "launch.lost_after" in err, nproc
        assert time.monotonic() - began > LOST - 1
        wait_until_gone(pids[nproc])


def test_a_rank_that_gave_up_waiting_says_which_one_hung(tmp_path):
    status, _, err = launched(tmp_path, "gives_up").end()
    assert status == 1
    said = r"rank 0 failed: RuntimeError: timed out.*; rank 1 \(process \d+\) has stood at .*launched.py:\d+ for"
    assert re.search(said, err)


def test_what_gets_on_slowly_is_not_cut(tmp_path):
    cases = [("saves_slowly", 1), ("saves_slowly", 2), ("steps_slowly", 2)]
    runs = [launched(tmp_path / f"{training}-{nproc}", training, nproc) for training, nproc in cases]
    for run, (_, nproc) in zip(runs, cases, strict=True):
        run.pids(nproc)
        os.kill(run.process.pid, signal.SIGTERM)
    for run, case in zip(runs, cases, strict=True):
        status, _, err = run.end()
        assert status == 128 + signal.SIGTERM and "which is saved" in err, (case, err)


def test_a_second_signal_of_any_kind_ends_at_once(tmp_path):
    """Not after launch.lost_after, which is a day here."""
    cases = [
        (1, (signal.SIGTERM, signal.SIGTERM)),
        (1, (signal.SIGINT, signal.SIGUSR1)),
        (2, (signal.SIGTERM, signal.SIGTERM)),
        (2, (signal.SIGUSR1, signal.SIGINT)),
    ]
    runs = []
    for number, (nproc, _) in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        lasting = (f"launch.nproc={nproc}", "launch.lost_after=86400")
        runs.append(Launched(tmp_path / str(number), "spins", *lasting))
    pids = [run.pids(nproc) for run, (nproc, _) in zip(runs, cases, strict=True)]
    for at in (0, 1):
        for run, (_, signals) in zip(runs, cases, strict=True):
            os.kill(run.process.pid, signals[at])
        time.sleep(1.3)
    for run, ranks, case in zip(runs, pids, cases, strict=True):
        assert run.end()[0] != 0, case
        wait_until_gone(ranks)


def test_progress_is_counted_from_the_last_beat_that_shows_some():
    still = StallTimer(lost_after=4 * LOOK_SECONDS)
    for progress in (1, 2, 2, 2, 2):
        still.look(Heartbeat(progress))
        assert not still.is_over
    still.look(Heartbeat(2, is_saving=True))
    assert not still.is_over
    still.look(Heartbeat(2))
    assert still.is_over
    still.seconds = SAVE_SECONDS
    assert StallTimer(1.0).is_over is False
    still.look(Heartbeat(2, is_saving=True))
    assert still.is_over


def test_a_start_takes_its_time_unless_it_is_stopped():
    """Imports from a cold file server, a driver that wakes up: no beat, and no harm."""
    worker = RankProcess(0, ["sleep", "60"], os.environ, lost_after=4 * LOOK_SECONDS)
    try:
        for _ in range(40):
            worker.look()
        assert worker.is_silent() and worker.lost() is None
        os.kill(worker.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, worker.process.pid, os.WSTOPPED)
        assert "it is stopped" in worker.lost()
        os.kill(worker.process.pid, signal.SIGCONT)
        worker.silent = int(START_SECONDS / LOOK_SECONDS)
        assert "no sign of life for 600 s" in worker.lost()
    finally:
        worker.end()
    assert worker.status == -signal.SIGKILL and worker.lost() is None
