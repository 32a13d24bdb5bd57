"""Models that others got wrong, by name: rotary tables by hand in float64, and tiny models that are alive."""

import math

import pytest
import torch

from dtrain import models
from dtrain.models.common import decoder
from tests.tiny import FAMILIES, VOCAB, save_weights, write_model


@pytest.mark.trap(
    "rotary frequencies rounded by a cast of the model",
    "NVIDIA-NeMo/Automodel PR#2549",
    "far tokens are turned by up to π",
)
def test_frequencies_stay_float32_when_the_model_is_cast(tmp_path, monkeypatch):
    """The tables of a model that was cast to bfloat16 are those of float64, rounded once."""
    directory = save_weights(write_model(tmp_path, "llama", max_position_embeddings=8192))
    model, made, tables = models.from_pretrained(directory), [], decoder.rotary_tables
    monkeypatch.setattr(decoder, "rotary_tables", lambda *given: made.append(tables(*given)) or made[-1])
    positions = torch.tensor([[0, 1, 999, 8191]])
    model(torch.tensor([[3, 4, 5, 6]]), positions)
    model.bfloat16()(torch.tensor([[3, 4, 5, 6]]), positions)
    size = made[-1][0].shape[-1]
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = positions[0, :, None].double() * frequencies
    assert made[-1][0].dtype == torch.bfloat16 and made[0][0].dtype == torch.float32
    for cos, signed_sin in made:
        allowed = 1e-3 if cos.dtype == torch.float32 else 5e-3  # 8191 · a rounding of a frequency in float32
        assert (cos[0, :, 0, : size // 2].double() - angles.cos()).abs().max() < allowed
        assert (signed_sin[0, :, 0, size // 2 :].double() - angles.sin()).abs().max() < allowed


@pytest.mark.trap(
    "two dead models agree",
    "NVIDIA-NeMo/Automodel #3701",
    "tests of parity that see nothing",
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_of_the_tests_are_alive(tmp_path, family):
    """Their loss is not ln V, the token before changes it, and every parameter of a token's way has a gradient."""
    model = models.from_pretrained(save_weights(write_model(tmp_path, family)), torch.float64)
    ids = torch.arange(3, 27)[None] * 5 % VOCAB
    logits = model(ids)[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    assert (losses - math.log(VOCAB)).abs().mean() > 0.01
    changed = ids.clone()
    changed[0, 0] += 1
    assert (model(changed)[0, 1:-1] - logits[1:]).abs().max() > 1e-4
    losses.mean().backward()
    dead = [name for name, one in model.named_parameters() if one.grad is None or not one.grad.any()]
    assert [name for name in dead if ".experts." not in name] == []
