"""Code of the user's in a process of its own, which may hang, crash or be killed without harm to the run.

`Worker` is the parent's side, `child` the other. Every wait is bounded, unless the user allows a
week or more; the process is killed with all that it started.
"""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self

from dtrain.base.errors import UserError
from dtrain.base.import_paths import search_path

LOAD_SECONDS = 120.0  # for the imports of the user's own modules; a longer timeout counts
WEEK = 7 * 86400.0  # a socket takes no timeout of a month; what is allowed longer than a week has no limit


class Lost(Exception):
    """Raised where the process is of no use any more, and has been killed; the message says why."""


class Worker:
    """A process that has loaded code of the user's, and is started anew where it is gone. Derive from it.

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
        # The kernel ends a process with the thread that started it (PR_SET_PDEATHSIG, `orphans.end_with`): that thread
        # lives as long as this.
        self._thread = ThreadPoolExecutor(1, "worker")
        try:
            self._start()
        except Lost as lost:
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

    def _ensure(self) -> None:
        """Start another process, with the same code loaded, where this one is gone. Raises Lost where that fails."""
        if not self._is_alive:
            self._kill()
            try:
                self._start()
            except UserError as error:  # it could be loaded once: no mistake that ends a run
                raise Lost(f"cannot be loaded any more: {str(error).splitlines()[-1]}") from None

    def _ask(self, method: str, *arguments: Any, grace: float = 0.0, at_least: float = 0.0) -> Iterator[Any]:
        """Yield the answers of a method of the service, as they come.

        Raises Lost where one takes longer than max(timeout, at_least) + grace seconds, or the process is gone.
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
            raise Lost(self._end())
        except TimeoutError:
            raise Lost(f"took longer than {seconds:g} s ({self._key})") from None
        except (OSError, ValueError):  # ValueError: closed by another thread
            raise Lost(self._end()) from None
        finally:
            if not is_over:
                self._kill()

    def _kill(self) -> None:
        """End the process and what it started. May be called again."""
        if self._is_alive:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with suppress(OSError):  # it ends a wait for an answer in another thread, whoever else holds the other end
            self._socket.shutdown(socket.SHUT_RDWR)
        self._incoming.close()
        self._socket.close()

    def _start(self) -> None:
        if self._is_closed:
            raise Lost("is closed")
        self._socket, other_end = socket.socketpair()
        with other_end:
            self._process = self._thread.submit(_spawn, self._service, other_end.fileno()).result()
        self._incoming = self._socket.makefile("rb")
        (answer,) = self._ask("load", *self._load, at_least=LOAD_SECONDS)
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

    def _judge(self, stage: str, cause: str, text: str, loss: str) -> None:
        """Say what went wrong in the user's code, and what that costs. Raises UserError where nothing of its kind, a
        `stage` in _has_worked, has ever worked: that is its user's mistake."""
        if stage not in self._has_worked:
            raise UserError(text)
        self._tell(stage, cause, text + loss)

    def _tell(self, stage: str, cause: str, text: str) -> None:
        if (stage, cause) not in self._reported:
            self._reported.add((stage, cause))
            self._say(text)


def _spawn(service: str, channel: int) -> subprocess.Popen[bytes]:
    """Start a process that answers at the socket `channel`. What the user's code prints goes to standard error; what it
    reads is empty; CUDA's devices are hidden from it, whose memory is the run's, until it names them itself."""
    module, name = service.split(":")
    code = "import json, os, sys; os.environ['CUDA_VISIBLE_DEVICES'] = ''; "
    code += "parent, channel, sys.path[:] = json.loads(sys.argv[1]); "
    code += f"from dtrain.rl.child import serve; from {module} import {name}; serve(parent, channel, {name}())"
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, json.dumps([os.getpid(), channel, search_path()])],
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=[channel],
        # A session of its own: Ctrl-C at the terminal is for the run to answer, and what the code starts goes with it.
        start_new_session=True,
    )
