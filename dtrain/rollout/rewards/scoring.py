"""Completions to rewards, in one worker process that may hang, crash or be killed without harm to the run."""

import json
import math
import os
import pickle
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from dtrain.errors import UserError
from dtrain.rollout.rewards.find import find, search_path
from dtrain.rollout.rewards.worker import HEADER, message, start_line

LOAD_SECONDS = 120.0  # for the rewards' own imports; a longer timeout counts
CHUNK = 1 << 16


class Spec(Protocol):
    """A reward of a recipe: `config.schema.Reward`, or anything alike."""

    fn: str
    weight: float
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Scores:
    """total: the weighted sum of the parts for each completion; parts: by reward's name. NaN where none is known."""

    total: list[float]
    parts: dict[str, list[float]]


class _Lost(Exception):
    """The worker is of no use any more; the message says why."""


class Rewards:
    """Rewards by name or import path, loaded in a process of their own.

    specs: each with fn, weight and kwargs. timeout: seconds that one reward may take over one call of `score`. say:
    told, once for each cause, why a reward has no values. Two rewards of one name are told apart by a number.

    Raises UserError where a name or path is not there, or a module or class of the user's cannot be loaded. Not for
    several threads at once.
    """

    def __init__(self, specs: Sequence[Spec], *, timeout: float = 60.0, say: Callable[[str], None] = print):
        self._weights = {name: spec.weight for name, spec in zip(reward_names(specs), specs, strict=True)}
        found = [find(spec.fn) for spec in specs]
        self._loads = [
            (name, *where, dict(spec.kwargs or {}))
            for name, where, spec in zip(self._weights, found, specs, strict=True)
        ]
        self._timeout, self._say = timeout, say
        self._told: set[str] = set()
        self._has_worked: set[str] = set()
        self._worker: _Worker | None = None
        self._is_closed = False
        # The kernel ends the worker with the thread that started it, so that thread has to live as long as this.
        self._thread = ThreadPoolExecutor(1, "rewards")
        try:
            self._in_thread(self._load)
        except UserError:
            self.close()
            raise
        except _Lost as lost:
            self.close()
            names = ", ".join(self._weights)
            raise UserError(f"the rewards ({names}) cannot be loaded: their process {lost}") from None

    @property
    def names(self) -> list[str]:
        """The parts' names, in the order of the specs."""
        return list(self._weights)

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> Scores:
        """The rewards of N completions; columns: the data's others, a list of N each.

        A reward that takes longer than the timeout, or whose process dies, has no values in this call, and the process
        is replaced. So has one that raises or gives something else than N numbers or None, except in its first call of
        all: that is its user's mistake, and a UserError with the end of the traceback.
        """
        own = {"prompts": list(prompts), "completions": list(completions)}
        batch = {**columns, **own, "completion_ids": [list(ids) for ids in completion_ids]}
        wrong = {key: len(values) for key, values in batch.items() if len(values) != len(own["completions"])}
        if wrong:
            raise ValueError(f"{len(own['completions'])} completions, but {wrong}")
        if not own["completions"]:
            return Scores([], {name: [] for name in self._weights})
        return self._in_thread(self._score, batch)

    def close(self) -> None:
        """End the worker, at once even where it computes. May be called again."""
        if not self._is_closed:
            self._is_closed = True
            if self._worker is not None:
                self._worker.signal()
                self._thread.submit(self._worker.kill)
            self._thread.shutdown(wait=True)

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._thread.submit(work, *arguments).result()
        except (UserError, _Lost):
            raise
        except BaseException:  # Ctrl-C while the worker computes: nobody waits for it any more
            self.close()
            raise

    def _load(self) -> None:
        """A worker with all rewards loaded."""
        if self._is_closed:
            raise _Lost("is closed")
        self._worker = _Worker(start_line(search_path()))
        seconds = max(self._timeout, LOAD_SECONDS)
        self._worker.send(("load", self._loads), seconds)
        answer = self._worker.answer(seconds)
        if "ready" not in answer:
            self._worker.kill()
            names = ", ".join(self._weights)
            raise UserError(answer.get("user") or f"the rewards ({names}) cannot be loaded:\n{answer['error']}")

    def _load_again(self) -> None:
        self._worker.kill()
        try:
            self._load()
        except UserError as error:  # it could be loaded once: no mistake that ends a run
            raise _Lost(f"cannot be loaded any more: {str(error).splitlines()[-1]}") from None

    def _score(self, batch: Mapping[str, Sequence[Any]]) -> Scores:
        count = len(batch["completions"])
        parts = {name: [math.nan] * count for name in self._weights}
        has_batch = False
        for index, name in enumerate(self._weights):
            try:
                if not self._worker.is_alive:
                    self._load_again()
                    has_batch = False
                if not has_batch:
                    self._worker.send(("batch", batch), self._timeout)
                    has_batch = True
                self._worker.send(("call", index), self._timeout)
                answer = self._worker.answer(self._timeout)
            except _Lost as lost:
                self._worker.kill()
                self._tell(name, str(lost), f"reward {name} {lost}; its values of this rollout are unknown")
                continue
            if "values" in answer:
                self._has_worked.add(name)
                parts[name] = [math.nan if value is None else value for value in answer["values"]]
                continue
            text = answer.get("user") or f"reward {name} failed:\n{answer['error']}"
            if name not in self._has_worked:
                raise UserError(text)
            self._tell(name, text.splitlines()[-1], f"{text}\nits values of this rollout are unknown")
        return Scores([self._sum([part[i] for part in parts.values()]) for i in range(count)], parts)

    def _sum(self, values: Sequence[float]) -> float:
        known = [w * v for w, v in zip(self._weights.values(), values, strict=True) if not math.isnan(v)]
        return math.fsum(known) if known else math.nan

    def _tell(self, name: str, cause: str, text: str) -> None:
        if f"{name}: {cause}" not in self._told:
            self._told.add(f"{name}: {cause}")
            self._say(text)


class _Worker:
    """One process and the pipes to it, which are waited for no longer than is said."""

    def __init__(self, command: list[str]):
        # A session of its own: Ctrl-C at the terminal is for the run to answer, and what a reward starts goes with it.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, content: Any, timeout: float) -> None:
        data, until = memoryview(message(pickle.dumps(content))), time.monotonic() + timeout
        while data:
            self._wait(self._in, selectors.EVENT_WRITE, until, timeout)
            try:
                data = data[os.write(self._in, data[:CHUNK]) :]
            except BlockingIOError:
                continue
            except OSError:
                raise _Lost(self._end()) from None

    def answer(self, timeout: float) -> dict[str, Any]:
        until = time.monotonic() + timeout
        length = int.from_bytes(self._read(HEADER, until, timeout), "little")
        return json.loads(self._read(length, until, timeout))

    def signal(self) -> None:
        """Kill the process and what it started."""
        if self._process.poll() is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has just ended
                pass

    def kill(self) -> None:
        """End the process and its pipes."""
        self.signal()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()

    def _read(self, count: int, until: float, timeout: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._wait(self._out, selectors.EVENT_READ, until, timeout)
            part = os.read(self._out, min(count - len(data), CHUNK))
            if not part:
                raise _Lost(self._end())
            data += part
        return bytes(data)

    def _wait(self, pipe: int, event: int, until: float, timeout: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, event)
            if not selector.select(max(until - time.monotonic(), 0)):
                raise _Lost(f"took longer than {timeout:g} s (grpo.reward_timeout)")

    def _end(self) -> str:
        try:
            status = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        return (
            f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended its process with status {status}"
        )


def reward_names(specs: Sequence[Spec]) -> list[str]:
    """What the rewards are called: the last word of the path, the second of one name numbered."""
    names: list[str] = []
    for spec in specs:
        name = spec.fn.rsplit(".", 1)[-1]
        taken = sum(other == name or other.startswith(f"{name}#") for other in names)
        names.append(f"{name}#{taken + 1}" if taken else name)
    return names
