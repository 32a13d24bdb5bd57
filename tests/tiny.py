"""Tiny models and data on disk for tests: one config per family, a word-level tokenizer, tokenized rows."""

import json
import random
from pathlib import Path

from dtrain.recipe.schema import Recipe
from dtrain.training import load_recipe
from tests.problem_lines import preflight

VOCAB = 67
NO_MEANS = {"activation_checkpointing": "none", "activation_offload": False, "tile": "none"}

_SHARED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
    },
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "num_hidden_layers": 3,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "pad_token_id": None,
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "no_rope_layers": [1, 0],
        "pad_token_id": None,
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.25,
        "logits_scaling": 2.0,
    },
    "granite4": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "logits_scaling": 2.0,
        "attention_multiplier": 0.25,
        "num_local_experts": 0,
        "shared_intermediate_size": 40,
        "position_embedding_type": "rope",
        "layer_types": ["attention", "attention"],
    },
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "head_dim": 16,
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 10,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": 10,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 6,
    },
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "head_dim": 16,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "qwen3.5-moe": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 14,
    },
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "rms_norm_eps": 1e-3,  # the norms of small random branches would make roundings a thousand times larger
        "head_dim": 8,
        "global_head_dim": 12,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "sliding_window": 6,
        "vocab_size_per_layer_input": VOCAB + 3,
        "hidden_size_per_layer_input": 6,
        "final_logit_softcapping": 5.0,
    },
    "gemma4-moe": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "rms_norm_eps": 1e-3,
        "head_dim": 8,
        "global_head_dim": 12,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 10,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 7,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 10,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 10,
        "sliding_window": 6,
        "swiglu_limit": 0.5,
        "pad_token_id": None,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 16,
        "num_hidden_layers": 3,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 10000.0,
        "rope_local_base_freq": 100.0,
    },
}


def write_model(directory: Path, family: str = "qwen3", *, tied: bool = True, **changes) -> Path:
    """A model directory without weights: config.json and a word-level tokenizer of VOCAB words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    directory.mkdir(parents=True, exist_ok=True)
    model = {**_SHARED, **FAMILIES[family], "tie_word_embeddings": tied, **changes}
    (directory / "config.json").write_text(json.dumps(model))
    words = {f"w{index}": index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w1", "pad_token": "w0"}))
    return directory


def save_weights(directory: Path, seed: int = 0) -> Path:
    """Random weights for a `write_model` directory; those of every seed have the same size."""
    from safetensors.torch import save_file

    from dtrain import models
    from dtrain.checkpoint.huggingface.file_rows import fused_weights

    model = models.build(models.read_config(directory))
    models.init_weights(model, seed)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    whole = {}
    for one in fused_weights(model, tensors):
        parts = [tensors[part] for part in one.parts]
        whole[one.name] = one.join(parts) if one.expert is None else parts[0][one.expert].clone()
    files = {model.checkpoint_names(name)[0]: tensor for name, tensor in whole.items()}
    save_file(files, directory / "model.safetensors")
    return directory


def write_rows(path: Path, count: int = 60, longest: int = 24, seed: int = 0, untrained: float = 0.3) -> Path:
    """Tokenized rows of random lengths; about `untrained` of the labels are -100."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            ids = [draw.randrange(VOCAB) for _ in range(draw.randint(3, longest))]
            labels = [-100 if draw.random() < untrained else token for token in ids]
            labels[-1] = ids[-1]
            file.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")
    return path


def write_pairs(path: Path, count: int = 40, longest: int = 8, seed: int = 0) -> Path:
    """Tokenized preferences of random lengths."""
    draw = random.Random(seed)

    def ids() -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))]

    with path.open("w") as file:
        for _ in range(count):
            file.write(json.dumps({"prompt_ids": ids(), "chosen_ids": ids(), "rejected_ids": ids()}) + "\n")
    return path


def tiny_recipe(root: Path, *overrides: str, family: str = "qwen3", tied: bool = True, name: str = "run") -> Recipe:
    """An SFT recipe over a tiny model from scratch and 60 tokenized rows under `root`, float64, 10 steps."""
    model = root / f"{family}-{'tied' if tied else 'untied'}"
    if not model.exists():
        write_model(model, family, tied=tied)
    rows = root / "rows.jsonl"
    if not rows.exists():
        write_rows(rows)
    recipe = {
        "run": {"name": name, "dir": str(root / "runs")},
        "model": {"path": str(model), "init": "scratch"},
        "data": {"train": {"path": str(rows)}, "max_length": 32},
        "parallel": {"reduce_each": False, "optimizer_offload": False},
        "train": {"steps": 10, "global_batch": 8, "micro_batch": 2, "dtype": "float64", **NO_MEANS},
        "optimizer": {"lr": 1e-2},
        "scheduler": {"warmup_steps": 2},
        "checkpoint": {"every": None, "export": "none"},
        "metrics": {"tensorboard": False},
    }
    return load_recipe(recipe, overrides)


def tiny_dpo(root: Path, *overrides: str, family: str = "qwen3", name: str = "run") -> Recipe:
    """A DPO recipe over a tiny model from scratch and 40 tokenized pairs, float64: two steps of 4 pairs."""
    pairs = root / "pairs.jsonl"
    if not pairs.exists():
        write_pairs(pairs)
    shape = ("method=dpo", f"data.train.path={pairs}", "train.global_batch=4", "train.steps=2")
    return tiny_recipe(root, *shape, "scheduler.warmup_steps=0", *overrides, family=family, name=name)


def write_prompts(path: Path, count: int = 24, longest: int = 6, seed: int = 0) -> Path:
    """Tokenized prompts of random lengths, each with a column `wanted`: a token id."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            ids = [draw.randrange(2, VOCAB) for _ in range(draw.randint(1, longest))]
            file.write(json.dumps({"prompt_ids": ids, "wanted": draw.randrange(2, VOCAB)}) + "\n")
    return path


def tiny_grpo(root: Path, *overrides: str, family: str = "qwen3", name: str = "run") -> Recipe:
    """A GRPO recipe over a tiny model from scratch and 24 tokenized prompts, float64: rollouts of 4 prompts × 4
    completions, 8 of them a step."""
    prompts = root / "prompts.jsonl"
    if not prompts.exists():
        write_prompts(prompts)
    section = [
        "method=grpo",
        f"data.train.path={prompts}",
        "grpo.prompts_per_step=4",
        "grpo.group_size=4",
        "grpo.rewards=[{fn: tests.methods.judges.even}]",
        "grpo.sampling.max_new_tokens=6",
    ]
    return tiny_recipe(root, *section, *overrides, family=family, name=name)


def check(recipe: Recipe, world_size: int) -> list[str]:
    """The problems of a recipe that need no file to be seen."""
    return preflight(recipe, world_size, "keys")
