"""Models in plain PyTorch under Hugging Face's names: configuration, families, initialisation.

Imports no torch: names that need it are imported on first use, and the file of a family when a config.json names it.

read_config                  config.json to a `ModelConfig`
registry                     the families by architecture
building                     from a `ModelConfig` to a model, and its starting values
shapes                       names and shapes of a model's layers, from its config
llama, qwen, qwen3_5, gemma3, gemma4, phi, olmo, smollm, granite, mistral, qwen_vl, gpt_oss
                             the families: class, tensor-parallel plan and reader of config.json of each
vision                       the vision towers of those that take images
common                       parts that the families share
"""

from typing import TYPE_CHECKING

from dtrain.base.exports import late_names
from dtrain.models.common.config import ModelConfig, Rope
from dtrain.models.read_config import parse_config, read_config

if TYPE_CHECKING:
    from dtrain.checkpoint.huggingface.pretrained import from_pretrained
    from dtrain.models.building import build, init_weights
else:  # a type checker would accept any name from __getattr__
    __getattr__ = late_names(
        __name__,
        {"building": "build init_weights", "dtrain.checkpoint.huggingface.pretrained": "from_pretrained"},
    )

__all__ = ["ModelConfig", "Rope", "build", "from_pretrained", "init_weights", "parse_config", "read_config"]
