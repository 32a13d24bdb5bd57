"""Models in plain PyTorch under Hugging Face's names: configuration, families, initialisation.

Imports no torch, because commands that only read a config.json need none. For example, `dtrain push` starts in 0.3
seconds, and torch takes 1.3 more. The names that need torch are imported when they are first used (PEP 562), and the
file of a family when a config.json names it.

read_config                  config.json to a `ModelConfig`
registry                     the families by architecture
building                     from a `ModelConfig` to a model and its initial values; names and shapes of its layers
llama, qwen, qwen3_5, gemma3, gemma4, phi, olmo, smollm, granite, mistral, qwen_vl, gpt_oss, deepseek
                             the families: class, tensor-parallel plan and reader of config.json of each
transformers                 models of the transformers library, for architectures that dtrain does not have
vision                       the vision towers of the families that accept images
common                       parts that the families share
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dtrain.models.common.config import ModelConfig, Rope
from dtrain.models.read_config import parse_config, read_config

if TYPE_CHECKING:
    from dtrain.checkpoint.huggingface.pretrained import from_pretrained
    from dtrain.models.building import build, init_weights
else:  # a type checker would accept any name from __getattr__
    _NAMES_WITH_TORCH = {
        "build": "dtrain.models.building",
        "init_weights": "dtrain.models.building",
        "from_pretrained": "dtrain.checkpoint.huggingface.pretrained",
    }

    def __getattr__(name: str) -> Any:
        if name not in _NAMES_WITH_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_NAMES_WITH_TORCH[name]), name)


__all__ = ["ModelConfig", "Rope", "build", "from_pretrained", "init_weights", "parse_config", "read_config"]
