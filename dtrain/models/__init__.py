"""Models in plain PyTorch under Hugging Face's names: configuration, families, initialisation.

`config` is torch-free; what needs torch is imported when it is first asked for.

    config, fields, rope_config  config.json to a `ModelConfig`; its fields, its rotary scaling
    config_families, config_gemma, config_gpt_oss, config_parts
                                 the families' fields; Gemma's; gpt-oss's; what all have alike
    quantization_config          its section about a checkpoint in 4 bits
    registry                     from a `ModelConfig` to a model
    llama, qwen, qwen3_5, gemma3, gemma4, phi, olmo, smollm, granite, mistral, qwen_vl, gpt_oss
                                 the families
    tower                        what is one part of a multimodal checkpoint
    layers, functions            what they are made of; norms, activations, rotary embedding
    moe, routing                 a mixture of experts in a layer; what its layers share, and the loss that balances them
    regions                      parts of a layer that are compiled
    init                         starting values
    adapter_config, adapters     which layers have an adapter, and of what rank; what it computes
    nf4, nf4_config              weights in 4 bits; what they ask of a model
"""

from typing import Any

from dtrain.models.common.config import ModelConfig, Rope
from dtrain.models.read_config import parse_config, read_config

__all__ = ["ModelConfig", "Rope", "build", "from_pretrained", "init_weights", "parse_config", "read_config"]


def __getattr__(name: str) -> Any:
    if name == "build":
        from dtrain.models.registry import build

        return build
    if name == "from_pretrained":
        from dtrain.checkpoint.huggingface.pretrained import from_pretrained

        return from_pretrained
    if name == "init_weights":
        from dtrain.models.common.init import init_weights

        return init_weights
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
