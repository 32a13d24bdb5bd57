"""Python code of a model behind the walls of bubblewrap, within limits, and gone when it or its starter ends.

A sandbox is a fresh interpreter (`python -I -S`) under `bwrap`: of the host it has /usr and the interpreter's own
directory, read-only, and no more; one scratch directory of 16 MiB; an empty environment; namespaces of its own for
users, processes, networks, messages and names. No capability is left. A seccomp filter lets it start threads but no
process, and refuses changes of modes and attributes and memory that no limit counts, such as System V's. Limits of
memory, time, files and threads hold inside. Linux on x86-64 and ARM64 alone.

A test in Python is two such processes (`remote_calls`): one runs the code, the other the test, which calls the code
through pipes. The exit status of the second decides. A program is one, and its output is compared here.
"""

import importlib.util
import marshal
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from importlib.abc import InspectLoader
from pathlib import Path
from typing import Any, Self

from dtrain.base.errors import UserError
from dtrain.base.json_files import split_lines

_START_SECONDS = 60.0  # until the walls stand
_SPARE_SECONDS = 5.0  # of clock beside the seconds of work
_SCRATCH_BYTES = 16 << 20
_OUTPUT_BYTES = 1 << 20
_MODULES = tuple(f"dtrain.rl.rewards.{name}" for name in ("plain_values", "remote_calls"))
_BOOT = """
import marshal, os, sys, types
os.write(2, b"+")  # the walls stand
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
with open(int(sys.argv[1]), "rb") as file:
    modules, job = marshal.load(file), marshal.load(file)
for name, code in modules:
    module = sys.modules[name] = types.ModuleType(name)
    exec(code, module.__dict__)
module.main(job)
"""
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_REFUSED_CALLS: dict[str, tuple[int | None, int | None]] = {  # name -> its numbers on x86-64 and ARM64
    # processes and namespaces
    **{"fork": (57, None), "vfork": (58, None), "unshare": (272, 97), "setns": (308, 268)},
    # memory that no limit counts
    **{"shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180)},
    **{"memfd_create": (319, 279)},
    **{"memfd_secret": (447, 447), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    # what else is known for its holes
    **{"bpf": (321, 280), "io_uring_setup": (425, 425), "perf_event_open": (298, 241), "userfaultfd": (323, 282)},
    # modes, owners, times and attributes: devices and open files are the host's, and root owns them there too
    **{"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None)},
    **{"fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None)},
    **{"futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6)},
    **{"fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16)},
    **{"setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469)},
}
_CLONE = (56, 220)
_WITHOUT = "kwargs: {allow_full_access: true} runs the model's code without walls, with your files and network"
_INSTALL = "apt-get install bubblewrap, dnf install bubblewrap, or conda install -c conda-forge bubblewrap"


@dataclass(frozen=True)
class CodeSandbox:
    """Runs code of a model. seconds: of processor, and a little more of clock. memory: bytes of addresses of each
    process. has_walls: False runs the code as the user, with the limits alone."""

    seconds: float
    memory: int
    has_walls: bool = True

    def passes(self, code: str, test: str | None, stdin: str = "", printed: str = "") -> bool:
        """Return whether `code` passes `test` within the limits.

        test: Python that calls what the code defines, and passes where it runs to its end; None for a program, whose
        exit status must be 0. stdin: text of the program's standard input; printed: what must stand on its output,
        white space at the ends of lines and of the whole left aside. Raises UserError where a process does not start.
        """
        return self._prints(code, stdin, printed) if test is None else self._passes(code, test)

    def _prints(self, code: str, stdin: str, printed: str) -> bool:
        with tempfile.TemporaryFile() as standard_input, tempfile.TemporaryFile() as output:
            standard_input.write(stdin.encode(errors="replace"))
            standard_input.seek(0)
            with _Process(self.has_walls, standard_input.fileno(), output.fileno()) as process:
                process.send(self._job("program", code=code))
                status = process.wait(self.seconds + _SPARE_SECONDS)
            output.seek(0)
            return status == 0 and _lines(output.read(_OUTPUT_BYTES).decode(errors="replace")) == _lines(printed)

    def _passes(self, code: str, test: str) -> bool:
        with ExitStack() as stack:
            questions, answers = os.pipe(), os.pipe()
            ends = stack.enter_context(ExitStack())
            for end in (*questions, *answers):
                ends.callback(os.close, end)
            nowhere = stack.enter_context(open(os.devnull, "r+b")).fileno()
            of_code = {"incoming": questions[0], "outgoing": answers[1]}
            of_test = {"incoming": answers[0], "outgoing": questions[1]}
            code_process = stack.enter_context(_Process(self.has_walls, nowhere, nowhere, *of_code.values()))
            test_process = stack.enter_context(_Process(self.has_walls, nowhere, nowhere, *of_test.values()))
            ends.close()  # the two alone hold the pipes, so that each sees the other's end
            code_process.send(self._job("code", code=code, **of_code))
            test_process.send(self._job("test", test=test, **of_test))
            return test_process.wait(self.seconds + _SPARE_SECONDS) == 0

    def _job(self, role: str, **more: Any) -> dict[str, Any]:
        limits = {"memory": self.memory, "seconds": self.seconds, "has_walls": self.has_walls}
        return {"role": role, **limits, **more}


class _Process:
    """An interpreter that waits for its job, and is gone at the end of the context. Raises UserError where it does not
    start."""

    def __init__(self, has_walls: bool, standard_input: int, output: int, *pipes: int):
        self._pipes, self._files = pipes, (standard_input, output)
        self._has_walls = has_walls

    def __enter__(self) -> Self:
        walls = _bwrap() if self._has_walls else []
        with ExitStack() as ends:
            job, self._job = os.pipe()
            ends.callback(os.close, job)
            command = [os.path.realpath(getattr(sys, "_base_executable", sys.executable)), "-I", "-S", "-c", _BOOT]
            passed = [job, *self._pipes]
            if self._has_walls:
                seccomp, writer = os.pipe()  # whose buffer holds the filter
                os.write(writer, _seccomp_filter())
                os.close(writer)
                ends.callback(os.close, seccomp)
                command = [*walls, "--seccomp", str(seccomp), "--", *command]
                passed.append(seccomp)
            self._process = subprocess.Popen(
                [*command, str(job)],
                stdin=self._files[0],
                stdout=self._files[1],
                stderr=subprocess.PIPE,
                env={},
                cwd="/",
                pass_fds=passed,
                start_new_session=True,
            )
        try:
            self._wait_for_walls()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it. With bwrap all that it runs ends, since it is the init of its processes that dies with bwrap."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()
        if self._job >= 0:
            os.close(self._job)

    def send(self, job: dict[str, Any]) -> None:
        with suppress(BrokenPipeError), os.fdopen(self._job, "wb") as file:
            self._job = -1
            file.write(_modules() + marshal.dumps(job))

    def wait(self, seconds: float) -> int | None:
        """Return the exit status; None where it takes longer."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def _wait_for_walls(self) -> None:
        assert self._process.stderr is not None
        heard, deadline = b"", time.monotonic() + _START_SECONDS
        while not heard.endswith(b"+"):
            left = deadline - time.monotonic()
            is_ready = select.select([self._process.stderr], [], [], max(left, 0))[0]
            more = os.read(self._process.stderr.fileno(), 1 << 16) if is_ready else b""
            if not more:
                why = heard.decode(errors="replace").strip().splitlines() or ["it says nothing"]
                raise UserError(
                    f"python_tests: a process for the model's code does not start here: {why[-1]}. The walls need "
                    "bubblewrap 0.7 or later and namespaces of users, which containers (docker run --security-opt "
                    "seccomp=unconfined --security-opt systempaths=unconfined) and Ubuntu (sysctl "
                    f"kernel.apparmor_restrict_unprivileged_userns=0) must allow; {_WITHOUT}"
                )
            heard += more


def _bwrap() -> list[str]:
    """Return the command that makes the walls, up to the program behind them. Raises UserError where it is not
    installed."""
    program = shutil.which("bwrap")
    if program is None or os.uname().machine not in _MACHINES:
        raise UserError(
            "python_tests: the model's code runs behind the walls of bubblewrap (Linux on x86-64 and ARM64), and bwrap "
            f"is not installed here: {_INSTALL}; {_WITHOUT}"
        )
    command = [program, "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    command += ["--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/lib", "/lib32", "/lib64"):
        path = Path(name)
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            command += ["--ro-bind", name, name]
    for name in ("/etc/ld.so.cache", "/etc/localtime"):
        command += ["--ro-bind-try", name, name]
    for prefix in dict.fromkeys(map(os.path.realpath, (sys.base_prefix, sys.base_exec_prefix))):
        if not Path(prefix).is_relative_to("/usr"):
            command += ["--ro-bind", prefix, prefix]
    command += ["--proc", "/proc", "--dev", "/dev", "--size", str(_SCRATCH_BYTES), "--tmpfs", "/tmp"]
    # Settings of the kernel in /proc/sys are files that the host's root owns, so root inside could write them.
    for name in ("/proc", "/dev", "/"):
        command += ["--remount-ro", name]
    return [*command, "--chdir", "/tmp"]


def _seccomp_filter() -> bytes:
    """Return the instructions of a filter that lets threads start, but no process, and refuses `_REFUSED_CALLS`."""
    machine = os.uname().machine
    column = [*_MACHINES].index(machine)
    allow, refuse, absent = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38
    rules = [(0x20, 0, 0, 4), (0x15, 1, 0, _MACHINES[machine]), (6, 0, 0, 0x80000000)]  # another machine's calls kill
    rules += [(0x20, 0, 0, 0), (0x35, 0, 1, 0x40000000), (6, 0, 0, absent)]  # x32's do not exist
    rules += [(0x15, 0, 1, 435), (6, 0, 0, absent)]  # clone3, whose flags a filter cannot read
    for numbers in _REFUSED_CALLS.values():
        number = numbers[column]
        rules += [] if number is None else [(0x15, 0, 1, number), (6, 0, 0, refuse)]
    rules += [(0x15, 0, 4, _CLONE[column]), (0x20, 0, 0, 16), (0x45, 1, 0, 0x10000)]
    rules += [(6, 0, 0, refuse), (6, 0, 0, allow), (6, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)


@cache
def _modules() -> bytes:
    """Return the modules that run in a sandbox, compiled, in the order of their imports."""
    compiled = []
    for name in _MODULES:
        spec = importlib.util.find_spec(name)
        assert spec is not None and isinstance(spec.loader, InspectLoader)
        compiled.append((name, spec.loader.get_code(name)))
    return marshal.dumps(compiled)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in split_lines(text.strip())]
