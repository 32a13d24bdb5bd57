"""Architectures for which GGUF files are written: hyperparameters, tensors, and differences to llama.cpp.

Two differences are undone when tensors are written (`to_llama_cpp`):

- llama.cpp's `llama` rotates neighbouring elements of a head (0 and 1, 2 and 3, ...), and Hugging Face's Llama those of
  the two halves (0 and d/2, ...). So the rows of q and k are reordered.
- llama.cpp's Gemma 3 multiplies by a norm's weight, and Hugging Face's by 1 + the weight.

Models with other differences are refused. The differences were found by reading llama.cpp's graphs (src/models).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dtrain.base.errors import UserError
from dtrain.models.common.config import FULL, SLIDING, ModelConfig, Rope
from dtrain.models.common.functions import rotary_frequencies

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Mistral3ForConditionalGeneration": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2_5_VLForConditionalGeneration": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3VLForConditionalGeneration": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Phi3ForCausalLM": "phi3",
}
"""llama.cpp's name for each architecture of config.json."""
_ROPES = {
    "llama": ("default", "linear", "llama3", "yarn"),
    "qwen2": ("default", "linear", "yarn"),
    "qwen3": ("default", "linear", "yarn"),
    "gemma3": ("default", "linear"),
    "phi3": ("default", "longrope"),
}
"""The kinds of rotary scaling that each architecture of llama.cpp computes."""
_GEMMA_PERIOD = 6  # every sixth layer of Gemma 3 has full attention
_GEMMA_27B_LAYERS = 62  # llama.cpp recognises the 27B model, which scales q·k in another way, by its number of layers
ALTERNATIVE = "`dtrain export RUN DIR` writes a directory, which llama.cpp's own convert_hf_to_gguf.py may read"


def architecture_of(config: ModelConfig) -> str:
    """Return llama.cpp's name for a model's architecture.

    Raises:
        UserError: If dtrain writes no GGUF files for this architecture, or llama.cpp computes the model differently.
            One error lists all differences.
    """
    arch = ARCHITECTURES.get(config.architecture)
    if arch is not None and config.transformers is not None:
        text = f"{config.architecture}: GGUF files are written of dtrain's own models, not of those of transformers"
        raise UserError(f"{text}. Export with model.implementation=native")
    if arch is None:
        supported = ", ".join(ARCHITECTURES)
        raise UserError(f"{config.architecture}: no GGUF file is written of it, but of {supported}; {ALTERNATIVE}")
    if problems := list(_problems(arch, config)):
        lines = "\n  ".join([f"llama.cpp's {arch} cannot compute this {config.architecture}:", *problems, ALTERNATIVE])
        raise UserError(lines)
    return arch


def _problems(arch: str, config: ModelConfig) -> Iterator[str]:
    """Yield the parts of a model that llama.cpp computes differently, or for which it has no tensor."""
    if config.num_labels is not None:
        yield "a head of rewards or classes in place of the vocabulary's"
    if (config.hidden_act == "gelu_pytorch_tanh") != (arch == "gemma3") or config.hidden_act in ("gelu", "relu"):
        yield f"the activation {config.hidden_act}"
    if arch not in ("llama", "qwen2", "qwen3") and config.qkv_bias:
        yield "biases of q, k and v"
    if arch != "llama" and config.o_bias:
        yield "a bias of o_proj"
    if arch != "llama" and config.mlp_bias:
        yield "biases of the MLP"
    heads = config.num_attention_heads * config.head_dim
    if arch in ("qwen2", "phi3") and heads != config.hidden_size:
        yield f"heads of {heads} elements in all beside a hidden size of {config.hidden_size}"
    if not math.isclose(config.attention_scale, _attention_scale(arch, config), rel_tol=1e-6):
        yield f"q·k multiplied by {config.attention_scale}, and not by {_attention_scale(arch, config)}"
    for kind, rope in config.ropes.items():
        computed_kinds = ("default",) if arch == "gemma3" and kind == SLIDING else _ROPES[arch]
        if rope.kind not in computed_kinds:
            yield f"rotary scaling {rope.kind} of {kind}"
        if rope.kind == "yarn" and (rope.beta_fast, rope.beta_slow, rope.truncate) != (32.0, 1.0, True):
            yield "YaRN with a beta_fast other than 32, a beta_slow other than 1, or without truncate"
        if rope.query_beta:
            yield "queries that grow with their position (llama_4_scaling_beta)"
    if arch != "gemma3" and config.final_logit_softcapping is not None:
        yield "final_logit_softcapping"


def _attention_scale(arch: str, config: ModelConfig) -> float:
    if arch == "gemma3" and config.num_hidden_layers == _GEMMA_27B_LAYERS:
        return (config.hidden_size // config.num_attention_heads) ** -0.5
    return config.head_dim**-0.5


def unsupported_window(arch: str, config: ModelConfig) -> int | None:
    """Return the model's sliding window if llama.cpp does not support it for this architecture, otherwise None.

    Texts of at most this many tokens give the same results without it.
    """
    return None if arch == "gemma3" else config.sliding_window


def add_sizes(writer: Any, arch: str, config: ModelConfig, file: Mapping[str, Any]) -> None:
    """Add the hyperparameters to a GGUFWriter. `file` is config.json with the text part's fields at the top level."""
    positions = file.get("max_position_embeddings") or config.max_position_embeddings
    window = unsupported_window(arch, config)
    writer.add_context_length(min(positions, window) if window else positions)
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = _main_rope(config)
    writer.add_rope_freq_base(rope.theta)
    writer.add_rope_dimension_count(int(config.head_dim * rope.rotary_fraction))
    _add_scaling(writer, rope)
    if arch == "gemma3":
        _add_gemma(writer, config)


def _main_rope(config: ModelConfig) -> Rope:
    return config.ropes.get(FULL) or config.ropes[SLIDING]


def _add_scaling(writer: Any, rope: Rope) -> None:
    from gguf import RopeScalingType

    if rope.kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.factor)
    if rope.kind == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope.factor)
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_positions)
        # llama.cpp multiplies by the paper's factor itself.
        writer.add_rope_scaling_attn_factors(rope.table_scale / (1 + 0.1 * math.log(rope.factor)))
    if rope.kind == "longrope":
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_positions)
        writer.add_rope_scaling_attn_factors(rope.table_scale)


def _add_gemma(writer: Any, config: ModelConfig) -> None:
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base_swa(config.ropes[SLIDING].theta)
        slides = [kind == SLIDING for kind in config.layer_types]
        if slides != [(index + 1) % _GEMMA_PERIOD != 0 for index in range(len(slides))]:
            writer.add_sliding_window_pattern(slides)
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def rotary_tensors(arch: str, config: ModelConfig, file: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors by which llama.cpp divides rotary frequencies, for scalings without a formula there.

    Args:
        arch: llama.cpp's architecture.
        config: Config of the model.
        file: As in `add_sizes`.

    Returns:
        Float32 tensors [rotated elements / 2] by name.
    """
    rope = _main_rope(config)
    if rope.kind == "llama3":
        unscaled = rotary_frequencies(Rope(theta=rope.theta), config.head_dim, torch.float64)
        return {"rope_freqs.weight": (unscaled / rotary_frequencies(rope, config.head_dim, torch.float64)).float()}
    if rope.kind == "longrope":
        scaling = file.get("rope_scaling") or file.get("rope_parameters") or {}
        long = torch.tensor(scaling["long_factor"], dtype=torch.float32)
        return {"rope_factors_long.weight": long, "rope_factors_short.weight": torch.tensor(rope.pair_factors)}
    return {}


def to_llama_cpp(arch: str, config: ModelConfig, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor in llama.cpp's form. See the module's docstring.

    Args:
        arch: llama.cpp's architecture.
        config: Config of the model.
        name: Name of the tensor in Hugging Face's files.
        tensor: The tensor. The B of an adapter is changed like the layer's weight.
    """
    module, _, parameter = name.rpartition(".")
    if arch == "gemma3" and module.endswith("norm") and parameter == "weight":
        return tensor + 1
    heads_by_layer = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    heads = heads_by_layer.get(module.rpartition(".")[2])
    if arch != "llama" or heads is None:
        return tensor
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
