"""Code of the user's in a process of its own, which may hang, crash or be killed without harm to the run.

`UserCodeProcess` is the parent's side, `child` the other. Every wait is bounded; the process is killed with all that it
started.
"""

import json
import os
import pickle
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dtrain.errors import UserError
from dtrain.rollout.child import HEADER, Answer, message, start_line

LOAD_SECONDS = 120.0  # for the imports of the user's own modules; a longer timeout counts
CHUNK = 1 << 16
DAY = 86400.0

T = TypeVar("T")


class Lost(Exception):
    """The worker is of no use any more; the message says why."""


class UserCodeProcess:
    """A process that has loaded code of the user's, and is replaced where it is lost.

    module: where its `main` is; load: what it is sent first, and answers with {"ready": true}; what: whose code that
    is, as messages name it; timeout: seconds that a call may take; key: the recipe's key for that.

    Raises UserError where the code cannot be loaded. Not for several threads at once.
    """

    def __init__(self, module: str, load: tuple[str, Any], *, what: str, timeout: float, key: str):
        self._module, self._first, self._what, self._key = module, load, what, key
        self._timeout = timeout
        self._process: _Process | None = None
        self._is_closed = False
        # The kernel ends the process with the thread that started it, so that thread has to live as long as this.
        self._thread = ThreadPoolExecutor(1, "worker")
        try:
            self.run(self._load)
        except UserError:
            self.close()
            raise
        except Lost as lost:
            self.close()
            raise UserError(f"{what} cannot be loaded: their process {lost}") from None

    def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """`work` in the thread that all other methods but `close` belong to. An exception that is neither UserError nor
        Lost, Ctrl-C meanwhile above all, closes the worker."""
        try:
            return self._thread.submit(work, *arguments).result()
        except (UserError, Lost):
            raise
        except BaseException:  # nobody waits for the process any more
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive

    def send(self, kind: str, content: Any) -> None:
        """Raises Lost where the process does not take it in time, or is gone."""
        self._process.send((kind, content), self._timeout, self._key)

    def answer(self, grace: float = 0.0) -> Answer:
        """The next answer. Raises Lost where there is none within the timeout and `grace` seconds, or the process is
        gone."""
        return self._process.answer(self._timeout, self._key, grace)

    def kill(self) -> None:
        self._process.kill()

    def replace(self) -> None:
        """Another process in place of this one, with the same code loaded. Raises Lost where that fails."""
        self.kill()
        try:
            self._load()
        except UserError as error:  # it could be loaded once: no mistake that ends a run
            raise Lost(f"cannot be loaded any more: {str(error).splitlines()[-1]}") from None

    def close(self) -> None:
        """End the process, at once even where it computes. May be called again."""
        if not self._is_closed:
            self._is_closed = True
            if self._process is not None:
                self._process.signal()
                self._thread.submit(self._process.kill)
            self._thread.shutdown(wait=True)

    def _load(self) -> None:
        if self._is_closed:
            raise Lost("is closed")
        self._process = _Process(start_line(self._module))
        seconds = max(self._timeout, LOAD_SECONDS)
        self._process.send(self._first, seconds, self._key)
        answer = self._process.answer(seconds, self._key)
        if "ready" not in answer:
            self.kill()
            raise UserError(answer.get("user") or f"{self._what} cannot be loaded:\n{answer['error']}")


class _Process:
    """One process and the pipes to it, which are waited for no longer than is said."""

    def __init__(self, command: list[str]):
        # A session of its own: Ctrl-C at the terminal is for the run to answer, and what the code starts goes with it.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, content: Any, timeout: float, key: str) -> None:
        data, until = memoryview(message(pickle.dumps(content))), time.monotonic() + timeout
        late = f"took longer than {timeout:g} s ({key})"
        while data:
            self._wait(self._in, selectors.EVENT_WRITE, until, late)
            try:
                data = data[os.write(self._in, data[:CHUNK]) :]
            except BlockingIOError:
                continue
            except OSError:
                raise Lost(self._end()) from None

    def answer(self, timeout: float, key: str, grace: float = 0.0) -> Answer:
        until, late = time.monotonic() + timeout + grace, f"took longer than {timeout:g} s ({key})"
        length = int.from_bytes(self._read(HEADER, until, late), "little")
        return json.loads(self._read(length, until, late))

    def signal(self) -> None:
        """Kill the process and what it started."""
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has just ended
                pass

    def kill(self) -> None:
        """End the process and its pipes. May be called again."""
        self.signal()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()

    def _read(self, count: int, until: float, late: str) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._wait(self._out, selectors.EVENT_READ, until, late)
            part = os.read(self._out, min(count - len(data), CHUNK))
            if not part:
                raise Lost(self._end())
            data += part
        return bytes(data)

    def _wait(self, pipe: int, event: int, until: float, late: str) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, event)
            while not selector.select(min(max(until - time.monotonic(), 0), DAY)):  # a selector takes no longer waits
                if time.monotonic() >= until:
                    raise Lost(late)

    def _end(self) -> str:
        try:
            status = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        return (
            f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended its process with status {status}"
        )
