"""The routes and their access: checked by a request's head alone, before its body is read."""

import hmac
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrain.commands.serve.adapters import LOAD, UNLOAD, Adapters
from dtrain.commands.serve.connection import RequestHead
from dtrain.commands.serve.fields import IGNORED, ApiError, Field, Table
from dtrain.commands.serve.protocol import Ask, Parser
from dtrain.commands.serve.updates import BUCKET, CHECKSUMS, FROM_DISK, GROUP_NAME, MEETING, TENSORS, Updates
from dtrain.commands.serve.worker import MODES, EngineThread

ASK_BYTES = 1 << 25  # of the body of a completion: some photographs, or a million token ids
CONTROL_BYTES = 1 << 24  # names and shapes of all tensors
PAUSE: Table = {"mode": Field(str, "abort", among=(*MODES, "in_place")), "clear_cache": IGNORED}
_HOST = re.compile(r"(\[.*\]|[^:]*?)\.?(:[0-9]*)?")
_JSON = re.compile(r"application/json(\s*;\s*charset=\"?utf-8\"?)?")

Act = tuple[Table, Callable[[Mapping[str, Any]], dict[str, Any]]]  # the body's fields, and what answers them


class Gate:
    """Paths of a server and their access. `get`, `ask`, `act` and `control` map paths to handlers that answer without a
    body, draw, answer at once, and change the server. control is there if `has_control`.

    key: what clients must send as `Authorization: Bearer`, or None. hosts: the names in a request's `Host` that are
    served without a key.
    """

    def __init__(self, key: str | None, hosts: set[str]):
        self.key, self.hosts, self.has_control = key, hosts, False
        self._started = int(time.time())
        self.get: dict[str, Callable[[], dict[str, Any]]] = {}
        self.ask: dict[str, Callable[[Mapping[str, Any]], Ask]] = {}
        self.act: dict[str, Act] = {}
        self.control: dict[str, Act] = {}

    def admit(self, head: RequestHead) -> None:
        """Raise ApiError for a request that is not allowed, by its head alone: the key comes first, the body's size
        last."""
        self._check_caller(head)
        path, headers = head.path, head.headers
        if head.method not in ("GET", "POST"):
            known = head.method in ("HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT")
            raise ApiError(405 if known else 501, f"this server takes GET and POST, not {head.method}")
        if path in self.control and not self.has_control:
            raise ApiError(404, f"{path} is not served: start it with --control DIR and --api-key-file FILE")
        if path in self.control and "origin" in headers:
            raise ApiError(403, f"{path} is not for pages in a browser")
        routes = [*self.get, *self.ask, *self.act, *(self.control if self.has_control else ())]
        if path not in routes:
            raise ApiError(404, f"there is no {path[:80]} here, only {', '.join(routes)}")
        if (path in self.get) != (head.method == "GET"):
            raise ApiError(405, f"{path} wants {'GET' if path in self.get else 'POST'}")
        if path in self.get and head.length:
            raise ApiError(400, f"{path} takes no body")
        kind, coding = headers.get("content-type", ""), headers.get("content-encoding", "identity")
        if head.length and not (_JSON.fullmatch(kind.lower()) and coding.lower() == "identity"):
            what = "send a body as Content-Type: application/json, without Content-Encoding, not "
            curl = "(curl: -H 'Content-Type: application/json')"
            raise ApiError(415, f"{what}{kind[:80]!r} and {coding[:80]!r} {curl}")
        most = ASK_BYTES if path in self.ask or path in self.act else CONTROL_BYTES
        if head.length > most:
            raise ApiError(413, f"the body has {head.length} bytes, and at most {most} are taken")

    def has_key(self, head: RequestHead) -> bool:
        """Return whether this server has a key and the request shows it."""
        if self.key is None:
            return False
        scheme, _, token = head.headers.get("authorization", "").partition(" ")
        return hmac.compare_digest(token.strip().encode(), self.key.encode()) and scheme.lower() == "bearer"

    def models(self, name: str, max_length: int, adapters: Sequence[str] = ()) -> dict[str, Any]:
        """Return the body of /v1/models."""
        base = {"id": name, "object": "model", "created": self._started, "owned_by": "dtrain"}
        base["max_model_len"] = max_length
        return {"object": "list", "data": [base, *({**base, "id": other, "parent": name} for other in adapters)]}

    def _check_caller(self, head: RequestHead) -> None:
        if self.key is None:  # a page may lead its visitors' browsers here by a name of its own
            host = _HOST.fullmatch(head.headers.get("host", "localhost").lower())
            if host is None or host[1] not in self.hosts:
                raise ApiError(403, f"the header Host must be one of {', '.join(sorted(self.hosts))}")
            return
        if not self.has_key(head) and head.path != "/health":
            raise ApiError(401, "the key is wrong or missing: send `Authorization: Bearer KEY`")


class Service(Gate):
    """Routes of a language model. control, which pauses the server and changes its weights, is there if `updates` has a
    root, and needs a key."""

    def __init__(self, parser: Parser, worker: EngineThread, updates: Updates, key: str | None, hosts: set[str]):
        super().__init__(key, hosts)
        self.parser, self.worker, self.updates = parser, worker, updates
        self.adapters = Adapters(updates, parser)
        self.has_control = key is not None and updates.root is not None
        self.get = {
            "/health": self.health,
            "/v1/models": lambda: self.models(parser.model, parser.max_length, parser.adapters),
            "/weight_info": lambda: {"weight_version": worker.version},
            "/get_world_size": lambda: {"world_size": 1},
            "/is_paused": lambda: {"is_paused": worker.paused},
        }
        self.ask = {"/v1/completions": parser.completion, "/v1/chat/completions": parser.chat}
        self.control = {
            "/pause": (PAUSE, self.pause),
            "/resume": ({}, self.resume),
            "/pause_generation": (PAUSE, self.pause),
            "/continue_generation": ({}, self.resume),
            "/flush_cache": ({"timeout": IGNORED}, self.flush),
            "/update_weights_from_disk": (FROM_DISK, updates.from_disk),
            "/init_weights_update_group": (MEETING, updates.meet),
            "/destroy_weights_update_group": (GROUP_NAME, updates.part),
            "/update_weights_from_distributed": (BUCKET, updates.receive),
            "/check_weights": (TENSORS, updates.check),
            "/weight_checker": (CHECKSUMS, updates.checksums),
            "/v1/load_lora_adapter": (LOAD, self.adapters.load),
            "/v1/unload_lora_adapter": (UNLOAD, self.adapters.unload),
        }

    def health(self) -> dict[str, Any]:
        if self.worker.failure is not None:
            raise ApiError(503, self.worker.failure)
        if self.worker.torn:
            raise ApiError(503, "an update of the weights began and did not end")
        load = dict(zip(("running", "waiting"), self.worker.load, strict=True))
        return {"status": "paused" if self.worker.paused else "ok", "weight_version": self.worker.version, **load}

    def pause(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Pause the server. {"mode"}: keep (SGLang: in_place), wait or abort, vLLM's and SGLang's default."""
        self.worker.pause(fields["mode"].replace("in_place", "keep"))
        return {"status": "paused"}

    def resume(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        self.worker.resume()
        return {"status": "resumed"}

    def flush(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"success": True, "message": "no keys outlive their completion"}
