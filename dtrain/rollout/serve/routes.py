"""What each route does, and who may call it: told by a request's head alone, before its body is read."""

import hmac
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dtrain.rollout.serve.connection import Head
from dtrain.rollout.serve.fields import ApiError, check, choice, ignored
from dtrain.rollout.serve.protocol import Ask, Parser
from dtrain.rollout.serve.updates import Updates
from dtrain.rollout.serve.worker import MODES, Worker

ASK_BYTES = 1 << 23  # of the body of a completion: a million token ids
CONTROL_BYTES = 1 << 24  # names and shapes of all tensors
KNOWN_METHODS = ("HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT")
PAUSE = {"mode": choice({**{mode: mode for mode in MODES}, "in_place": "keep"}, "abort"), "clear_cache": ignored()}


@dataclass(frozen=True)
class Route:
    """act: of the body; its answer, or what is to be decoded. is_control: it pauses the server or changes weights."""

    method: str
    act: Callable[[Mapping[str, Any]], dict[str, Any] | Ask]
    most: int = CONTROL_BYTES
    is_control: bool = False

    @property
    def is_ask(self) -> bool:
        return self.method == "POST" and not self.is_control


class Service:
    """What the routes do, and for whom. key: what clients must send as `Authorization: Bearer`, or None. hosts: the
    names in a request's `Host` that are served (None: all). Control routes are there where `updates` has a root, and
    need a key."""

    def __init__(
        self,
        parser: Parser,
        worker: Worker,
        updates: Updates,
        key: str | None = None,
        hosts: set[str] | None = None,
    ):
        self.parser, self.worker, self.updates, self.key, self.hosts = parser, worker, updates, key, hosts
        self.started = int(time.time())
        done = {"success": True, "message": "no keys outlive their completion"}
        control = {
            "/pause": self.pause,
            "/resume": self.resume,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/flush_cache": lambda body: done,
            "/update_weights_from_disk": updates.from_disk,
            "/init_weights_update_group": updates.meet,
            "/destroy_weights_update_group": updates.part,
            "/update_weights_from_distributed": updates.receive,
            "/check_weights": updates.check,
            "/weight_checker": updates.checksums,
        }
        self.routes = {
            "/health": Route("GET", lambda body: self.health()),
            "/v1/models": Route("GET", lambda body: self.models()),
            "/weight_info": Route("GET", lambda body: {"weight_version": worker.version}),
            "/get_world_size": Route("GET", lambda body: {"world_size": 1}),
            "/is_paused": Route("GET", lambda body: {"is_paused": worker.paused}),
            "/v1/completions": Route("POST", parser.completion, ASK_BYTES),
            "/v1/chat/completions": Route("POST", parser.chat, ASK_BYTES),
            **{path: Route("POST", act, is_control=True) for path, act in control.items()},
        }

    def route(self, head: Head) -> Route:
        """The route that a request may take, by its head alone. Raises ApiError."""
        self._check_caller(head)
        route = self.routes.get(head.path)
        if head.method not in ("GET", "POST"):
            known = head.method in KNOWN_METHODS
            what = f"this server takes GET and POST, not {head.method}"
            raise ApiError(405, what, allow="GET, POST") if known else ApiError(501, what)
        if route is None:
            known = [path for path, one in self.routes.items() if not one.is_control or self.has_control]
            raise ApiError(404, f"there is no {head.path[:80]} here, only {', '.join(known)}")
        if route.is_control and not self.has_control:
            raise ApiError(404, f"{head.path} is not served: start it with --control DIR and --api-key-file FILE")
        if route.is_control and "origin" in head.headers:
            raise ApiError(403, f"{head.path} is not for pages in a browser")
        if route.method != head.method:
            raise ApiError(405, f"{head.path} wants {route.method}", allow=route.method)
        if route.method == "GET" and head.length:
            raise ApiError(400, f"{head.path} takes no body")
        if route.method == "POST":
            self._check_body(head, route)
        return route

    @property
    def has_control(self) -> bool:
        return self.key is not None and self.updates.root is not None

    def _check_caller(self, head: Head) -> None:
        scheme, _, given = head.headers.get("authorization", "").partition(" ")
        if self.key is None:  # a page may lead its visitors' browsers here by a name of its own
            host = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?", head.headers.get("host", "localhost"))
            if self.hosts is not None and (host is None or host[1].lower().rstrip(".") not in self.hosts):
                raise ApiError(403, f"the header Host must be one of {', '.join(sorted(self.hosts))}")
            return
        is_right = hmac.compare_digest(given.strip().encode(), self.key.encode()) and scheme.lower() == "bearer"
        if head.path != "/health" and not is_right:
            raise ApiError(401, "the key is wrong or missing: send `Authorization: Bearer KEY`")

    @staticmethod
    def _check_body(head: Head, route: Route) -> None:
        if head.length is None:
            raise ApiError(411, "send the body with Content-Length")
        kind = head.headers.get("content-type", "none").lower()
        if head.length and not re.fullmatch(r"application/json(\s*;\s*charset=\"?utf-8\"?)?", kind):
            raise ApiError(415, f"send the body with Content-Type: application/json, not {kind[:80]}")
        if head.headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "send the body as it is, without Content-Encoding")
        if head.length > route.most:
            raise ApiError(413, f"the body has {head.length} bytes, and at most {route.most} are taken")

    def health(self) -> dict[str, Any]:
        if self.worker.failure is not None:
            raise ApiError(503, self.worker.failure)
        if self.worker.torn:
            raise ApiError(503, "an update of the weights began and did not end")
        running, waiting = self.worker.load
        return {
            "status": "paused" if self.worker.paused else "ok",
            "weight_version": self.worker.version,
            "running": running,
            "waiting": waiting,
        }

    def models(self) -> dict[str, Any]:
        card = {
            "id": self.parser.model,
            "object": "model",
            "created": self.started,
            "owned_by": "dtrain",
            "max_model_len": self.parser.max_length,
        }
        return {"object": "list", "data": [card]}

    def pause(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{"mode"}: keep (SGLang: in_place), wait or abort, vLLM's and SGLang's default."""
        self.worker.pause(check(body, PAUSE)["mode"])
        return {"status": "paused"}

    def resume(self, body: Mapping[str, Any]) -> dict[str, Any]:
        check(body, {})
        self.worker.resume()
        return {"status": "resumed"}
