"""From a ModelConfig to a model: which class an architecture has, and how it is built."""

from collections.abc import Callable

import torch

from dtrain.attention.kernels import choose_kernel
from dtrain.models.adapter_config import AdapterConfig
from dtrain.models.adapters import add_adapters
from dtrain.models.config import SLIDING, ModelConfig
from dtrain.models.gemma3 import Gemma3ForCausalLM
from dtrain.models.gemma4 import Gemma4ForCausalLM
from dtrain.models.gpt_oss import GptOssForCausalLM
from dtrain.models.granite import GraniteForCausalLM, GraniteMoeHybridForCausalLM
from dtrain.models.layers import CausalLM
from dtrain.models.llama import LlamaForCausalLM
from dtrain.models.mistral import MistralForCausalLM, MixtralForCausalLM
from dtrain.models.moe import share_routing
from dtrain.models.olmo import OlmoForCausalLM
from dtrain.models.phi import Phi3ForCausalLM
from dtrain.models.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM
from dtrain.models.qwen3_5 import Qwen3_5ForCausalLM
from dtrain.models.qwen_vl import Qwen2_5_VLText, Qwen3_VLText
from dtrain.models.smollm import SmolLM3ForCausalLM
from dtrain.parallel.placement import exact_modules

FAMILIES: dict[str, Callable[[ModelConfig], CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Ministral3ForCausalLM": MistralForCausalLM,
    "Mistral3ForConditionalGeneration": MistralForCausalLM,
    "Qwen2_5_VLForConditionalGeneration": Qwen2_5_VLText,
    "Qwen3VLForConditionalGeneration": Qwen3_VLText,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Olmo2ForCausalLM": OlmoForCausalLM,
    "Olmo3ForCausalLM": OlmoForCausalLM,
    "SmolLM3ForCausalLM": SmolLM3ForCausalLM,
    "GraniteForCausalLM": GraniteForCausalLM,
    "GraniteMoeHybridForCausalLM": GraniteMoeHybridForCausalLM,
    "Qwen3_5ForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3_5ForConditionalGeneration": Qwen3_5ForCausalLM,
    "Qwen3_5MoeForCausalLM": Qwen3_5ForCausalLM,
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "Gemma3ForConditionalGeneration": Gemma3ForCausalLM,
    "Gemma4ForCausalLM": Gemma4ForCausalLM,
    "Gemma4ForConditionalGeneration": Gemma4ForCausalLM,
    "GptOssForCausalLM": GptOssForCausalLM,
}


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
        model = FAMILIES[config.architecture](config)
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
