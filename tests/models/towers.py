"""Multimodal models of transformers, tiny, around the text models of tests/models/oracle.py."""

import torch
import transformers

from tests.models.oracle import _TINY, VOCAB, _gemma, _ministral3, _mistral, randomise


def make_multimodal():
    """A Gemma3ForConditionalGeneration with a vision tower of one layer."""
    vision = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        vision_use_head=False,
    )
    config = transformers.Gemma3Config(
        text_config=_gemma().to_dict(), vision_config=vision, mm_tokens_per_image=1, image_token_index=VOCAB - 1
    )
    return randomise(transformers.Gemma3ForConditionalGeneration(config))


def _mistral3(text, **more):
    vision = transformers.PixtralVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    return transformers.Mistral3Config(
        text_config=text.to_dict(), vision_config=vision.to_dict(), image_token_index=VOCAB - 1, **more
    )


def _qwen_vl(config, text, **vision):
    text = {
        **_TINY,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]},
        **text,
    }
    shared = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=48)
    tokens = dict(image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
    tied = text.get("tie_word_embeddings", False)
    return config(text_config=text, vision_config={**shared, **vision}, tie_word_embeddings=tied, **tokens)


# Multimodal checkpoints, of which the text tower is trained.
TOWERS = {
    "gemma3": lambda: make_multimodal().config,
    "mistral-small": lambda: _mistral3(_mistral(sliding_window=None, head_dim=12), tie_word_embeddings=False),
    "ministral3": lambda: _mistral3(_ministral3(), tie_word_embeddings=False),
    "ministral3-tied": lambda: _mistral3(_ministral3(tie_word_embeddings=True), tie_word_embeddings=True),
    "qwen2.5-vl": lambda: _qwen_vl(transformers.Qwen2_5_VLConfig, dict(hidden_size=64), out_hidden_size=64),
    "qwen3-vl": lambda: _qwen_vl(
        transformers.Qwen3VLConfig,
        dict(head_dim=16, tie_word_embeddings=True),
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    ),
}


def make_tower(name):
    """The transformers model of one of `TOWERS`, every parameter random, in eval mode."""
    torch.manual_seed(0)
    return randomise(transformers.AutoModelForImageTextToText.from_config(TOWERS[name]()))
