"""The paths of a server and the functions behind them. app.py serves them over HTTP."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrain.commands.serve.protocol import IGNORED, ApiError, ApiRequest, Field, Parser, Table
from dtrain.commands.serve.updates import (
    BUCKET_FIELDS,
    CHECKSUM_FIELDS,
    FROM_DISK_FIELDS,
    GROUP_FIELDS,
    GROUP_NAME_FIELD,
    LOAD_ADAPTER_FIELDS,
    TENSOR_FIELDS,
    UNLOAD_ADAPTER_FIELDS,
    Adapters,
    Updates,
)
from dtrain.commands.serve.worker import MODES, EngineThread

PAUSE: Table = {"mode": Field(str, "abort", choices=(*MODES, "in_place")), "clear_cache": IGNORED}

# The fields of a body, and the function that returns the body of the response.
Act = tuple[Table, Callable[[Mapping[str, Any]], dict[str, Any]]]


class Routes:
    """The paths of a server, and who may use them.

    Attributes:
        key: Key that clients must send as `Authorization: Bearer KEY`. None if they need no key.
        hosts: Values of a request's header `Host` that are served if there is no key.
        get: Functions that return the body of the response to a GET, by path.
        completions: Functions that turn the body of a POST into completions to sample, by path.
        act: Functions that respond to a POST, with the fields of its body, by path.
        control: The same for requests that change the server.
        has_control: Whether `control` is served.
    """

    def __init__(self, key: str | None, hosts: set[str]):
        self.key, self.hosts, self.has_control = key, hosts, False
        self._started = int(time.time())
        self.get: dict[str, Callable[[], dict[str, Any]]] = {}
        self.completions: dict[str, Callable[[Mapping[str, Any]], ApiRequest]] = {}
        self.act: dict[str, Act] = {}
        self.control: dict[str, Act] = {}

    def models(self, name: str, max_length: int, adapters: Sequence[str] = ()) -> dict[str, Any]:
        """Return the body of /v1/models.

        Args:
            name: Name of the model.
            max_length: Maximum tokens of prompt and completion together.
            adapters: Names of its adapters.
        """
        base = {"id": name, "object": "model", "created": self._started, "owned_by": "dtrain"}
        base["max_model_len"] = max_length
        data = [base]
        for adapter in adapters:
            data.append({**base, "id": adapter, "parent": name})
        return {"object": "list", "data": data}


class Service(Routes):
    """The routes of a language model.

    The control routes pause the server and change its weights. They are served if there is a key and `updates` has a
    root.

    Args:
        parser: Parses requests.
        worker: Thread of the engine.
        updates: Updates of its weights.
        key: As of `Routes`.
        hosts: As of `Routes`.
    """

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
        self.completions = {"/v1/completions": parser.completion, "/v1/chat/completions": parser.chat}
        self.control = {
            "/pause": (PAUSE, self.pause),
            "/resume": ({}, self.resume),
            "/pause_generation": (PAUSE, self.pause),
            "/continue_generation": ({}, self.resume),
            "/flush_cache": ({"timeout": IGNORED}, self.flush),
            "/update_weights_from_disk": (FROM_DISK_FIELDS, updates.from_disk),
            "/init_weights_update_group": (GROUP_FIELDS, updates.join_group),
            "/destroy_weights_update_group": (GROUP_NAME_FIELD, updates.leave_group),
            "/update_weights_from_distributed": (BUCKET_FIELDS, updates.receive),
            "/check_weights": (TENSOR_FIELDS, updates.check),
            "/weight_checker": (CHECKSUM_FIELDS, updates.checksums),
            "/v1/load_lora_adapter": (LOAD_ADAPTER_FIELDS, self.adapters.load),
            "/v1/unload_lora_adapter": (UNLOAD_ADAPTER_FIELDS, self.adapters.unload),
        }

    def health(self) -> dict[str, Any]:
        """Return the body of /health. Raises ApiError if the server cannot serve completions."""
        if self.worker.failure is not None:
            raise ApiError(503, self.worker.failure)
        if self.worker.is_half_updated:
            raise ApiError(503, "an update of the weights began and did not end")
        running, waiting = self.worker.load
        status = "paused" if self.worker.paused else "ok"
        return {"status": status, "weight_version": self.worker.version, "running": running, "waiting": waiting}

    def pause(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Pause decoding. {"mode"?}.

        mode: what happens to running completions: "keep" (which SGLang calls "in_place"), "wait", or "abort", the
        default as in vLLM and SGLang.
        """
        self.worker.pause(fields["mode"].replace("in_place", "keep"))
        return {"status": "paused"}

    def resume(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Continue decoding."""
        self.worker.resume()
        return {"status": "resumed"}

    def flush(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Do nothing: keys and values are dropped when their completion ends."""
        return {"success": True, "message": "no keys outlive their completion"}
