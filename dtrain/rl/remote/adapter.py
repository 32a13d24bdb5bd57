"""Publishing of the adapter alone to servers: which of them take it, and each version in a directory of its own.

Servers that know a version by its name may still draw with the one before; `HttpEngine.update_adapter` says when it
goes. They read the fields of PEFT's file that are the same everywhere: one rank for all layers, and alpha ÷ rank.
"""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dtrain.checkpoint.dcp.training_state import model_tensors
from dtrain.checkpoint.huggingface.merged import folded, gathered
from dtrain.checkpoint.peft.files import write_adapter
from dtrain.models.common.adapter_config import AdapterConfig, is_adapter
from dtrain.models.common.adapters import adapted_layers
from dtrain.models.common.decoder import CausalLM
from dtrain.parallel.placement import reshard_model
from dtrain.rl.remote.dialects import AdapterVersion
from dtrain.rl.remote.http import HttpEngine
from dtrain.rl.remote.publish import Publisher
from dtrain.rl.remote.shared_directory import step_directory

MERGED = "grpo.server.weights=directory sends merged weights"


def refusal(engine: HttpEngine, config: AdapterConfig) -> str | None:
    """Return why the servers cannot take an adapter of this kind; None where they can. Raises UserError."""
    if config.modules_to_save:
        return f"no server takes what is trained beside the adapter, lora.modules_to_save={[*config.modules_to_save]}"
    if config.parameters:
        return f"no server is known to take adapters of experts, lora.target={[*config.parameters]}"
    strict = next((server for server in engine.servers if not server.dialect.dora), None)
    if config.dora and strict is not None:
        return f"{strict.client.url}: {strict.dialect.name} takes no DoRA"
    lacking = engine.lacks_adapters()
    if lacking is None:
        return None
    ranks = config.rank, *config.rank_pattern.values()
    starts = dict.fromkeys(server.dialect.start_with(max(ranks)) for server in engine.servers)
    return f"{lacking}: {'; '.join(starts)}"


class AdapterPublisher(Publisher):
    """Publisher that writes the adapter to `shared`/step-N, marked when it is whole, and has the servers load it.

    shared: a directory that trainer and servers see under the same path. base: the directory of the model that the
    adapter is of. Two step-N stay: those that a server may still draw with are among them.
    """

    def __init__(self, shared: Path, base: Path, config: AdapterConfig, engine: HttpEngine | None):
        super().__init__(engine, None)
        self.shared, self.base, self.config = Path(shared).absolute(), base, config
        self._run = secrets.token_hex(4)  # servers keep names, and what they know by them, from run to run

    def publish(self, model: CausalLM, version: int) -> None:
        """Write the adapter of `model` and have the servers load it. Collective; one all-gather per sharded tensor of
        the adapter. Raises UserError where the directory cannot be written or no server took it."""
        config, tensors = served(model, self.config)
        directory = step_directory(self.shared, version)
        write_adapter(directory, tensors, config, model.config, str(self.base), replace=True, ranks=self.ranks)
        adapter = AdapterVersion(directory, version, f"{self._run}-{directory.name}", config.rank)
        self._announce(directory, version, lambda: self.engine.update_adapter(adapter))


@torch.no_grad()
def served(model: CausalLM, config: AdapterConfig) -> tuple[AdapterConfig, Mapping[str, Tensor]]:
    """Return the adapter of `model` as servers read it: tensors by parameter name, A [r, in], B [out, r], as they lie.

    Where ranks or scales differ between layers, or the scale is rsLoRA's: every A and B filled up with zeros to one
    rank, the scale in B, all of them whole. Collective: one all-gather then per sharded tensor.
    """
    reshard_model(model)
    tensors = {name: tensor for name, tensor in model_tensors(model).items() if is_adapter(name)}
    is_plain = not (config.rslora or config.rank_pattern or config.alpha_pattern)
    if is_plain or config.dora:
        return config, tensors
    layers, tensors = adapted_layers(model), {name: gathered(tensor) for name, tensor in tensors.items()}
    rank = max(tensor.shape[0] for name, tensor in tensors.items() if name.endswith(".lora_A"))
    for name, tensor in tensors.items():
        adapter = layers[name.rpartition(".")[0]].adapter
        assert adapter is not None
        tensors[name] = folded(name, tensor, rank, adapter.scale)
    plain = replace(config, rank=rank, alpha=float(rank), rslora=False, rank_pattern={}, alpha_pattern={})
    return plain, tensors
