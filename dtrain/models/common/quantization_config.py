"""Weights in 4 bits: `quantization_config` of a config.json, as bitsandbytes' checkpoints have it, and what
`lora.quantize=nf4` asks of a model. Imports no torch.

Blocks of 64 weights of a row share a scale. A tensor-parallel rank of a layer that is cut by its inputs holds whole
blocks, so that the ranks' weights are those of one process.
"""

from collections.abc import Iterable
from typing import Any

from dtrain.base.name_patterns import fullmatch, pattern_error
from dtrain.models.common.adapter_config import is_stack, linears, parameters
from dtrain.models.common.config import ModelConfig
from dtrain.models.common.config_fields import shown

BLOCK = 64
_CUT_BY_INPUTS = ("o_proj", "out_proj", "down_proj", "output_linear")  # of the style rowwise
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
    return any(fullmatch(_from_start(pattern), name) or name.endswith(pattern) for pattern in patterns)


def _from_start(pattern: str) -> str:
    """The expression for whole names of which `pattern` is the beginning, up to a dot."""
    return rf"(?:{pattern})(?:(?<=\.)|(?=\.|$)).*"


def _is_pattern(value: Any) -> bool:
    return isinstance(value, str) and pattern_error(_from_start(value)) is None


def held_by_nf4(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """[out, in] of the linear layers of `config`, and [E, out, in] of its stacks of experts, that `lora.quantize=nf4`
    holds in 4 bits, by name in files: all but what weighs a token's experts."""
    gates = (".router.proj", ".shared_expert_gate")
    stacks = parameters(config, all_of_them=True).items()
    layers: dict[str, tuple[int, ...]] = {
        name: size for name, size in linears(config).items() if not name.endswith(gates)
    }
    return layers | {name: size for name, size in stacks if is_stack(name)}


def block_problems(config: ModelConfig, names: Iterable[str], tp: int) -> list[str]:
    """Return what keeps the layers `names` (in files) from 4 bits on `tp` tensor-parallel ranks, one line each for
    layers of one name and size."""
    problems, table = [], linears(config) | held_by_nf4(config)
    made = "lora.quantize=nf4 makes" if config.unquantized is None else "bitsandbytes made"
    instead = "set lora.quantize=none" if config.unquantized is None else "use the original checkpoint"
    for name, inputs in dict.fromkeys((name.rpartition(".")[2], table[name][-1]) for name in names):
        if inputs % BLOCK:
            problems.append(f"{made} blocks of {BLOCK} inputs, which do not divide the {inputs} of {name}: {instead}")
        elif name in _CUT_BY_INPUTS and inputs // BLOCK % tp:
            fitting = [str(size) for size in range(1, tp) if inputs // BLOCK % size == 0]
            problems.append(
                f"parallel.tp={tp} does not divide the {inputs // BLOCK} blocks of {BLOCK} inputs that "
                f"{made} of {name}'s {inputs}; of the sizes below it tp may be {', '.join(fitting)}"
            )
    return problems
