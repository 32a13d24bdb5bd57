"""Models from their ModelConfig, on meta or a device."""

import torch

from dtrain.attention.kernels import choose_kernel
from dtrain.models.common.adapter_config import AdapterConfig
from dtrain.models.common.adapters import add_adapters
from dtrain.models.common.config import SLIDING, ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.moe import share_routing
from dtrain.models.registry import class_of
from dtrain.parallel.tensor import exact_modules


def build(
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    kernel: str = "sdpa",
    adapter: AdapterConfig | None = None,
) -> CausalLM:
    """The model of `config`, its parameters in `dtype` on `device` and NOT initialised: `init_weights` or
    `checkpoint.huggingface.read_weights` fills them. device "meta" takes no memory; `to_empty` gives it later.

    kernel: of attention, by name; UserError if it cannot do what this model needs. adapter: whose parameters it gets
    beside its own, for `checkpoint.adapter_files.read_adapter` to fill. No collective, no randomness.
    """

    device = torch.device(device)
    chosen = choose_kernel(
        kernel, device=device.type, window=SLIDING in config.layer_types, documents=True, cache=True, backward=True
    )
    with torch.device("meta"):
        model: CausalLM = class_of(config.architecture)(config)
    if config.experts is not None:
        model.routing = share_routing(model, config.experts.count)
    hold_in(model, dtype)
    if adapter is not None:
        model.adapters = add_adapters(model, adapter)
    if device.type != "meta":
        model.to_empty(device=device)
    model.tie_weights()
    model.use_kernel(chosen)
    return model


def hold_in(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """`model.to(dtype)`; what `exact_modules` have in float32 at least."""
    model.to(dtype)
    for module in exact_modules(model).values():
        module.to(torch.promote_types(dtype, torch.float32))
