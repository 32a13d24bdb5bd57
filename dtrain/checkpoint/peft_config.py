"""adapter_config.json of an adapter in PEFT's layout, in and out, and its names for parameters. Imports no torch.

The layout: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.models.adapter_config import AdapterConfig

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def adapter_of(section: Mapping[str, Any]) -> AdapterConfig:
    """The adapter that the values of a recipe's section `lora` describe. Raises UserError where `path` holds none that
    can be read."""
    return AdapterConfig.of(section)


def peft_name(name: str) -> str:
    """PEFT's name for the model's trained parameter `name`: of an adapter, or of a module that is trained whole."""
    module, _, parameter = name.rpartition(".")
    if parameter in ("lora_A", "lora_B"):
        return f"base_model.model.{module}.{parameter}.weight"
    if parameter == "lora_magnitude":
        return f"base_model.model.{module}.lora_magnitude_vector"
    return f"base_model.model.{name}"


def peft_config(config: AdapterConfig, linears: Iterable[str], base: str | None) -> dict[str, Any]:
    """adapter_config.json of an adapter of the model at `base`, whose linear layers are `linears`.

    The targets are the last parts of the adapted layers' names where these mean no others, else the names.
    """
    names = list(linears)
    adapted = config.adapted(names)
    ends = sorted({name.rpartition(".")[2] for name in adapted})
    by_end = {name for name in names if name.rpartition(".")[2] in ends} == set(adapted)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": ends if by_end else sorted(adapted),
        "exclude_modules": None,
        "layers_to_transform": None,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "modules_to_save": list(config.modules_to_save) or None,
        "bias": "none",
        "lora_bias": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }
