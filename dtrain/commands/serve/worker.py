"""The thread that owns the engine: takes requests in, decodes, hands tokens out, and lets weights change between steps.

Everything that touches the model runs here, so that a step never sees half an update. What happens to completions that
are under way when the weights change is the caller's choice (`MODES`). The default keeps them, with their keys and
values: waiting for the longest would leave the device idle, and what a trainer corrects for stays exact, for each
token's logprob is that of the weights that drew it (in-flight updates, arXiv:2509.19128). A piece says the oldest
version that drew one of its tokens.

Completions of the model and of its adapter are never in one forward: requests enter in their order, and those of the
other wait until these have ended.
"""

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

from dtrain.base.errors import UserError
from dtrain.commands.serve.answers import StreamChunk
from dtrain.commands.serve.protocol import ApiError, ApiRequest
from dtrain.inference.engine import Engine, NonFiniteLogits, TokenScores, score_prompts
from dtrain.inference.kv_cache import PromptKey
from dtrain.inference.request import Request
from dtrain.rl.routed import to_npy_text

T = TypeVar("T")
Mode = Literal["keep", "wait", "abort"]
# keep: completions under way go on with the new weights; wait: they end first, and later ones wait; abort: they are
# refused with 503, to be sent again.
MODES: tuple[Mode, ...] = ("keep", "wait", "abort")
# What can go wrong in one client's work without harm to the others'.
FAULTS = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
MAX_SEQUENCES = 4096  # that wait or are decoded at a time
LOOK_SECONDS = 0.05  # between looks at whether the end is to come at once
HALF_UPDATED = "an update of the weights began and did not end; send one whole first"
ABORTED = "the weights changed under way; ask again"


@dataclass(eq=False)
class Job:
    """A client's call. `send` gets its requests' tokens, or one ApiError for all: `EngineThread.submit`. scores: of
    the prompts, where they are asked for, by the weights of `scores_version`."""

    ask: ApiRequest
    send: Callable[[StreamChunk | ApiError], object]
    scores: dict[Sequence[int], TokenScores] = field(default_factory=dict)
    scores_version: int = -1
    is_over: bool = False  # refused, or its client is gone


@dataclass(eq=False)
class _Row:
    """Request `index` of a job. num_sent: tokens that the client has; version: of the weights when the engine took it,
    and scored its prompt."""

    job: Job
    index: int
    request: Request
    num_sent: int = 0
    version: int = 0
    scores: TokenScores | None = None

    def send(self, ids: list[int], logprobs: list[float], finish: str | None, routed: str | None = None) -> None:
        """Send further tokens to the client."""
        self.num_sent += len(ids)
        self.job.send(StreamChunk(self.index, ids, logprobs, finish, self.version, self.scores, routed))


class EngineThread(threading.Thread):
    """Thread that owns the engine.

    At most MAX_SEQUENCES sequences wait or are decoded at a time. Those beyond are refused. The engine gets no more
    than it can decode together: those that wait here start with the weights of the time when they are let in.

    `version` counts the updates of the weights and of the adapter; `torn` says that one began and did not end, so that
    nothing is decoded until one does. `failure` is why the thread ended, where it was not asked to.
    """

    def __init__(self, engine: Engine):
        super().__init__(name="engine", daemon=True)
        self.version = 0
        self.is_half_updated = False
        self.failure: str | None = None
        self.paused = False
        self._adapter: str | None = None  # the loaded adapter
        self._active: str | None = None  # the adapter of the rows that the engine has
        self._engine = engine
        self._changed = threading.Condition()
        self._inbox: deque[_Row] = deque()
        self._acts: deque[tuple[Callable[[], Any], Mode, Future]] = deque()
        self._dropped: set[Job] = set()
        self._rows: dict[int, _Row] = {}  # by the engine's ticket
        self._closing: str | None = None  # why no work is taken in
        self._ending = False
        self._activate(None)

    @property
    def load(self) -> tuple[int, int]:
        """The numbers of sequences in the engine and of those that wait for it."""
        return len(self._rows), len(self._inbox)

    def submit(self, ask: ApiRequest, send: Callable[[StreamChunk | ApiError], object]) -> Job:
        """Put the requests of `ask` in the queue.

        Args:
            ask: The requests of one call.
            send: Called on this thread with one StreamChunk for each request, in a stream with several, the last with
                a finish. An echo with logprobs also gets the prompt's scores. Called once with an ApiError if the call
                fails. It must not block.

        Raises:
            ApiError: If the server is full or ends.
        """
        job = Job(ask, send)
        with self._changed:
            if self._closing is not None:
                raise ApiError(503, self._closing)
            busy = sum(self.load)
            if busy + len(ask.requests) > MAX_SEQUENCES:
                raise ApiError(503, f"the server has {busy} completions to do; ask later")
            self._inbox.extend(_Row(job, index, request) for index, request in enumerate(ask.requests))
            self._changed.notify_all()
        return job

    def drop(self, job: Job) -> None:
        """Forget a job whose client is gone."""
        with self._changed:
            self._dropped.add(job)
            self._changed.notify_all()

    def run_between_steps(self, do: Callable[[], T], mode: Mode = "keep") -> T:
        """Run `do` on the engine's thread, between two steps; its result, or the UserError or ApiError that it raised.

        Raises ApiError: 503 where the worker ends first, 409 where completions under way are paused and `mode` is to
        wait for them.
        """
        done: Future = Future()
        with self._changed:
            if self._ending or self.failure is not None:
                raise ApiError(503, self._closing or "the server is ending")
            self._acts.append((do, mode, done))
            self._changed.notify_all()
        return done.result()

    def pause(self, mode: Mode) -> None:
        """Decode nothing until `resume`; requests are still taken in."""
        self.run_between_steps(lambda: setattr(self, "paused", True), mode)

    def use_adapter(self, name: str | None) -> None:
        """Set the name of the loaded adapter. None: no adapter is loaded. For `between_steps`."""
        self._adapter = name
        self._activate(self._active if self._active == name else None)

    def resume(self) -> None:
        """Decode again. Raises ApiError while the weights are half of one version and half of another."""
        if self.is_half_updated:
            raise ApiError(409, HALF_UPDATED)
        self.run_between_steps(lambda: setattr(self, "paused", False))

    def end(self, grace: float, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Take no more work in, finish what there is within `grace` seconds or until `hurry`, refuse the rest.
        Return whether all was finished."""
        until = time.monotonic() + grace
        with self._changed:
            self._closing = "the server is ending"
            while not (is_idle := self.failure is not None or self.load == (0, 0)):
                if time.monotonic() >= until or hurry():
                    break
                self._changed.wait(LOOK_SECONDS)
            self._ending = True
            self._changed.notify_all()
        self.join()
        return is_idle

    def run(self) -> None:
        finished = False
        try:
            while self._turn():
                pass
            finished = True
        finally:
            with self._changed:
                if not finished:
                    self.failure = self._closing = "the engine has failed; the server's terminal says why"
                self._ending = True
                error = ApiError(503, self._closing or "the server is ending")
                for job in {row.job for row in [*self._rows.values(), *self._inbox]}:
                    job.send(error)
                for _, _, done in self._acts:
                    if not done.done():
                        done.set_exception(error)
                self._changed.notify_all()

    def _turn(self) -> bool:
        """Run one round: cancellations, acts, new requests, a step. Return False if the worker has to end."""
        with self._changed:
            self._changed.wait_for(self._is_due)
            if self._ending:
                return False
            dropped, self._dropped = self._dropped, set()
        self._cancel(dropped)
        while self._acts and self._act(*self._acts[0]):
            with self._changed:
                self._acts.popleft()
        if self._decodes:
            if not self._acts:
                self._admit()
            if self._engine.has_work:
                self._step()
        with self._changed:
            self._changed.notify_all()
        return True

    @property
    def _decodes(self) -> bool:
        return not self.paused and not self.is_half_updated

    def _is_due(self) -> bool:
        enters = self._inbox and len(self._rows) < self._engine.budget.rows
        work = self._decodes and (enters or self._engine.has_work)
        return bool(self._ending or self._acts or self._dropped or work)

    def _act(self, do: Callable[[], Any], mode: Mode, done: Future) -> bool:
        """Run an act unless it waits for the completions under way. Return whether it is over."""
        if mode == "wait" and self._rows:
            if self._decodes:
                return False
            done.set_exception(ApiError(409, "completions under way are paused: resume first, or keep or abort"))
            return True
        if mode == "abort":
            self._cancel({row.job for row in self._rows.values()}, ApiError(503, ABORTED))
        try:
            done.set_result(do())
        except (UserError, ApiError) as error:
            done.set_exception(error)
        except FAULTS as error:
            done.set_exception(self._fault(error))
        return True

    def _admit(self) -> None:
        """Give the engine as many requests as it can decode together.

        Engines read a prompt once for all that are under way with it: a request waits while its prompt is in use by
        some that began with other weights.
        """
        old = {PromptKey.of(row.request) for row in self._rows.values() if row.version != self.version}
        passed_over: deque[_Row] = deque()
        gone: set[Job] = set()
        with self._changed:  # who asks for the load finds each row here or there
            while self._inbox and len(self._rows) < self._engine.budget.rows:
                row = self._inbox.popleft()
                adapter = row.job.ask.adapter
                if row.job.is_over:
                    continue
                if PromptKey.of(row.request) in old or (adapter != self._active and self._rows):
                    passed_over.append(row)
                    if adapter != self._active:
                        break
                elif adapter is not None and self._adapter != adapter:
                    gone.add(row.job)
                else:
                    self._activate(adapter)
                    row.version = self.version
                    self._enter(row)
            self._inbox.extendleft(reversed(passed_over))
        self._cancel(gone, ApiError(404, "the adapter that was asked for is not here any more", "model"))

    def _activate(self, adapter: str | None) -> None:
        """Let the engine compute with the adapter of this name, or with the model only."""
        self._active = adapter
        # A model may have an adapter of its own, which takes part in all completions. No other one is loaded then.
        self._engine.use_adapters(adapter is not None or self._engine.model.adapters is not None)

    def _enter(self, row: _Row) -> None:
        try:
            if row.job.ask.echo and row.job.ask.logprobs:
                self._engine.check(row.request, "the request")
                row.scores = self._scores(row.job)[row.request.prompt]
            if row.request.sampling.max_new_tokens == 0:
                row.send([], [], "length")
            else:
                self._rows[self._engine.add(row.request)] = row
        except UserError as error:
            self._cancel({row.job}, ApiError(400, str(error)))
        except FAULTS as error:
            self._cancel({row.job}, self._fault(error))

    def _scores(self, job: Job) -> dict[Sequence[int], TokenScores]:
        """Return the scores of the job's prompts by these weights."""
        if job.scores_version != self.version:
            prompts = list(dict.fromkeys(request.prompt for request in job.ask.requests))
            engine = self._engine
            scores = score_prompts(engine.model, prompts, engine.budget.prefill, engine.adapters)
            job.scores, job.scores_version = dict(zip(prompts, scores, strict=True)), self.version
        return job.scores

    def _step(self) -> None:
        try:
            ended = self._engine.step()
        except NonFiniteLogits as error:
            self._cancel({self._rows[ticket].job for ticket in error.tickets}, ApiError(500, str(error)))
            return
        except FAULTS as error:
            self._engine.drop_all_work()
            self._cancel({row.job for row in self._rows.values()}, self._fault(error))
            torch.zeros(1, device=self._engine.device).item()  # raises where the device is lost: then all ends
            return
        for ticket, completion in ended:
            row = self._rows.pop(ticket)
            ids, logprobs = completion.ids[row.num_sent :], completion.logprobs[row.num_sent :]
            routed = None if completion.routed is None else to_npy_text(completion.routed[:-1])
            row.send(ids, logprobs, completion.finish, routed)
        for ticket, row in self._rows.items():
            if row.job.ask.fields["stream"]:
                ids, logprobs = self._engine.progress(ticket, row.num_sent)
                if ids:
                    row.send(ids, logprobs, None)

    @staticmethod
    def _fault(error: Exception) -> ApiError:
        """Print a fault's traceback on the terminal, and return the client's error."""
        traceback.print_exception(error)
        return ApiError(500, f"the server has a fault ({type(error).__name__}), which its terminal tells")

    def _cancel(self, jobs: set[Job], error: ApiError | None = None) -> None:
        """Forget these jobs' requests, and send each job's client `error`."""
        if not jobs:
            return
        for ticket in [ticket for ticket, row in self._rows.items() if row.job in jobs]:
            self._engine.cancel(ticket)
            del self._rows[ticket]
        with self._changed:
            self._inbox = deque(row for row in self._inbox if row.job not in jobs)
        for job in jobs:
            job.is_over = True
            if error is not None:
                job.send(error)
