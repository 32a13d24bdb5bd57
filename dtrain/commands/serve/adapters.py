"""An adapter beside the model that is served, by a name of its own: loaded, loaded again in place, unloaded.

The words are vLLM's (docs/features/lora.md): load_lora_adapter, unload_lora_adapter; `weight_version` and `mode` are
those of `updates`. One is loaded at a time. It is read beside the model, while completions go on, and put in between
two steps: nothing changes where it does not fit.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtrain.adapters.config import PARAMETERS
from dtrain.adapters.lora import adapted_layers, build_with_adapters, remove_adapters
from dtrain.base.errors import UserError
from dtrain.checkpoint.peft.config import read_adapter_config
from dtrain.checkpoint.peft.files import read_adapter
from dtrain.commands.serve.fields import FLAG, IGNORED, ApiError, Field, Table
from dtrain.commands.serve.protocol import Parser
from dtrain.commands.serve.updates import VERSION, Updates
from dtrain.commands.serve.worker import HALF, MODES
from dtrain.models.common.decoder import CausalLM

LOAD: Table = {
    "lora_name": Field(str, "", most=256),
    "lora_path": Field(str, "", most=4096),
    "load_inplace": FLAG,
    "base_model_name": IGNORED,
    "is_3d_lora_weight": Field(among=(False,)),
    "weight_version": VERSION,
    "mode": Field(str, "keep", among=MODES),
}
# An adapter that goes takes nothing that is under way with it along by default.
UNLOAD: Table = {
    "lora_name": Field(str, "", most=256),
    "lora_int_id": IGNORED,
    "mode": Field(str, "wait", among=("wait", "abort")),
}


class Adapters:
    """Adapter of the model of `updates`, below whose root its directory must be. `load` and `unload` take a
    body's fields and raise ApiError."""

    def __init__(self, updates: Updates, parser: Parser):
        self.updates, self.worker, self.parser = updates, updates.worker, parser

    def load(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Load PEFT's files in a directory. {"lora_name", "lora_path", "load_inplace"?, "weight_version"?, "mode"?}.
        load_inplace: the adapter of that name gives way; mode: what becomes of completions under way."""
        name, path = fields["lora_name"], fields["lora_path"]
        self._check_free(name, fields["load_inplace"])
        if not name or not path or name == self.parser.model:
            raise ApiError(400, "lora_name, which is not the model's, and lora_path must be given", "lora_name")
        directory = self.updates.below(path, "lora_path")
        loaded = read_beside(self.updates.model, directory)

        def put_in() -> None:
            self._check_free(name, fields["load_inplace"])
            if self.worker.torn:
                raise ApiError(409, HALF)
            self.put(name, loaded)
            self.updates.count(fields["weight_version"])

        self.worker.between_steps(put_in, fields["mode"])
        return self.updates.done(f"loaded {name}")

    def begin_with(self, name: str, directory: Path) -> None:
        """Load an adapter from anywhere, before the worker starts. Raises UserError."""
        if name == self.parser.model or self.updates.is_merged or adapted_layers(self.updates.model):
            raise UserError(f"--adapter {name}={directory}: name it unlike the model, and serve its base model")
        self.put(name, read_beside(self.updates.model, directory))

    def unload(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Unload an adapter. {"lora_name", "mode"?}: completions under way with it end first (wait), or are refused
        (abort)."""
        name = fields["lora_name"]

        def take_out() -> None:
            if name not in self.parser.adapters:
                raise ApiError(404, f"there is no adapter {name!r} here", "lora_name")
            self.put(None, None)

        self.worker.between_steps(take_out, fields["mode"])
        return {"success": True, "message": f"unloaded {name}"}

    def put(self, name: str | None, loaded: CausalLM | None) -> None:
        """Give the model the adapters that `loaded` holds, under `name`, in place of its own; None for none. On the
        worker's thread, or before it starts."""
        put_in(self.updates.model, loaded)
        self.worker.use_adapter(name)
        self.parser.adapters = () if name is None else (name,)

    def _check_free(self, name: str, in_place: bool) -> None:
        held = self.parser.adapters
        if self.updates.is_merged:
            raise ApiError(409, "the model that is served has an adapter of its own: serve its base model")
        if held and held != (name,):
            raise ApiError(409, f"{held[0]!r} is loaded, and one is at a time: unload it first", "lora_name")
        if held and not in_place:
            raise ApiError(400, f"{name!r} has already been loaded; load_inplace=true replaces it", "lora_name")


def put_in(model: CausalLM, loaded: CausalLM | None) -> None:
    """Give `model` the adapters of `loaded`, from `read_beside`, in place of its own; None for none."""
    remove_adapters(model)
    if loaded is None:
        return
    model.tied_parameters.update(loaded.tied_parameters)
    for path, layer in adapted_layers(loaded).items():
        target: Any = model.get_submodule(path)
        target.wrapper = layer.wrapper
        target._parameters.update({name: layer._parameters[name] for name in PARAMETERS if name in layer._parameters})


def read_beside(model: CausalLM, directory: Path) -> CausalLM:
    """Return a model that has the adapters in `directory` and, on meta, weights of the shapes of `model`. Raises
    UserError if the files are not an adapter of such a model."""
    config = read_adapter_config(directory)
    if config.modules_to_save:
        saved = ", ".join(config.modules_to_save)
        raise UserError(
            f"{directory}: it has modules_to_save ({saved}), which are not served beside a model: serve the adapter's "
            "directory as it is, or the merged model"
        )
    first = next(model.parameters())
    beside = build_with_adapters(model.config, config, first.dtype, "meta")
    held: dict[nn.Parameter, nn.Parameter] = {}  # layers that the files join share A
    for layer in adapted_layers(beside).values():
        for name, meta in layer._parameters.items():
            if name in PARAMETERS and meta is not None:
                if meta not in held:
                    held[meta] = nn.Parameter(torch.empty_like(meta, device=first.device), requires_grad=False)
                layer._parameters[name] = held[meta]
    read_adapter(beside, directory)
    return beside
