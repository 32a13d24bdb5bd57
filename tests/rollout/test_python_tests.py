"""The reward python_tests: what passes, and what code of a model cannot do."""

import os
import time

import pytest

from dtrain.config.schema import Reward
from dtrain.errors import UserError
from dtrain.rollout.rewards import Rewards
from dtrain.rollout.rewards.jail import Jail
from dtrain.rollout.rewards.python_tests import PythonTests, code_of, read_tests


def _isolates():
    try:
        return Jail(1.0, 256 << 20).passes("", "")
    except UserError:
        return False


isolating = pytest.mark.skipif(not _isolates(), reason="this system does not isolate (jail.py)")
RIGHT = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
WRONG = "```python\ndef add(a, b):\n    return a - b\n```"
TESTS = ["assert add(1, 2) == 3", "assert add(2, 0) == 2"]
PROGRAM = "```py\na, b = map(int, input().split())\nprint(a + b, ' ')\n```"


@isolating
def test_the_share_of_tests_that_pass():
    reward = PythonTests(timeout=3.0)
    pairs = {"inputs": ["1 2", "3 4"], "outputs": ["3\n", "8"]}
    completions = [RIGHT, WRONG, PROGRAM, "no code", RIGHT]
    found = reward(completions, tests=[TESTS, TESTS, pairs, TESTS[0], None])
    assert found == [1.0, 0.5, 0.5, 0.0, None]
    assert PythonTests(whole=True)([WRONG], tests=[TESTS]) == [0.0]
    spec = Reward(fn="python_tests", kwargs={"column": "asserts"})
    with Rewards([spec]) as rewards:
        assert rewards.score(["q"], [RIGHT], [[1]], {"asserts": [TESTS]}).total == [1.0]
    with pytest.raises(UserError, match="reward python_tests: the data has no column 'tests'"):
        reward([RIGHT], answer=[1])


HOSTILE = {
    "an endless loop": "while True: pass",
    "sleep": "import time; time.sleep(60)",
    "all memory": "x = bytearray(1 << 30)",
    "gigabytes of output": "import os\nwhile True: os.write(1, b'x' * (1 << 20))",
    "a large file": "open('f', 'wb').write(bytes(1 << 22))",
    "a process": "import os\nif os.fork() == 0: os._exit(0)\nos.wait()",
    "leaving early": "import os; os._exit(0)",
    "leaving politely": "raise SystemExit(0)",
    "leaving as a system that does not isolate": "import os; os._exit(77)",
    "leaving its group": "import os; os.setsid()",
    "the proof": "import __main__, os; os.write(__main__.told, __main__.proof.encode()); os._exit(0)",
    "the host's loopback": "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
    "another host": "import socket; socket.create_connection(('192.0.2.1', 80), 2)",
    "a process to kill": "import os; os.kill({pid}, 0)",
    "another's environment": "open('/proc/{pid}/environ', 'rb').read(1)",
    "an environment": "import os; os.environ['HOME']",
    "the user's files": "open('{file}', 'w').write('x')",
    "a file emptied": "import os; os.truncate('{file}', 0)",
    "a file removed": "import os; os.remove('{file}')",
    "a file of its own": "open('/tmp/dtrain-made', 'w')",
    "another program": "import subprocess; subprocess.run(['/bin/true'], check=True)",
}


@isolating
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_fails_and_does_no_harm(tmp_path, name):
    import socket

    kept = tmp_path / "kept"
    kept.write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        said = {"port": server.getsockname()[1], "pid": os.getpid(), "file": kept}
        code = HOSTILE[name]
        for key, value in said.items():
            code = code.replace(f"{{{key}}}", str(value))
        began = time.monotonic()
        assert not Jail(1.0, 256 << 20).passes(code, "")
        assert time.monotonic() - began < 20
        if name in ("the host's loopback", "a process to kill"):  # which the host's own namespaces allow
            assert Jail(1.0, 256 << 20, isolated=False).passes(code, "")
    assert kept.read_text() == "mine"


@isolating
def test_threads_start_and_no_process():
    code = "import threading\ndone = []\none = threading.Thread(target=done.append, args=(1,))\none.start()\none.join()"
    assert Jail(1.0, 256 << 20).passes(code, "assert done == [1]")


def test_a_kernel_without_namespaces_is_told(monkeypatch):
    monkeypatch.setattr(Jail, "_run", lambda *_: 77)
    with pytest.raises(UserError, match="does not isolate.*set isolated=false"):
        PythonTests()


@isolating
def test_a_program_ends_as_programs_do():
    """Its status and what it prints count, at whatever moment; its output may be closed, its input no text."""
    ends = (
        "print(6); exit()",
        "import sys; print(6); sys.stdout.close(); sys.exit(0)",
        "import atexit; atexit.register(print, 6)",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print(6))).start()",
    )
    jail = Jail(3.0, 256 << 20)
    assert [jail.passes(code, None, "\ud800", "6") for code in ends] == [True] * 4
    assert not jail.passes("print(6); exit(1)", None, "", "6")


def test_blocks_and_tests_are_read():
    assert code_of("```\nx = 1\n```\n```python\ny = 2\n```") == "y = 2\n"
    assert code_of("```bash\nls\n```\n1. So\n   ```py\n   y = 2\n   ```\n```text\n5\n```\n```\n5\n```") == "y = 2\n"
    assert code_of("So:\n```python\r\ny = 2") == "y = 2"
    assert code_of("plain") == "plain"
    assert read_tests('{"inputs": ["1"], "outputs": [2]}', "t") == [(None, "1", "2")]
    assert read_tests("", "t") == []
    assert read_tests('["a", "b"]', "t") == read_tests(["a", "b"], "t") == [("a", "", ""), ("b", "", "")]
    assert read_tests({"inputs": [["1", 2]], "outputs": [True]}, "t") == [(None, "1\n2", "True")]
    pairs = {"inputs": [1], "outputs": [2]}
    for wrong in ({"inputs": ["1"], "outputs": []}, [1], {"inputs": ["1"]}, {"inputs": "1", "outputs": "2"},
                  {"fn_name": "f", **pairs}):  # fmt: skip
        with pytest.raises(UserError, match="as many inputs as outputs"):
            read_tests(wrong, "t")
    with pytest.raises(UserError, match="t is 3: it must be a text of Python"):
        read_tests(3, "t")
