"""Python code of a model in a process of its own: cut off from networks, within limits, and gone when it ends.

A jail is a fresh interpreter (`python -I -S`) with an empty environment. It has namespaces of its own for users,
networks and processes: no address answers, the loopback included, and it signals and outlives nobody. Landlock lets it
write, make and delete no file; what it prints goes to a file of at most 1 MiB. A seccomp filter lets it start threads
but no process. Memory and time have limits. It reads what the user may read, and may change the modes and times of the
user's files. Linux on x86-64 and ARM64 alone.
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

_REFUSED = 77  # exit status: the kernel lacks what the jail is made of
_FILE = 1 << 20  # bytes of a file, what is printed included
_START = 5.0  # seconds that a jail may take beside its work

# Runs in the jail. Arguments: the jail's directory, "1" for a system that must isolate, bytes of memory, seconds.
_INSIDE = r"""
import builtins, ctypes, json, os, resource, signal, struct, sys, types
place, isolated, memory, seconds = sys.argv[1], sys.argv[2] == "1", int(sys.argv[3]), int(sys.argv[4])
with open(os.path.join(place, "job")) as file:
    job = json.load(file)
os.remove(os.path.join(place, "job"))
libc = ctypes.CDLL(None, use_errno=True)

def need(ok):
    if isolated and not ok:
        os._exit(77)

if isolated:
    need(libc.unshare(0x10000000 | 0x40000000 | 0x20000000 | 0x08000000) == 0)  # users, networks, processes, messages
    child = os.fork()
    if child:  # the first process of the new namespace takes all others with it
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
libc.prctl(1, signal.SIGKILL)  # ends with its parent
libc.prctl(38, 1, 0, 0, 0)  # gains no rights: Landlock and seccomp ask for that
version = libc.syscall(444, None, ctypes.c_size_t(0), 1)
writes = sum(1 << bit for bit in (1, *range(4, 13), *([14] if version >= 3 else [])))  # write, remove, make, truncate
ruleset = libc.syscall(444, ctypes.byref(ctypes.c_uint64(writes)), ctypes.c_size_t(8), 0)
need(ruleset >= 0 and libc.syscall(446, ruleset, 0) == 0)
# clone; fork, vfork, and setpgid and setsid, by which it would leave the group that is killed
known = {"x86_64": (0xC000003E, 56, (57, 58, 109, 112)), "aarch64": (0xC00000B7, 220, (154, 157))}
machine = known.get(os.uname().machine)
need(machine is not None)
if machine is not None:
    arch, clone, others = machine
    allow, refuse, absent = 0x7FFF0000, 0x00050000 | 11, 0x00050000 | 38
    rules = [(0x20, 0, 0, 4), (0x15, 1, 0, arch), (6, 0, 0, 0x80000000)]  # another machine's calls end the process
    rules += [(0x20, 0, 0, 0), (0x35, 0, 1, 0x40000000), (6, 0, 0, absent)]  # x32's do not exist
    rules += [(0x15, 0, 1, 435), (6, 0, 0, absent)]  # clone3, whose flags a filter cannot read
    for number in others:
        rules += [(0x15, 0, 1, number), (6, 0, 0, refuse)]
    rules += [(0x15, 0, 4, clone), (0x20, 0, 0, 16), (0x45, 1, 0, 0x10000), (6, 0, 0, refuse), (6, 0, 0, allow)]
    rules += [(6, 0, 0, allow)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    head = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(program))
    need(libc.prctl(22, 2, ctypes.c_char_p(head), 0, 0) == 0)
for kind, limit in (
    (resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, 1 << 20),
    (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(kind, (limit, limit))
told, proof = job.pop("fd"), job.pop("proof")
os.write(told, b"+")  # isolated: from here on the exit status is the code's
sys.argv[:] = ["solution"]
builtins.exit = builtins.quit = sys.exit  # as `site` has them
main = sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(job["code"], "solution", "exec"), main.__dict__)
if job["test"] is not None:  # else a program, which ends as it likes
    exec(compile(job["test"], "test", "exec"), main.__dict__)
    os.write(told, proof.encode())
    os._exit(0)
"""


@dataclass(frozen=True)
class Jail:
    """seconds: of processor and of clock. memory: bytes of addresses. isolated: False keeps the process in the host's
    namespaces, whose networks it reaches, and goes on where the kernel lacks Landlock or seccomp."""

    seconds: float
    memory: int
    isolated: bool = True

    def passes(self, code: str, test: str | None, given: str = "", printed: str = "") -> bool:
        """Whether `code` and then `test` run to their end, without an error and within the limits.

        test: None for a program, whose exit status must be 0. given: what stands on its input; printed: what must stand
        on its output, white space at the ends of lines and of the whole left aside. Raises UserError where the system
        does not isolate.
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
                os.set_blocking(heard.fileno(), False)
                said = heard.read(len(proof) + 2) or b""
                if status == _REFUSED and not said:
                    raise UserError(
                        "python_tests: this system does not isolate code of a model: it needs Linux 5.13 with "
                        "Landlock, seccomp, and namespaces of users and networks; a container's rules may forbid: "
                        "allow them, or set isolated=false to run the code with the network and your files in its reach"
                    )
                if test is not None:
                    return said == b"+" + proof.encode()
                out.seek(0)
                return status == 0 and _lines(out.read(_FILE).decode(errors="replace")) == _lines(printed)

    def _run(self, place: Path, proof: int, given: str, out: int) -> int:
        """The exit status; a process beyond its time is killed, with its group."""
        limits = ["1" if self.isolated else "0", str(self.memory), str(max(1, round(self.seconds)))]
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
            process.communicate(given.encode(errors="replace"), timeout=self.seconds + _START)
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
