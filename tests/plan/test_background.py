"""The plan beside a run: what it tells, and that it goes with the process it is beside."""

import os
import signal
import time

import pytest

from dtrain.commands.plan.background import PlannedPeak
from dtrain.commands.plan.plan import resolve_plan
from dtrain.commands.plan.processes import Child, run_in_parallel
from dtrain.commands.plan.report import gib
from dtrain.commands.plan.step import plan_step
from tests.launch.processes import Launched, wait_until_gone
from tests.tiny import tiny_recipe


def test_a_run_is_told_its_planned_peak_and_waits_for_nothing(tmp_path):
    recipe = tiny_recipe(tmp_path)
    with PlannedPeak(recipe, 2, "cpu") as planned:
        assert planned.peak() is None
        expected = plan_step(resolve_plan(recipe, 2, "cpu")).peak
        assert planned.peak(wait=300) is planned.peak() and planned.peak().words == f"planned peak {gib(expected)}"


def test_what_cannot_be_planned_does_not_end_the_run(tmp_path, monkeypatch):
    recipe = tiny_recipe(tmp_path)
    with PlannedPeak(recipe, 3, "cpu") as refused:
        assert "no plan (the recipe has a problem" in refused.peak(wait=300).words
    monkeypatch.setattr("dtrain.commands.plan.background.make_plan", lambda *_: os._exit(3))
    with PlannedPeak(recipe, 2, "cpu") as died:
        assert died.peak(wait=300).words == "no plan (a process that computes a plan died (exit code 3))"


def test_children_end_with_their_parent_and_with_their_context(tmp_path):
    file = tmp_path / "pid"

    def sleeper():
        file.write_text(str(os.getpid()))
        time.sleep(600)

    def parent():
        with Child(sleeper):
            while not (file.exists() and file.read_text()):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    with Child(parent) as outer:
        assert outer.is_done(wait=300)
        assert isinstance(outer.outcome(), RuntimeError)
    wait_until_gone([int(file.read_text())])
    file.unlink()
    with Child(sleeper):
        while not (file.exists() and file.read_text()):
            time.sleep(0.01)
    wait_until_gone([int(file.read_text())])


def test_calls_run_side_by_side():
    assert run_in_parallel([lambda: 1, os.getpid, lambda: "three"])[::2] == [1, "three"]


class Particular(Exception):
    """Pickle does not make it again: it is called with two arguments."""

    def __init__(self, one, two):
        super().__init__(f"{one}\n{two}")


def test_whatever_a_call_raises_is_told(tmp_path, monkeypatch):
    def fails(*_):
        raise Particular("this", "that")

    with pytest.raises(RuntimeError, match="Particular: this\nthat") as caught:
        run_in_parallel([fails])
    assert "in fails" in caught.value.__notes__[0]
    monkeypatch.setattr("dtrain.commands.plan.background.make_plan", fails)
    with PlannedPeak(tiny_recipe(tmp_path), 1, "cpu") as planned:
        assert planned.peak(wait=300).words == "no plan (Particular: this that)"


def test_of_a_run_in_processes_of_its_own_rank_0_is_told(tmp_path):
    launched = Launched(tmp_path, "told_its_plan", "launch.nproc=2", "launch.device=cpu", "metrics.plan=true")
    status, _, err = launched.end()
    assert status == 0, err
    recipe = tiny_recipe(tmp_path)
    expected = plan_step(resolve_plan(recipe, 2, "cpu")).peak
    marks = [(launched.runs / f"mark-{rank}").read_text() for rank in range(2)]
    assert marks == [f"planned peak {gib(expected)}", "not asked"]
