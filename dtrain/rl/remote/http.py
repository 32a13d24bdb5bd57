"""`HttpEngine`: completions from servers that already run (vLLM, SGLang, `dtrain serve`), over HTTP.

Token ids go in, with the files of images if there are any (`dialects.ImageRoute`). Token ids and log-probabilities come
out. All samples of a prompt are one call. One call goes through these functions:

    generate                 groups the requests, and runs one call per group in a thread
      _complete              chooses a server, and tries again elsewhere if a server fails
        _choose_server       waits for a usable server with the fewest calls in progress
        _request_completions sends the request by the server's dialect, or by a route for images
        _check_completion    refuses answers of older weights and impossible lengths

A server that fails is avoided for a growing time. A server that did not take the last weights gets no requests until it
takes others. No torch is needed. On a mesh, one rank calls `generate` and shares the result.
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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dtrain.base.errors import Interrupted, UserError
from dtrain.inference.chats import ImagePrompt
from dtrain.inference.request import Completion, Request, SamplingParams, ShouldStop
from dtrain.rl.remote.dialects import DIALECTS, ROUTES, AdapterVersion, Call, Dialect, ImageRoute, detect_dialect
from dtrain.rl.remote.http_client import (
    ClientError,
    HttpClient,
    RetryableError,
    RetryState,
    pause_after,
    read_api_key,
    with_advice,
)

if TYPE_CHECKING:
    from dtrain.rl.routed import RoutedExpertsReader

T = TypeVar("T")
Item = TypeVar("Item")
STOP_CHECK_SECONDS = 0.5  # between calls of `should_stop`
PROBE_SECONDS = 30.0  # for the completion that shows whether a server reports routed experts
REPORT_SECONDS = 30.0  # between lines about a server that does not answer yet
MIN_SECONDS = 0.1  # the smallest time limit of a request
CONTEXT_HINT = (
    "Start the server with a context for prompt and completion (--max-model-len, --context-length, --max-length)"
)
CLOSED_STATUSES = (403, 404, 405)  # statuses for a route that the release lacks, or that was not enabled at the start


@dataclass
class ServerClient:
    """A server, and what this engine knows of it.

    Attributes:
        client: Calls the server.
        dialect: The server's protocol.
        model: The model's name there.
        adapter: Name of the adapter to sample with. None: the model without an adapter.
        is_waiting_for_adapter: Whether new calls wait until the server has the adapter's next version.
        calls_per_adapter: Number of calls in progress for each adapter that the server has loaded.
        num_calls: Number of calls in progress.
        failures: Number of failures in a row.
        retry_at: Time before which the server is avoided, because it failed.
        version: Version of the weights that it got last. None: those it was started with.
        update_problem: Why it did not take the last weights. It then gets no requests. None if it took them.
        image_routes: Routes for prompts with images that the server may have. One of them after the first such call.
    """

    client: HttpClient
    dialect: Dialect
    model: str
    adapter: str | None = None
    is_waiting_for_adapter: bool = False
    calls_per_adapter: dict[str, int] = field(default_factory=dict)
    num_calls: int = 0
    failures: int = 0
    retry_at: float = 0.0
    version: int | None = None
    update_problem: str | None = None
    image_routes: Sequence[ImageRoute] = ()

    def record_update(self, version: int, problem: str | None, adapter: str | None = None) -> None:
        """Record the end of an update.

        Args:
            version: Version of the weights.
            problem: Why the server did not take it. None if it did.
            adapter: Name of the adapter that was loaded. None for full weights.
        """
        self.update_problem = problem
        self.is_waiting_for_adapter = False
        if problem is None:
            self.adapter = adapter
            if adapter is not None:
                self.calls_per_adapter.setdefault(adapter, 0)
            self.version, self.failures, self.retry_at = version, 0, 0.0


class HttpEngine:
    """Samples completions with servers.

    Args:
        urls: Addresses of the servers.
        kind: "vllm", "sglang" or "dtrain". "auto" finds it from the owner of each server's models.
        model: The model's name on the servers. None: the first of each server's models.
        timeout: Seconds that one call may take, retries included.
        retries: Further tries at one server after it gave no answer or a passing error.
        concurrency: Calls in progress at the same time, over all servers.
        start_timeout: Seconds that the servers may take to come up.
        api_key_file: A file with the servers' API key.
        routed: Reads routed experts, which every request then asks for. The constructor checks with a prompt of two
            tokens whether the servers report them.
        vocab_size: Every token id of an answer must be below this.
        print_line: Prints a line, for example about a server that fails.
        should_stop: Ends the wait for the servers with Interrupted.

    Attributes:
        servers: The servers.

    Raises:
        UserError: If an address or kind is wrong, or a server does not come up.
        Interrupted: If `should_stop` returns true while the servers come up.
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
        print_line: Callable[[str], None] = lambda line: None,
        should_stop: ShouldStop | None = None,
    ):
        if not urls:
            raise UserError("grpo.server.urls is empty. Set at least one address, http://host:port")
        if kind != "auto" and kind not in DIALECTS:
            raise UserError(f"grpo.server.kind={kind} is unknown. Use auto, {', '.join(DIALECTS)}")
        self.timeout = timeout
        self.retries = retries
        self.concurrency = concurrency
        self.print_line = print_line
        self._routed = routed
        self._vocab_size = vocab_size
        self._changed = threading.Condition()
        self._closed = False
        key = read_api_key(api_key_file)
        until = time.monotonic() + start_timeout
        self._start_timeout = start_timeout
        self._clients = [HttpClient(url, key) for url in urls]
        self.servers: list[ServerClient] = self._run_in_threads(
            self._clients, lambda client, stop: self._connect(client, kind, model, RetryState(until, stop)), should_stop
        )

    def generate(self, requests: Sequence[Request], should_stop: ShouldStop | None = None) -> list[Completion]:
        """Sample completions.

        Args:
            requests: The requests.
            should_stop: Ends the calls in progress with Interrupted, within half a second.

        Returns:
            The completions, in order. Their `version` is what the server reports, or else the version of the weights
            that it had when the call began.

        Raises:
            UserError: If no server answers, with the last error of each, or an answer is unusable.
            Interrupted: If `should_stop` returns true.
        """
        if any(request.images is not None for request in requests):
            raise UserError("requests to a server cannot have decoded images. Set `image_prompt` instead of `images`")
        completions_of_groups = self._run_in_threads(group_samples(requests), self._complete, should_stop)
        return [completion for completions in completions_of_groups for completion in completions]

    def update_from_directory(self, directory: Path, version: int) -> None:
        """Have every server load full weights from a directory that all servers can read.

        A server that fails gets no requests until the next update reaches it.

        Raises:
            UserError: If no server took the weights.
        """
        directory = directory.absolute()
        self._update(lambda server, call: server.dialect.load(call, directory, version), version, directory)

    def update_adapter(self, adapter: AdapterVersion) -> None:
        """Have every server load an adapter from a directory that all servers can read, and sample with it from now on.

        New calls wait meanwhile. Earlier versions are unloaded at the next update after their last call.

        Raises:
            UserError: If no server took the adapter.
        """
        with self._changed:
            for server in self.servers:
                server.is_waiting_for_adapter = True

        def load(server: ServerClient, call: Call) -> str:
            with self._changed:
                idle = []
                if server.dialect.has_named_versions:
                    idle = [name for name, num_calls in server.calls_per_adapter.items() if num_calls == 0]
                for name in idle:
                    del server.calls_per_adapter[name]
            for name in idle:
                # A server that has already dropped the adapter by itself refuses.
                with suppress(UserError, ClientError):
                    server.dialect.unload_adapter(call, name)
            return server.dialect.load_adapter(call, adapter)

        self._update(load, adapter.version, adapter.directory)

    def adapter_problem(self) -> str | None:
        """Ask all servers whether they can load adapters. Return the first reason against it, or None.

        Raises:
            UserError: If a server does not answer.
        """

        def check(server: ServerClient, stop: threading.Event) -> str | None:
            problem = server.dialect.adapter_problem(partial(self._call, server, stop))
            return None if problem is None else f"{server.client.url}: {problem}"

        for problem in self._run_in_threads(self.servers, check):
            if problem is not None:
                return problem
        return None

    def close(self) -> None:
        """End the calls in progress. `generate` raises UserError in its thread."""
        self._closed = True
        self._end_calls()

    def _end_calls(self) -> None:
        for client in self._clients:
            client.hang_up()
        with self._changed:
            self._changed.notify_all()

    def _connect(self, client: HttpClient, kind: str, model: str | None, tries: RetryState) -> ServerClient:
        """Wait until a server is up, and find its dialect and model. Raises UserError."""
        reported_at = 0.0
        while True:
            try:
                dialect, models = detect_dialect(client, kind, tries.seconds)
                break
            except ClientError as error:
                message = str(error)
                if error.status == 401:
                    message = with_advice(error, "Set grpo.server.api_key_file to a file with the server's key")
                raise UserError(f"{client.url}: {message}") from error
            except RetryableError as error:
                tries.record(client.url, error)
                limit = f"grpo.server.start_timeout={self._start_timeout:g}"
                if tries.count(client.url) == 1 or time.monotonic() - reported_at >= REPORT_SECONDS:
                    reported_at = time.monotonic()
                    self.print_line(
                        f"{client.url}: {error}. Waiting for the server for {tries.seconds:.0f} more seconds ({limit})"
                    )
                if not tries.wait(client.url):
                    raise UserError(
                        f"{tries.summary()}. The server did not come up within {limit} seconds. Start it, or remove it "
                        "from grpo.server.urls"
                    ) from error
        if model is not None and model not in models:
            names = ", ".join(models)
            raise UserError(f"grpo.server.model={model}: {client.url} has no such model. Its models are {names}")
        server = ServerClient(client, dialect, model or models[0], image_routes=ROUTES[dialect.name])
        if self._routed is not None:
            self._check_routed_experts(server)
        return server

    def _check_routed_experts(self, server: ServerClient) -> None:
        """Request a completion of one token to check whether the server reports routed experts.

        A server that does not answer now is accepted, because it may still be waiting for weights.

        Raises:
            UserError: If the server does not report experts, or serves another model.
        """
        requests = [Request([0, 0], SamplingParams(max_new_tokens=1))]
        path, body = server.dialect.body(requests, server.model)
        try:
            try:
                answer = server.client.request(
                    path, body | server.dialect.routed_fields, min(PROBE_SECONDS, self.timeout)
                )
                completions = self._read(server, server.dialect, answer, requests)
            except RetryableError:
                return
            self._add_routed_experts(server, answer, requests, completions)
        except (ClientError, RetryableError, UserError) as error:
            advice = "Servers must report routed experts for grpo.router_replay=true"
            raise UserError(f"{server.client.url}: {with_advice(error, advice)}") from error

    def _read(
        self, server: ServerClient, route: Dialect | ImageRoute, answer: Any, requests: Sequence[Request]
    ) -> list[Completion]:
        """Read the completions in an answer of `route`. Raises RetryableError and UserError."""
        try:
            if isinstance(route, ImageRoute):
                route.check(answer, requests[0])
            completions = route.read(answer, requests)
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            kind = f"{type(error).__name__}: {error}"
            raise RetryableError(f"the answer does not have {server.dialect.name}'s form ({kind})") from error
        for completion in completions:
            largest_id = max(completion.ids, default=0)
            if largest_id >= self._vocab_size:
                raise UserError(
                    f"the server sampled the token {largest_id}, but the model's ids end at {self._vocab_size - 1}. "
                    "Serve the model of the run"
                )
        return completions

    def _add_routed_experts(
        self, server: ServerClient, answer: Any, requests: Sequence[Request], completions: list[Completion]
    ) -> list[Completion]:
        """Return `completions` with the routed experts of the answer, if they are needed.

        Raises:
            UserError: If the experts do not fit the model.
            RetryableError: If the answer has none.
        """
        reader = self._routed
        if reader is None:
            return completions
        results = []
        sent_experts = server.dialect.routed(answer)
        for completion, request, sent in zip(completions, requests, sent_experts, strict=True):
            num_tokens = len(request.prompt) + len(completion.ids)
            if sent is None and completion.ids:
                raise RetryableError(f"the answer has no routed experts. {server.dialect.routed_start}")
            if completion.ids:
                routed = reader.read(sent, num_tokens)
            else:
                routed = reader.unknown(num_tokens)
            results.append(replace(completion, routed=routed))
        return results

    def _update(self, load: Callable[[ServerClient, Call], str | None], version: int, directory: Path) -> None:
        """Update all servers.

        Args:
            load: Updates a server. Returns the adapter to sample with, or None for full weights. Raises UserError or
                ClientError if the server does not take them.
            version: Version of the weights.
            directory: Directory of the weights, for the message.

        Raises:
            UserError: If no server took the weights.
        """

        def update(server: ServerClient, stop: threading.Event) -> None:
            problem = adapter = None
            try:
                adapter = load(server, partial(self._call, server, stop))
            except (UserError, ClientError) as error:
                problem = str(error)
                self.print_line(f"{server.client.url} did not load version {version} of the weights: {problem}")
            with self._changed:
                server.record_update(version, problem, adapter)
                self._changed.notify_all()

        self._run_in_threads(self.servers, update)
        if all(server.update_problem for server in self.servers):
            problems = "; ".join(f"{server.client.url}: {server.update_problem}" for server in self.servers)
            raise UserError(f"no server loaded version {version} of the weights ({directory}): {problems}")

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
        """Return the answer to one call. It is tried `tries` times, by default 1 + `retries`.

        Raises:
            ClientError: If the server refuses the call.
            UserError: If no try is answered.
        """
        attempts = RetryState(time.monotonic() + self.timeout, stop)
        url = server.client.url
        max_tries = 1 + self.retries if tries is None else tries
        while True:
            try:
                return server.client.request(path, body, attempts.seconds, is_json=is_json)
            except RetryableError as error:
                attempts.record(url, error)
                if self._closed or not attempts.wait(url, max_tries=max_tries):
                    raise UserError(f"{path}: {attempts.summary()}") from error

    def _complete(self, requests: Sequence[Request], stop: threading.Event) -> list[Completion]:
        """Return the completions of one prompt's samples, from the first server that returns usable completions.

        Args:
            requests: The samples.
            stop: Set if the call is no longer wanted.

        Raises:
            UserError: If no server is usable any more, or a server refuses the request.
        """
        tries = RetryState(time.monotonic() + self.timeout, stop)
        while True:
            chosen = self._choose_server(tries)
            server, version, adapter = chosen.server, chosen.version, chosen.adapter
            # If this server does not answer, another one should still have time: each gets half of what remains.
            seconds = tries.seconds / 2 if chosen.has_others else tries.seconds
            try:
                completions = self._request_completions(server, adapter, requests, seconds)
                if adapter is None and version is not None:
                    stale = server.dialect.stale_weights(server.client, version, seconds)
                    if stale is not None:
                        raise RetryableError(_restarted_message(stale, version))
                if adapter is not None and server.dialect.has_named_versions:
                    # The adapter's name determines its version. The server reports the version of the base model.
                    completions = [replace(completion, version=version) for completion in completions]
                for completion, request in zip(completions, requests, strict=True):
                    _check_completion(completion, request.sampling.max_new_tokens, version)
            except RetryableError as error:
                self._record_failure(server, tries, error)
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
            return [with_version(completion, version) for completion in completions]

    def _request_completions(
        self, server: ServerClient, adapter: str | None, requests: Sequence[Request], seconds: float
    ) -> list[Completion]:
        """Request the completions of one prompt's samples. Raises RetryableError, ClientError and UserError."""
        prompt = requests[0].image_prompt
        try:
            if prompt is not None:
                return self._request_with_images(server, adapter, requests, prompt, seconds)
            return self._post(server, server.dialect, adapter, requests, seconds)
        except ClientError as error:
            if error.status == 400 and re.search("max_model_len|context", str(error)):
                raise UserError(with_advice(error, CONTEXT_HINT)) from error
            if adapter is None or error.status != 404:
                raise
            raise RetryableError(
                f"{error} (the server had the adapter {adapter} before, so it may have been restarted)"
            ) from error

    def _request_with_images(
        self,
        server: ServerClient,
        adapter: str | None,
        requests: Sequence[Request],
        prompt: ImagePrompt,
        seconds: float,
    ) -> list[Completion]:
        """Request the completions of a prompt with images by the first route that the server has, and remember it."""
        until = time.monotonic() + seconds
        routes = [route for route in server.image_routes if route.supports(prompt)]
        if not routes:
            raise UserError(f"{server.dialect.name} accepts no images of this model. Use vLLM or dtrain serve")
        refusal: str | None = None  # of the last route that the server does not have
        for index, route in enumerate(routes):
            has_others = index + 1 < len(routes)
            remaining = max(MIN_SECONDS, until - time.monotonic())
            try:
                if has_others:
                    # First an empty request: a server may refuse a route while a large request is still being sent,
                    # and the refusal is then lost.
                    self._check_route(server, route.path, remaining)
                completions = self._post(server, route, adapter, requests, remaining)
                break
            except ClientError as error:
                if not has_others or error.status not in CLOSED_STATUSES:
                    raise
                refusal = str(error)
        with self._changed:
            is_first_refusal = refusal is not None and len(server.image_routes) > 1
            server.image_routes = [route]
        if is_first_refusal:
            self.print_line(
                f"{server.client.url}: {refusal}. Images are sent to this server as conversations instead of token ids"
            )
        return completions

    @staticmethod
    def _check_route(server: ServerClient, path: str, seconds: float) -> None:
        """Raise ClientError if the server does not have a path, or refuses to serve it."""
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
        """Send one request and read its completions."""
        path, body = route.body(requests, server.model, adapter)
        if self._routed is not None:
            body = body | server.dialect.routed_fields
        answer = server.client.request(path, body, seconds)
        return self._add_routed_experts(server, answer, requests, self._read(server, route, answer, requests))

    def _choose_server(self, tries: RetryState) -> "_ChosenServer":
        """Wait for a usable server, choose the one with the fewest calls in progress, and count a call there.

        Raises:
            UserError: If no server is usable any more, or the time is over.
        """
        with self._changed:
            while True:
                now = time.monotonic()
                if self._closed or tries.stop.is_set():
                    raise UserError("the connection to the servers was closed before all completions had arrived")
                usable = []
                for server in self.servers:
                    has_tries_left = tries.count(server.client.url) <= self.retries
                    if server.update_problem is None and has_tries_left:
                        usable.append(server)
                if not usable or now > tries.until:
                    raise self._no_server_error(tries)
                candidates = [server for server in usable if not server.is_waiting_for_adapter]
                ready = [server for server in candidates if server.retry_at <= now]
                if ready:
                    server = min(ready, key=lambda server: server.num_calls)
                    server.num_calls += 1
                    if server.adapter is not None:
                        server.calls_per_adapter[server.adapter] += 1
                    return _ChosenServer(server, len(usable) > 1, server.version, server.adapter)
                next_time = min([tries.until, *(server.retry_at for server in candidates)])
                self._changed.wait(max(0.01, next_time - now))

    def _no_server_error(self, tries: RetryState) -> UserError:
        reasons = [tries.summary()]
        for server in self.servers:
            if server.update_problem:
                reasons.append(f"{server.client.url} did not load the last weights: {server.update_problem}")
        return UserError(
            f"no server returned completions within {self.timeout:.0f} s ({'; '.join(reasons)}). Start the servers "
            "again and resume the run"
        )

    def _record_failure(self, server: ServerClient, tries: RetryState, error: RetryableError) -> None:
        """Record a failed call, and avoid its server for a while."""
        tries.record(server.client.url, error)
        with self._changed:
            server.failures += 1
            # Calls that fail at the same time lengthen the pause only once.
            if server.retry_at <= time.monotonic():
                server.retry_at = time.monotonic() + pause_after(server.failures)
        if server.failures == 1:
            self.print_line(f"{server.client.url}: {error}. Trying again")

    def _run_in_threads(
        self, items: Sequence[Item], act: Callable[[Item, threading.Event], T], should_stop: ShouldStop | None = None
    ) -> list[T]:
        """Run `act(item, stop)` for all items in threads. The first error ends the other calls and is raised."""
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
                self._end_calls()
                raise
            return [future.result() for future in futures]


class _ChosenServer(NamedTuple):
    """The server that was chosen for a call.

    Attributes:
        server: The server.
        has_others: Whether other servers are usable.
        version: Version of the weights to sample with.
        adapter: Name of the adapter to sample with. None: the model without an adapter.
    """

    server: ServerClient
    has_others: bool
    version: int | None
    adapter: str | None


def _check_completion(completion: Completion, max_new_tokens: int, version: int | None) -> None:
    """Check the length and the version of a completion.

    Raises:
        UserError: If its length is impossible for `max_new_tokens` and its finish.
        RetryableError: If weights before `version` sampled it.
    """
    count = len(completion.ids)
    is_empty = count == 0 and max_new_tokens > 0
    is_cut_early = completion.finish == "length" and count != max_new_tokens
    if count > max_new_tokens or is_empty or is_cut_early:
        raise UserError(
            f'a completion has {count} tokens and the finish_reason "{completion.finish}", but the request allowed '
            f"{max_new_tokens} tokens. {CONTEXT_HINT}"
        )
    if version is not None and completion.version is not None and completion.version < version:
        raise RetryableError(_restarted_message(f"version {completion.version} of the weights", version))


def _restarted_message(weights: str, version: int) -> str:
    """Return the message for a server that has older weights than `version`."""
    return f"the server has {weights} instead of version {version}, so it may have been restarted"


def with_version(completion: Completion, version: int | None) -> Completion:
    """Return a completion whose version is `version` if the server has not reported one."""
    if completion.version is not None:
        return completion
    return replace(completion, version=version)


def wait_for(futures: Sequence[Future], should_stop: ShouldStop | None = None) -> None:
    """Wait until all futures are done.

    Raises:
        Exception: The first error of a future.
        Interrupted: If `should_stop` returns true before.
    """
    interval = None if should_stop is None else STOP_CHECK_SECONDS
    pending: Collection[Future] = futures
    while pending:
        done, pending = wait(pending, interval, FIRST_EXCEPTION)
        for future in done:
            future.result()
        if pending and should_stop is not None and should_stop():
            raise Interrupted


def group_samples(requests: Sequence[Request]) -> list[list[Request]]:
    """Group requests that are samples of one prompt with consecutive sample_index.

    Example:
        >>> params = SamplingParams(max_new_tokens=4)
        >>> requests = [Request([1, 2], params, 0, prompt, sample) for prompt in (0, 1) for sample in (0, 1, 2)]
        >>> [len(group) for group in group_samples(requests)]
        [3, 3]
    """
    groups: list[list[Request]] = []
    for request in requests:
        if groups and replace(request, sample_index=request.sample_index - 1) == groups[-1][-1]:
            groups[-1].append(request)
        else:
            groups.append([request])
    return groups
