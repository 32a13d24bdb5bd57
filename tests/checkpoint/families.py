"""Tiny checkpoints on disk of the families in tests/models/oracle.py: the outside oracle for reading and writing."""

import torch

from tests.models import oracle, towers

MULTIMODAL = "gemma3-vision"
FAMILIES = (
    "llama3",
    "llama-pad",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3",
    "gemma4",
    "deepseek-v3",
    MULTIMODAL,
)  # llama-pad has a tied head


def save_family(name, directory, **kwargs):
    """Write the tiny checkpoint of a family to `directory`; returns transformers' model."""
    model = towers.make_multimodal() if name == MULTIMODAL else oracle.make(name)
    model.save_pretrained(directory, **kwargs)
    return model


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits
