"""The Starlette application of `dtrain serve`: access, request bodies, responses as JSON or as server-sent events.

The functions of routes.py block, so they run on Starlette's threads. Completions block no thread: the engine's thread
passes their tokens to the event loop.

No CORS header is sent, and a body must be declared as JSON. For pages of another origin, a browser then neither sends
requests with a body nor shows the responses.
"""

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from anyio import to_thread
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dtrain.base.errors import UserError
from dtrain.commands.serve.answers import Answer, StreamChunk, server_sent_event
from dtrain.commands.serve.classify import ClassifyService
from dtrain.commands.serve.protocol import ApiError, ApiRequest, Table, check, read_object
from dtrain.commands.serve.routes import Service
from dtrain.commands.serve.worker import EngineThread, Job

T = TypeVar("T")

MAX_BODY_BYTES = 1 << 25  # enough for several photographs, a million token ids, or the names of all tensors
CLIENT_GONE = 499  # status in the log if the client has disconnected
# Headers of errors by status.
HEADERS = {401: {"WWW-Authenticate": 'Bearer realm="dtrain"'}, 503: {"Retry-After": "1"}}

Chunks = AsyncGenerator[StreamChunk, None]


class Json(JSONResponse):
    """JSON in ASCII, because names and messages may contain half a surrogate pair, which UTF-8 cannot encode."""

    def render(self, content: Any) -> bytes:
        """Encode the content."""
        return json.dumps(content).encode()


class EventStream(StreamingResponse):
    """The server-sent events of an answer.

    `chunks` is closed when all events are sent, and as soon as the client disconnects.

    Args:
        answer: The answer.
        first: The first chunk.
        chunks: The other chunks.
    """

    def __init__(self, answer: Answer, first: StreamChunk, chunks: Chunks):
        events = _events(answer, first, chunks)
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks):
            await super().__call__(scope, receive, send)


class KeyMiddleware:
    """Middleware that refuses a request without the key before its body is read. `/health` needs no key."""

    def __init__(self, app: ASGIApp, key: str):
        self.app, self.key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health" or self._has_key(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        error = ApiError(401, "the key is wrong or missing: send `Authorization: Bearer KEY`")
        await _refusal(error)(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # The time of the comparison must not depend on how many characters are right.
        is_equal = hmac.compare_digest(token.strip().encode(), self.key.encode())
        return is_equal and scheme.lower() == "bearer"


def make_app(service: Service | ClassifyService) -> Starlette:
    """Return the application that serves the routes of `service`."""
    endpoints = _Endpoints(service)
    routes = []
    for path, read in service.get.items():
        routes.append(Route(path, partial(endpoints.get, read), methods=["GET"]))
    for path, parse in service.completions.items():
        routes.append(Route(path, partial(endpoints.complete, parse), methods=["POST"]))
    for path, (table, act) in service.act.items():
        routes.append(Route(path, partial(endpoints.act, table, act), methods=["POST"]))
    if service.has_control:
        for path, (table, act) in service.control.items():
            routes.append(Route(path, partial(endpoints.control, table, act), methods=["POST"]))
    if service.key is None:
        # A web page could give its own host name this server's address, and let its visitors' browsers send requests
        # here (DNS rebinding). The header Host then has the page's name.
        access = Middleware(TrustedHostMiddleware, allowed_hosts=sorted(service.hosts), www_redirect=False)
    else:
        access = Middleware(KeyMiddleware, key=service.key)
    handlers: Mapping[Any, Any] = {
        ApiError: _refuse,
        UserError: _refuse_mistake,
        ClientDisconnect: _end_quietly,
        HTTPException: endpoints.refuse_route,
        Exception: _report_fault,
    }
    return Starlette(routes=routes, middleware=[access], exception_handlers=handlers)


class _Endpoints:
    """The functions that respond to requests to the paths of `service`."""

    def __init__(self, service: Service | ClassifyService):
        self.service = service
        # One body is parsed at a time, because decoded images may need many times the memory of the body.
        self._parsing = asyncio.Lock()

    async def get(self, read: Callable[[], dict[str, Any]], request: Request) -> Response:
        return Json(read())

    async def act(self, table: Table, act: Callable[[Mapping[str, Any]], Any], request: Request) -> Response:
        return await _run(act, check(await _read_body(request), table))

    async def control(self, table: Table, act: Callable[[Mapping[str, Any]], Any], request: Request) -> Response:
        if "origin" in request.headers:
            raise ApiError(403, f"{request.url.path} is not for pages in a browser")
        body = await _read_body(request)
        return await _run(act, check({**request.query_params, **body}, table))

    async def complete(self, parse: Callable[[Mapping[str, Any]], ApiRequest], request: Request) -> Response:
        """Respond to a request for completions."""
        assert isinstance(self.service, Service)
        worker, tokenizer = self.service.worker, self.service.parser.tokenizer
        body = await _read_body(request)
        async with self._parsing:
            api_request = await to_thread.run_sync(parse, body)
        answer = Answer(api_request, tokenizer)
        arrived: asyncio.Queue[StreamChunk | ApiError] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def send(chunk: StreamChunk | ApiError) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, chunk)

        # `submit` waits while the engine starts other requests, so it runs on a thread.
        job = await to_thread.run_sync(worker.submit, api_request, send)
        chunks = _receive_chunks(worker, job, arrived)
        if not api_request.fields["stream"]:
            all_chunks = await _until_disconnect(request, _collect(chunks))
            return Json(await to_thread.run_sync(answer.body, all_chunks))
        # An error before the first chunk still gets a status of its own.
        first = await _until_disconnect(request, anext(chunks))
        return EventStream(answer, first, chunks)

    async def refuse_route(self, request: Request, error: HTTPException) -> Response:
        """Respond to a request to an unknown path, or with the wrong method."""
        service, path = self.service, request.url.path
        if error.status_code == 405:
            message = f"{path} wants {'GET' if path in service.get else 'POST'}"
        elif path in service.control:
            message = f"{path} is not served: start the server with --control DIR and --api-key-file FILE"
        else:
            paths = [*service.get, *service.completions, *service.act]
            if service.has_control:
                paths += service.control
            message = f"there is no {path[:80]} here, only {', '.join(paths)}"
        refusal = ApiError(error.status_code, message)
        return Json(refusal.body, refusal.status, headers=error.headers)


async def _read_body(request: Request) -> dict[str, Any]:
    """Return the JSON object of a body, {} if there is no body. Raises ApiError."""
    too_large = ApiError(413, f"the body is too large: the limit is {MAX_BODY_BYTES} bytes")
    if int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise too_large
    if not body:
        return {}
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        curl = "(curl: -H 'Content-Type: application/json')"
        raise ApiError(415, f"send a body as Content-Type: application/json, not {content_type[:80]!r} {curl}")
    return read_object(body)


async def _run(act: Callable[[Mapping[str, Any]], dict[str, Any]], fields: Mapping[str, Any]) -> Response:
    # abandon_on_cancel: the server can end although `act` waits for a trainer's group that never meets.
    return Json(await to_thread.run_sync(act, fields, abandon_on_cancel=True))


async def _receive_chunks(worker: EngineThread, job: Job, arrived: "asyncio.Queue[StreamChunk | ApiError]") -> Chunks:
    """Yield the tokens of all requests of a job as they arrive. Closing the generator cancels the requests.

    Raises:
        ApiError: If the engine cannot finish the requests.
    """
    num_unfinished = len(job.api_request.requests)
    try:
        while num_unfinished:
            chunk = await arrived.get()
            if isinstance(chunk, ApiError):
                num_unfinished = 0
                raise chunk
            if chunk.finish is not None:
                num_unfinished -= 1
            yield chunk
    finally:
        if num_unfinished:
            worker.drop(job)


async def _collect(chunks: Chunks) -> list[StreamChunk]:
    return [chunk async for chunk in chunks]


async def _events(answer: Answer, first: StreamChunk, chunks: Chunks) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of an answer. After an error, an event with the error is the last one."""
    try:
        yield answer.event(first)
        async for chunk in chunks:
            yield answer.event(chunk)
        yield answer.last_events()
    except ApiError as error:
        yield server_sent_event(error.body)


async def _until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. Cancel it and raise ClientDisconnect if the client disconnects first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refusal(error: ApiError) -> Response:
    return Json(error.body, error.status, headers=HEADERS.get(error.status))


async def _refuse(request: Request, error: ApiError) -> Response:
    return _refusal(error)


async def _refuse_mistake(request: Request, error: UserError) -> Response:
    return _refusal(ApiError(400, str(error)))


async def _end_quietly(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _report_fault(request: Request, error: Exception) -> Response:
    """Respond to a request that met an error in the server. uvicorn logs its traceback."""
    return _refusal(ApiError(500, "an error in the server; its terminal shows the traceback"))
