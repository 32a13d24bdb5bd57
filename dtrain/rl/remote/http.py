"""`HttpEngine`: completions from servers that already run (vLLM, SGLang, `dtrain serve`), over HTTP.

Token ids go in, with the files of images (`dialects.ImageRoute`), and token ids and logprobs come out. All samples of
a prompt are one call; calls go to the server that has the fewest under way. No torch; on a mesh one rank calls
`generate` and shares what it gives.
"""

import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dtrain.base.errors import Interrupted, UserError
from dtrain.inference.chats import ImagePrompt
from dtrain.inference.request import Completion, Request, SamplingParams, ShouldStop
from dtrain.rl.remote.dialects import DIALECTS, ROUTES, AdapterVersion, Call, Dialect, ImageRoute, detect_dialect
from dtrain.rl.remote.http_client import ClientError, HttpClient, RetryableError, RetryState, pause_after, read_api_key

if TYPE_CHECKING:
    from dtrain.rl.routed import RoutedExpertsReader

T = TypeVar("T")
Item = TypeVar("Item")
ASK_EVERY = 0.5  # seconds between questions whether to stop
TRY_SECONDS = 30.0  # for the completion that shows what a server answers
CONTEXT = "does the server's context hold prompt and completion (--max-model-len, --context-length, --max-length)?"
CLOSED_STATUSES = (403, 404, 405)  # of a route that a release has not, or that its start left closed
REPORT_EVERY = 30.0  # seconds between lines about a server that is waited for


@dataclass
class ServerClient:
    """Client of a server. version: of the weights that it got last, None: those it started with; adapter: the name
    of the one to draw with, None: the model alone; update_problem: why it did not take the last weights, so that it
    is asked for nothing until it does. is_waiting_for_adapter: calls wait for an adapter's next version.
    calls_per_adapter: adapters' names there, and how many calls are under way with each.
    image_routes: those that it may have."""

    client: HttpClient
    dialect: Dialect
    model: str
    adapter: str | None = None
    is_waiting_for_adapter: bool = False
    calls_per_adapter: dict[str, int] = field(default_factory=dict)
    num_calls: int = 0
    failures: int = 0  # in a row
    retry_at: float = 0.0
    version: int | None = None
    update_problem: str | None = None
    image_routes: Sequence[ImageRoute] = ()

    def record_update(self, version: int, problem: str | None, adapter: str | None = None) -> None:
        """Record that it has this version of the weights, `adapter` or the model's, or why it did not take it."""
        self.update_problem, self.is_waiting_for_adapter = problem, False
        if problem is None:
            self.adapter = adapter
            if adapter is not None:
                self.calls_per_adapter.setdefault(adapter, 0)
            self.version, self.failures, self.retry_at = version, 0, 0.0


class HttpEngine:
    """Servers at `urls`. kind: vllm, sglang, dtrain, or auto, which asks each for the owner of its models.

    model: its name there (None: the only one each has). timeout: seconds that one call may take, tries included.
    retries: further tries at one server, with growing pauses, where it gives no answer or a passing error; a server
    that fails is passed over for a while, the others go on. concurrency: calls under way at once, over all servers.
    start_timeout: seconds that the servers may take to come up. api_key_file: a file with the key that they want.
    routed: reads where the tokens went, which the servers are then asked for with every completion, and once before,
    with a prompt of two tokens. vocab_size: the bound that every token's id is below. say: gets a line about each
    server that fails.

    Raises UserError where a server's address or kind is wrong, or one does not come up, and Interrupted soon after
    `should_stop` says yes while they come up.
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
        start_timeout: float = 300.0,
        api_key_file: str | Path | None = None,
        routed: "RoutedExpertsReader | None" = None,
        vocab_size: int = 2**31,
        say: Callable[[str], None] = lambda line: None,
        should_stop: ShouldStop | None = None,
    ):
        if not urls:
            raise UserError("no server is named: give at least one address, http://host:port")
        if kind != "auto" and kind not in DIALECTS:
            raise UserError(f"kind={kind} is unknown; choose auto, {', '.join(DIALECTS)}")
        self.timeout, self.retries, self.concurrency, self.say = timeout, retries, concurrency, say
        self._routed, self._vocab_size = routed, vocab_size
        self._changed = threading.Condition()
        self._closed = False
        key = read_api_key(api_key_file)
        until = time.monotonic() + start_timeout
        self._start_timeout = start_timeout
        self._clients = [HttpClient(url, key) for url in urls]
        self.servers: list[ServerClient] = self._all(
            self._clients, lambda client, stop: self._meet(client, kind, model, RetryState(until, stop)), should_stop
        )

    def generate(self, requests: Sequence[Request], should_stop: ShouldStop | None = None) -> list[Completion]:
        """Return the completions of `requests`, in order. `Completion.version` is what the server says, else the
        version that it had got last when it was asked. Raises UserError where no server answers, naming each with its
        last error, or one answers what cannot be used, and Interrupted soon after `should_stop` says yes."""
        if any(request.images is not None for request in requests):
            raise UserError("prompts with decoded images are for the native engine: servers get an `image_prompt`")
        drawn = self._all(group_samples(requests), self._complete, should_stop)
        return [completion for completions in drawn for completion in completions]

    def update_from_directory(self, directory: Path, version: int) -> None:
        """Have every server read a whole directory that they all see. One that fails is asked for nothing until the
        next update reaches it; UserError where none took it."""
        directory = directory.absolute()
        self._update(lambda server, call: server.dialect.load(call, directory, version), version, directory)

    def update_adapter(self, adapter: AdapterVersion) -> None:
        """Have every server load an adapter from a directory that they all see, and draw with it from here on; earlier
        versions go when no call is under way with them. New calls wait meanwhile. Fails as `update_from_directory`."""
        with self._changed:
            for server in self.servers:
                server.is_waiting_for_adapter = True

        def give(server: ServerClient, call: Call) -> str:
            with self._changed:
                idle = [
                    name
                    for name, calls in server.calls_per_adapter.items()
                    if not calls and server.dialect.has_named_versions
                ]
                for name in idle:
                    del server.calls_per_adapter[name]
            for name in idle:
                # A server that has dropped it by itself refuses.
                with suppress(UserError, ClientError):
                    server.dialect.unload_adapter(call, name)
            return server.dialect.load_adapter(call, adapter)

        self._update(give, adapter.version, adapter.directory)

    def adapter_problem(self) -> str | None:
        """Return why a server takes no adapter, by its own answers; None where all take them. Raises UserError."""

        def look(server: ServerClient, stop: threading.Event) -> str | None:
            lacking = server.dialect.adapter_problem(partial(self._call, server, stop))
            return None if lacking is None else f"{server.client.url}: {lacking}"

        return next((problem for problem in self._all(self.servers, look) if problem), None)

    def close(self) -> None:
        """End the calls under way: `generate` raises UserError in its thread."""
        self._closed = True
        self._hang_up()

    def _hang_up(self) -> None:
        for client in self._clients:
            client.hang_up()
        with self._changed:
            self._changed.notify_all()

    def _meet(self, client: HttpClient, kind: str, model: str | None, tries: RetryState) -> ServerClient:
        reported_at = 0.0
        while True:
            try:
                dialect, models = detect_dialect(client, kind, tries.seconds)
                break
            except ClientError as error:
                fix = "; grpo.server.api_key_file names a file with the server's key" if error.status == 401 else ""
                raise UserError(f"{client.url}: {error}{fix}") from error
            except RetryableError as error:
                tries.record(client.url, error)
                waits = f"of {self._start_timeout:g} s, grpo.server.start_timeout"
                if tries.count(client.url) == 1 or time.monotonic() - reported_at >= REPORT_EVERY:
                    reported_at = time.monotonic()
                    self.say(f"{client.url}: {error}; waiting for it to come up, {tries.seconds:.0f} s left {waits}")
                if not tries.wait(client.url):
                    raise UserError(
                        f"{tries.summary()}: the server did not come up (the time {waits}, is over); start it, or "
                        "take it out of grpo.server.urls"
                    ) from error
        if model is not None and model not in models:
            raise UserError(f"{client.url} has no model {model}; it has {', '.join(models)}")
        server = ServerClient(client, dialect, model or models[0], image_routes=ROUTES[dialect.name])
        if self._routed is not None:
            self._try_routed(server)
        return server

    def _try_routed(self, server: ServerClient) -> None:
        """Ask for a completion with its experts. Raises UserError where the server does not say where tokens go, or
        serves another model. One that gives no answer now may wait for weights."""
        requests = [Request([0, 0], SamplingParams(max_new_tokens=1))]
        path, body = server.dialect.body(requests, server.model)
        try:
            try:
                answer = server.client.request(
                    path, body | server.dialect.routed_fields, min(TRY_SECONDS, self.timeout)
                )
                completions = self._read(server, server.dialect, answer, requests)
            except RetryableError:
                return
            self._with_routed(server, answer, requests, completions)
        except (ClientError, RetryableError, UserError) as error:
            requirement = "grpo.router_replay=true needs servers that say which experts tokens go to"
            raise UserError(f"{server.client.url}: {error}; {requirement}") from error

    def _read(
        self, server: ServerClient, route: Dialect | ImageRoute, answer: Any, requests: Sequence[Request]
    ) -> list[Completion]:
        """Return the completions of an answer by `route`. Raises RetryableError and UserError."""
        try:
            if isinstance(route, ImageRoute):
                route.check(answer, requests[0])
            completions = route.read(answer, requests)
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            shape = f"{type(error).__name__}: {error}"
            raise RetryableError(f"an answer in another form than {server.dialect.name}'s ({shape})") from error
        beyond = [token for completion in completions for token in completion.ids if token >= self._vocab_size]
        if beyond:
            raise UserError(
                f"it drew the token {max(beyond)}, and the model has {self._vocab_size}: does it serve this very model?"
            )
        return completions

    def _with_routed(
        self, server: ServerClient, answer: Any, requests: Sequence[Request], completions: list[Completion]
    ) -> list[Completion]:
        """Return `completions` with their experts. Raises UserError, and RetryableError where the answer has none."""
        if (reader := self._routed) is None:
            return completions
        results = []
        texts = server.dialect.routed(answer)
        for completion, request, text in zip(completions, requests, texts, strict=True):
            count = len(request.prompt) + len(completion.ids)
            if text is None and completion.ids:
                raise RetryableError(f"its answer has no routed experts; {server.dialect.routed_start}")
            routed = reader.read(text, count) if completion.ids else reader.unknown(count)
            results.append(replace(completion, routed=routed))
        return results

    def _update(self, give: Callable[[ServerClient, Call], str | None], version: int, directory: Path) -> None:
        """Give all servers their weights from `directory`: `give` raises where one does not take them, and names the
        adapter to draw with."""

        def attempt(server: ServerClient, stop: threading.Event) -> None:
            problem = adapter = None
            try:
                adapter = give(server, partial(self._call, server, stop))
            except (UserError, ClientError) as error:
                problem = str(error)
                self.say(f"{server.client.url} did not take version {version} of the weights: {problem}")
            with self._changed:
                server.record_update(version, problem, adapter)
                self._changed.notify_all()

        self._all(self.servers, attempt)
        if all(server.update_problem for server in self.servers):
            problems = "; ".join(f"{server.client.url}: {server.update_problem}" for server in self.servers)
            raise UserError(f"no server took version {version} of the weights ({directory}): {problems}")

    def _call(
        self,
        server: ServerClient,
        stop: threading.Event,
        path: str,
        body: dict[str, Any] | None,
        *,
        is_json: bool = True,
        tries: int | None = None,
    ) -> Any:
        """Return the answer to one call, tried `tries` times, 1 + self.retries by default. Raises ClientError and
        UserError."""
        attempts, url = RetryState(time.monotonic() + self.timeout, stop), server.client.url
        while True:
            try:
                return server.client.request(path, body, attempts.seconds, is_json=is_json)
            except RetryableError as error:
                attempts.record(url, error)
                if self._closed or not attempts.wait(url, most=1 + self.retries if tries is None else tries):
                    raise UserError(f"{path}: {attempts.summary()}") from error

    def _complete(self, requests: Sequence[Request], stop: threading.Event) -> list[Completion]:
        tries = RetryState(time.monotonic() + self.timeout, stop)
        while True:
            server, has_others, version, adapter = self._choose(tries)
            # Half of the time that is left for this try, while another server could be asked after it.
            seconds = tries.seconds / 2 if has_others else tries.seconds
            try:
                completions = self._ask(server, adapter, requests, seconds)
                if adapter is None and version is not None:
                    held = server.dialect.stale_weights(server.client, version, seconds)
                    if held is not None:
                        raise RetryableError(f"it has {held}, not version {version}: was it restarted?")
                if (
                    adapter is not None and server.dialect.has_named_versions
                ):  # the name tells the version, not the base's
                    completions = [replace(completion, version=version) for completion in completions]
                for completion, request in zip(completions, requests, strict=True):
                    _check(completion, request.sampling.max_new_tokens, version)
            except RetryableError as error:
                self._failed(server, tries, error)
                continue
            except (ClientError, UserError) as error:
                raise UserError(f"{server.client.url}: {error}") from error
            finally:
                with self._changed:
                    server.num_calls -= 1
                    if adapter is not None:
                        server.calls_per_adapter[adapter] -= 1
                    self._changed.notify_all()
            with self._changed:
                server.failures = 0
            return [c if c.version is not None else replace(c, version=version) for c in completions]

    def _ask(
        self, server: ServerClient, adapter: str | None, requests: Sequence[Request], seconds: float
    ) -> list[Completion]:
        try:
            if (prompt := requests[0].image_prompt) is not None:
                return self._ask_with_images(server, adapter, requests, prompt, seconds)
            return self._post(server, server.dialect, adapter, requests, seconds)
        except ClientError as error:
            if error.status == 400 and re.search("max_model_len|context", str(error)):
                raise UserError(f"{error}; {CONTEXT}") from error
            if adapter is None or error.status != 404:
                raise
            raise RetryableError(f"{error} (it had the adapter {adapter}): was it restarted?") from error

    def _ask_with_images(
        self,
        server: ServerClient,
        adapter: str | None,
        requests: Sequence[Request],
        prompt: ImagePrompt,
        seconds: float,
    ) -> list[Completion]:
        """Return the completions by the first route that the server has for this prompt, and keep to it."""
        until, refusal = time.monotonic() + seconds, None
        routes = [route for route in server.image_routes if route.supports(prompt)]
        if not routes:
            raise UserError(f"{server.dialect.name} takes no images of this model: use vLLM or dtrain serve")
        while True:
            route, *others = routes
            left = max(0.1, until - time.monotonic())
            try:
                if others:  # without images: a refusal would break off what is being sent
                    self._check_route(server, route.path, left)
                completions = self._post(server, route, adapter, requests, left)
                break
            except ClientError as error:
                if not others or error.status not in CLOSED_STATUSES:
                    raise
                routes, refusal = others, str(error)
        with self._changed:
            is_news = refusal is not None and len(server.image_routes) > 1
            server.image_routes = [route]
        if is_news:
            self.say(
                f"{server.client.url}: {refusal}; images are sent to it in conversations, and the token ids that it "
                "reads are compared"
            )
        return completions

    @staticmethod
    def _check_route(server: ServerClient, path: str, seconds: float) -> None:
        """Raise ClientError where the server has no such path, or keeps it closed."""
        try:
            server.client.request(path, {}, seconds)
        except ClientError as error:
            if error.status in CLOSED_STATUSES:
                raise

    def _post(
        self,
        server: ServerClient,
        route: Dialect | ImageRoute,
        adapter: str | None,
        requests: Sequence[Request],
        seconds: float,
    ) -> list[Completion]:
        """Return the completions that the server gives to one call."""
        path, body = route.body(requests, server.model, adapter)
        if self._routed is not None:
            body = body | server.dialect.routed_fields
        answer = server.client.request(path, body, seconds)
        return self._with_routed(server, answer, requests, self._read(server, route, answer, requests))

    def _choose(self, tries: RetryState) -> tuple[ServerClient, bool, int | None, str | None]:
        """Wait for a server that may be asked, the one with the fewest calls, and take a place there. Return it,
        whether there are more, and the version and the adapter to draw with."""
        with self._changed:
            while True:
                now = time.monotonic()
                if self._closed or tries.stop.is_set():
                    raise UserError("the client was closed while completions were under way")
                able = [
                    s for s in self.servers if s.update_problem is None and tries.count(s.client.url) <= self.retries
                ]
                if not able or now > tries.until:
                    late = [s for s in self.servers if s.update_problem]
                    behind = [f"{s.client.url} did not take the last weights: {s.update_problem}" for s in late]
                    raise UserError(
                        f"no server gave completions within {self.timeout:.0f} s "
                        f"({'; '.join([tries.summary(), *behind])}); start them again and resume the run"
                    )
                free = [server for server in able if not server.is_waiting_for_adapter]
                ready = [server for server in free if server.retry_at <= now]
                if ready:
                    server = min(ready, key=lambda server: server.num_calls)
                    server.num_calls += 1
                    if server.adapter is not None:
                        server.calls_per_adapter[server.adapter] += 1
                    return server, len(able) > 1, server.version, server.adapter
                self._changed.wait(max(0.01, min([tries.until, *(server.retry_at for server in free)]) - now))

    def _failed(self, server: ServerClient, tries: RetryState, error: RetryableError) -> None:
        tries.record(server.client.url, error)
        with self._changed:
            server.failures += 1
            # Calls that fail together count once.
            if server.retry_at <= time.monotonic():
                server.retry_at = time.monotonic() + pause_after(server.failures)
        if server.failures == 1:
            self.say(f"{server.client.url}: {error}; trying again")

    def _all(
        self, items: Sequence[Item], act: Callable[[Item, threading.Event], T], should_stop: ShouldStop | None = None
    ) -> list[T]:
        """Run `act(item, stop)` for all items, in threads; the first error ends the others' calls and is raised."""
        if not items:
            return []
        stop = threading.Event()
        with ThreadPoolExecutor(min(len(items), self.concurrency), thread_name_prefix="rollout") as threads:
            futures = [threads.submit(act, item, stop) for item in items]
            try:
                wait_for(futures, should_stop)
            except BaseException:
                stop.set()
                threads.shutdown(wait=False, cancel_futures=True)
                self._hang_up()
                raise
            return [future.result() for future in futures]


def _check(completion: Completion, most: int, version: int | None) -> None:
    """Raise UserError for a completion that `most` tokens do not explain, and RetryableError for one of older
    weights."""
    count = len(completion.ids)
    if count > most or (not count and most) or (completion.finish == "length" and count != most):
        raise UserError(
            f"a completion has {count} tokens and ended by {completion.finish}, where "
            f"{most} were asked for at most: {CONTEXT}"
        )
    if version is not None and completion.version is not None and completion.version < version:
        raise RetryableError(f"it has version {completion.version} of the weights, not {version}: was it restarted?")


def wait_for(futures: Sequence[Future], should_stop: ShouldStop | None = None) -> None:
    """Wait until all are done. Raises the first error, and Interrupted if `should_stop` returns True before."""
    missing: Collection[Future] = futures
    while missing:
        done, missing = wait(missing, None if should_stop is None else ASK_EVERY, FIRST_EXCEPTION)
        for future in done:
            future.result()
        if missing and should_stop is not None and should_stop():
            raise Interrupted


def group_samples(requests: Sequence[Request]) -> list[list[Request]]:
    """Group requests that are samples of one prompt with ascending sample_index."""
    groups: list[list[Request]] = []
    for request in requests:
        if groups and replace(request, sample_index=request.sample_index - 1) == groups[-1][-1]:
            groups[-1].append(request)
        else:
            groups.append([request])
    return groups
