"""A sandbox for Python code that a model wrote: bubblewrap (`bwrap`) around a fresh interpreter, with limits.

One call of `CodeSandbox.run` starts one interpreter, which runs the text of `sandboxed.py` and is gone when the call
returns:

    bwrap  --unshare-..  --ro-bind /usr /usr  --tmpfs /tmp  ..  --  python -I -S -c SANDBOXED JOB_FD
      stdin:   a file with the program's input
      stdout:  a file that the caller reads after the end. Only the caller compares it with what is expected.
      stderr:  a pipe for errors of bwrap itself. `sandboxed.py` closes it before any code of the model runs.
      JOB_FD:  a file with the code, the test without its expected values, and the limits

bwrap gives the process its own users, processes, network and mounts. `sandboxed.py` sets the limits on memory, time,
files, processes and threads.
"""

import inspect
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dtrain.base.errors import UserError
from dtrain.rl.rewards import sandboxed

_SCRATCH_BYTES = 16 << 20
_NOBODY = 65534
_INSTALL = "apt-get install bubblewrap, dnf install bubblewrap, or conda install -c conda-forge bubblewrap"
_WITHOUT = "kwargs: {allow_full_access: true} runs the model's code without a sandbox, with your files and network"


@dataclass(frozen=True)
class Finished:
    """The end of a sandboxed process.

    Attributes:
        status: Its exit status, negative for a signal. None if it ran out of time and was killed.
        output: What it wrote to standard output, at most 4 MiB.
    """

    status: int | None
    output: str


@dataclass(frozen=True)
class CodeSandbox:
    """Runs Python code of a model.

    Attributes:
        seconds: Limit on processor time.
        memory: Limit on the address space, in bytes.
        is_isolated: False runs the code as the current user without bwrap. Only the limits are left then.
        extra_seconds: Wall-clock time in addition to `seconds`, for starting on a busy machine.
    """

    seconds: float
    memory: int
    is_isolated: bool = True
    extra_seconds: float = 5.0

    def run(self, code: str, *, test: str | None = None, modules: Sequence[str] = (), stdin_text: str = "") -> Finished:
        """Run `code`, and then `test` in the same interpreter.

        Args:
            code: A Python program.
            test: Python that runs after the code and reports values (`sandboxed.py`). Standard output then contains
                these reports and nothing else. None runs only the program.
            modules: Modules of the standard library that `test` uses without importing them.
            stdin_text: The program's standard input.

        Raises:
            UserError: If bwrap is not installed or the interpreter does not start.
        """
        job = {
            "code": code,
            "test": test,
            "modules": modules,
            "memory": self.memory,
            "seconds": max(1, round(self.seconds)),
            "limits_threads": self.is_isolated and _counts_threads_by_namespace(),
        }
        with (
            tempfile.TemporaryFile() as job_file,
            tempfile.TemporaryFile() as stdin,
            tempfile.TemporaryFile() as output,
        ):
            _write(job_file, json.dumps(job))
            _write(stdin, stdin_text)
            _write(output, "")
            status = self._run_interpreter(job_file, stdin, output)
            output.seek(0)
            return Finished(status, output.read().decode(errors="replace"))

    def _run_interpreter(self, job: IO[bytes], stdin: IO[bytes], output: IO[bytes]) -> int | None:
        """Run `sandboxed.py`, kill it at the wall-clock limit, and return its exit status."""
        drops_root = self.is_isolated and os.geteuid() == 0
        interpreter = _interpreter(drops_root)
        command = [interpreter, "-I", "-S", "-c", inspect.getsource(sandboxed), str(job.fileno())]
        if self.is_isolated:
            command = [*_bwrap_command(interpreter), *command]
        try:
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=output,
                stderr=subprocess.PIPE,
                env={},
                cwd="/",
                pass_fds=[job.fileno()],
                start_new_session=True,
                # The user in the sandbox is the one who starts bwrap. As root it would own the host's devices.
                user=_NOBODY if drops_root else None,
                group=_NOBODY if drops_root else None,
                extra_groups=[] if drops_root else None,
            )
        except OSError as error:
            raise _start_error(str(error)) from None
        with process:
            try:
                _, errors = process.communicate(timeout=self.seconds + self.extra_seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                # All processes in the sandbox end with bwrap. Without bwrap they are usually in its group.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        messages = errors.decode(errors="replace").splitlines()
        if messages:
            raise _start_error(messages[-1])
        return process.returncode


def _write(file: IO[bytes], text: str) -> None:
    file.write(text.encode(errors="replace"))
    file.seek(0)
    # A program that opens /dev/stdin or /dev/stdout opens the file again, perhaps as the user nobody. The file has no
    # name, so no other process can open it.
    os.fchmod(file.fileno(), 0o666)


def _start_error(reason: str) -> UserError:
    return UserError(
        f"python_tests: the sandbox for the model's code does not start here: {reason}. It needs bubblewrap 0.8 or "
        "later and user namespaces. Allow these in a container (docker run --security-opt seccomp=unconfined "
        "--security-opt systempaths=unconfined) and on Ubuntu (sysctl kernel.apparmor_restrict_unprivileged_userns=0). "
        f"If dtrain runs as root, the user nobody must be able to read Python's directory. {_WITHOUT}"
    )


def _counts_threads_by_namespace() -> bool:
    """Return whether RLIMIT_NPROC counts only the threads in the sandbox.

    Before Linux 5.14 it counts all threads of the user, of which a training job has more than the limit.
    """
    major, minor = os.uname().release.split(".")[:2]
    return (int(major), int(minor)) >= (5, 14)


def _interpreter(drops_root: bool) -> str:
    """Return the interpreter that runs the code: dtrain's own, without its virtual environment.

    Root's interpreter may be in a directory that only root can enter, such as /root/.pyenv. The user nobody then gets
    the system's interpreter of the same version.
    """
    own = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    if drops_root:
        system = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
        others_can_enter = all(parent.stat().st_mode & stat.S_IXOTH for parent in own.parents)
        if not others_can_enter and system.exists():
            return str(system)
    return str(own)


def _bwrap_command(interpreter: str) -> list[str]:
    """Return the bwrap command up to its last option.

    Raises:
        UserError: If bwrap is not installed.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise UserError(
            "python_tests: the model's code runs in a sandbox of bubblewrap, which needs Linux, and bwrap is not "
            f"installed here: {_INSTALL}; {_WITHOUT}"
        )
    command = [program, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"]
    command += ["--new-session", "--clearenv", "--cap-drop", "ALL", "--hostname", "sandbox"]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/lib", "/lib32", "/lib64"):
        path = Path(name)
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            command += ["--ro-bind", name, name]
    for name in ("/etc/ld.so.cache", "/etc/localtime"):
        command += ["--ro-bind-try", name, name]
    if not interpreter.startswith("/usr/"):
        for prefix in sorted({os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)}):
            command += ["--ro-bind", prefix, prefix]
    command += ["--proc", "/proc", "--dev", "/dev", "--size", str(_SCRATCH_BYTES), "--tmpfs", "/tmp"]
    # Both are file systems in memory, which would have no limit.
    command += ["--remount-ro", "/dev", "--remount-ro", "/"]
    return [*command, "--chdir", "/tmp", "--"]
