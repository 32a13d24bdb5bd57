"""New weights for the model that is served: from a directory, or from a trainer's broadcast, always between two steps.

The words are SGLang's (docs/advanced_features/sglang_for_rl.md): update_weights_from_disk, init_weights_update_group,
update_weights_from_distributed, destroy_weights_update_group, with `weight_version`.
"""

import ctypes
import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.checkpoint.huggingface import read_weights
from dtrain.checkpoint.training_state import aliases, model_tensors
from dtrain.rollout.serve.protocol import ApiError, Fields
from dtrain.rollout.serve.worker import MODES, Mode, Worker
from dtrain.rollout.shared_directory import is_whole, version_of
from dtrain.rollout.weights import GROUP, Info, WeightReceiver

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16)}
DTYPES["float16"] = torch.float16


class Updates:
    """The updates of `model`, on the thread of `worker`. The methods take an HTTP body and raise ApiError."""

    def __init__(self, model: nn.Module, worker: Worker):
        self.model, self.worker = model, worker
        self._tensors = _by_every_name(model)
        self._groups: dict[str, WeightReceiver] = {}
        self._meeting = threading.Lock()

    def from_disk(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{"model_path", "weight_version"?, "mode"?}: the safetensors of a directory that has its marker."""
        path = body.get("model_path")
        if not isinstance(path, str) or not Path(path).is_dir():
            raise ApiError(
                404, f"model_path={path!r}: there is no such directory on the server's machine", "model_path"
            )
        self.load(Path(path), version=_version(body), mode=_mode(body))
        return self._done(f"read {path}")

    def load(self, directory: Path, version: int | None = None, mode: Mode = "keep") -> None:
        """Read a whole directory. Nothing changes where it is not whole (409) or does not fit (UserError)."""
        if not is_whole(directory):
            raise ApiError(409, f"{directory} has no marker: it is being written; ask again when it is whole")
        version = version_of(directory) if version is None else version

        def read() -> None:
            read_weights(self.model, directory)
            self._count(version)

        self.worker.between_steps(read, mode)

    def check(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Whether a broadcast of these names, dtypes and shapes would fit: asked before a group waits for it."""
        info = self._info(body)
        lacking = {id(tensor) for tensor in self._tensors.values()} - {id(self._tensors[name]) for name in info}
        if lacking:
            names = sorted(name for name, tensor in self._tensors.items() if id(tensor) in lacking)
            raise ApiError(400, f"the update lacks {len(names)} tensors, the first {names[0]}", "names")
        return {"success": True, "message": f"{len(info)} tensors fit"}

    def checksums(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{"action": "checksum"}, as vLLM has it: each tensor's name and the SHA-256 of its bytes."""
        if body.get("action") != "checksum":
            raise ApiError(400, "action must be checksum", "action")

        def read() -> dict[str, str]:
            return {name: _sha256(tensor) for name, tensor in model_tensors(self.model).items()}

        return {"checksums": self.worker.between_steps(read)}

    def meet(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{"master_address", "master_port", "rank_offset", "world_size", "group_name"?}: join a trainer's group."""
        fields = Fields(body)
        name = body.get("group_name") or GROUP
        address = body.get("master_address")
        port, rank = fields.integer("master_port", None, 1, 65535), fields.integer("rank_offset", None, 1)
        size = fields.integer("world_size", None, 2)
        if not isinstance(address, str) or port is None or rank is None or size is None:
            raise ApiError(400, "master_address, master_port, rank_offset and world_size are needed")
        device = next(self.model.parameters()).device
        try:
            with self._meeting:
                self._groups[name] = WeightReceiver(address, port, rank, size, device, name=name)
        except RuntimeError as error:  # torch's word for a peer that does not come
            raise ApiError(504, f"no group at {address}:{port}: {_first_line(error)}") from error
        return {"success": True, "message": f"rank {rank} of {size}"}

    def part(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{"group_name"?}: leave a trainer's group."""
        self._groups.pop(body.get("group_name") or GROUP, None)
        return {"success": True, "message": "left"}

    def receive(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{"names", "dtypes", "shapes", "group_name"?, "load_format"?, "weight_version"?, "mode"?}: one bucket.

        Without `load_format: flattened_bucket` each tensor is a message of its own. The bucket that says weight_version
        is the last; until it came nothing is decoded.
        """
        info, version = self._info(body), _version(body)
        receiver = self._groups.get(body.get("group_name") or GROUP)
        if receiver is None:
            raise ApiError(409, "this server is in no such group: init_weights_update_group first", "group_name")
        buckets = [info] if body.get("load_format") == "flattened_bucket" else [{name: info[name]} for name in info]

        def read() -> None:
            self.worker.torn = True
            try:
                with torch.no_grad():
                    for bucket in buckets:
                        for name, tensor in receiver.receive_bucket(bucket):
                            self._tensors[name].copy_(tensor)
            except RuntimeError as error:  # torch's word for a sender that is gone
                raise ApiError(504, f"the broadcast broke off: {_first_line(error)}") from error
            if version is not None:
                self._count(version)

        # Between two buckets of one update nothing is decoded, so that there is nothing to wait for.
        self.worker.between_steps(read, "keep" if self.worker.torn else _mode(body))
        return self._done(f"received {len(info)} tensors")

    def _count(self, version: int | None) -> None:
        self.worker.version = self.worker.version + 1 if version is None else version
        self.worker.torn = False

    def _done(self, message: str) -> dict[str, Any]:
        return {"success": True, "message": message, "weight_version": self.worker.version}

    def _info(self, body: Mapping[str, Any]) -> Info:
        names, dtypes, shapes = (body.get(key) for key in ("names", "dtypes", "shapes"))
        if not all(isinstance(value, list) for value in (names, dtypes, shapes)) or not (
            len(names) == len(dtypes) == len(shapes) > 0
        ):
            raise ApiError(400, "names, dtypes and shapes must be lists of one length, not empty", "names")
        info: Info = {}
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            kind = DTYPES.get(str(dtype).removeprefix("torch."))
            if kind is None:
                raise ApiError(400, f"{name} is {dtype}; dtrain takes {', '.join(DTYPES)}", "dtypes")
            if name not in self._tensors:
                raise ApiError(400, f"the model has no tensor {name!r}", "names")
            if list(self._tensors[name].shape) != shape:
                raise ApiError(400, f"{name} is {shape}, the model has {list(self._tensors[name].shape)}", "shapes")
            info[name] = (torch.Size(shape), kind)
        return info


def _by_every_name(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors under all names that it and checkpoints know them by; a tied one under both."""
    names = aliases(model)
    found: dict[str, Tensor] = {}
    for first, tensor in model_tensors(model).items():
        data = tensor.detach()
        for name in names[first]:
            found.update(dict.fromkeys([name, *model.checkpoint_names(name)], data))
    return found


def _sha256(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256((ctypes.c_char * flat.numel()).from_address(flat.data_ptr())).hexdigest()


def _mode(body: Mapping[str, Any]) -> Mode:
    mode = "abort" if body.get("abort_all_requests") else body.get("mode", "keep")
    if mode not in MODES:
        raise ApiError(400, f"mode={mode!r} is unknown; choose {', '.join(MODES)}", "mode")
    return mode


def _version(body: Mapping[str, Any]) -> int | None:
    """`weight_version`, a whole number or its digits."""
    value = body.get("weight_version")
    if value is None:
        return None
    if isinstance(value, bool) or not str(value).isdecimal():
        raise ApiError(400, f"weight_version={value!r} must be a whole number", "weight_version")
    return int(value)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
