"""Rewards in their process: what they are given, what they may give, and that none of what they do ends the run."""

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dtrain.base.errors import UserError
from dtrain.rl.rewards import Rewards, find

MODULE = """
import asyncio, os, sys, time

def exact(completions, answer):
    return [float(a == b) for a, b in zip(completions, answer)]

def everything(prompts, completions, completion_ids, **columns):
    assert prompts[0] == [{"role": "user", "content": "1"}] and completion_ids == [[1], [2]], (prompts, completion_ids)
    assert set(columns) == {"answer", "hint"} and columns["hint"] == [None, 2.5], columns
    return [1, 2]

async def slow_async(completions, seconds=0.01):
    await asyncio.sleep(seconds)
    return [3.0 for _ in completions]

class Keyword:
    def __init__(self, word):
        self.word = word
    def __call__(self, completions):
        return [self.word in text for text in completions]

class Number:
    def __float__(self):
        return 0.25

def none(completions):
    return [None, 1.0]

def nothing(completions):
    return [None] * len(completions)

def odd(completions):
    return (Number(), float("nan"))

def loud(completions):
    print("a reward prints")
    os.write(1, b"past python\\n")
    assert sys.stdin.read() == ""
    return [1.0] * len(completions)

def pid(completions):
    return [os.getpid()] * len(completions)

def forks(completions):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return [0.25 if child else 7.0] * len(completions)

LARGE = {"infinite": float("inf"), "too large": 1e308, "too many digits": 10**5000}

def when_told(completions):
    what = completions[0]
    if what == "hang":
        open("hanging", "w").close()
        time.sleep(1000)
    if what == "hang in c":
        "a" * 40 + "!" and __import__("re").match("(a+)+$", "a" * 60 + "!")
    if what == "exit":
        os._exit(7)
    if what == "leave":
        if os.fork() == 0:
            os.setsid()
            time.sleep(20)
        os._exit(7)
    if what == "kill":
        os.kill(os.getpid(), 9)
    if what == "raise":
        raise RuntimeError("no luck")
    if what == "quit":
        sys.exit("leaving")
    if what == "short":
        return [1.0]
    if what == "word":
        return ["1.0"] * len(completions)
    if what in LARGE:
        return [LARGE[what]] * len(completions)
    if what == "text":
        return "12"
    return [1.0] * len(completions)

def needs_gold(completions, gold):
    return [0.0]

def torch_loaded(completions):
    return [float("torch" in sys.modules)] * len(completions)
"""


@dataclass
class Spec:
    fn: str
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The working directory with a user's module `mine`."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


TWO = {
    "prompts": [[{"role": "user", "content": "1"}], "2"],
    "completions": ["1", "3"],
    "completion_ids": [[1], [2]],
    "columns": {"answer": ["1", "2"], "hint": [None, 2.5]},
}


def scored(rewards, first="1"):
    return rewards.score(**{**TWO, "completions": [first, "3"]})


def test_functions_get_what_they_take_and_their_sum_is_weighted(mine):
    specs = [
        Spec("mine.exact", 2.0),
        Spec("mine:everything", 0.5),
        Spec("mine.slow_async", -1.0, {"seconds": 0.02}),
        Spec("mine.Keyword", 1.0, {"word": "3"}),
        Spec("mine.none", 10.0),
        Spec("mine.odd", 4.0),
        Spec("math_exact"),
        Spec("math_exact", 1.0, {"column": "hint"}),
    ]
    with Rewards(specs) as rewards:
        scores = scored(rewards)
    assert rewards.names == [*"exact mine:everything slow_async Keyword none odd math_exact math_exact#2".split()]
    expected = [[1, 0], [1, 2], [3, 3], [0, 1], [None, 1], [0.25, None], [1, 0], [None, 0]]
    for values, right in zip(scores.parts.values(), expected, strict=True):
        assert [None if math.isnan(value) else value for value in values] == right
    assert scores.total == [2.0 + 0.5 - 3 + 0 + 1 + 1, 0 + 1 - 3 + 1 + 10 + 0]


def test_a_completion_that_no_reward_knows_has_none(mine):
    with Rewards([Spec("mine.nothing"), Spec("mine.none")]) as rewards:
        scores = scored(rewards)
        assert math.isnan(scores.total[0]) and scores.total[1] == 1.0
        assert rewards.score([], [], [], {}).total == []


def test_a_reward_that_forks_answers_once(mine):
    """The child's return, too, is no other reward's answer, nor one of the next call."""
    with Rewards([Spec("mine.forks"), Spec("mine.exact", 10.0)]) as rewards:
        for _ in range(3):
            assert scored(rewards).parts == {"forks": [0.25, 0.25], "exact": [1.0, 0.0]}


def test_what_a_reward_prints_is_not_taken_for_its_answer(mine, capfd):
    with Rewards([Spec("mine.loud")]) as rewards:
        assert scored(rewards).total == [1.0, 1.0]
    out, err = capfd.readouterr()
    assert out == "" and "a reward prints" in err and "past python" in err


def test_no_torch_is_loaded_for_it(mine):
    with Rewards([Spec("mine.torch_loaded")]) as rewards:
        assert scored(rewards).total == [0.0, 0.0]


FAILURES = {
    "hang": "took longer than 0.5 s",
    "hang in c": "took longer than 0.5 s",
    "exit": "ended with status 7",
    "kill": "was killed by SIGKILL",
    "raise": "RuntimeError: no luck",
    "quit": "SystemExit: leaving",
    "short": "returned 1 values for 2 completions",
    "word": "returned '1.0' for a completion",
    "infinite": "returned inf for a completion. It must return a finite number",
    "too large": "returned 1e+308 for a completion. It must return a number of at most 1e+30 in size",
    "too many digits": "returned inf for a completion. It must return a finite number",
    "text": "returned '12'. It must return a list of 2 numbers or None",
}


def test_whatever_happens_to_one_reward_the_others_and_later_calls_have_values(mine):
    said = []
    specs = [Spec("mine.exact"), Spec("mine.when_told"), Spec("mine.none", 5.0)]
    with Rewards(specs, timeout=0.5, print_line=said.append) as rewards:
        assert scored(rewards).total == [2.0, 6.0]
        for failure, words in FAILURES.items():
            said.clear()
            for _ in range(2):
                scores = scored(rewards, failure)
                assert all(math.isnan(value) for value in scores.parts["when_told"])
                assert scores.total == [0.0, 5.0], failure  # what is unknown is left out
            assert len(said) == (failure not in ("hang in c", "too many digits")), said  # told once for each cause
            assert all(words in text and "reward when_told" in text and "unknown" in text for text in said), said
        assert scored(rewards).total == [2.0, 6.0]


@pytest.mark.parametrize("failure", ["raise", "short", "word"])
def test_a_mistake_in_the_first_call_of_all_is_the_users_to_mend(mine, failure):
    with Rewards([Spec("mine.when_told")]) as rewards, pytest.raises(UserError) as caught:
        scored(rewards, failure)
    assert FAILURES[failure] in str(caught.value)
    if failure == "raise":
        assert str(mine / "mine.py") in str(caught.value)


def test_answers_that_nobody_waited_for_are_not_taken_for_later_ones(mine):
    """A mistake ends the call between two rewards' answers."""
    with Rewards([Spec("mine.when_told"), Spec("mine.exact", 2.0)]) as rewards:
        with pytest.raises(UserError):
            scored(rewards, "raise")
        assert scored(rewards).parts == {"when_told": [1.0, 1.0], "exact": [1.0, 0.0]}


def test_what_a_reward_leaves_behind_holds_nobody_up(mine):
    """It lives in a session of its own, with the process's end of the way to it."""
    said = []
    with Rewards([Spec("mine.when_told"), Spec("mine.exact")], timeout=0.5, print_line=said.append) as rewards:
        began = time.monotonic()
        assert scored(rewards, "leave").total == [0.0, 0.0]
        assert scored(rewards).total == [2.0, 1.0] and time.monotonic() - began < 10
    assert time.monotonic() - began < 10 and len(said) == 1 and FAILURES["hang"] in said[0]


def test_what_cannot_be_loaded_or_called_is_said_at_once(mine):
    (mine / "broken.py").write_text("import not_there\ndef fn(completions): return [0.0]\n")
    (mine / "dying.py").write_text("import os\nos._exit(3)\ndef fn(completions): return [0.0]\n")
    for spec, words in (
        (Spec("broken.fn"), "No module named 'not_there'"),
        (Spec("dying.fn"), "the process ended with status 3"),
        (Spec("mine.Keyword"), "missing 1 required positional argument: 'word'"),
    ):
        with pytest.raises(UserError, match="cannot be loaded") as caught:
            Rewards([spec])
        assert words in str(caught.value)
    for spec, words in (
        (Spec("torch.mean"), "cannot be called by names (no signature"),
        (Spec("os.system"), "C module"),
    ):
        with pytest.raises(UserError) as caught:
            Rewards([spec])
        assert words in str(caught.value)
    with Rewards([Spec("mine.needs_gold")]) as rewards, pytest.raises(UserError) as caught:
        scored(rewards)
    assert str(caught.value) == (
        "reward needs_gold takes gold, which is no column of the data (it has answer, hint). "
        "dtrain itself gives prompts, completions, completion_ids"
    )
    with Rewards([Spec("math_exact", 1.0, {"column": "gold"})]) as rewards:
        with pytest.raises(UserError, match="the data has no column 'gold'"):
            scored(rewards)


def test_a_name_or_path_that_is_not_there_is_found_without_running_it(mine):
    (mine / "package").mkdir()
    (mine / "package" / "__init__.py").write_text("raise SystemExit\n")
    (mine / "package" / "inner.py").write_text("raise SystemExit\nif True:\n    fn = print\nfrom os import path as p\n")
    (mine / "wrong.py").write_text("def fn(:\n")
    assert find("math_exact") == ("dtrain.rl.rewards.right_answers", "math_exact")
    for name in ("package.inner.fn", "package.inner:fn", "package.inner.p", "mine.exact", "json.dumps"):
        assert ".".join(find(name)) == name.replace(":", ".")
    for name, words in (
        ("math_exat", "did you mean math_exact?"),
        ("mine.exacct", "defines no exacct; did you mean exact?"),
        ("nowhere.fn", f"there is no module nowhere, neither in {mine}"),
        ("package.outer.fn", "there is no module package.outer"),
        ("mine.exact.fn", "there is no module mine.exact"),
        ("wrong.fn", "is not valid Python"),
    ):
        with pytest.raises(UserError) as caught:
            find(name)
        assert words in str(caught.value), name


def alive(pid):
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def gone_within(seconds, pid):
    until = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(pid)


def test_closing_ends_the_process_and_a_process_that_was_killed_is_replaced(mine):
    rewards = Rewards([Spec("mine.pid")])
    first = int(scored(rewards).total[0])
    os.kill(first, signal.SIGKILL)
    assert gone_within(5, first)
    second = int(scored(rewards).total[0])
    assert second != first and alive(second)
    rewards.close()
    rewards.close()
    assert gone_within(5, second)


@pytest.mark.parametrize("how", ["idle", "hang"])
def test_a_killed_parent_leaves_no_process(mine, how):
    code = f"""
        import math, threading
        from tests.rollout.test_rewards import Spec, TWO, scored
        from dtrain.rl.rewards import Rewards
        rewards = Rewards([Spec("mine.pid"), Spec("mine.when_told")])
        print(int(scored(rewards).parts["pid"][0]), flush=True)
        scored(rewards, {how!r}) if {how!r} == "hang" else threading.Event().wait()
    """
    root = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n" + textwrap.dedent(code)],
        stdout=subprocess.PIPE, text=True, cwd=mine,
    )  # fmt: skip
    worker = int(parent.stdout.readline())
    time.sleep(0.2)
    assert alive(worker)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone_within(5, worker)


def test_ctrl_c_does_not_wait_for_a_reward(mine):
    code = f"""
        import signal, sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
        from tests.rollout.test_rewards import Spec, scored
        from dtrain.rl.rewards import Rewards
        rewards = Rewards([Spec("mine.when_told"), Spec("mine.exact")], timeout=100)
        scored(rewards)
        print("ready", flush=True)
        scored(rewards, "hang")
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=mine,
    )  # fmt: skip
    assert parent.stdout.readline() == "ready\n"
    while not (mine / "hanging").exists():
        assert parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    _, err = parent.communicate(timeout=60)
    assert "KeyboardInterrupt" in err
