"""tools/sweep: a draw is a function of its seed and number, its failure is told in a line, damage is damage."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT
from tools import sweep


def test_a_draw_is_a_function_of_seed_and_number():
    kinds = [sweep.plan(3, number, Path())[:2] for number in range(40)]
    assert kinds == [sweep.plan(3, number, Path())[:2] for number in range(40)]
    assert {kind for kind, _ in kinds} == set(sweep.KINDS)


def test_damage_changes_a_file_the_same_way_each_time():
    content = json.dumps({"a": [1, {"b": "text"}], "c": None}).encode()
    for damage in ("bytes", "cut", "doubled", "value", "key"):
        results = {sweep.damaged(random.Random(5), content, damage) for _ in range(2)}
        assert len(results) == 1 and results != {content}


@pytest.mark.processes
def test_a_draw_that_is_right_says_nothing_and_a_wrong_one_says_where():
    # In a process of its own: a draw is forked, which is safe only where no other test has started threads.
    number = next(number for number in range(99) if sweep.plan(0, number, Path())[0] == "file")
    program = (
        "from tools import sweep\n"
        f"print(sweep.outcome(0, {number}))\n"
        "sweep.dtrain = lambda words: 1 / 0\n"
        f"print(sweep.outcome(0, {number}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    right, wrong = done.stdout.splitlines()
    assert right == "None"
    assert "ZeroDivisionError: division by zero" in wrong
