"""Python processes for tests, forked from this one: what they run finds torch imported, and costs no start.

`ForkedPython` is `subprocess.Popen` for commands of Python. The process has descriptors, a session, an environment and
signals as one that was started has them. What it starts itself by `SHORTCUTS`, its ranks say, is forked as well.
"""

import atexit
import ctypes
import gc
import inspect
import logging
import multiprocessing.process
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import tests.world  # noqa: F401  imports all of torch that a rank needs, and sets its threads
from dtrain.base.orphans import end_with_parent
from dtrain.launch.processes import START

SHORTCUTS = {"dtrain", "tests.launch.launched", "torch.distributed.run", START}  # modules, and code after -c
NETWORK, HOSTNAME = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS

_start = subprocess.Popen._execute_child
_held: list[object] = []  # of this process: what must not be closed, for the numbers of its descriptors are others' now
_marks: set[int] = set()  # descriptors that a fork keeps open, by which it is found


class ForkedPython(subprocess.Popen):
    """A process of [sys.executable, options, -m MODULE or -c CODE, arguments] that ends with this one.

    mark: a descriptor that it and all forks of it keep open. enter: called in it first.
    """

    def __init__(self, command: Sequence[str], *, mark: int | None = None, enter=lambda: None, **options):
        self._enter, self._mark, self._parent = enter, mark, os.getpid()
        super().__init__(command, preexec_fn=self._begin, **options)

    def _begin(self) -> None:
        end_with_parent(self._parent)
        self._enter()

    def _execute_child(self, *arguments):
        _fork(self, inspect.signature(_start).bind(self, *arguments).arguments, self._mark)


@contextmanager
def forking() -> Iterator[None]:
    """Have what the block starts by SHORTCUTS forked from this process."""
    subprocess.Popen._execute_child = _fork_or_start
    try:
        yield
    finally:
        subprocess.Popen._execute_child = _start


def in_namespace(network: str, hostname: str | None = None) -> None:
    """Enter a network namespace of `ip netns`, as a host of that name: for `ForkedPython`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{network}") as opened:
        done = libc.setns(opened.fileno(), NETWORK)
    if hostname is not None:
        done = done or libc.unshare(HOSTNAME)
        socket.sethostname(hostname)
    if done:
        raise OSError(ctypes.get_errno(), f"namespace {network}")


def _fork_or_start(self, *arguments):
    """As `subprocess.Popen._execute_child`, that forks what is of SHORTCUTS."""
    given = inspect.signature(_start).bind(self, *arguments).arguments
    if given["args"][0] == sys.executable and SHORTCUTS & set(given["args"]):
        _fork(self, given, None)
    else:
        _start(self, *arguments)


def _fork(self: subprocess.Popen, given: dict, mark: int | None) -> None:
    gc.collect()
    self.pid = os.fork()
    if self.pid == 0:
        try:
            _become(given, mark)
            _run(given["args"])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    self._child_created = True
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(given[name] for name in pipes))


def _become(given: dict, mark: int | None) -> None:
    """Make of a fork what a started process is: nothing of its parent is open, registered or caught."""
    gc.freeze()
    _held.extend([sys.stdin, sys.stdout, sys.stderr])
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    multiprocessing.process._children = set()
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    logging.root.handlers.clear()
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    _marks.update([mark] if mark is not None else [])
    ends = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
    ends = [os.dup(end) if 0 <= end < 3 else end for end in ends]  # before another takes its place
    for number, end in enumerate(ends):
        if end >= 0:
            os.dup2(end, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in {*given["pass_fds"], *_marks}:
            with suppress(OSError):
                os.close(number)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering=1, closefd=False) for number, mode in enumerate(("r", "w", "w"))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    if given["env"] is not None:
        os.environ.clear()
        os.environ.update(given["env"])
    if given["cwd"] is not None:
        os.chdir(given["cwd"])
    if given["start_new_session"]:
        os.setsid()
    if given["preexec_fn"]:
        given["preexec_fn"]()
    subprocess.Popen._execute_child = _fork_or_start


def _run(command: Sequence[str]) -> None:
    """Run the program to its end, with the status that the interpreter has. Never returns."""
    at = next(place for place, word in enumerate(command) if word in ("-c", "-m"))
    program, sys.argv = command[at + 1], list(map(str, command[at + 1 :]))
    run: Callable[[], object]
    if command[at] == "-m":
        run = partial(runpy.run_module, program, run_name="__main__", alter_sys=True)
    else:
        run = partial(exec, program, {"__name__": "__main__"})
    status: object = 0
    try:
        run()
    except SystemExit as error:
        status = error.code
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(int(status or 0) & 0xFF)


def pids_with(mark: int) -> list[int]:
    """Return the processes that have the file of a descriptor open, zombies and this one left out."""
    wanted = os.stat(mark)
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(entry.name) != os.getpid() and any(os.path.samestat(wanted, fd.stat()) for fd in entry.glob("fd/*")):
                pids.append(int(entry.name))
    return pids
