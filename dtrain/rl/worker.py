"""User code in its own process, which may hang, crash or be killed without harm to the run.

`Worker` is the side of the run, and `serve` the side of the process. They exchange messages over a socket pair:

    Worker   -> process    pickle of (method, arguments), for example ("score", (batch, 0))
    process  -> Worker     one line of JSON for each result, then the line `null`

The process ends with its parent, and loads no torch unless the user's code does. Every wait has a time limit, unless
the user allows a week or more. Killing the process also kills everything that it started.
"""

import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Any, Self, TypedDict

from dtrain.base import orphans
from dtrain.base.errors import UserError
from dtrain.base.processes import import_search_path
from dtrain.base.ranges import MAX_REWARD

LOAD_SECONDS = 120.0  # time limit for importing the user's modules, unless the recipe's timeout is longer
TRACEBACK_LINES = 12  # the last lines of a traceback that a message shows
WEEK = 7 * 86400.0  # a socket accepts no timeout of a month, so a timeout of a week or more means no limit
EXIT_SECONDS = 5  # time that a process gets to end after it has closed its socket


class WorkerLost(Exception):
    """The process is no longer usable and has been killed. The message says why."""


class Worker:
    """A process that has loaded user code. A lost process is replaced by another one.

    Only one thread may use an object, except for `close`.

    Args:
        service: A class, "module:Class". The process calls its methods.
        load: Arguments of its method `load`, which is called first.
        what: Name of the user's code in messages.
        timeout: Seconds that an answer may take.
        key: The recipe key of the timeout, for messages.
        print_line: Prints a line. Called once for each cause of a failure.

    Raises:
        UserError: If the code cannot be loaded.
    """

    def __init__(
        self, service: str, *load: Any, what: str, timeout: float, key: str, print_line: Callable[[str], None]
    ):
        self._service, self._load, self._what = service, load, what
        self._timeout, self._key, self._print_line = timeout, key, print_line
        self._reported: set[tuple[str, str]] = set()  # (stage, cause) of the failures that were printed
        self._has_worked: set[str] = set()  # stages that have succeeded at least once
        self._is_closed = False
        # The kernel ends a process when the thread that started it ends (PR_SET_PDEATHSIG, `orphans.end_with_parent`).
        # So a thread that lives as long as this object starts all processes.
        self._thread = ThreadPoolExecutor(1, "worker")
        try:
            self._start()
        except WorkerLost as lost:
            raise UserError(f"{what} cannot be loaded: the process {lost}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process at once, even during a call. May be called again, and from another thread."""
        self._is_closed = True
        self._kill()
        self._thread.shutdown()

    @property
    def _is_alive(self) -> bool:
        return self._process.poll() is None

    def _ensure_running(self) -> None:
        """Start another process with the same code if the process has ended. Raises WorkerLost on failure."""
        if self._is_alive:
            return
        self._kill()
        try:
            self._start()
        except UserError as error:  # the code could be loaded before, so the run does not end
            raise WorkerLost(f"cannot be loaded any more: {str(error).splitlines()[-1]}") from None

    def call(self, method: str, *arguments: Any, grace: float = 0.0, at_least: float = 0.0) -> Iterator[Any]:
        """Call a method of the service and yield its results as they arrive.

        If the caller does not consume all results, for example because of Ctrl-C, the process is killed, because its
        next line would be taken for the result of another call.

        Args:
            method: Name of the method.
            arguments: Its arguments. They are pickled.
            grace: Seconds to wait in addition to the timeout, for a process that enforces the timeout itself.
            at_least: Smallest timeout in seconds.

        Raises:
            WorkerLost: If a result takes longer than max(timeout, at_least) + grace seconds, or the process ended.
        """
        seconds = max(self._timeout, at_least)
        has_limit = seconds < WEEK
        is_complete = False
        try:
            self._socket.settimeout(seconds if has_limit else None)
            self._socket.sendall(pickle.dumps((method, arguments)))
            self._socket.settimeout(seconds + grace if has_limit else None)
            while True:
                line = self._incoming.readline()
                if not line.endswith(b"\n"):  # the process closed its end, perhaps within a line
                    raise WorkerLost(self._describe_exit())
                result = json.loads(line)
                if result is None:
                    is_complete = True
                    return
                yield result
        except TimeoutError:
            raise WorkerLost(f"took longer than {seconds:g} s ({self._key})") from None
        except (OSError, ValueError):  # ValueError: another thread closed the socket
            raise WorkerLost(self._describe_exit()) from None
        finally:
            if not is_complete:
                self._kill()

    def _kill(self) -> None:
        """Kill the process and everything that it started. May be called again."""
        if self._is_alive:
            # Some have their own session, for example tool servers, so killing the group does not reach them.
            descendants = orphans.descendants(self._process.pid)
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGKILL)
            orphans.kill_all(descendants)
        self._process.wait()
        # This ends a wait in another thread, even if a forked process still has the other end of the socket.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._incoming.close()
        self._socket.close()

    def _start(self) -> None:
        """Start the process and load the user's code. Raises UserError, and WorkerLost if the process ends."""
        if self._is_closed:
            raise WorkerLost("is closed")
        self._socket, other_end = socket.socketpair()
        with other_end:
            self._process = self._thread.submit(_spawn, self._service, other_end.fileno()).result()
        self._incoming = self._socket.makefile("rb")
        (outcome,) = self.call("load", *self._load, at_least=LOAD_SECONDS)
        if "value" not in outcome:
            self._kill()
            raise UserError(outcome.get("user") or f"{self._what} cannot be loaded:\n{outcome['error']}")

    def _describe_exit(self) -> str:
        """Return how the process ended."""
        try:
            status = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def _report_failure(self, stage: str, cause: str, text: str, loss: str) -> None:
        """Print a failure of the user's code, once for each cause.

        Args:
            stage: What failed, such as a reward's name or "step".
            cause: Failures with the same stage and cause are printed once.
            text: What went wrong.
            loss: What the failure costs. Added to the text.

        Raises:
            UserError: If this stage has never worked. Then the code is wrong, and the run ends.
        """
        if stage not in self._has_worked:
            raise UserError(text)
        self._report_once(stage, cause, text + loss)

    def _report_once(self, stage: str, cause: str, text: str) -> None:
        if (stage, cause) not in self._reported:
            self._reported.add((stage, cause))
            self._print_line(text)


def _spawn(service: str, channel: int) -> subprocess.Popen[bytes]:
    """Start a process that serves calls of `service` on the socket `channel`.

    The user's code prints to standard error and reads an empty standard input. CUDA devices are hidden from it, because
    the run needs their memory. The code can set CUDA_VISIBLE_DEVICES to see them.
    """
    module, name = service.split(":")
    code = "import json, os, sys; os.environ['CUDA_VISIBLE_DEVICES'] = ''; "
    code += "parent, channel, sys.path[:] = json.loads(sys.argv[1]); "
    code += f"from dtrain.rl.worker import serve; from {module} import {name}; serve(parent, channel, {name}())"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, json.dumps([os.getpid(), channel, import_search_path()])],
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=[channel],
        # Its own session: the run handles Ctrl-C at the terminal, and processes that the code starts belong to it.
        start_new_session=True,
    )


class Outcome(TypedDict, total=False):
    """Outcome of a call in the process, as JSON. A successful call has `value`, a failed one `user` or `error`.

    Attributes:
        value: What the call returned.
        user: Message of a UserError.
        error: The last lines of the traceback of any other exception.
        kind: Name of that exception.
        lost: Why the process was lost. The parent adds this.
        missed: Why the result was not waited for, or is incomplete.
        stage: What failed, if it is not what was called: a step may fail in its observation.
    """

    value: Any
    user: str
    error: str
    kind: str
    lost: str
    missed: str
    stage: str


def serve(parent: int, channel: int, service: Any) -> None:
    """Serve calls of the methods of `service` until the parent closes the socket. Never returns.

    A service may get a `main` when it loads. Then `main` runs in this thread, and another thread serves the calls,
    because some code needs the main thread, for example to set signal handlers.

    Args:
        parent: Process id of the parent. This process ends with it.
        channel: File descriptor of the socket.
        service: Object whose methods return an iterable of results.
    """
    orphans.end_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    server_pid = os.getpid()
    connection = socket.socket(fileno=channel)
    connection.set_inheritable(False)
    calls = connection.makefile("rb")

    def serve_call() -> None:
        method, arguments = pickle.load(calls)
        results = getattr(service, method)(*arguments)
        for result in chain(results, [None]):
            if os.getpid() != server_pid:  # the user's code has forked, and this is the child: it must not answer
                os._exit(0)
            connection.sendall(json.dumps(result).encode() + b"\n")

    def serve_all() -> None:
        try:
            while True:
                serve_call()
        finally:
            os._exit(0)

    with suppress(EOFError):
        while getattr(service, "main", None) is None:
            serve_call()
        threading.Thread(target=serve_all, daemon=True).start()
        service.main()
    os._exit(0)  # threads of the user's code must not keep the process alive


def attempt(act: Callable[..., Any], *arguments: Any) -> Outcome:
    """Call `act` and return its result or any exception as an Outcome.

    Example:
        >>> attempt(int, "7")
        {'value': 7}
        >>> attempt(int, "seven")["kind"]
        'ValueError'
    """
    try:
        return {"value": act(*arguments)}
    except UserError as error:
        return {"user": str(error)}
    except BaseException as error:  # sys.exit too: the process continues, and the parent reports the failure
        lines = traceback.format_exc().strip().splitlines()
        return {"error": "\n".join(lines[-TRACEBACK_LINES:]), "kind": type(error).__qualname__}


def to_reward(value: Any, of: str = "") -> float | None:
    """Convert a reward of the user's code to a float, NaN to None.

    Args:
        value: None or anything that `float` accepts, except text.
        of: What the reward is for, such as " for a completion", for the message.

    Raises:
        UserError: If the value is not a number, infinite, or larger than MAX_REWARD.

    Example:
        >>> to_reward(True), to_reward(float("nan")), to_reward(None)
        (1.0, None, None)
    """
    if value is None:
        return None
    is_number = hasattr(value, "__float__") or hasattr(value, "__index__")
    if isinstance(value, str | bytes) or not is_number:
        raise UserError(f"returned {shown(value)}{of}. It must return a finite number or None")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of floats
        number = math.inf
    if math.isinf(number):
        raise UserError(f"returned {number}{of}. It must return a finite number or None")
    if abs(number) > MAX_REWARD:
        raise UserError(f"returned {number}{of}. It must return a number of at most {MAX_REWARD:g} in size, or None")
    return None if math.isnan(number) else number


def shown(value: Any) -> str:
    """Return `repr(value)` for a message, cut to 80 characters.

    Example:
        >>> shown([1, 2])
        '[1, 2]'
        >>> len(shown("a" * 100))
        80
    """
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
