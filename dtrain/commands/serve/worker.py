"""The thread that owns the engine. It accepts requests, decodes, returns tokens, and lets weights change between steps.

Only this thread touches the model, so that a step never sees a half-finished update. What happens to completions that
are running when the weights change is the caller's choice (`MODES`). By default they continue, with the keys and values
of the old weights: waiting for the longest completion would leave the device idle. Off-policy corrections stay exact,
because each token's log-probability is that of the weights that sampled it (in-flight updates, arXiv:2509.19128). A
chunk has the oldest version that sampled one of its tokens.

Completions of the model and of its adapter are never in the same forward. Requests are started in order, and those with
another adapter wait until the running ones have ended.
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
# What happens to running completions when the weights change.
# keep: they continue with the new weights. wait: they end first, and later requests wait. abort: they are refused with
# status 503, and the client can send them again.
MODES: tuple[Mode, ...] = ("keep", "wait", "abort")
# Errors that may come from one client's work, after which the server continues.
FAULTS = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
MAX_SEQUENCES = 4096  # largest number of sequences that wait or are decoded at a time
LOOK_SECONDS = 0.05  # time between checks for a second signal while the server ends
HALF_UPDATED = "an update of the weights began and did not end; send a complete one first"
ABORTED = "the weights changed during the completion; send the request again"


@dataclass(eq=False)
class Job:
    """A client's call.

    Attributes:
        api_request: The call.
        send: Called with the tokens of its requests, or with one ApiError for all. See `EngineThread.submit`.
        scores: Scores of the prompts, if they were requested.
        scores_version: Version of the weights that computed the scores.
        is_over: Whether the call was refused or its client has disconnected.
    """

    api_request: ApiRequest
    send: Callable[[StreamChunk | ApiError], object]
    scores: dict[Sequence[int], TokenScores] = field(default_factory=dict)
    scores_version: int = -1
    is_over: bool = False


@dataclass(eq=False)
class _Row:
    """One request of a job.

    Attributes:
        job: The job.
        index: Index of the request in the job.
        request: The request.
        num_sent: Number of tokens that were sent to the client.
        version: Version of the weights when the engine started the request and scored its prompt.
        scores: Scores of the prompt, if they were requested.
    """

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


@dataclass(eq=False)
class _Action:
    """A function to run between two steps.

    Attributes:
        function: The function.
        mode: What happens to running completions.
        done: Gets the function's result or error.
    """

    function: Callable[[], Any]
    mode: Mode
    done: Future


class EngineThread(threading.Thread):
    """The thread that owns the engine.

    At most MAX_SEQUENCES sequences wait or are decoded at a time, and further ones are refused. The engine gets no more
    sequences than it can decode together. The others wait in this object's queue, so that updates of the weights that
    arrive meanwhile apply to them.

    Attributes:
        version: Version of the weights and the adapter. An update either sets it or adds one.
        is_half_updated: Whether an update began and did not end. Then nothing is decoded until another one ends.
        failure: Why the thread ended, if it was not asked to.
        paused: Whether decoding is paused.
    """

    def __init__(self, engine: Engine):
        super().__init__(name="engine", daemon=True)
        self.version = 0
        self.is_half_updated = False
        self.failure: str | None = None
        self.paused = False
        self._adapter: str | None = None  # the loaded adapter
        self._active: str | None = None  # the adapter of the requests that the engine is decoding
        self._engine = engine
        # Guards the attributes below that other threads use. Notified when anything changes.
        self._changed = threading.Condition()
        self._inbox: deque[_Row] = deque()  # waiting requests
        self._actions: deque[_Action] = deque()
        self._dropped: set[Job] = set()  # jobs whose client has disconnected
        self._rows: dict[int, _Row] = {}  # requests in the engine, by its ticket
        self._closing: str | None = None  # why no new requests are accepted
        self._ending = False
        self._activate(None)

    @property
    def load(self) -> tuple[int, int]:
        """The numbers of sequences in the engine and of those that wait."""
        return len(self._rows), len(self._inbox)

    def submit(self, api_request: ApiRequest, send: Callable[[StreamChunk | ApiError], object]) -> Job:
        """Put the requests of a call in the queue.

        Args:
            api_request: The call.
            send: Receives the results, on the engine's thread, and must not block. It is called with one StreamChunk
                for each request. In a stream it is called with several chunks for each request, and the last one has a
                finish. With echo and logprobs, chunks also have the scores of the prompt. If the call fails, it is
                called once with an ApiError.

        Raises:
            ApiError: If the server is full or ends.
        """
        job = Job(api_request, send)
        with self._changed:
            if self._closing is not None:
                raise ApiError(503, self._closing)
            busy = sum(self.load)
            if busy + len(api_request.requests) > MAX_SEQUENCES:
                raise ApiError(503, f"the server is busy with {busy} completions; try again later")
            self._inbox.extend(_Row(job, index, request) for index, request in enumerate(api_request.requests))
            self._changed.notify_all()
        return job

    def drop(self, job: Job) -> None:
        """Cancel a job whose client has disconnected."""
        with self._changed:
            self._dropped.add(job)
            self._changed.notify_all()

    def run_between_steps(self, function: Callable[[], T], mode: Mode = "keep") -> T:
        """Run a function on the engine's thread, between two steps, and return its result.

        Args:
            function: The function. A UserError or ApiError that it raises is raised here.
            mode: What happens to running completions.

        Raises:
            ApiError: With status 503 if the thread ends first. With status 409 if `mode` is "wait" and the running
                completions are paused, so that they would never end.
        """
        done: Future = Future()
        with self._changed:
            if self._ending or self.failure is not None:
                raise ApiError(503, self._closing or "the server is ending")
            self._actions.append(_Action(function, mode, done))
            self._changed.notify_all()
        return done.result()

    def pause(self, mode: Mode) -> None:
        """Stop decoding until `resume`. Requests are still accepted.

        Args:
            mode: What happens to running completions.

        Raises:
            ApiError: As `run_between_steps`.
        """
        self.run_between_steps(lambda: self._set_paused(True), mode)

    def _set_paused(self, is_paused: bool) -> None:
        self.paused = is_paused

    def use_adapter(self, name: str | None) -> None:
        """Set the name of the loaded adapter. None: no adapter is loaded. To be called by `run_between_steps`."""
        self._adapter = name
        self._activate(name if self._active == name else None)

    def resume(self) -> None:
        """Decode again. Raises ApiError if an update of the weights began and did not end."""
        if self.is_half_updated:
            raise ApiError(409, HALF_UPDATED)
        self.run_between_steps(lambda: self._set_paused(False))

    def end(self, grace: float, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Refuse new requests, finish the accepted ones, and end the thread.

        Args:
            grace: Seconds to finish. What is not finished then is refused.
            hurry: Called repeatedly. If it returns True, the thread ends at once.

        Returns:
            Whether all requests were finished.
        """
        until = time.monotonic() + grace
        with self._changed:
            self._closing = "the server is ending"
            is_idle = self._is_idle()
            while not is_idle and time.monotonic() < until and not hurry():
                self._changed.wait(LOOK_SECONDS)
                is_idle = self._is_idle()
            self._ending = True
            self._changed.notify_all()
        self.join()
        return is_idle

    def _is_idle(self) -> bool:
        return self.failure is not None or self.load == (0, 0)

    def run(self) -> None:
        """Serve until `end`, or until an error that is not in FAULTS."""
        finished = False
        try:
            while self._turn():
                pass
            finished = True
        finally:
            with self._changed:
                if not finished:
                    self.failure = self._closing = "the engine has failed; the server's terminal shows the error"
                self._ending = True
                error = ApiError(503, self._closing or "the server is ending")
                for job in {row.job for row in [*self._rows.values(), *self._inbox]}:
                    job.send(error)
                for action in self._actions:
                    if not action.done.done():
                        action.done.set_exception(error)
                self._changed.notify_all()

    def _turn(self) -> bool:
        """Run one round: cancellations, actions, new requests, a step. Return whether another round follows."""
        with self._changed:
            self._changed.wait_for(self._has_work)
            if self._ending:
                return False
            dropped, self._dropped = self._dropped, set()
        self._cancel(dropped)
        while self._actions and self._run_action(self._actions[0]):
            with self._changed:
                self._actions.popleft()
        if self._decodes:
            # An action that waits for the running completions comes before new requests.
            if not self._actions:
                self._start_requests()
            if self._engine.has_work:
                self._step()
        with self._changed:
            self._changed.notify_all()
        return True

    @property
    def _decodes(self) -> bool:
        return not self.paused and not self.is_half_updated

    def _has_work(self) -> bool:
        can_start_requests = bool(self._inbox) and len(self._rows) < self._engine.budget.rows
        can_step = self._decodes and (can_start_requests or self._engine.has_work)
        return bool(self._ending or self._actions or self._dropped or can_step)

    def _run_action(self, action: _Action) -> bool:
        """Run an action, unless it waits for running completions. Return whether it is done."""
        if action.mode == "wait" and self._rows:
            if self._decodes:
                return False
            error = ApiError(409, "running completions are paused: resume first, or use mode keep or abort")
            action.done.set_exception(error)
            return True
        if action.mode == "abort":
            self._cancel({row.job for row in self._rows.values()}, ApiError(503, ABORTED))
        try:
            action.done.set_result(action.function())
        except (UserError, ApiError) as error:
            action.done.set_exception(error)
        except FAULTS as error:
            action.done.set_exception(self._fault(error))
        return True

    def _start_requests(self) -> None:
        """Give the engine as many waiting requests as it can decode together.

        The engine shares the keys and values of a prompt among all running requests with that prompt. A request must
        not use keys of older weights, so it waits while its prompt is in use by requests that began with other weights.
        """
        old_prompts = {PromptKey.of(row.request) for row in self._rows.values() if row.version != self.version}
        passed_over: deque[_Row] = deque()
        without_adapter: set[Job] = set()
        with self._changed:  # so that `load` finds each row either here or in the engine
            while self._inbox and len(self._rows) < self._engine.budget.rows:
                row = self._inbox.popleft()
                adapter = row.job.api_request.adapter
                if row.job.is_over:
                    continue
                has_other_adapter = adapter != self._active
                if PromptKey.of(row.request) in old_prompts or (has_other_adapter and self._rows):
                    passed_over.append(row)
                    if has_other_adapter:
                        break  # later requests must not overtake it for ever
                elif adapter is not None and self._adapter != adapter:
                    without_adapter.add(row.job)
                else:
                    self._activate(adapter)
                    row.version = self.version
                    self._start(row)
            self._inbox.extendleft(reversed(passed_over))
        self._cancel(without_adapter, ApiError(404, "the requested adapter is not loaded any more", "model"))

    def _activate(self, adapter: str | None) -> None:
        """Let the engine compute with the adapter of this name. None: without one."""
        self._active = adapter
        # A model may have its own adapter, which is part of all completions. No other one can be loaded then.
        self._engine.use_adapters(adapter is not None or self._engine.model.adapters is not None)

    def _start(self, row: _Row) -> None:
        """Give a request to the engine, or end it if it asks for no tokens. Errors are sent to its client."""
        try:
            if row.job.api_request.echo and row.job.api_request.logprobs:
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
        """Return the scores of the job's prompts by the current weights."""
        if job.scores_version != self.version:
            prompts = list(dict.fromkeys(request.prompt for request in job.api_request.requests))
            engine = self._engine
            scores = score_prompts(engine.model, prompts, engine.budget.prefill, engine.adapters)
            job.scores = dict(zip(prompts, scores, strict=True))
            job.scores_version = self.version
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
            torch.zeros(1, device=self._engine.device).item()  # raises if the device is lost, which ends this thread
            return
        for ticket, completion in ended:
            row = self._rows.pop(ticket)
            ids, logprobs = completion.ids[row.num_sent :], completion.logprobs[row.num_sent :]
            routed = None if completion.routed is None else to_npy_text(completion.routed[:-1])
            row.send(ids, logprobs, completion.finish, routed)
        for ticket, row in self._rows.items():
            if row.job.api_request.fields["stream"]:
                ids, logprobs = self._engine.progress(ticket, row.num_sent)
                if ids:
                    row.send(ids, logprobs, None)

    @staticmethod
    def _fault(error: Exception) -> ApiError:
        """Print the traceback of an error in the server, and return the error for the client."""
        traceback.print_exception(error)
        return ApiError(500, f"an error in the server ({type(error).__name__}); its terminal shows the traceback")

    def _cancel(self, jobs: set[Job], error: ApiError | None = None) -> None:
        """Cancel all requests of jobs, and send `error` to each job's client."""
        if not jobs:
            return
        tickets = [ticket for ticket, row in self._rows.items() if row.job in jobs]
        for ticket in tickets:
            self._engine.cancel(ticket)
            del self._rows[ticket]
        with self._changed:
            self._inbox = deque(row for row in self._inbox if row.job not in jobs)
        for job in jobs:
            job.is_over = True
            if error is not None:
                job.send(error)
