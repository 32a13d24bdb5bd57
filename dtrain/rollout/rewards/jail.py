"""Python code of a model in a process of its own: cut off from networks, within limits, and gone with all it started.

A jail is a fresh interpreter (`python -I -S`) with an empty environment, in an empty directory that is deleted
afterwards. It has namespaces of its own for users, networks and processes, so that no address answers, the loopback
included, and no process outlives it. Where the kernel knows Landlock, it changes and deletes no file outside of its
directory. Memory, time, the size of a file and the number of processes have limits. It still reads what the user may
read. Linux alone.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dtrain.errors import UserError

_REFUSED = 77  # exit status: the kernel gives no namespaces
_FILE = 1 << 20  # bytes of a file, what is printed included
_START = 5.0  # seconds that a jail may take beside its work

# Runs in the jail. Arguments: the jail's directory, "1" to cut the network, bytes of memory, seconds.
_INSIDE = r"""
import ctypes, json, os, resource, signal, sys
place, cut, memory, seconds = sys.argv[1], sys.argv[2] == "1", int(sys.argv[3]), int(sys.argv[4])
with open(os.path.join(place, "job")) as file:
    job = json.load(file)
os.remove(os.path.join(place, "job"))
libc = ctypes.CDLL(None, use_errno=True)
if cut:
    if libc.unshare(0x10000000 | 0x40000000 | 0x20000000 | 0x08000000):  # users, networks, processes, messages
        os._exit(77)
    child = os.fork()
    if child:  # the first process of the new namespace takes all others with it
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
libc.prctl(1, signal.SIGKILL)  # ends with its parent
libc.prctl(38, 1, 0, 0, 0)  # gains no rights, which Landlock asks for
writes = sum(1 << bit for bit in (1, 4, 5, 6, 7, 8, 9, 10, 11, 12))  # to write, remove and make
ruleset = libc.syscall(444, ctypes.byref(ctypes.c_uint64(writes)), ctypes.c_size_t(8), 0)
if ruleset >= 0:
    class Below(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]
    below = Below(writes, os.open(place, os.O_PATH))
    libc.syscall(445, ruleset, 1, ctypes.byref(below), 0)
    libc.syscall(446, ruleset, 0)
for kind, limit in (
    (resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, 1 << 20),
    (resource.RLIMIT_NPROC, 16), (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(kind, (limit, limit))
told, proof = job.pop("fd"), job.pop("proof")
names = {"__name__": "__main__"}
exec(compile(job["code"], "solution", "exec"), names)
exec(compile(job["test"], "test", "exec"), names)
sys.stdout.flush()
os.write(told, proof.encode())
os._exit(0)
"""


@dataclass(frozen=True)
class Jail:
    """seconds: of processor and of clock. memory: bytes of addresses. cut: whether networks are cut off; False keeps
    the process in the host's namespaces, whose networks it reaches and where what it starts may stay."""

    seconds: float
    memory: int
    cut: bool = True

    def passes(self, code: str, test: str, given: str | None = None, printed: str | None = None) -> bool:
        """Whether `code` and then `test` run to their end, without an error and within the limits.

        given: what stands on its input; printed: what must stand on its output, white space at the ends of lines and of
        the whole left aside. Raises UserError where the kernel gives no namespaces.
        """
        proof = secrets.token_hex(16)
        with tempfile.TemporaryDirectory(prefix="dtrain-jail-") as name:
            place = Path(name)
            ours, theirs = os.pipe()
            with os.fdopen(ours, "rb") as heard, (place / "out").open("w+b") as out:
                try:
                    job = {"code": code, "test": test, "fd": theirs, "proof": proof}
                    (place / "job").write_text(json.dumps(job))
                    status = self._run(place, theirs, given, out.fileno())
                finally:
                    os.close(theirs)
                if status == _REFUSED:
                    raise UserError(
                        "python_tests: this system gives no namespaces of users and networks (a container's rules, or "
                        "kernel.unprivileged_userns_clone=0), so code of the model would reach the network: allow "
                        "them, or set network=host to let it"
                    )
                os.set_blocking(heard.fileno(), False)
                if heard.read(len(proof) + 1) != proof.encode():
                    return False
                out.seek(0)
                return printed is None or _lines(out.read(_FILE).decode(errors="replace")) == _lines(printed)

    def _run(self, place: Path, proof: int, given: str | None, out: int) -> int:
        """The exit status; a process beyond its time is killed, with its group."""
        limits = ["1" if self.cut else "0", str(self.memory), str(max(1, round(self.seconds)))]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _INSIDE, str(place), *limits],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.DEVNULL,
            cwd=place,
            env={"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            pass_fds=[proof],
            start_new_session=True,
        )
        try:
            process.communicate((given or "").encode(), timeout=self.seconds + _START)
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        return process.returncode


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
