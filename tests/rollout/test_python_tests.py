"""The reward python_tests: what it reads, and the share that it gives."""

import pytest

from dtrain.base.errors import UserError
from dtrain.recipe.rollouts import Reward
from dtrain.rl.rewards import Rewards
from dtrain.rl.rewards.columns import missing_column_problem
from dtrain.rl.rewards.python_tests import AssertTest, ProgramTest, PythonTests, extract_code, read_tests
from tests.rollout.test_code_sandbox import sandbox_or_skip

RIGHT = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
WRONG = "```python\ndef add(a, b):\n    return a - b\n```"
TESTS = ["assert add(1, 2) == 3", "assert add(2, 0) == 2"]
PROGRAM = "```py\na, b = map(int, input().split())\nprint(a + b, ' ')\n```"


def test_the_share_of_tests_that_pass():
    sandbox_or_skip()
    reward = PythonTests(timeout=3.0)
    pairs = {"inputs": ["1 2", "3 4"], "outputs": ["3\n", "8"]}
    completions = [RIGHT, WRONG, PROGRAM, "no code", RIGHT]
    found = reward(completions, tests=[TESTS, TESTS, pairs, TESTS[0], None])
    assert found == [1.0, 0.5, 0.5, 0.0, None]
    assert PythonTests(whole=True)([WRONG], tests=[TESTS]) == [0.0]
    form_feed = "```py\nprint('1\\x0c2')\n```"  # is within a line, although Python's splitlines ends lines there
    assert reward([form_feed] * 2, tests=[{"inputs": [""], "outputs": [out]} for out in ("1\n2", "1\x0c2")]) == [
        0.0,
        1.0,
    ]
    spec = Reward(fn="python_tests", kwargs={"column": "asserts"})
    with Rewards([spec]) as rewards:
        assert rewards.score(["q"], [RIGHT], [[1]], {"asserts": [TESTS]}).total == [1.0]
    with pytest.raises(UserError, match="reward python_tests: the data has no column 'tests'"):
        reward([RIGHT], answer=[1])


def test_too_little_memory_is_reported():
    sandbox_or_skip()
    with pytest.raises(UserError, match="memory=4 MiB or timeout=6.0 is too little"):
        PythonTests(memory=4)


def test_a_missing_sandbox_is_reported_before_a_run(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    how = "bwrap is not installed here: apt-get install bubblewrap"
    with pytest.raises(UserError, match=how):
        PythonTests()
    assert how in missing_column_problem("python_tests", {}, {"tests": TESTS})
    assert "the data has no column 'tests'" in missing_column_problem("python_tests", {}, {"answer": "4"})
    assert missing_column_problem("python_tests", {"allow_full_access": True}, {"tests": TESTS}) is None
    assert PythonTests(allow_full_access=True)([RIGHT, WRONG], tests=[TESTS, TESTS]) == [1.0, 0.5]


def test_a_program_ends_as_programs_do():
    """Its status and what it prints count, at whatever moment; its output may be closed, its input no text."""
    ends = (
        "print(6); exit()",
        "import sys; print(6); sys.stdout.close(); sys.exit(0)",
        "import atexit; atexit.register(print, 6)",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print(6))).start()",
    )
    sandbox = sandbox_or_skip()
    test = ProgramTest("\ud800", "6")
    assert [test.passes(code, sandbox) for code in ends] == [True] * 4
    wrong = ("print(6); exit(1)", "print(7)", "import os; print(6); os._exit(0)")
    assert not any(test.passes(code, sandbox) for code in wrong)


def test_blocks_and_tests_are_read():
    assert extract_code("```\nx = 1\n```\n```python\ny = 2\n```") == "y = 2\n"
    assert (
        extract_code("```bash\nls\n```\n1. So\n   ```py\n   y = 2\n   ```\n```text\n5\n```\n```\n5\n```") == "y = 2\n"
    )
    assert extract_code("So:\n```python\r\ny = 2") == "y = 2"
    assert extract_code("plain") == "plain"
    assert read_tests('{"inputs": ["1"], "outputs": [2]}', "t") == [ProgramTest("1", "2")]
    assert read_tests("", "t") == []
    assert read_tests('["a", "b"]', "t") == read_tests(["a", "b"], "t") == [AssertTest("a"), AssertTest("b")]
    assert read_tests({"inputs": [["1", 2]], "outputs": [True]}, "t") == [ProgramTest("1\n2", "True")]
    pairs = {"inputs": [1], "outputs": [2]}
    for wrong in ({"inputs": ["1"], "outputs": []}, [1], {"inputs": ["1"]}, {"inputs": "1", "outputs": "2"},
                  {"fn_name": "f", **pairs}):  # fmt: skip
        with pytest.raises(UserError, match="as many inputs as outputs"):
            read_tests(wrong, "t")
    with pytest.raises(UserError, match="t is 3: it must be a text of Python"):
        read_tests(3, "t")
