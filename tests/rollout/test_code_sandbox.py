"""Code of a model behind walls: what it cannot reach, what it cannot claim, and what a test can ask of it."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from dtrain.base.errors import UserError
from dtrain.base.orphans import kill
from dtrain.rl.rewards.code_sandbox import CodeSandbox

MEMORY = 256 << 20


def sandbox_or_skip() -> CodeSandbox:
    """A sandbox of 2 s; skips where bubblewrap is missing or may not make walls."""
    sandbox = CodeSandbox(2.0, MEMORY)
    try:
        assert sandbox.passes("", "")
    except UserError as error:
        pytest.skip(str(error))
    return sandbox


def passed(sandbox, cases):
    """The names of those of `cases`, name -> (code, test), that pass."""
    with ThreadPoolExecutor(4) as pool:
        verdicts = pool.map(lambda case: sandbox.passes(*case), cases.values())
        return {name for name, verdict in zip(cases, verdicts, strict=True) if verdict}


# The test is empty: code that gets to its end would pass.
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
    "leaving its group": "import os, time\ntry: os.setsid()\nexcept OSError: pass\ntime.sleep(60)",
    "the proof": "import __main__, os; os.write(__main__.told, __main__.proof.encode()); os._exit(0)",
    "the host's loopback": "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
    "another host": "import socket; socket.create_connection(('192.0.2.1', 80), 2)",
    "a process to kill": "import os; os.kill({pid}, 0)",
    "another's environment": "open('/proc/{pid}/environ', 'rb').read(1)",
    "an environment": "import os; os.environ['HOME']",
    "the user's files": "open('{file}', 'w').write('x')",
    "a file emptied": "import os; os.truncate('{file}', 0)",
    "a file removed": "import os; os.remove('{file}')",
    "a file of its own beside the scratch": "open('/made', 'w')",
    "another program": "import subprocess; subprocess.run(['/bin/true'], check=True)",
    "a file that is read": "open('{file}').read()",
    "the password file": "open('/etc/passwd').read()",
    "the interpreter's own file": "import os; open(os.__file__, 'a')",
    "a mode changed": "import os; os.chmod(os.__file__, 0o600)",
    "extended attributes": "import os; os.setxattr('{file}', 'user.x', b'1')",
    "extended attributes of the interpreter": "import os; os.setxattr(os.__file__, 'user.x', b'1')",
    "a Unix socket by path": "import socket; socket.socket(socket.AF_UNIX).connect('{socket}')",
    "an abstract Unix socket": "import socket; socket.socket(socket.AF_UNIX).connect('\\0{abstract}')",
    "System V shared memory": "import ctypes; assert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0",
    "System V queues": "import ctypes; assert ctypes.CDLL(None).msgget(0, 0o1600) >= 0",
    "memory files": "import os; os.memfd_create('x')",
    "POSIX shared memory": "open('/dev/shm/x', 'w')",
    "a full scratch": "for number in range(32): open(str(number), 'wb').write(bytes(1 << 20))",
    "a namespace": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "the mode of a device": "import os; os.chmod('/dev/null', 0o666)",
    "the mode of an open file": "import os; os.fchmod(0, 0o666)",
    "the times of a device": "import os; os.utime('/dev/null')",
    "a setting of the kernel": "open('/proc/sys/kernel/core_pattern', 'r+')",
    "the score of the killer of processes": "open('/proc/self/oom_score_adj', 'w').write('-1000')",
    "closed pipes": "import os; os.closerange(0, 4096)",
    "frames": "import sys, os\nframe = sys._getframe()\nwhile frame:\n    for value in [*frame.f_globals.values()]:\n"
    "        for fd in range(4096):\n            try: os.write(fd, str(value).encode() + b'+')\n"
    "            except OSError: pass\n    frame = frame.f_back\nos._exit(0)",
    "a forged answer": "import os\nanswer = b'{\"value\": true, \"contents\": [], \"raised\": false}\\n'\n"
    "for fd in range(3, 4096):\n    try: os.write(fd, answer)\n    except OSError: pass\nos._exit(0)",
}  # fmt: skip
ALLOWED_WITHOUT_WALLS = (
    *("the host's loopback", "a process to kill", "a file that is read", "a Unix socket by path"),
    *("an abstract Unix socket", "extended attributes", "System V shared memory", "another's environment"),
)


def test_hostile_code_fails_and_does_no_harm(tmp_path):
    sandbox = sandbox_or_skip()
    kept = tmp_path / "kept"
    kept.write_text("mine")
    path, abstract = tmp_path / "socket", f"dtrain-{os.getpid()}"
    before = os.stat(os.__file__)
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for address in (str(path), f"\0{abstract}"):
            listening = stack.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(address)
            listening.listen()
        values = {"port": server.getsockname()[1], "pid": os.getpid(), "file": kept, "socket": path}
        codes = dict(HOSTILE)
        for key, value in (values | {"abstract": abstract}).items():
            codes = {name: code.replace(f"{{{key}}}", str(value)) for name, code in codes.items()}
        test = "assert forged == 1"
        began = time.monotonic()
        cases = {name: (code, test if name == "a forged answer" else "") for name, code in codes.items()}
        assert passed(sandbox, cases) == set()
        assert time.monotonic() - began < 120
        # The attempts are real: without walls these succeed.
        reached = {name: (codes[name], "") for name in ALLOWED_WITHOUT_WALLS}
        assert passed(CodeSandbox(2.0, MEMORY, has_walls=False), reached) == set(reached)
    after = os.stat(os.__file__)
    assert (before.st_mode, before.st_size) == (after.st_mode, after.st_size)
    assert kept.read_text() == "mine" and os.listxattr(kept) == ["user.x"]  # of the attempt without walls


def test_programs_are_cut_off_too():
    sandbox = sandbox_or_skip()
    programs = ("open('/etc/passwd'); print(6)", "import os; os.fork(); print(6)", "print(6); exit(1)", "print(7)")
    assert not any(sandbox.passes(program, None, "", "6") for program in programs)


def test_files_stand_in_a_scratch_of_the_process():
    sandbox = sandbox_or_skip()
    code = (
        "import tempfile\nopen('/tmp/dtrain-made', 'w').write('x')\nfile = tempfile.TemporaryFile()\ndef f(): return 1"
    )
    assert sandbox.passes(code, "import os\nassert f() == 1 and os.listdir('/tmp') == []")
    assert not Path("/tmp/dtrain-made").exists()


def test_threads_start_and_no_process():
    code = "import threading\ndone = []\none = threading.Thread(target=done.append, args=(1,))\none.start()\none.join()"
    assert sandbox_or_skip().passes(code, "assert done == [1]")


def test_code_ends_with_a_starter_that_is_killed():
    sandbox_or_skip()
    starter = (
        "import os, threading, time\n"
        "from dtrain.base.orphans import descendants\n"
        "from dtrain.rl.rewards.code_sandbox import CodeSandbox\n"
        "code = 'import time\\nwhile True: time.sleep(1)'\n"
        "threading.Thread(target=CodeSandbox(60.0, 256 << 20).passes, args=(code, '')).start()\n"
        "while len(pids := descendants(os.getpid())) < 6: time.sleep(0.05)\n"
        "print(*pids, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = process.stdout.readline().split()
        assert len(pids) == 6 and all(map(_runs, pids))  # bwrap, init and Python, of code and of test
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and any(_runs(pid) for pid in pids):
            time.sleep(0.05)
        left = [int(pid) for pid in pids if _runs(pid)]
        kill(left)
        assert not left


def _runs(pid):
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _liar(body, base="", made=""):
    return f"class Liar({base}):\n    {body}\n    __hash__ = lambda s: hash(2)\ndef f(x): return Liar({made})"


EQUALS = "__eq__ = lambda s, o: True"
LIES = {
    "equality": (_liar(EQUALS), "assert f(1) == 2"),
    "equality, turned": (_liar(EQUALS), "assert 2 == f(1)"),
    "equality in a list": (_liar(EQUALS), "assert [f(1)] == [2]"),
    "inequality": (_liar("__ne__ = lambda s, o: False"), "assert not f(1) != 2"),
    "a set": (_liar(EQUALS), "assert f(1) in {2}"),
    "an int": (_liar(EQUALS, "int", "7"), "assert f(1) == 2"),
    "a str": (_liar(EQUALS, "str", "'7'"), "assert f(1) == '2'"),
    "a tuple": (_liar(EQUALS, "tuple", "[7]"), "assert f(1) == (2,)"),
    "a list": (_liar(EQUALS, "list", "[7]"), "assert f(1) == [2]"),
    "a dict": (_liar(EQUALS, "dict", "{7: 7}"), "assert f(1) == {2: 2}"),
    "a difference": (_liar("__sub__ = __rsub__ = lambda s, o: 0"), "assert abs(f(1) - 2) < 1e-6"),
    "a difference, turned": (_liar("__sub__ = __rsub__ = lambda s, o: 0"), "assert abs(2 - f(1)) < 1e-6"),
    "an order": (_liar("__lt__ = __gt__ = lambda s, o: True"), "assert f(1) < 2"),
    "an order, turned": (_liar("__lt__ = __gt__ = lambda s, o: True"), "assert 1 < f(1)"),
    "a member": (_liar("__contains__ = lambda s, o: True"), "assert 2 in f(1)"),
    "a class": (_liar("__class__ = property(lambda s: int)"), "assert isinstance(f(1), int)"),
    "mock's ANY": ("from unittest.mock import ANY\ndef f(x): return ANY", "assert f(1) == 2"),
    "an end for a function": ("import os\nf = os._exit", "assert f(0) == 2"),
    "an end in a function": ("import os\ndef f(x): os._exit(0)", "assert f(0) == 2"),
    "an end that a test catches": ("import os\ndef f(x): os._exit(0)", "try: f(0)\nexcept BaseException: pass"),
    "an exit in a function": ("def f(x): raise SystemExit(0)", "assert f(0) == 2"),
    "another abs": ("abs = lambda x: 0\ndef f(x): return 9", "assert abs(f(0) - 2) < 1e-6"),
    "another all": ("all = lambda x: True\ndef f(x): return 9", "assert all([f(0) == 2])"),
    "another math": ("class math: isclose = lambda *a: True\ndef f(x): return 9.0", "assert math.isclose(f(0), 2)"),
    "patched builtins": ("import builtins, operator, json\nbuiltins.abs = builtins.all = operator.eq = lambda *a: 0\n"
                         "json.dumps = lambda *a: 'true'\ndef f(x): return 9", "assert abs(f(0) - 2) < 1e-6"),
    "the test's own functions": ("def f(check):\n    check.__globals__['done'] = True\n    return 2",
                                 "done = False\ndef check(): pass\nf(check)\nassert done"),
    "a list within a list": ("def f(x): x.clear(); x.append(2)", "a = [[1]]; f(a[0]); assert a == [[3]]"),
}  # fmt: skip


def test_no_lie_makes_a_value_equal_another():
    assert passed(sandbox_or_skip(), LIES) == set()


def test_a_system_without_walls_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"bwrap is not installed here: apt-get install bubblewrap.*allow_full_access"):
        CodeSandbox(1.0, MEMORY).passes("", "")
    assert CodeSandbox(2.0, MEMORY, has_walls=False).passes("x = 1", "assert x == 1")
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho bwrap: Unknown option --size >&2\nexit 1\n")
    bwrap.chmod(0o755)
    with pytest.raises(UserError, match=r"does not start here: bwrap: Unknown option --size\. .*bubblewrap 0\.7"):
        CodeSandbox(1.0, MEMORY).passes("", "")
