"""Adapters that others got wrong, by name: against PEFT."""

import peft
import pytest
import torch

from dtrain import models
from tests.adapters.by_peft import IDS, logits, quietly, save_adapter, save_base


@pytest.mark.trap(
    "DoRA scales the bias of the layer",
    "huggingface/peft PR#2122",
    "another model than the adapter was trained for",
)
def test_dora_leaves_the_bias_alone(tmp_path):
    """PEFT's logits of a model with large biases in every layer that has an adapter."""
    base = save_base(tmp_path / "base", "llama-biases")
    theirs = save_adapter(base, tmp_path / "adapter", use_dora=True)
    layers = [one for one in theirs.modules() if isinstance(one, peft.tuners.lora.Linear)]
    assert layers and all(one.get_base_layer().bias.abs().max() > 0.05 for one in layers)
    ours = quietly(lambda: models.from_pretrained(tmp_path / "adapter")).eval()
    with torch.no_grad():
        assert (ours(IDS) - logits(theirs)).abs().max() < 5e-5
