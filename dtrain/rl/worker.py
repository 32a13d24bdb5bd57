"""Code of the user's in a process of its own, which may hang, crash or be killed without harm to the run.

`Worker` is the parent's side, `serve` the other, which dies with its parent and loads no torch unless the user's code
does. Every wait is bounded, unless the user allows a week or more; the process is killed with all that it started. A
call is (method, arguments), pickled. An answer is a line of JSON, and null comes after the last one of a call.
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

LOAD_SECONDS = 120.0  # for the imports of the user's own modules; a longer timeout counts
LAST_LINES = 12  # of a traceback
WEEK = 7 * 86400.0  # a socket takes no timeout of a month; what is allowed longer than a week has no limit


class WorkerLost(Exception):
    """Raised where the process is of no use any more, and has been killed; the message says why."""


class Worker:
    """A process that has loaded code of the user's, and is started anew where it is gone.

    service: a class, module:Class, whose methods the process answers; load: arguments of its `load`, called first.
    what: whose code that is, as messages name it; timeout: seconds that an answer may take; key: the recipe's key for
    that. say: called with what went wrong, once for each cause.

    Raises UserError where the code cannot be loaded. Not for several threads at once, but for `close`.
    """

    def __init__(self, service: str, *load: Any, what: str, timeout: float, key: str, say: Callable[[str], None]):
        self._service, self._load, self._what = service, load, what
        self._timeout, self._key, self._say = timeout, key, say
        self._reported: set[tuple[str, str]] = set()
        self._has_worked: set[str] = set()
        self._is_closed = False
        # The kernel ends a process with the thread that started it (PR_SET_PDEATHSIG, `orphans.end_with_parent`): that
        # thread lives as long as this.
        self._thread = ThreadPoolExecutor(1, "worker")
        try:
            self._start()
        except WorkerLost as lost:
            raise UserError(f"{what} cannot be loaded: their process {lost}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, at once even where it computes. May be called again."""
        self._is_closed = True
        self._kill()
        self._thread.shutdown()

    @property
    def _is_alive(self) -> bool:
        return self._process.poll() is None

    def _ensure_running(self) -> None:
        """Start another process, with the same code loaded, if the process has ended. Raises WorkerLost on failure."""
        if not self._is_alive:
            self._kill()
            try:
                self._start()
            except UserError as error:  # it could be loaded once: no mistake that ends a run
                raise WorkerLost(f"cannot be loaded any more: {str(error).splitlines()[-1]}") from None

    def call(self, method: str, *arguments: Any, grace: float = 0.0, at_least: float = 0.0) -> Iterator[Any]:
        """Yield the answers of a method of the service, as they come.

        Raises WorkerLost where one takes longer than max(timeout, at_least) + grace seconds, or the process is gone.
        Whatever ends this before the last answer, Ctrl-C too, kills the process: nobody waits for it.
        """
        seconds = max(self._timeout, at_least)
        is_over = False
        try:
            self._socket.settimeout(seconds if seconds < WEEK else None)
            self._socket.sendall(pickle.dumps((method, arguments)))
            self._socket.settimeout(seconds + grace if seconds < WEEK else None)
            while (line := self._incoming.readline()).endswith(b"\n"):
                answer = json.loads(line)
                if answer is None:
                    is_over = True
                    return
                yield answer
            raise WorkerLost(self._end())
        except TimeoutError:
            raise WorkerLost(f"took longer than {seconds:g} s ({self._key})") from None
        except (OSError, ValueError):  # ValueError: closed by another thread
            raise WorkerLost(self._end()) from None
        finally:
            if not is_over:
                self._kill()

    def _kill(self) -> None:
        """End the process and what it started. May be called again."""
        if self._is_alive:
            started = orphans.descendants(self._process.pid)  # some in sessions of their own, tool servers for example
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGKILL)
            orphans.kill_all(started)
        self._process.wait()
        with suppress(OSError):  # it ends a wait for an answer in another thread, whoever else holds the other end
            self._socket.shutdown(socket.SHUT_RDWR)
        self._incoming.close()
        self._socket.close()

    def _start(self) -> None:
        if self._is_closed:
            raise WorkerLost("is closed")
        self._socket, other_end = socket.socketpair()
        with other_end:
            self._process = self._thread.submit(_spawn, self._service, other_end.fileno()).result()
        self._incoming = self._socket.makefile("rb")
        (answer,) = self.call("load", *self._load, at_least=LOAD_SECONDS)
        if "value" not in answer:
            self._kill()
            raise UserError(answer.get("user") or f"{self._what} cannot be loaded:\n{answer['error']}")

    def _end(self) -> str:
        try:
            status = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        return (
            f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended its process with status {status}"
        )

    def _report_failure(self, stage: str, cause: str, text: str, loss: str) -> None:
        """Say what went wrong in the user's code, and what that costs. Raises UserError where nothing of its kind, a
        `stage` in _has_worked, has ever worked: that is its user's mistake."""
        if stage not in self._has_worked:
            raise UserError(text)
        self._report_once(stage, cause, text + loss)

    def _report_once(self, stage: str, cause: str, text: str) -> None:
        if (stage, cause) not in self._reported:
            self._reported.add((stage, cause))
            self._say(text)


def _spawn(service: str, channel: int) -> subprocess.Popen[bytes]:
    """Start a process that answers at the socket `channel`. What the user's code prints goes to standard error; what it
    reads is empty; CUDA's devices are hidden from it, whose memory is the run's, until it names them itself."""
    module, name = service.split(":")
    code = "import json, os, sys; os.environ['CUDA_VISIBLE_DEVICES'] = ''; "
    code += "parent, channel, sys.path[:] = json.loads(sys.argv[1]); "
    code += f"from dtrain.rl.worker import serve; from {module} import {name}; serve(parent, channel, {name}())"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, json.dumps([os.getpid(), channel, import_search_path()])],
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=[channel],
        # A session of its own: Ctrl-C at the terminal is for the run to answer, and what the code starts goes with it.
        start_new_session=True,
    )


class Outcome(TypedDict, total=False):
    """Outcome of a call: its value; or `user`, a mistake that its user can mend; or `error`, the end of a traceback,
    with `kind`, the exception's name. The parent adds `lost`, why the process is gone. An environment's may have
    `missed`, why it was not waited for, and `stage`, what failed, where that is not what was asked."""

    value: Any
    user: str
    error: str
    kind: str
    lost: str
    missed: str
    stage: str


def serve(parent: int, channel: int, service: Any) -> None:
    """Answer calls of methods of `service`, which give their answers one after another, until the parent closes its end
    of the socket `channel`. Never returns. Once a service has a `main`, that has this thread, and another answers: the
    user's code may need the main one, for signals say."""
    orphans.end_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    own = os.getpid()
    connection = socket.socket(fileno=channel)
    connection.set_inheritable(False)
    calls = connection.makefile("rb")

    def answer_one() -> None:
        method, arguments = pickle.load(calls)
        for answer in chain(getattr(service, method)(*arguments), [None]):
            if os.getpid() != own:  # a process that the user's code forked and let go on: its answer is nobody's
                os._exit(0)
            connection.sendall(json.dumps(answer).encode() + b"\n")

    def answer_all() -> None:
        try:
            while True:
                answer_one()
        finally:
            os._exit(0)

    with suppress(EOFError):
        while getattr(service, "main", None) is None:
            answer_one()
        threading.Thread(target=answer_all, daemon=True).start()
        service.main()
    os._exit(0)  # threads of the user's code must not hold the process


def attempt(act: Callable[..., Any], *arguments: Any) -> Outcome:
    """Return what `act` returns or raises, any exception, as an Outcome."""
    try:
        return {"value": act(*arguments)}
    except UserError as error:
        return {"user": str(error)}
    except BaseException as error:  # sys.exit in the user's code too: the process serves on, and the parent tells it
        lines = traceback.format_exc().strip().splitlines()
        return {"error": "\n".join(lines[-LAST_LINES:]), "kind": type(error).__qualname__}


def to_reward(value: Any, of: str = "") -> float | None:
    """Return a reward as a float, NaN as None. of: what it is given for, as the message says it. Raises UserError for
    what is no number, infinite or above LARGEST_REWARD in size."""
    if value is None:
        return None
    if isinstance(value, str | bytes) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise UserError(f"gave {shown(value)}{of}; a finite number or None is needed")
    try:
        number = float(value)
    except OverflowError:  # a whole number
        number = math.inf
    if math.isinf(number):
        raise UserError(f"gave {number}{of}; a finite number or None is needed")
    if abs(number) > MAX_REWARD:
        raise UserError(f"gave {number}{of}; a number of at most {MAX_REWARD:g} in size, or None, is needed")
    return None if math.isnan(number) else number


def shown(value: Any) -> str:
    """Return `value` as a message shows it, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
