"""Updates of the weights and the adapter of a served model, which are loaded between two decoding steps.

Weights come from a directory or from a trainer's broadcast. The routes are SGLang's
(docs/advanced_features/sglang_for_rl.md): update_weights_from_disk, init_weights_update_group,
update_weights_from_distributed, destroy_weights_update_group, with `weight_version`. The messages of a group are the
bytes of tensors: nothing that arrives is unpickled.

An adapter is served next to the model under its own name. It can be loaded, replaced and unloaded. The routes are
vLLM's (docs/features/lora.md): load_lora_adapter, unload_lora_adapter, with `weight_version` and `mode` as for weights.
One adapter can be loaded at a time. Its files are read while completions continue. An adapter that does not fit changes
nothing.
"""

import hashlib
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dtrain.adapters.config import PARAMETERS
from dtrain.adapters.lora import adapted_layers, build_with_adapters, remove_adapters
from dtrain.base.errors import UserError
from dtrain.checkpoint.dcp.training_state import model_tensors, tensor_aliases
from dtrain.checkpoint.huggingface.converted import is_library_model
from dtrain.checkpoint.huggingface.file_rows import FusedWeight, fused_weights
from dtrain.checkpoint.huggingface.merged import merge_in_place
from dtrain.checkpoint.huggingface.read import check_fit, read_weights
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles
from dtrain.checkpoint.peft.config import read_adapter_config
from dtrain.checkpoint.peft.files import read_adapter
from dtrain.commands.serve.protocol import COUNT, FLAG, IGNORED, TEXT, ApiError, Field, Parser, Table
from dtrain.commands.serve.worker import HALF_UPDATED, MODES, EngineThread, Mode
from dtrain.models.common.config import is_in_vision_tower
from dtrain.models.common.decoder import CausalLM
from dtrain.policy.weights import WEIGHT_GROUP, WeightInfo, WeightReceiver
from dtrain.rl.remote.publish import is_complete_step, step_number

if TYPE_CHECKING:
    from dtrain.models.transformers.conversion import Conversion
    from dtrain.models.transformers.model import TransformersCausalLM

DTYPES = {str(kind): kind for kind in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
DTYPES |= {name.removeprefix("torch."): kind for name, kind in DTYPES.items()}


def _version(value: Any, name: str) -> int:
    """Return a whole number, from itself or its digits."""
    value = int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,19}", value) else value
    return Field(int, maximum=2**63 - 1).read(value, name)


VERSION_FIELD = Field(convert=_version)
GROUP_NAME_FIELD: Table = {"group_name": Field(str, WEIGHT_GROUP, maximum=256)}
TENSOR_FIELDS: Table = {
    "names": Field(list, [], items=TEXT),
    "dtypes": Field(list, [], items=Field(choices=tuple(DTYPES))),
    "shapes": Field(list, [], items=Field(list, items=Field(int))),
}
UPDATE_FIELDS: Table = {
    "weight_version": VERSION_FIELD,
    "mode": Field(str, "keep", choices=MODES),
    "abort_all_requests": FLAG,
    **dict.fromkeys(("flush_cache", "torch_empty_cache", "is_async", "keep_pause"), IGNORED),  # SGLang's
}
FROM_DISK_FIELDS: Table = {**UPDATE_FIELDS, "model_path": Field(str, "", maximum=4096), "load_format": IGNORED}
BUCKET_FIELDS: Table = {
    **UPDATE_FIELDS,
    **TENSOR_FIELDS,
    **GROUP_NAME_FIELD,
    "load_format": Field(choices=("flattened_bucket",)),
}
CHECKSUM_FIELDS: Table = {"action": Field(choices=("checksum",))}
GROUP_FIELDS: Table = {
    **dict.fromkeys(("master_address", "master_port", "rank_offset", "world_size"), COUNT),
    "master_address": TEXT,
    "backend": Field(choices=("gloo", "nccl")),
    **GROUP_NAME_FIELD,
}

LOAD_ADAPTER_FIELDS: Table = {
    "lora_name": Field(str, "", maximum=256),
    "lora_path": Field(str, "", maximum=4096),
    "load_inplace": FLAG,
    "base_model_name": IGNORED,
    "is_3d_lora_weight": Field(choices=(False,)),
    "weight_version": VERSION_FIELD,
    "mode": Field(str, "keep", choices=MODES),
}
# By default, running completions end before the adapter is unloaded.
UNLOAD_ADAPTER_FIELDS: Table = {
    "lora_name": Field(str, "", maximum=256),
    "lora_int_id": IGNORED,
    "mode": Field(str, "wait", choices=("wait", "abort")),
}


class Updates:
    """Updates of the weights of a model.

    The handlers of routes accept the checked fields of a body, and raise ApiError. Their docstrings list the fields,
    with a "?" after optional ones.

    An update replaces the weights of the base model. If updates are possible, the model's own adapter is therefore
    merged into the weights first. An update may leave out the complete vision tower, as trainers of text models do. The
    tower then stays unchanged.

    Args:
        model: The model.
        worker: Thread of its engine, on which updates run.
        root: Directories of weights must be below it. None: no directory can be loaded by a client.
        watched: Whether the server watches a directory and calls `load` itself, so that updates are possible without a
            root.

    Attributes:
        is_merged: Whether an adapter was merged into the weights. They cannot be the base of other adapters then.
    """

    def __init__(self, model: CausalLM, worker: EngineThread, root: Path | None = None, *, watched: bool = False):
        self.model, self.worker = model, worker
        can_update = root is not None or watched
        self.is_merged = can_update and merge_in_place(model)
        self.root = None if root is None else Path(os.path.realpath(root))
        self._tensors = _tensors_by_name(model)
        self._tower_tensors = [name for name in model_tensors(model) if is_in_vision_tower(name)]
        # All names of the tower's tensors, by which an update may send them.
        tower_ids = {id(self._tensors[name].parts[0]) for name in self._tower_tensors}
        self._tower_aliases = {name for name, target in self._tensors.items() if id(target.parts[0]) in tower_ids}
        self._groups: dict[str, WeightReceiver] = {}
        self._joining = threading.Lock()

    def from_disk(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Read the safetensors of a complete directory. {"model_path", "weight_version"?, "mode"?}."""
        directory = self.below(fields["model_path"], "model_path")
        self.load(directory, fields["weight_version"], _mode(fields))
        return self.done(f"read {directory}")

    def below(self, path: str, name: str) -> Path:
        """Return a directory that a client has named, after checking that it is below the root.

        Args:
            path: The path.
            name: Name of its field, for errors.

        Raises:
            ApiError: If it is not below the root, or not a directory.
        """
        directory = Path(os.path.realpath(path.replace("\0", "")))
        if self.root is None or not directory.is_relative_to(self.root):
            raise ApiError(403, f"{name}={str(directory)!r} is not below {self.root}", name)
        if not os.path.isdir(directory):
            raise ApiError(404, f"{name}={str(directory)!r}: there is no such directory on the server's machine", name)
        return directory

    def load(self, directory: Path, version: int | None = None, mode: Mode = "keep") -> None:
        """Read the weights of a complete directory.

        Args:
            directory: The directory.
            version: Version of the weights. None: from the directory's name.
            mode: What happens to running completions.

        Raises:
            ApiError: With status 409 if the directory is not complete. Nothing has changed then.
            UserError: If the weights do not fit the model. Nothing has changed then.
        """
        if not is_complete_step(directory):
            raise ApiError(409, f"{directory} has no marker: it is still being written; try again when it is complete")
        version = step_number(directory) if version is None else version

        def read() -> None:
            files = WeightFiles(directory)
            kept = self._tower_tensors if self._tower_aliases.isdisjoint(files.stored) else ()
            check_fit(self.model, files, kept)  # before anything changes
            try:
                read_weights(self.model, directory, kept)
            except BaseException:
                self.worker.is_half_updated = True
                raise
            self.count(version)

        self.worker.run_between_steps(read, mode)

    def check(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Check that a broadcast fits the model, before a group is formed for it. {"names", "dtypes", "shapes"}."""
        info = self._info(fields)
        # Several names may stand for the same tensor, so tensors are compared by identity.
        missing = {id(target.parts[0]) for target in self._tensors.values()}
        missing -= {id(self._tensors[name].parts[0]) for name in info}
        if self._tower_aliases.isdisjoint(info):
            missing -= {id(self._tensors[name].parts[0]) for name in self._tower_tensors}
        if missing:
            names = sorted(name for name, target in self._tensors.items() if id(target.parts[0]) in missing)
            raise ApiError(400, f"the update is missing {len(names)} tensors, the first {names[0]}", "names")
        return {"success": True, "message": f"{len(info)} tensors fit"}

    def checksums(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the SHA-256 of the bytes of each tensor by name. {"action": "checksum"}, as vLLM has it."""

        def compute() -> dict[str, str]:
            return {name: _sha256(tensor) for name, tensor in model_tensors(self.model).items()}

        return {"checksums": self.worker.run_between_steps(compute)}

    def join_group(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Join a trainer's group. {"master_address", "master_port", "rank_offset", "world_size", "group_name"?}."""
        address, port = fields["master_address"], fields["master_port"]
        rank, world_size, name = fields["rank_offset"], fields["world_size"], fields["group_name"]
        if None in (address, port, rank, world_size) or not (port < 1 << 16 and 0 < rank < world_size):
            raise ApiError(400, "master_address, master_port, rank_offset and a larger world_size are needed")
        device = next(self.model.parameters()).device
        try:
            with self._joining:
                self._groups[name] = WeightReceiver(address, port, rank, world_size, device, name=name)
        except RuntimeError as error:  # raised by torch if the trainer does not arrive
            raise ApiError(504, f"no group at {address}:{port}: {_first_line(error)}") from error
        return {"success": True, "message": f"rank {rank} of {world_size}"}

    def leave_group(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Leave a trainer's group. {"group_name"?}."""
        self._groups.pop(fields["group_name"], None)
        return {"success": True, "message": "left"}

    def receive(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Receive a bucket. {"names", "dtypes", "shapes", "group_name"?, "load_format"?, "weight_version"?, "mode"?}.

        Without `load_format: flattened_bucket` each tensor is a message of its own. The bucket with weight_version is
        the last one of an update. Until it arrives, nothing is decoded.
        """
        info, version = self._info(fields), fields["weight_version"]
        receiver = self._groups.get(fields["group_name"])
        if receiver is None:
            raise ApiError(409, "this server is in no such group: call init_weights_update_group first", "group_name")
        buckets = [info] if fields["load_format"] else [{name: info[name]} for name in info]

        def read() -> None:
            self.worker.is_half_updated = True
            try:
                with torch.no_grad():
                    for bucket in buckets:
                        for name, tensor in receiver.receive_bucket(bucket):
                            self._tensors[name].fill(tensor)
            except RuntimeError as error:  # raised by torch if the sender is gone
                raise ApiError(504, f"the broadcast broke off: {_first_line(error)}") from error
            if version is not None:
                self.count(version)

        # Nothing is decoded between two buckets of an update, so running completions could not end, and "wait" would be
        # refused. Only the first bucket of an update uses the mode of the request.
        self.worker.run_between_steps(read, "keep" if self.worker.is_half_updated else _mode(fields))
        return self.done(f"received {len(info)} tensors")

    def count(self, version: int | None) -> None:
        """Record a complete update. Must be called on the worker's thread.

        Args:
            version: Version of the weights. None: one more than before.
        """
        self.worker.version = self.worker.version + 1 if version is None else version
        self.worker.is_half_updated = False

    def done(self, message: str) -> dict[str, Any]:
        """Return the body of the response to an update."""
        return {"success": True, "message": message, "weight_version": self.worker.version}

    def _info(self, fields: Mapping[str, Any]) -> WeightInfo:
        names, dtypes, shapes = (fields[key] for key in TENSOR_FIELDS)
        if not len(set(names)) == len(names) == len(dtypes) == len(shapes) > 0:
            raise ApiError(400, "names, each once, dtypes and shapes must be lists of one length, not empty", "names")
        info: WeightInfo = {}
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            if name not in self._tensors:
                raise ApiError(400, f"the model has no tensor {name!r}", "names")
            own = self._tensors[name].shape
            if own != shape:
                raise ApiError(400, f"{name} is {shape}, the model has {own}", "shapes")
            info[name] = (torch.Size(shape), DTYPES[dtype])
        return info


class Adapters:
    """The adapter that is served next to a model. Handlers are as in `Updates`.

    Args:
        updates: Updates of the model. The adapter's directory must be below its root.
        parser: Parser of requests, which knows the adapter's name.
    """

    def __init__(self, updates: Updates, parser: Parser):
        self.updates, self.worker, self.parser = updates, updates.worker, parser

    def load(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Load the files of an adapter. {"lora_name", "lora_path", "load_inplace"?, "weight_version"?, "mode"?}.

        load_inplace: replace the adapter of that name. mode: what happens to running completions.
        """
        name, path = fields["lora_name"], fields["lora_path"]
        self._check_free(name, fields["load_inplace"])
        if not name or not path or name == self.parser.model:
            raise ApiError(400, "lora_name, which is not the model's, and lora_path must be given", "lora_name")
        directory = self.updates.below(path, "lora_path")
        loaded = read_adapter_model(self.updates.model, directory)

        def attach() -> None:
            # Another request may have loaded an adapter meanwhile.
            self._check_free(name, fields["load_inplace"])
            if self.worker.is_half_updated:
                raise ApiError(409, HALF_UPDATED)
            self.put(name, loaded)
            self.updates.count(fields["weight_version"])

        self.worker.run_between_steps(attach, fields["mode"])
        return self.updates.done(f"loaded {name}")

    def load_at_start(self, name: str, directory: Path) -> None:
        """Load an adapter from any directory, before the worker starts. Raises UserError."""
        if name == self.parser.model or self.updates.is_merged or adapted_layers(self.updates.model):
            raise UserError(
                f"--adapter {name}={directory}: serve the adapter's base model, under a name other than the adapter's"
            )
        self.put(name, read_adapter_model(self.updates.model, directory))

    def unload(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Unload an adapter. {"lora_name", "mode"?}.

        mode: whether its running completions end first (wait) or are refused (abort).
        """
        name = fields["lora_name"]

        def detach() -> None:
            if name not in self.parser.adapters:
                raise ApiError(404, f"there is no adapter {name!r} here", "lora_name")
            self.put(None, None)

        self.worker.run_between_steps(detach, fields["mode"])
        return {"success": True, "message": f"unloaded {name}"}

    def put(self, name: str | None, loaded: CausalLM | None) -> None:
        """Replace the model's adapter. To be called on the worker's thread, or before it starts.

        Args:
            name: Name of the new adapter. None: there is none.
            loaded: Model with the new adapter, from `read_adapter_model`.
        """
        attach_adapters(self.updates.model, loaded)
        self.worker.use_adapter(name)
        self.parser.adapters = () if name is None else (name,)

    def _check_free(self, name: str, in_place: bool) -> None:
        """Raise ApiError if an adapter with this name cannot be loaded."""
        loaded = self.parser.adapters
        if self.updates.is_merged:
            raise ApiError(409, "the model that is served has its own adapter: serve its base model instead")
        if loaded and loaded != (name,):
            raise ApiError(409, f"{loaded[0]!r} is loaded, and only one can be: unload it first", "lora_name")
        if loaded and not in_place:
            raise ApiError(400, f"{name!r} has already been loaded; load_inplace=true replaces it", "lora_name")


def attach_adapters(model: CausalLM, loaded: CausalLM | None) -> None:
    """Replace the adapters of a model by those of another one.

    Args:
        model: The model.
        loaded: Model with the new adapters, from `read_adapter_model`. None: there are none.
    """
    remove_adapters(model)
    if loaded is None:
        return
    model.tied_parameters.update(loaded.tied_parameters)
    for path, layer in adapted_layers(loaded).items():
        target: Any = model.get_submodule(path)
        target.wrapper = layer.wrapper
        target._parameters.update({name: layer._parameters[name] for name in PARAMETERS if name in layer._parameters})


def read_adapter_model(model: CausalLM, directory: Path) -> CausalLM:
    """Read an adapter into a model of its own, whose other weights have no memory (meta tensors).

    Args:
        model: The model that the adapter is for.
        directory: Directory with PEFT's files.

    Raises:
        UserError: If the files are not an adapter of such a model.
    """
    config = read_adapter_config(directory)
    if config.modules_to_save:
        saved = ", ".join(config.modules_to_save)
        raise UserError(
            f"{directory}: it has modules_to_save ({saved}), which cannot be served next to a model: serve the "
            "adapter's directory as it is, or the merged model"
        )
    first = next(model.parameters())
    loaded = build_with_adapters(model.config, config, first.dtype, "meta")
    # Give memory to the adapter's parameters. Layers that are fused in the files share A, so each is created once.
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for layer in adapted_layers(loaded).values():
        for name, meta in layer._parameters.items():
            if name in PARAMETERS and meta is not None:
                if meta not in allocated:
                    allocated[meta] = nn.Parameter(torch.empty_like(meta, device=first.device), requires_grad=False)
                layer._parameters[name] = allocated[meta]
    read_adapter(loaded, directory)
    return loaded


@dataclass(frozen=True)
class _Target:
    """The tensors of the model that one name in a checkpoint stands for.

    Usually this is one tensor. A checkpoint may also store several tensors of the model as one fused tensor.

    Attributes:
        parts: The tensors.
        joint: How the checkpoint joins them.
    """

    parts: list[Tensor]
    joint: FusedWeight

    @property
    def shape(self) -> list[int]:
        """Shape of the joined tensor."""
        return list(self.joint.shape([part.shape for part in self.parts]))

    def fill(self, tensor: Tensor) -> None:
        """Copy a joined tensor, [shape], into its parts."""
        for part, rows in zip(self.parts, self.joint.split(tensor, self.parts), strict=True):
            part.copy_(rows)


def _tensors_by_name(model: CausalLM) -> dict[str, _Target]:
    """Return the model's tensors under all names that the model and checkpoints use. A tied one has several."""
    if is_library_model(model):
        return _library_tensors_by_name(model)
    names, tensors = tensor_aliases(model), model_tensors(model)
    by_name: dict[str, _Target] = {}
    for joint in fused_weights(model, tensors):
        parts = [tensors[part].detach() for part in joint.parts]
        if joint.expert is not None:
            parts = [parts[0][joint.expert]]
        target = _Target(parts, joint)
        for name in names.get(joint.name, [joint.name]):
            by_name[name] = target
            for checkpoint_name in model.checkpoint_names(name):
                by_name[checkpoint_name] = target
    return by_name


class _ConversionTarget:
    """Tensors of the model that transformers computes from several tensors of a checkpoint, such as stacks of experts.

    Args:
        conversion: The conversion.
        tensors: The tensors of the model, by transformers' names.
    """

    def __init__(self, conversion: "Conversion", tensors: Mapping[str, Tensor]):
        self._conversion, self._tensors = conversion, tensors
        self._received: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor of the checkpoint. When all are there, fill the tensors of the model, and free them."""
        self._received[name] = tensor.clone()
        if len(self._received) == len(self._conversion.sources):
            for target, result in self._conversion.convert(self._received).items():
                self._tensors[target].copy_(result)
            self._received = {}


@dataclass(frozen=True)
class _SourceTarget(_Target):
    """A source tensor of a `_ConversionTarget`, by its name in the checkpoint. Its one part is a meta tensor.

    Attributes:
        group: The tensors of the model.
    """

    group: _ConversionTarget

    def fill(self, tensor: Tensor) -> None:
        """Override `_Target.fill`."""
        self.group.add(self.joint.name, tensor)


def _library_tensors_by_name(model: "TransformersCausalLM") -> dict[str, _Target]:
    """Return the tensors of a model of transformers under the names that `save_pretrained` writes."""
    from dtrain.models.transformers.conversion import plan_loading, plan_saving  # loads transformers

    tensors: dict[str, Tensor] = {}  # by transformers' names, with all names of a tied one
    shapes: dict[str, tuple[int, ...]] = {}  # once for each tensor
    own_tensors = model_tensors(model)
    for name, aliases in tensor_aliases(model).items():
        tensor = own_tensors[name].detach()
        tensors |= dict.fromkeys(map(model.library_name, aliases), tensor)
        shapes[model.library_name(name)] = tuple(tensor.shape)
    stored: dict[str, tuple[int, ...]] = {}
    for saved in plan_saving(model.library_model, shapes):
        stored |= saved.targets
    by_name: dict[str, _Target] = {}
    for name, tensor in tensors.items():
        if name not in shapes:  # the second name of a tied tensor
            by_name[name] = _Target([tensor], FusedWeight(name, (name,)))
    for conversion in plan_loading(model.library_model, tensors, stored).conversions:
        group = _ConversionTarget(conversion, tensors)
        for name in conversion.source_names:
            joint = FusedWeight(name, (name,))
            if conversion.converter is None:
                (target,) = conversion.targets
                by_name[name] = _Target([tensors[target]], joint)
            else:
                by_name[name] = _SourceTarget([torch.empty(stored[name], device="meta")], joint, group)
    return by_name


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def _mode(fields: Mapping[str, Any]) -> Mode:
    return "abort" if fields["abort_all_requests"] else fields["mode"]


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its class if it has none."""
    message = str(error).strip()
    return message.splitlines()[0] if message else type(error).__name__
