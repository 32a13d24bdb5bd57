"""Quantized weights: `quantization_config` of a config.json, as bitsandbytes' checkpoints have it. Imports no torch."""

import re
from collections.abc import Iterable
from typing import Any

from dtrain.base.name_patterns import pattern_error
from dtrain.models.common.config_fields import shown

_READ = "of quantized weights only bitsandbytes' nf4, mxfp4, and fp8 in blocks of 128 × 128 are read"
_ORIGINAL = "; use the original checkpoint"
_SIBLING = (
    "take the model in bfloat16, by the same name without -FP8, -AWQ, -GPTQ-Int4 or -bnb-8bit (Qwen, Meta), or with "
    "-BF16 (Mistral)"
)


def _instead(values: dict[str, Any]) -> str:
    """Return what to say of weights in a format that is known."""
    method = values.get("quant_method")
    if method == "bitsandbytes" and values.get("load_in_8bit", values.get("_load_in_8bit")):
        return f"{_ORIGINAL}; bitsandbytes weights in 8 bits are not trained: {_SIBLING}"
    known = ("fp8", "fbgemm_fp8", "finegrained_fp8", "awq", "gptq", "compressed-tensors", "modelopt", "hqq")
    return f"{_ORIGINAL}; {method} weights are not trained: {_SIBLING}" if method in known else _ORIGINAL


def _is_unpacked(values: dict[str, Any]) -> bool:
    """Return whether weights with this section are read as bfloat16 (`checkpoint.huggingface.packed`)."""
    is_fp8 = values.get("quant_method") == "fp8" and values.get("weight_block_size") == [128, 128]
    is_plain = values.get("activation_scheme", "dynamic") == "dynamic" and values.get("fmt", "e4m3") == "e4m3"
    return values.get("quant_method") == "mxfp4" or (is_fp8 and is_plain)


def unquantized(section: Any, problems: list[str]) -> tuple[str, ...] | None:
    """The patterns of modules that a checkpoint with this section, in 4 bits, holds as they were; None of one that is
    read as bfloat16. What dtrain does not read is added to `problems`: everything but bitsandbytes' nf4, mxfp4, and fp8
    in blocks."""
    values = section if isinstance(section, dict) else {}
    if _is_unpacked(values):
        return None
    kind, storage = values.get("bnb_4bit_quant_type", "fp4"), values.get("bnb_4bit_quant_storage") or "uint8"
    if values.get("quant_method") != "bitsandbytes" or not values.get("load_in_4bit", values.get("_load_in_4bit")):
        problems.append(f"quantization_config {shown(section)}: {_READ}{_instead(values)}")
    elif kind != "nf4":
        problems.append(f"quantization_config has bnb_4bit_quant_type {shown(kind)}: {_READ}{_ORIGINAL}")
    elif storage not in ("uint8", "torch.uint8"):
        problems.append(f"quantization_config has bnb_4bit_quant_storage {shown(storage)}: only uint8 is read")
    patterns = values.get("llm_int8_skip_modules") or []
    if not isinstance(patterns, list) or not all(map(_is_pattern, patterns)):
        problems.append("quantization_config llm_int8_skip_modules: must be a list of names or regular expressions")
        return ()
    return tuple(patterns)


def skips(patterns: Iterable[str], name: str) -> bool:
    """Return whether the module of this name is left as it was, as transformers matches names: a pattern is the name's
    beginning up to a dot, as it stands or as a regular expression, or its end."""
    return any(re.fullmatch(_from_start(pattern), name) or name.endswith(pattern) for pattern in patterns)


def _from_start(pattern: str) -> str:
    """The expression for whole names of which `pattern` is the beginning, up to a dot."""
    return rf"(?:{pattern})(?:(?<=\.)|(?=\.|$)).*"


def _is_pattern(value: Any) -> bool:
    return isinstance(value, str) and pattern_error(_from_start(value)) is None
