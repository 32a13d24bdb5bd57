"""Tiny random checkpoints of every family, made by transformers: the outside oracle for reading and writing."""

import torch
import transformers as hf

SIZES = dict(
    vocab_size=67,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def gemma3_text(**kwargs):
    return hf.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=8, query_pre_attn_scalar=8, **kwargs)


def gemma3_both():
    vision = hf.SiglipVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    return hf.Gemma3Config(text_config=gemma3_text(), vision_config=vision, mm_tokens_per_image=4)


FAMILIES = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "llama-tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=8)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(gemma3_text()),
    "gemma3-vision": lambda: hf.Gemma3ForConditionalGeneration(gemma3_both()),
}


def save_family(name, directory, **kwargs):
    """Write the tiny checkpoint of a family to `directory`; returns transformers' model."""
    torch.manual_seed(0)
    model = FAMILIES[name]().eval()
    model.save_pretrained(directory, **kwargs)
    return model


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits
