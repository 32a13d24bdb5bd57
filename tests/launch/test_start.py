"""Ranks: where they are placed, and real processes that end well, fail, are stopped, and are killed.

`tests.launch.launched` is the process that is watched here: a launcher with fake trainings.
"""

import os
import signal
import socket
import stat
import tempfile
import time
from pathlib import Path

import pytest
import torch

from dtrain.base.errors import RecipeError, UserError
from dtrain.launch import exits, launch
from dtrain.launch.exits import OutOfMemory
from dtrain.launch.rank import memory_errors
from dtrain.launch.rank_info import RankInfo, first_host, read_rank_info
from dtrain.training import load_recipe
from tests.checkpoint.processes import Processes, children
from tests.launch.processes import Launched, wait_until_gone
from tests.tiny import tiny_recipe

NOTHING_LOST = "stopped before the first step: nothing is lost; the same command starts here again"
TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NODELIST": "gpu[07-09],login1",
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
}


# ---- without processes


@pytest.fixture(autouse=True)
def sighup_is_not_ignored():
    """Under nohup the tests ignore SIGHUP, and so would the runs that they start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_the_place_that_torchrun_gives():
    assert read_rank_info({}, 4) is None
    agent = {"MASTER_ADDR": "host", "MASTER_PORT": "7", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    found = read_rank_info({**TORCHRUN, **agent, "TORCHELASTIC_RESTART_COUNT": "2"}, 8)
    assert found == RankInfo(3, 1, 4, 2, "torchrun", 2, ("host", 7), True)


def test_the_place_that_slurm_gives():
    found = read_rank_info({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x4)"}, 8)
    assert found == RankInfo(5, 1, 8, 2, "slurm", 0, ("gpu07", 20041))
    assert read_rank_info({**SLURM, "MASTER_ADDR": "a", "MASTER_PORT": "9"}, 1).master == ("a", 9)
    assert read_rank_info({**SLURM, **TORCHRUN}, 1).started_by == "torchrun"
    assert read_rank_info({**SLURM, "SLURM_STEP_NUM_TASKS": "6"}, 1).world_size == 6  # under --preserve-env


def test_a_pod_of_kubeflow_is_one_rank():
    """Its PyTorchJob sets these four, and no LOCAL_RANK."""
    pod = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    found = read_rank_info(pod, 1)
    assert (found.rank, found.local_rank, found.world_size, found.local_world_size) == (1, 0, 3, 1)
    assert found.master == ("job-master-0", 23456) and found.needs_rendezvous
    with pytest.raises(UserError, match="launch.nproc=8. Set launch.nproc=1, or run torchrun in the pod"):
        read_rank_info(pod, 8)
    with pytest.raises(UserError, match="neither LOCAL_RANK nor MASTER_ADDR"):
        read_rank_info({"RANK": "0", "WORLD_SIZE": "2"}, 1)
    assert read_rank_info({**pod, "RANK": "0", "WORLD_SIZE": "1"}, 8) is None  # a job of one pod starts its own ranks


@pytest.mark.parametrize("nproc", [1, 8])
def test_what_slurm_starts_that_is_no_rank(nproc):
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}
    assert read_rank_info(batch, nproc) is None
    assert read_rank_info({**batch, "SLURM_STEP_ID": "4294967290"}, nproc) is None  # the shell of salloc
    alone = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert (read_rank_info(alone, nproc) is None) == (nproc > 1)


@pytest.mark.parametrize(
    ("listed", "node", "tasks"),
    [("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("2,1", 1, 1), ("16", 0, 16), ("4(x2)", 9, 4), ("", 0, 8)],
)
def test_the_tasks_of_a_node_by_slurm_s_list(listed, node, tasks):
    given = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": listed, "SLURM_NODEID": str(node)}
    assert read_rank_info(given, 1).local_world_size == tasks


def test_an_environment_that_contradicts_itself_is_refused():
    for name in ("SLURM_LOCALID", "SLURM_NTASKS"):
        with pytest.raises(UserError, match=f"{name} is not set"):
            read_rank_info({key: value for key, value in SLURM.items() if key != name}, 1)
    with pytest.raises(UserError, match="WORLD_SIZE is 'two', which is not a number"):
        read_rank_info({**TORCHRUN, "WORLD_SIZE": "two"}, 1)
    with pytest.raises(UserError, match="LOCAL_WORLD_SIZE is not set"):  # of one host or several: it cannot be told
        read_rank_info({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, 1)
    assert read_rank_info({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 1).local_world_size == 1
    with pytest.raises(UserError, match="rank 3 of 2"):
        read_rank_info({**TORCHRUN, "WORLD_SIZE": "2"}, 1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a1", "a1"),
        ("a1,b2", "a1"),
        ("gpu[07-09,12],x", "gpu07"),
        ("r[1,3]n[04-05]", "r1n04"),
        ("a-[1-2]-b", "a-1-b"),
        ("[7-9]", "7"),
    ]
    + [("", "localhost")],
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def test_a_run_in_this_process_leaves_its_environment_as_it_was(tmp_path):
    before, during = dict(os.environ), []
    launch(tiny_recipe(tmp_path), lambda recipe, runtime: during.append(dict(os.environ)))
    assert "GLOO_SOCKET_IFNAME" in during[0] and "GLOO_SOCKET_IFNAME" not in before
    assert dict(os.environ) == before


def test_a_recipe_with_problems_starts_nothing(tmp_path):
    def never(recipe, runtime):
        raise AssertionError

    with pytest.raises(RecipeError, match=r"train\.global_batch=3 is not"):
        launch(load_recipe(tiny_recipe(tmp_path), ["train.global_batch=3"]), never)


def test_in_place_the_train_function_gets_one_rank_and_restored_signals(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    seen = []

    def train(recipe, runtime):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        seen.append((runtime.rank, runtime.world_size, runtime.device, runtime.stop.signum))
        seen.append(torch.distributed.is_initialized())

    threads = torch.get_num_threads()
    launch(tiny_recipe(tmp_path), train)
    torch.set_num_threads(threads)
    assert seen == [(0, 1, torch.device("cpu"), signal.SIGTERM), False]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_second_signal_is_raised_where_the_run_stands(monkeypatch):
    monkeypatch.setattr(exits, "SAME_SECONDS", 0.0)
    asked = []
    with pytest.raises(KeyboardInterrupt), exits.on_stop_signals(asked.append):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.01)
    assert asked == [signal.SIGUSR1]


@pytest.mark.parametrize("allocate", [lambda: torch.empty(2**60), lambda: bytearray(2**62)])
def test_running_out_of_memory_names_the_peak_and_the_keys(tmp_path, allocate):
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(OutOfMemory) as caught, memory_errors(recipe, RankInfo(), torch.device("cpu")):
        allocate()
    text = str(caught.value)
    assert "out of memory on rank 0 (cpu), at a peak of " in text
    for key in ("train.micro_batch (now 2)", "train.activation_checkpointing=full", "data.max_length (now 32)"):
        assert key in text
    assert "launch.nproc" in text
    with pytest.raises(RuntimeError, match="shapes"), memory_errors(recipe, RankInfo(), torch.device("cpu")):
        raise RuntimeError("shapes do not fit")


# ---- with processes


def test_a_mistake_that_every_rank_finds_is_told_once(tmp_path):
    status, _, err = Launched(tmp_path, "mistaken", "launch.nproc=2").end()
    assert status == 1
    assert err.strip() == "data.train.path: line 7 is not JSON"


def test_ctrl_c_gives_the_ranks_time_to_save_and_has_a_status_of_its_own(tmp_path):
    launched = Launched(tmp_path, "waits", "launch.nproc=2")
    pids = launched.pids(2)
    launched.ctrl_c()
    status, out, err = launched.end()
    assert status == 130
    assert err.strip().splitlines()[-1] == "stopped after step 3, which is saved"
    assert {path.name for path in launched.runs.glob("saved-*")} == {"saved-0", "saved-1"}
    wait_until_gone(pids)


def test_a_killed_worker_ends_the_run_though_the_others_hang(tmp_path):
    launched = Launched(tmp_path, "hangs", "launch.nproc=2")
    pids = launched.pids(2)
    os.kill(pids[1], signal.SIGKILL)
    status, _, err = launched.end(20)
    assert status == 1
    host = socket.gethostname()
    assert err.strip().splitlines()[-1].startswith(f"rank 1 on {host} was killed by SIGKILL")
    assert "log-rank1.txt" in err and len(err.strip().splitlines()) == 1
    wait_until_gone(pids)


def test_workers_die_with_their_launcher(tmp_path):
    launched = Launched(tmp_path, "hangs", "launch.nproc=2")
    pids = launched.pids(2)
    launched.process.kill()
    launched.end()
    wait_until_gone(pids)


def test_a_second_ctrl_c_ends_a_run_at_once(tmp_path):
    launched = Launched(tmp_path, "hangs")
    launched.pids(1)
    launched.ctrl_c()
    time.sleep(1.2)
    launched.ctrl_c()
    status, _, err = launched.end()
    assert status in (130, -signal.SIGINT)
    assert "press Ctrl-C again" in err


def test_sigterm_however_it_comes_lets_the_ranks_save(tmp_path):
    ways = ("launcher", "group", "workers")
    for to in ways:
        (tmp_path / to).mkdir()
    runs = {to: Launched(tmp_path / to, "waits", "launch.nproc=2") for to in ways}
    for to, launched in runs.items():
        pids = launched.pids(2)
        if to == "group":
            os.killpg(launched.process.pid, signal.SIGTERM)
        for pid in {"launcher": [launched.process.pid], "workers": pids, "group": []}[to]:
            os.kill(pid, signal.SIGTERM)
    for to, launched in runs.items():
        assert launched.end()[0] == 143, to
        assert {path.name for path in launched.runs.glob("saved-*")} == {"saved-0", "saved-1"}, to


@pytest.mark.parametrize(("signum", "starts"), [(signal.SIGINT, False), (signal.SIGTERM, True), (signal.SIGHUP, False)])
def test_a_signal_while_the_ranks_start_ends_the_run_in_order(tmp_path, signum, starts):
    """starts: with interpreters that have only begun to import when the signal comes."""
    launched = Launched(tmp_path, "waits", "launch.nproc=2", starts=starts)
    deadline = time.monotonic() + 120
    while len(workers := children(launched.process.pid)) < 2:
        assert time.monotonic() < deadline, launched.process.poll()
        time.sleep(0.01)
    os.kill(launched.process.pid, signum)
    status, _, err = launched.end()
    assert status == 128 + signum
    assert err.strip().splitlines()[-1].endswith((NOTHING_LOST, "which is saved")) and "Traceback" not in err, err
    wait_until_gone(workers)


def test_sighup_stays_ignored_under_nohup():
    asked = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with exits.on_stop_signals(asked.append):
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
        assert asked == [] and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_before_the_run_is_ready_has_its_status_and_words(tmp_path):
    """At the first moment at which the command handles SIGHUP, long before its ranks start."""
    recipe = tiny_recipe(tmp_path, "train.steps=1000", "launch.nproc=2")
    started = Processes(recipe)
    caught = 0
    deadline = time.monotonic() + 120
    while not caught >> (signal.SIGHUP - 1) & 1:
        assert time.monotonic() < deadline, "the command does not handle SIGHUP"
        status = Path(f"/proc/{started.launcher.pid}/status").read_text()
        caught = int(status.split("SigCgt:")[1].split()[0], 16)
    os.kill(started.launcher.pid, signal.SIGHUP)
    assert started.end() == 128 + signal.SIGHUP
    assert (
        started.text()
        .strip()
        .endswith("stopped before the first step: nothing is lost; the same command starts here again")
    )


def test_what_a_killed_launcher_leaves_behind_holds_no_recipe(tmp_path, monkeypatch):
    """The recipe that it hands to its ranks has secrets in it."""
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    launched = Launched(tmp_path, "hangs", "launch.nproc=2")
    launched.pids(2)
    launched.process.kill()
    launched.end()
    (left,) = folder.glob("dtrain-*")
    assert stat.S_IMODE(left.stat().st_mode) == 0o700
    assert [path.name for path in left.iterdir() if path.suffix == ".yaml"] == []


def test_a_second_ctrl_c_ends_workers_that_hang(tmp_path):
    launched = Launched(tmp_path, "hangs", "launch.nproc=2")
    pids = launched.pids(2)
    launched.ctrl_c()
    time.sleep(1.2)
    launched.ctrl_c()
    assert launched.end()[0] in (130, -signal.SIGINT)
    wait_until_gone(pids)


def test_a_crash_is_told_with_its_traceback_and_its_log(tmp_path):
    status, _, err = Launched(tmp_path, "crashes", "launch.nproc=2").end()
    assert status == 1 and err.count("ZeroDivisionError: the reason") == 2
    assert "raise ZeroDivisionError" in err and "log-rank1.txt" in err.splitlines()[-1]
    assert "the reason" in (tmp_path / "runs" / "run" / "log-rank1.txt").read_text()


def test_a_restart_meets_anew_and_resumes(tmp_path):
    restart = ("launch.nproc=2", "launch.max_restarts=1", "checkpoint.resume=null")
    status, _, err = Launched(tmp_path, "fails_once", *restart).end()
    assert status == 0, err
    assert "starting again (1 of 1) after: rank " in err
    assert "failed: RuntimeError: a passing cloud" in err
    assert [path.read_text() for path in sorted((tmp_path / "runs").glob("mark-*"))] == ["auto", "auto"]


def test_under_torchrun_the_ranks_run_in_place(tmp_path):
    prefix = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    status, out, _ = Launched(tmp_path, "ends", prefix=prefix).end()
    assert status == 0 and "hello from 0" in out and "hello from 1" not in out
    marks = [path.read_text().split() for path in sorted((tmp_path / "runs").glob("mark-*"))]
    assert [mark[:2] for mark in marks] == [["2", "1.0"], ["2", "1.0"]]
    assert "hello from 1" in (tmp_path / "runs" / "run" / "log-rank1.txt").read_text()


@pytest.mark.parametrize(
    ("training", "last"),
    [("mistaken", "data.train.path: line 7 is not JSON"), ("waits", "stopped after step 3, which is saved")],
)
def test_torchrun_ends_its_log_with_our_line(tmp_path, training, last):
    prefix = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    launched = Launched(tmp_path, training, prefix=prefix, starts=True)  # torch logs to the stderr of its import
    if training == "waits":  # as a batch system announces a pre-emption
        for pid in launched.pids(2):
            os.kill(pid, signal.SIGUSR1)
    status, _, err = launched.end()
    assert status == 1 and "launched.py" not in err, err
    assert [line for line in err.splitlines() if line.strip("= ")][-1].endswith(last), err


def test_a_second_signal_of_any_kind_ends_at_once(tmp_path):
    cases = [
        (1, (signal.SIGTERM, signal.SIGTERM)),
        (1, (signal.SIGINT, signal.SIGUSR1)),
        (2, (signal.SIGTERM, signal.SIGHUP)),
        (2, (signal.SIGUSR1, signal.SIGINT)),
    ]
    runs = []
    for number, (nproc, _) in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        runs.append(Launched(tmp_path / str(number), "spins", f"launch.nproc={nproc}"))
    pids = [run.pids(nproc) for run, (nproc, _) in zip(runs, cases, strict=True)]
    for at in (0, 1):
        for run, (_, sent) in zip(runs, cases, strict=True):
            os.kill(run.process.pid, sent[at])
        time.sleep(1.3)
    for run, ranks, case in zip(runs, pids, cases, strict=True):
        assert run.end()[0] != 0, case
        wait_until_gone(ranks)
