"""The reward math_verify: pairs whose answer is known, answers that take too long, and processes that end."""

import time
from pathlib import Path

import pytest

from dtrain.base.orphans import descendants
from dtrain.recipe.rollouts import Reward
from dtrain.rl.rewards import Rewards
from dtrain.rl.rewards.columns import missing_column_problem
from dtrain.rl.rewards.right_answers import math_exact
from tests.rollout.test_rewards import gone_within

pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'dtrain[math]'")
pytest.importorskip("pebble", reason="pebble is not installed: pip install 'dtrain[math]'")

EQUAL = [  # what a completion says, what the data has; math_exact finds them different
    (r"So it is $\frac{\sqrt{3}}{3}$.", r"\frac{1}{\sqrt{3}}"),
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{1024}", "2^{10}"),
    (r"\boxed{3}", r"\log_2 8"),
    (r"\boxed{\{2, 1\}}", r"$\{1, 2\}$"),
    (r"\boxed{\{2, 1\}}", r"\{1, 2\}"),
    (r"The answer is $[\frac{1}{2}, 2)$", "[0.5, 2)"),
    (r"\boxed{[1, \infty)}", r"x \ge 1"),
    (r"\boxed{\frac{50\%}{1}}", "0.5"),
    ("#### 4i+3", "the sum #### 3+4i"),
    (r"\boxed{\begin{pmatrix} 0.5 \\ 2 \end{pmatrix}}", r"\begin{pmatrix} \frac{1}{2} \\ 2 \end{pmatrix}"),
    (r"\boxed{\sqrt{8}}", ["3", r"2\sqrt{2}"]),
]
ALREADY_EXACT = [(r"\boxed{\frac{3}{6}}", "0.5"), ("#### 25%", "1/4"), ("7", 7), ("yes, the answer is yes", "Yes")]
DIFFERENT = [
    (r"\boxed{2\sqrt{3}}", r"\sqrt{8}"),
    (r"\boxed{(x-1)^2}", "x^2+2x+1"),
    (r"\boxed{\{1, 2, 3\}}", r"\{1, 2\}"),
    (r"\boxed{(1, 2)}", "[1, 2)"),
    (r"\boxed{6.28}", r"2\pi"),
    (r"\boxed{50\%}", "0.05"),
    ("no idea", "42"),
    ("", "42"),
]


def scores(pairs, **options):
    """Return the rewards of (completion, answer) pairs, from the rewards' own process."""
    texts = [text for text, _ in pairs]
    with Rewards([Reward("math_verify", kwargs=options)]) as rewards:
        return rewards.score(texts, texts, [[0]] * len(pairs), {"answer": [answer for _, answer in pairs]}).total


@pytest.mark.processes
def test_pairs_whose_answer_is_known():
    texts, answers = zip(*EQUAL, strict=True)
    assert math_exact(texts, answer=answers) == [0.0] * len(EQUAL)
    expected = [1.0] * len(EQUAL + ALREADY_EXACT) + [0.0] * len(DIFFERENT)
    assert scores(EQUAL + ALREADY_EXACT + DIFFERENT) == expected


@pytest.mark.processes
def test_an_answer_that_takes_too_long_is_wrong_and_costs_the_others_nothing():
    """A factorial is computed in C, which no alarm interrupts."""
    started = time.monotonic()
    slow = (r"\boxed{100000000!}", r"\sqrt{5}")
    assert scores([slow, EQUAL[0], DIFFERENT[0], slow, EQUAL[1]], timeout=2.0) == [0.0, 1.0, 0.0, 0.0, 1.0]
    assert time.monotonic() - started < 45.0


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are read from /proc")
def test_its_processes_end_with_the_rewards():
    with Rewards([Reward("math_verify")]) as rewards:
        rewards.score(["a"], [r"\boxed{\sqrt{8}}"], [[0]], {"answer": [r"2\sqrt{2}"]})
        processes = descendants(rewards._process.pid)
    assert len(processes) >= 2  # the server, and one of the pool
    assert all(gone_within(5, pid) for pid in processes)


def test_a_missing_package_is_reported_before_the_run(monkeypatch):
    monkeypatch.setattr("dtrain.rl.rewards.symbolic_answers.find_spec", lambda name: None)
    problem = missing_column_problem("math_verify", {}, {"answer": "4"})
    assert problem == "reward math_verify needs math_verify and pebble, not installed: pip install 'dtrain[math]'"
