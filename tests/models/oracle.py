"""Tiny random checkpoints made by transformers, for every family and variant that dtrain names."""

import warnings

import torch
import transformers

from dtrain.checkpoint.huggingface.file_rows import fused_weights
from dtrain.models.common.config import ModelConfig

VOCAB = 97

_TINY = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    initializer_range=0.1,
)
_LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
_ALIKE = dict(rope_type="default", rope_theta=10000.0)
_YARN = dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=64)


def _gemma(**more):
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    base = dict(num_hidden_layers=7, head_dim=16, sliding_window=9, query_pre_attn_scalar=20, rope_parameters=ropes)
    return transformers.Gemma3TextConfig(**{**_TINY, **base, **more})


def _llama(**more):
    return transformers.LlamaConfig(**{**_TINY, **more})


def _mistral(**more):
    return transformers.MistralConfig(**{**_TINY, **more})


def _qwen2(**more):
    return transformers.Qwen2Config(**{**_TINY, **more})


def _qwen3(**more):
    return transformers.Qwen3Config(**{**_TINY, "head_dim": 16, **more})


def _qwen3_moe(**more):
    sizes = dict(head_dim=16, moe_intermediate_size=12, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True)
    return transformers.Qwen3MoeConfig(**{**_TINY, **sizes, **more})


def _mixtral(**more):
    sizes = dict(intermediate_size=20, num_local_experts=6, num_experts_per_tok=2)
    return transformers.MixtralConfig(**{**_TINY, **sizes, **more})


def _gpt_oss(**more):
    sizes = dict(intermediate_size=20, num_local_experts=6, num_experts_per_tok=3, head_dim=16, sliding_window=9)
    return transformers.GptOssConfig(**{**_TINY, **sizes, "swiglu_limit": 0.5, "rope_parameters": _ALIKE, **more})


def _deepseek(**more):
    sizes = dict(num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=12, v_head_dim=14)
    sizes |= dict(qk_nope_head_dim=10, qk_rope_head_dim=8, first_k_dense_replace=1)
    sizes |= dict(n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, moe_intermediate_size=12)
    return transformers.DeepseekV3Config(**{**_TINY, **sizes, "rope_parameters": _ALIKE, **more})


def _phi3(**more):
    return transformers.Phi3Config(**{**_TINY, **more})


def _olmo3(**more):
    ropes = {
        "full_attention": {**_YARN, "attention_factor": 1.2, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    base = dict(num_hidden_layers=4, sliding_window=9, rope_parameters=ropes)
    return transformers.Olmo3Config(**{**_TINY, **base, **more})


def _granite(**more):
    multipliers = dict(embedding_multiplier=3.0, residual_multiplier=0.22, attention_multiplier=0.2, logits_scaling=5.0)
    return transformers.GraniteConfig(**{**_TINY, **multipliers, **more})


_MINISTRAL_ROPE = {**_YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}


def _ministral3(**more):
    scales = dict(rope_parameters={**_MINISTRAL_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}, head_dim=16)
    return transformers.Ministral3Config(**{**_TINY, **scales, **more})


def _qwen3_5(config=transformers.Qwen3_5TextConfig, **more):
    sizes = dict(
        num_hidden_layers=4,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )
    return config(**{**_TINY, **sizes, **more})


def _qwen3_5_moe(**more):
    sizes = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, shared_expert_intermediate_size=20)
    sizes |= dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    return _qwen3_5(transformers.Qwen3_5MoeTextConfig, **{**sizes, **more})


def _gemma4(**more):
    ropes = {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    sizes = dict(
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        head_dim=16,
        global_head_dim=24,
        sliding_window=9,
        rope_parameters=ropes,
        hidden_size_per_layer_input=8,
        rms_norm_eps=1e-3,  # the norms of small random branches would make roundings a thousand times larger
        vocab_size_per_layer_input=VOCAB,
    )
    return transformers.Gemma4TextConfig(**{**_TINY, **sizes, **more})


VARIANTS = {
    "llama2": lambda: _llama(num_key_value_heads=4),
    "llama3": lambda: _llama(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
    "llama3.1": lambda: _llama(rope_parameters=_LLAMA3_ROPE),
    "llama3.2": lambda: _llama(rope_parameters=_LLAMA3_ROPE, tie_word_embeddings=True, head_dim=16),
    "llama-linear": lambda: _llama(rope_parameters={"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama-gelu": lambda: _llama(hidden_act="gelu"),
    "llama-relu": lambda: _llama(hidden_act="relu"),
    "llama-gelu-new": lambda: _llama(hidden_act="gelu_new"),
    "llama-pad": lambda: _llama(pad_token_id=5, tie_word_embeddings=True),
    "mistral": lambda: _mistral(sliding_window=None),
    "mistral-window": lambda: _mistral(sliding_window=11),
    "qwen2": lambda: _qwen2(),
    "qwen2.5-tied": lambda: _qwen2(tie_word_embeddings=True, num_key_value_heads=1),
    "qwen2-yarn": lambda: _qwen2(rope_parameters=_YARN),
    "qwen2-linear": lambda: _qwen2(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
    "qwen2-llama3": lambda: _qwen2(rope_parameters=_LLAMA3_ROPE),
    "qwen2-window": lambda: _qwen2(use_sliding_window=True, sliding_window=10, max_window_layers=1),
    "qwen3": lambda: _qwen3(),
    "qwen3-moe": lambda: _qwen3_moe(),
    "qwen3-moe-mixed": lambda: _qwen3_moe(
        norm_topk_prob=False, mlp_only_layers=[1], tie_word_embeddings=True, sliding_window=9, use_sliding_window=True
    ),
    "mixtral": lambda: _mixtral(),
    "mixtral-window": lambda: _mixtral(sliding_window=9, head_dim=16, tie_word_embeddings=True),
    "qwen3-tied": lambda: _qwen3(tie_word_embeddings=True),
    "qwen3-biases": lambda: _qwen3(attention_bias=True),
    "qwen3-yarn-factor": lambda: _qwen3(rope_parameters={**_YARN, "attention_factor": 1.3, "truncate": False}),
    "qwen3-yarn-mscale": lambda: _qwen3(
        rope_parameters={**_YARN, "mscale": 1.5, "mscale_all_dim": 0.7, "beta_fast": 16.0, "beta_slow": 2.0}
    ),
    "phi3": lambda: _phi3(sliding_window=11),
    "phi3-partial": lambda: _phi3(partial_rotary_factor=0.5, num_key_value_heads=1, head_dim=12),
    "phi4-mini": lambda: _phi3(
        max_position_embeddings=256 * 8,
        original_max_position_embeddings=96,
        rope_parameters={
            "rope_type": "longrope",
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.25, 3.5],
            "long_factor": [1.5, 9.0, 40.0],
        },
        tie_word_embeddings=True,
    ),
    "olmo2": lambda: transformers.Olmo2Config(**_TINY),
    "olmo2-biases": lambda: transformers.Olmo2Config(**{**_TINY, "num_key_value_heads": 4, "attention_bias": True}),
    "olmo3": lambda: _olmo3(),
    "olmo3-tied": lambda: _olmo3(tie_word_embeddings=True, layer_types=["full_attention", "sliding_attention"] * 2),
    "smollm3": lambda: transformers.SmolLM3Config(**{**_TINY, "no_rope_layer_interval": 2}),
    "smollm3-window": lambda: transformers.SmolLM3Config(
        **_TINY, no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=9, tie_word_embeddings=False
    ),
    "granite": lambda: _granite(tie_word_embeddings=True),
    "granite-biases": lambda: _granite(attention_bias=True, mlp_bias=True, residual_multiplier=1.5),
    "granite4": lambda: transformers.GraniteMoeHybridConfig(
        **_TINY,
        embedding_multiplier=3.0,
        residual_multiplier=0.22,
        attention_multiplier=0.2,
        logits_scaling=5.0,
        num_local_experts=0,
        shared_intermediate_size=64,
        position_embedding_type="rope",
        layer_types=["full_attention"] * 3,
        mamba_n_heads=2,
        tie_word_embeddings=True,
    ),
    "ministral3": lambda: _ministral3(),
    "ministral3-window": lambda: _ministral3(sliding_window=11, tie_word_embeddings=True),
    "qwen3.5": lambda: _qwen3_5(),
    "qwen3.5-moe": lambda: _qwen3_5_moe(),
    "qwen3.5-tied": lambda: _qwen3_5(
        tie_word_embeddings=True,
        linear_num_value_heads=2,
        linear_conv_kernel_dim=3,
        layer_types=["full_attention", "linear_attention"] * 2,
    ),
    "gemma4": lambda: _gemma4(num_kv_shared_layers=3, use_double_wide_mlp=True),
    "gemma4-unshared": lambda: _gemma4(
        vocab_size_per_layer_input=VOCAB + 30,
        final_logit_softcapping=3.0,
        attention_bias=True,
        tie_word_embeddings=False,
        pad_token_id=5,
        use_bidirectional_attention="vision",
    ),
    "gemma4-31b": lambda: _gemma4(
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=3.0,
        rope_parameters=None,
    ),
    "gemma4-shared-pairs": lambda: _gemma4(
        attention_k_eq_v=True, num_global_key_value_heads=1, num_kv_shared_layers=4, global_head_dim=16
    ),
    "gemma4-moe": lambda: _gemma4(
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=12,
    ),
    "gpt-oss": lambda: _gpt_oss(),
    "gpt-oss-yarn": lambda: _gpt_oss(
        num_key_value_heads=1,
        swiglu_alpha=1.2,
        tie_word_embeddings=True,
        attention_bias=False,
        rope_parameters={**_YARN, "truncate": False},
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "deepseek-v3": lambda: _deepseek(),
    "deepseek-v3-yarn": lambda: _deepseek(
        norm_topk_prob=False,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    ),
    # Its queries have no latent, and its experts are in one group, as Kimi K2's are.
    "moonlight": lambda: _deepseek(
        q_lora_rank=None, n_group=1, topk_group=1, n_shared_experts=2, rope_interleave=False, rms_norm_eps=1e-5
    ),
    "qwen3.5-pairs": lambda: _qwen3_5(linear_conv_kernel_dim=2),
    "gemma3": lambda: _gemma(),
    "gemma3-untied": lambda: _gemma(tie_word_embeddings=False, attention_bias=True),
    "gemma3-softcap": lambda: _gemma(final_logit_softcapping=3.0),
    "gemma3-llama3": lambda: _gemma(
        rope_parameters={
            "full_attention": _LLAMA3_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        }
    ),
}

_CLASSES = {
    "llama": transformers.LlamaForCausalLM,
    "mistral": transformers.MistralForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
    "qwen3": transformers.Qwen3ForCausalLM,
    "mixtral": transformers.MixtralForCausalLM,
    "qwen3_moe": transformers.Qwen3MoeForCausalLM,
    "phi3": transformers.Phi3ForCausalLM,
    "olmo2": transformers.Olmo2ForCausalLM,
    "olmo3": transformers.Olmo3ForCausalLM,
    "smollm3": transformers.SmolLM3ForCausalLM,
    "granite": transformers.GraniteForCausalLM,
    "granitemoehybrid": transformers.GraniteMoeHybridForCausalLM,
    "ministral3": transformers.Ministral3ForCausalLM,
    "qwen3_5_moe_text": transformers.Qwen3_5MoeForCausalLM,
    "qwen3_5_text": transformers.Qwen3_5ForCausalLM,
    "gemma3_text": transformers.Gemma3ForCausalLM,
    "gemma4_text": transformers.Gemma4ForCausalLM,
    "deepseek_v3": transformers.DeepseekV3ForCausalLM,
    "gpt_oss": transformers.GptOssForCausalLM,
}


def make(variant: str, dtype: torch.dtype = torch.float32):
    """The transformers model of a variant, every parameter random (norms and biases too), in eval mode."""
    config = VARIANTS[variant]()
    config._experts_implementation = "eager"  # torch's grouped product takes no float64
    torch.manual_seed(0)  # `randomise` adds to what transformers starts with
    return randomise(_CLASSES[config.model_type](config)).to(dtype)


def grads(model, known=(), whole_of=lambda grad: grad) -> dict[str, torch.Tensor]:
    """The gradients of a model, ours or transformers', by the names of files; known: names to choose among, where a
    tensor of ours may have several; whole_of: makes a rank's gradient that of all ranks."""
    found = {name: whole_of(parameter.grad) for name, parameter in model.named_parameters()}
    if not isinstance(getattr(model, "config", None), ModelConfig):
        if model.config.model_type == "gpt_oss":  # as in its files
            return found
        names = _MIXTRAL if model.config.model_type == "mixtral" else {}
        return {name: grad for one, whole in found.items() for name, grad in _of_experts(one, whole, names).items()}
    whole = {}
    for one in fused_weights(model, found, stored=[".experts.0.down_proj.weight"]):  # one by one
        parts = [found[part] for part in one.parts]
        whole[one.name] = one.join(parts) if one.expert is None else parts[0][one.expert]
    names = getattr(model, "checkpoint_names", lambda name: [name])
    return {next((file for file in names(name) if file in known), names(name)[0]): grad for name, grad in whole.items()}


_MIXTRAL = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _of_experts(name, grad, names):
    """A stack's gradient in transformers as those of the tensors that the files have; names: theirs of a name's
    parts."""
    name = ".".join(names.get(part, part) for part in name.split("."))
    parent, _, last = name.rpartition(".")
    if not parent.endswith(".experts"):
        return {name: grad}
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    return {
        f"{parent}.{number}.{names.get(part, part)}.weight": rows
        for number, matrix in enumerate(grad)
        for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True)
    }


@torch.no_grad()
def randomise(model):
    generator = torch.Generator().manual_seed(1)
    for layer in model.modules():
        if isinstance(scalar := getattr(layer, "layer_scalar", None), torch.Tensor):
            scalar.fill_(0.7 + torch.rand((), generator=generator))
        if isinstance(bias := getattr(layer, "e_score_correction_bias", None), torch.Tensor):
            bias.copy_(torch.randn(bias.shape, generator=generator) * 0.3)
    for parameter in model.parameters():
        scale = 0.05 if parameter.dim() > 1 else 0.5
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)
    return model.eval()


def save(model, directory):
    """save_pretrained without its progress bar."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.utils.logging.disable_progress_bar()
        model.save_pretrained(directory)
    return directory


def packed_rows(lengths: list[list[int]], padding: list[int]):
    """input_ids, position_ids, seq_ids [B, S] of rows with documents of these lengths and padding at their right."""
    generator = torch.Generator().manual_seed(2)
    rows = []
    for documents, pad in zip(lengths, padding, strict=True):
        positions = torch.cat([torch.arange(n) for n in documents] + [torch.arange(pad)])
        owners = torch.cat([torch.full((n,), i) for i, n in enumerate(documents)] + [torch.full((pad,), -1)])
        ids = torch.randint(0, VOCAB, owners.shape, generator=generator)
        rows.append((ids, positions, owners))
    return tuple(torch.stack(stream) for stream in zip(*rows, strict=True))
