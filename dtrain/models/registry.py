"""Registry of the model families: the module of each architecture, loaded when a config.json names it.

Imports no torch. A family is one file with a class of the architecture's name, derived from
`models.common.decoder.CausalLM`: its `plan` is the tensor-parallel plan, and its `read` makes a `ModelConfig` of a
config.json.

A family outside of dtrain is found in one of three ways (docs/plugins.md):

- The recipe's key `model.family` has its import path, such as `my_models.norm_llama:NormLlamaForCausalLM`.
- An installed package registers it as the plugin `model.family.NormLlamaForCausalLM`.
- A script adds a row before it calls `dtrain.run`, or calls `register_family` with the import path:

      FAMILIES["NormLlamaForCausalLM"] = Family("norm_llama", "my_models.norm_llama")
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.plugins import (
    import_object,
    importable_module,
    is_import_path,
    misspelt_key_hint,
    plugins,
    registered_path,
    split_import_path,
)
from dtrain.base.ranges import closest_name

FAMILY_KEY = "model.family"


@dataclass(frozen=True)
class Family:
    """Registry row of an architecture.

    Attributes:
        model_type: Name in files without `architectures`, such as the configs of models that are trained from scratch.
        module: Module with the class of the architecture.
        classifier: transformers' class of the same model with a head for classes, or for one reward. None if dtrain has
            no such head.
        text_tower: For a multimodal model, the model_type of its language model. None for a text model.
    """

    model_type: str
    module: str
    classifier: str | None = None
    text_tower: str | None = None


FAMILIES = {
    "LlamaForCausalLM": Family("llama", "dtrain.models.llama", "LlamaForSequenceClassification"),
    "MistralForCausalLM": Family("mistral", "dtrain.models.mistral", "MistralForSequenceClassification"),
    "MixtralForCausalLM": Family("mixtral", "dtrain.models.mistral", "MixtralForSequenceClassification"),
    "Ministral3ForCausalLM": Family("ministral3", "dtrain.models.mistral"),
    "Mistral3ForConditionalGeneration": Family("mistral3", "dtrain.models.mistral", text_tower="mistral"),
    "Qwen2_5_VLForConditionalGeneration": Family("qwen2_5_vl", "dtrain.models.qwen_vl", text_tower="qwen2"),
    "Qwen3VLForConditionalGeneration": Family("qwen3_vl", "dtrain.models.qwen_vl", text_tower="qwen3"),
    "Qwen2ForCausalLM": Family("qwen2", "dtrain.models.qwen", "Qwen2ForSequenceClassification"),
    "Qwen3ForCausalLM": Family("qwen3", "dtrain.models.qwen", "Qwen3ForSequenceClassification"),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", "dtrain.models.qwen", "Qwen3MoeForSequenceClassification"),
    "Phi3ForCausalLM": Family("phi3", "dtrain.models.phi", "Phi3ForSequenceClassification"),
    "Olmo2ForCausalLM": Family("olmo2", "dtrain.models.olmo", "Olmo2ForSequenceClassification"),
    "Olmo3ForCausalLM": Family("olmo3", "dtrain.models.olmo", "Olmo3ForSequenceClassification"),
    "SmolLM3ForCausalLM": Family("smollm3", "dtrain.models.smollm", "SmolLM3ForSequenceClassification"),
    "GraniteForCausalLM": Family("granite", "dtrain.models.granite"),
    "GraniteMoeHybridForCausalLM": Family("granitemoehybrid", "dtrain.models.granite"),
    "Qwen3_5ForCausalLM": Family("qwen3_5_text", "dtrain.models.qwen3_5", "Qwen3_5TextForSequenceClassification"),
    "Qwen3_5ForConditionalGeneration": Family("qwen3_5", "dtrain.models.qwen3_5", text_tower="qwen3_5_text"),
    "Qwen3_5MoeForCausalLM": Family("qwen3_5_moe_text", "dtrain.models.qwen3_5"),
    "Qwen3_5MoeForConditionalGeneration": Family("qwen3_5_moe", "dtrain.models.qwen3_5", text_tower="qwen3_5_moe_text"),
    "Gemma3ForCausalLM": Family("gemma3_text", "dtrain.models.gemma3", "Gemma3TextForSequenceClassification"),
    "Gemma3ForConditionalGeneration": Family("gemma3", "dtrain.models.gemma3", text_tower="gemma3_text"),
    "Gemma4ForCausalLM": Family("gemma4_text", "dtrain.models.gemma4"),
    "Gemma4ForConditionalGeneration": Family("gemma4", "dtrain.models.gemma4", text_tower="gemma4_text"),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", "dtrain.models.deepseek", "DeepseekV3ForSequenceClassification"),
    "GptOssForCausalLM": Family("gpt_oss", "dtrain.models.gpt_oss", "GptOssForSequenceClassification"),
}


def families() -> Mapping[str, Family]:
    """Return the rows of `FAMILIES`, and those of the families that installed packages register."""
    found = {}
    for import_path in plugins(FAMILY_KEY).values():
        module, architecture = split_import_path(import_path)
        found[architecture] = _row_of_own_family(module, architecture)
    return {**found, **FAMILIES}


def register_family(name: str) -> str:
    """Add a family outside of dtrain to `FAMILIES`. It is imported when a config.json names it.

    Args:
        name: The import path of its class, or the name of a plugin.

    Returns:
        Its architecture.

    Raises:
        UserError: If the name is not an import path, or if dtrain has a family of this name.

    Example:
        >>> register_family("dtrain.models.llama:LlamaForCausalLM")
        'LlamaForCausalLM'
    """
    import_path = registered_path(name, FAMILY_KEY)
    if not is_import_path(import_path):
        near = closest_name(name, plugins(FAMILY_KEY))
        hint = f"Did you mean {near}?" if near else "Set it to an import path such as package.module:Class"
        raise UserError(f"{FAMILY_KEY}={name} is not a family{misspelt_key_hint(name, FAMILY_KEY)}. {hint}")
    module, architecture = split_import_path(import_path)
    existing = FAMILIES.get(architecture)
    if existing is None or not existing.module.startswith("dtrain."):
        FAMILIES[architecture] = _row_of_own_family(module, architecture)
    elif existing.module != module:
        raise UserError(f"{FAMILY_KEY}={name}: dtrain has a family {architecture}. Give the class another name")
    return architecture


def family_rows() -> dict[str, dict[str, Any]]:
    """Return `FAMILIES` as JSON, for another process of the same run."""
    rows = {}
    for architecture, family in FAMILIES.items():
        module = importable_module(family.module, f"model family {architecture}")
        rows[architecture] = asdict(replace(family, module=module))
    return rows


def add_family_rows(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the rows from `family_rows` of another process to `FAMILIES`."""
    for architecture, row in rows.items():
        FAMILIES[architecture] = Family(**row)


def _row_of_own_family(module: str, architecture: str) -> Family:
    """Return the row of a family outside of dtrain. For example, NormLlamaForCausalLM has the model_type norm_llama."""
    stem = architecture.removesuffix("ForCausalLM")
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", stem)
    classifier = None if stem == architecture else f"{stem}ForSequenceClassification"
    return Family("_".join(words).lower(), module, classifier)


def load_class(architecture: str) -> type[Any]:
    """Return the class, a `CausalLM`, of a registered architecture. Loads its module, and torch.

    Raises:
        UserError: If the module cannot be imported, or does not have the class.
    """
    from dtrain.models.common.decoder import CausalLM  # loads torch

    module = families()[architecture].module
    if module.startswith("dtrain."):
        return getattr(import_module(module), architecture)
    import_path = f"{module}:{architecture}"
    family = import_object(import_path, FAMILY_KEY)
    if not (isinstance(family, type) and issubclass(family, CausalLM)):
        base = "dtrain.models.common.decoder.CausalLM"
        raise UserError(f"{FAMILY_KEY}={import_path} is not a family. Derive its class from {base}")
    return family


def architecture_of_model_type(model_type: object) -> str | None:
    """Return the architecture with a model_type. None if there is none.

    Example:
        >>> architecture_of_model_type("qwen3")
        'Qwen3ForCausalLM'
    """
    for architecture, family in families().items():
        if family.model_type == model_type:
            return architecture
    return None


def architecture_of_classifier(classifier: object) -> str | None:
    """Return the architecture with a classifier of this name. None if there is none.

    Example:
        >>> architecture_of_classifier("Qwen3ForSequenceClassification")
        'Qwen3ForCausalLM'
    """
    if classifier is None:
        return None
    for architecture, family in families().items():
        if family.classifier == classifier:
            return architecture
    return None
