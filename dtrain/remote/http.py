"""`HttpEngine`: completions from servers that already run (vLLM, SGLang, `dtrain serve`), over HTTP.

Token ids go in, token ids and logprobs come out. All samples of a prompt are one call; calls go to the server that has
the fewest under way. No torch; on a mesh one rank calls `generate` and shares what it gives.
"""

import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from dtrain.errors import Interrupted, UserError
from dtrain.remote.dialects import DIALECTS, Dialect, recognise
from dtrain.remote.wire import Refused, Unanswered, Wire
from dtrain.rollout.request import AskStop, Completion, Request

T = TypeVar("T")
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 15.0  # seconds between tries, doubled each time
ASK_EVERY = 0.5  # seconds between questions whether to stop


@dataclass
class ServerClient:
    """One server. version: of the weights that it was last given, None: those it started with; behind: why it did not
    take the last ones, so that it is asked for nothing until it does."""

    wire: Wire
    dialect: Dialect
    model: str
    busy: int = 0
    failures: int = 0  # in a row
    rest_until: float = 0.0
    version: int | None = None
    behind: str | None = None


@dataclass
class _Tries:
    """What one call met, by url. `until` bounds it; `stop` is set where it is not wanted any more."""

    until: float
    stop: threading.Event
    seen: dict[str, list[str]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return max(0.1, self.until - time.monotonic())

    def note(self, url: str, seen: str) -> int:
        """Remember a failure; how many there were at `url`."""
        self.seen.setdefault(url, []).append(seen)
        return len(self.seen[url])

    def told(self) -> str:
        lines = [f"{url}: {len(seen)} tries, the last: {seen[-1]}" for url, seen in self.seen.items()]
        return "; ".join(lines) or "none could be asked"


class HttpEngine:
    """Servers at `urls`. kind: vllm, sglang, dtrain, or auto, which asks each for the owner of its models.

    model: its name there (None: the only one each has). timeout: seconds that one call may take, tries included.
    retries: further tries at one server, with growing pauses, where it gives no answer or a passing error; a server
    that fails is passed over for a while, the others go on. concurrency: calls under way at once, over all servers.
    samples_per_call: at most so many samples of a prompt in one call. start_timeout: seconds that the servers may take
    to come up. api_key_file: a file with the key that the servers want. say: gets a line about each server that fails.

    Raises UserError where a server's address or kind is wrong, or one does not come up, and Interrupted soon after
    `ask_stop` says yes while they come up.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        kind: str = "auto",
        model: str | None = None,
        timeout: float = 600.0,
        retries: int = 3,
        concurrency: int = 64,
        samples_per_call: int | None = None,
        start_timeout: float = 300.0,
        api_key_file: str | Path | None = None,
        say: Callable[[str], None] = lambda line: None,
        ask_stop: AskStop | None = None,
    ):
        if not urls:
            raise UserError("no server is named: give at least one address, http://host:port")
        if kind != "auto" and kind not in DIALECTS:
            raise UserError(f"kind={kind} is unknown; choose auto, {', '.join(DIALECTS)}")
        self.timeout, self.retries, self.concurrency, self.say = timeout, retries, concurrency, say
        self.samples_per_call = samples_per_call
        self._changed = threading.Condition()
        self._closed = False
        key = read_key(api_key_file)
        self.servers: list[ServerClient] = []
        until = time.monotonic() + start_timeout
        self._wires = [Wire(url, key) for url in urls]

        def meet(wire: Wire, stop: threading.Event) -> ServerClient:
            return self._meet(wire, kind, model, _Tries(until, stop))

        self.servers = self._all(self._wires, meet, ask_stop)

    def generate(self, requests: Sequence[Request], ask_stop: AskStop | None = None) -> list[Completion]:
        """The completions of `requests`, in order. `Completion.version` is what the server says, else the version that
        it was last given when it was asked. Raises UserError where no server answers, naming each with its last error,
        or one answers what cannot be used, and Interrupted soon after `ask_stop` says yes."""
        calls = group(requests, self.samples_per_call)

        def complete(call: list[int], stop: threading.Event) -> list[Completion]:
            return self._complete([requests[index] for index in call], stop)

        found = self._all(calls, complete, ask_stop)
        completions: dict[int, Completion] = {}
        for call, several in zip(calls, found, strict=True):
            completions.update(zip(call, several, strict=True))
        return [completions[index] for index in range(len(requests))]

    def update_from_directory(self, directory: Path, version: int) -> None:
        """Have every server read a whole directory that they all see. One that fails is asked for nothing until the
        next update reaches it; UserError where none took it."""
        directory = directory.absolute()
        self.on_each(lambda server, call: server.dialect.load(call, directory, version), version, f"{directory}")

    def on_each(self, act: Callable[[ServerClient, Callable], Any], version: int, what: str) -> None:
        """`act(server, call)` on all servers at once, which gives them `version` of the weights."""
        problems = self._all(self.servers, lambda server, stop: self._attempt(server, act, stop))
        for server, problem in zip(self.servers, problems, strict=True):
            with self._changed:
                server.behind = problem
                if problem is None:
                    server.version, server.failures, server.rest_until = version, 0, 0.0
            if problem is not None:
                self.say(f"{server.wire.url} did not take version {version} of the weights: {problem}")
        if all(problem is not None for problem in problems):
            told = "; ".join(f"{server.wire.url}: {server.behind}" for server in self.servers)
            raise UserError(f"no server took version {version} of the weights ({what}): {told}")

    def call(self, server: ServerClient, path: str, body: dict[str, Any], stop: threading.Event | None = None) -> Any:
        """One call with tries, for what is no completion. Raises UserError and Refused."""
        tries = _Tries(time.monotonic() + self.timeout, stop or threading.Event())
        while True:
            try:
                return server.wire.post(path, body, tries.seconds)
            except Unanswered as error:
                count = tries.note(server.wire.url, str(error))
                if count > self.retries or self._closed or time.monotonic() + _pause(count) > tries.until:
                    raise UserError(f"{path}: {tries.told()}") from error
                tries.stop.wait(_pause(count))

    def close(self) -> None:
        """End the calls under way: `generate` raises UserError in its thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for wire in self._wires:
            wire.hang_up()

    def _meet(self, wire: Wire, kind: str, model: str | None, tries: _Tries) -> ServerClient:
        while True:
            try:
                known = recognise(wire, tries.seconds) if kind == "auto" else self._known(wire, kind, tries.seconds)
                break
            except Refused as error:
                raise UserError(f"{wire.url}: {error}") from error
            except Unanswered as error:
                count = tries.note(wire.url, str(error))
                if tries.stop.is_set() or time.monotonic() + _pause(count) > tries.until:
                    raise UserError(
                        f"{tries.told()}: the server did not come up; start it, or take it out of the servers"
                    ) from error
                if count == 1:
                    self.say(f"{wire.url}: {error}; waiting for it to come up")
                tries.stop.wait(_pause(count))
        dialect, models = known
        if model is not None and model not in models:
            raise UserError(f"{wire.url} has no model {model}; it has {', '.join(models)}")
        return ServerClient(wire, dialect, model or models[0])

    @staticmethod
    def _known(wire: Wire, kind: str, seconds: float) -> tuple[Dialect, list[str]]:
        models = wire.get("/v1/models", seconds).get("data") or []
        return DIALECTS[kind], [str(model.get("id")) for model in models] or ["default"]

    def _complete(self, requests: Sequence[Request], stop: threading.Event) -> list[Completion]:
        tries = _Tries(time.monotonic() + self.timeout, stop)
        while True:
            server = self._choose(tries)
            told = server.version
            try:
                path, body = server.dialect.body(requests, server.model)
                answer = server.wire.post(path, body, self._share(server, tries))
                completions = server.dialect.read(answer, requests)
                self._check(completions, requests, told)
            except Unanswered as error:
                self._failed(server, tries, str(error))
                continue
            except (Refused, UserError) as error:
                raise UserError(f"{server.wire.url}: {error}") from error
            finally:
                with self._changed:
                    server.busy -= 1
                    self._changed.notify_all()
            with self._changed:
                server.failures = 0
            return [one if one.version is not None else replace(one, version=told) for one in completions]

    @staticmethod
    def _check(completions: Sequence[Completion], requests: Sequence[Request], told: int | None) -> None:
        for completion, request in zip(completions, requests, strict=True):
            most = request.sampling.max_new_tokens
            if (
                len(completion.ids) > most
                or (not completion.ids and most)
                or (completion.finish == "length" and len(completion.ids) != most)
            ):
                raise UserError(
                    f"a completion has {len(completion.ids)} tokens and ended by {completion.finish}, where "
                    f"{most} were asked for at most: does the server's context hold prompt and completion "
                    "(--max-model-len, --context-length, --max-length)?"
                )
            if told is not None and completion.version is not None and completion.version < told:
                raise Unanswered(f"it has version {completion.version} of the weights, not {told}: was it restarted?")

    def _choose(self, tries: _Tries) -> ServerClient:
        """Wait for a server that may be asked, the one with the fewest calls; takes a place there."""
        with self._changed:
            while True:
                now = time.monotonic()
                if self._closed or tries.stop.is_set():
                    raise UserError("the client was closed while completions were under way")
                able = [server for server in self.servers if self._may_be_tried(server, tries)]
                if not able or now > tries.until:
                    raise UserError(self._given_up(tries))
                ready = [server for server in able if server.rest_until <= now]
                if ready:
                    server = min(ready, key=lambda one: one.busy)
                    server.busy += 1
                    return server
                resting = [server.rest_until for server in able if server.rest_until > now]
                self._changed.wait(max(0.01, min([tries.until, *resting]) - now))

    def _may_be_tried(self, server: ServerClient, tries: _Tries) -> bool:
        return server.behind is None and len(tries.seen.get(server.wire.url, [])) <= self.retries

    def _share(self, server: ServerClient, tries: _Tries) -> float:
        """Seconds for one try: half of what is left while another server could be asked after it."""
        others = [one for one in self.servers if one is not server and self._may_be_tried(one, tries)]
        return tries.seconds / 2 if others else tries.seconds

    def _given_up(self, tries: _Tries) -> str:
        behind = [
            f"{server.wire.url} did not take the last weights: {server.behind}"
            for server in self.servers
            if server.behind
        ]
        told = "; ".join([tries.told(), *behind])
        return f"no server gave completions within {self.timeout:.0f} s ({told}); start them again and resume the run"

    def _failed(self, server: ServerClient, tries: _Tries, seen: str) -> None:
        tries.note(server.wire.url, seen)
        with self._changed:
            server.failures += 1
            # Calls that fail together count once.
            if server.rest_until <= time.monotonic():
                server.rest_until = time.monotonic() + _pause(server.failures)
        if server.failures == 1:
            self.say(f"{server.wire.url}: {seen}; trying again")

    def _attempt(
        self, server: ServerClient, act: Callable[[ServerClient, Callable], Any], stop: threading.Event
    ) -> str | None:
        try:
            act(server, lambda path, body: self.call(server, path, body, stop))
        except (UserError, Refused) as error:
            return str(error)
        return None

    def _all(
        self, items: Sequence[Any], act: Callable[[Any, threading.Event], T], ask_stop: AskStop | None = None
    ) -> list[T]:
        """`act(item, stop)` for all items, in threads; the first error ends the others' calls and is raised."""
        if not items:
            return []
        stop = threading.Event()
        with ThreadPoolExecutor(min(len(items), self.concurrency), thread_name_prefix="rollout") as threads:
            futures = [threads.submit(act, item, stop) for item in items]
            try:
                wait_for(futures, ask_stop)
            except BaseException:
                stop.set()
                threads.shutdown(wait=False, cancel_futures=True)
                for wire in self._wires:
                    wire.hang_up()
                with self._changed:
                    self._changed.notify_all()
                raise
            return [future.result() for future in futures]


def wait_for(futures: Sequence[Future], ask_stop: AskStop | None = None) -> None:
    """Until all are done. Raises the first error among them, and Interrupted where `ask_stop` says yes before."""
    missing: Collection[Future] = futures
    while missing:
        done, missing = wait(missing, None if ask_stop is None else ASK_EVERY, FIRST_EXCEPTION)
        for future in done:
            future.result()
        if missing and ask_stop is not None and ask_stop():
            raise Interrupted


def group(requests: Sequence[Request], most: int | None = None) -> list[list[int]]:
    """Indices of requests that are samples of one prompt with ascending sample_index, at most `most` together."""
    groups: list[list[int]] = []
    for index, request in enumerate(requests):
        if groups and len(groups[-1]) < (most or len(requests)):
            last = requests[groups[-1][-1]]
            if replace(request, sample_index=0) == replace(last, sample_index=0) and (
                request.sample_index == last.sample_index + 1
            ):
                groups[-1].append(index)
                continue
        groups.append([index])
    return groups


def read_key(file: str | Path | None) -> str | None:
    """The API key that is the one line of `file`. Raises UserError."""
    if file is None:
        return None
    try:
        key = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: the API key cannot be read ({error})") from error
    if not re.fullmatch("[!-~]+", key):
        raise UserError(f"{file} must hold one line, the API key, of letters, digits and signs without a space")
    return key


def _pause(count: int) -> float:
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (count - 1))
