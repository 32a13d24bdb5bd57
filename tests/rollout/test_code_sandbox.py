"""The sandbox of model-written code: what it cannot reach, its limits, and a machine on which it does not start."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from dtrain.base.errors import UserError
from dtrain.base.orphans import kill_all
from dtrain.rl.rewards.code_sandbox import CodeSandbox

MEMORY = 256 << 20


def sandbox_or_skip(seconds=2.0, extra_seconds=5.0):
    """A sandbox. Skips where bubblewrap is not installed or must not make namespaces."""
    sandbox = CodeSandbox(seconds, MEMORY, extra_seconds=extra_seconds)
    try:
        assert sandbox.run("print(6)").output == "6\n"
    except UserError as error:
        pytest.skip(str(error))
    return sandbox


def succeeded(sandbox, programs):
    """The names of those of `programs`, name -> code, that exit with status 0."""
    with ThreadPoolExecutor(2) as pool:
        finished = pool.map(sandbox.run, programs.values())
        return {name for name, end in zip(programs, finished, strict=True) if end.status == 0}


# Each of these succeeds without the sandbox.
REACHES = {
    "the host's loopback": "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
    "a Unix socket by path": "import socket; socket.socket(socket.AF_UNIX).connect('{socket}')",
    "an abstract Unix socket": "import socket; socket.socket(socket.AF_UNIX).connect('\\0{abstract}')",
    "another process": "import os; os.kill({pid}, 0)",
    "a file": "open('{file}').read()",
    "the file system": "open('{file}', 'a').write('x')",
    "the environment": "import os; open('/proc/{pid}/environ', 'rb').read(1)",
}
# These are never tried without it.
ESCAPES = {
    "another host": "import socket; socket.create_connection(('192.0.2.1', 80), 2)",
    "the interpreter's own files": "import os; open(os.__file__, 'a')",
    "the mode of a device": "import os; os.chmod('/dev/null', 0o666)",
    "a setting of the kernel": "open('/proc/sys/kernel/core_pattern', 'r+')",
    "root": "import os; os.setuid(0)",
    "other namespaces": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
}
EXCEEDS = {
    "memory": "x = bytearray(1 << 30)",
    "time": "while True: pass",
    "time without work": "import os, time\nos.setsid() if os.getpid() != os.getsid(0) else None\ntime.sleep(60)",
    "output": "import os\nwhile True: os.write(1, b'x' * (1 << 20))",
    "a file": "open('x', 'wb').write(bytes(8 << 20))",
    "all files": "for number in range(32): open(str(number), 'wb').write(bytes(1 << 20))",
    "files elsewhere": "open('/dev/shm/x', 'w')",
    "processes": "import os, time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(60)",
}


def test_code_reaches_nothing_of_the_host(tmp_path):
    sandbox = sandbox_or_skip()
    kept = tmp_path / "kept"
    kept.write_text("mine")
    path, abstract = tmp_path / "socket", f"dtrain-{os.getpid()}"
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for address in (str(path), f"\0{abstract}"):
            listening = stack.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(address)
            listening.listen()
        values = {"port": server.getsockname()[1], "pid": os.getpid(), "file": kept, "socket": path}
        programs = {name: code.format(**values, abstract=abstract) for name, code in REACHES.items()}
        assert succeeded(sandbox, programs | ESCAPES) == set()
        assert kept.read_text() == "mine"
        assert succeeded(CodeSandbox(2.0, MEMORY, is_isolated=False), programs) == set(programs)


def test_code_stays_within_its_limits():
    sandbox = sandbox_or_skip(seconds=1.0, extra_seconds=1.0)
    assert succeeded(sandbox, EXCEEDS) == set()


def test_a_program_has_a_scratch_directory_and_threads():
    sandbox = sandbox_or_skip()
    code = """
import tempfile, threading
open("/tmp/dtrain-made", "w").write("x")
tempfile.TemporaryFile()
text = open("/dev/stdin").read()
thread = threading.Thread(target=print, args=(text,), kwargs={"file": open("/dev/stdout", "a")})
thread.start()
thread.join()
"""
    assert sandbox.run(code, stdin_text="read").output == "read\n"
    assert not Path("/tmp/dtrain-made").exists()


def test_code_ends_with_a_starter_that_is_killed():
    sandbox_or_skip()
    starter = (
        "import os, threading, time\n"
        "from dtrain.base.orphans import descendants\n"
        "from dtrain.rl.rewards.code_sandbox import CodeSandbox\n"
        "code = 'import time\\nwhile True: time.sleep(1)'\n"
        "threading.Thread(target=CodeSandbox(60.0, 256 << 20).run, args=(code,)).start()\n"
        "while len(pids := descendants(os.getpid())) < 3: time.sleep(0.05)\n"
        "print(*pids, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = process.stdout.readline().split()
        assert len(pids) == 3 and all(map(_runs, pids))  # bwrap, its init and Python
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and any(_runs(pid) for pid in pids):
            time.sleep(0.05)
        left = [int(pid) for pid in pids if _runs(pid)]
        kill_all(left)
        assert not left


def _runs(pid):
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_machine_without_a_sandbox_is_reported(monkeypatch):
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)  # for the user nobody
        monkeypatch.setenv("PATH", directory)
        with pytest.raises(UserError, match=r"not installed here: apt-get install bubblewrap.*allow_full_access"):
            CodeSandbox(1.0, MEMORY).run("")
        assert CodeSandbox(2.0, MEMORY, is_isolated=False).run("print(6)").output == "6\n"
        bwrap = Path(directory, "bwrap")
        bwrap.write_text("#!/bin/sh\necho bwrap: Unknown option --size >&2\nexit 1\n")
        bwrap.chmod(0o755)
        with pytest.raises(UserError, match=r"does not start here: bwrap: Unknown option --size\. .*bubblewrap 0\.8"):
            CodeSandbox(1.0, MEMORY).run("")
