"""Models from their ModelConfig: which class an architecture has, and how it is built."""

from importlib import import_module

import torch

from dtrain.attention.kernels import choose_kernel
from dtrain.models.common.adapter_config import AdapterConfig
from dtrain.models.common.adapters import add_adapters
from dtrain.models.common.config import SLIDING, ModelConfig
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.moe import share_routing
from dtrain.parallel.placement import exact_modules

FAMILIES: dict[str, str] = {
    "LlamaForCausalLM": "llama:LlamaForCausalLM",
    "MistralForCausalLM": "llama:LlamaForCausalLM",
    "MixtralForCausalLM": "mistral:MixtralForCausalLM",
    "Ministral3ForCausalLM": "mistral:MistralForCausalLM",
    "Mistral3ForConditionalGeneration": "mistral:MistralForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "qwen_vl:Qwen2_5_VLText",
    "Qwen3VLForConditionalGeneration": "qwen_vl:Qwen3_VLText",
    "Qwen2ForCausalLM": "qwen:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "qwen:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "qwen:Qwen3MoeForCausalLM",
    "Phi3ForCausalLM": "phi:Phi3ForCausalLM",
    "Olmo2ForCausalLM": "olmo:OlmoForCausalLM",
    "Olmo3ForCausalLM": "olmo:OlmoForCausalLM",
    "SmolLM3ForCausalLM": "smollm:SmolLM3ForCausalLM",
    "GraniteForCausalLM": "granite:GraniteForCausalLM",
    "GraniteMoeHybridForCausalLM": "granite:GraniteMoeHybridForCausalLM",
    "Qwen3_5ForCausalLM": "qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5:Qwen3_5ForCausalLM",
    "Gemma3ForCausalLM": "gemma3:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "gemma3:Gemma3ForCausalLM",
    "Gemma4ForCausalLM": "gemma4:Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration": "gemma4:Gemma4ForCausalLM",
    "GptOssForCausalLM": "gpt_oss:GptOssForCausalLM",
}
"""Architecture -> module of this package and class, loaded when a model of it is built."""


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
        module, _, name = FAMILIES[config.architecture].partition(":")
        model: CausalLM = getattr(import_module(f"dtrain.models.{module}"), name)(config)
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
