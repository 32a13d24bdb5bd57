"""Rotary frequencies and tables against transformers' own functions, bit for bit in float32."""

import math

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dtrain.models.common.config import FULL, SLIDING
from dtrain.models.common.functions import apply_rotary, rotary_frequencies, rotary_tables
from dtrain.models.read_config import parse_config
from tests.models.oracle import VARIANTS
from tests.models.published import PUBLISHED

CONFIGS = {name: parse_config(values) for name, values in PUBLISHED.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_frequencies_are_transformers_bits(variant):
    theirs = VARIANTS[variant]()
    ours = parse_config(theirs.to_dict())
    for kind, rope in ours.ropes.items():
        nested = "rope_theta" not in theirs.rope_parameters
        size = ours.rotary_dim(kind)
        turned = size if rope.kind == "proportional" else int(size * rope.rotary_fraction)
        if rope.kind == "default":
            expected, scale = 1.0 / (rope.theta ** (torch.arange(0, turned, 2, dtype=torch.float) / turned)), 1.0
        else:
            init = ROPE_INIT_FUNCTIONS[rope.kind]
            expected, scale = init(theirs, "cpu", layer_type=kind if nested else None)
        assert torch.equal(rotary_frequencies(rope, turned, torch.float32), expected)
        assert rope.table_scale == scale


@pytest.mark.parametrize("variant", ["llama3.1", "qwen3-yarn-mscale", "llama-linear", "llama2", "phi4-mini"])
def test_float64_is_the_same_formula(variant):
    config = parse_config(VARIANTS[variant]().to_dict())
    rope = config.ropes[FULL]
    low, high = (
        rotary_frequencies(rope, int(config.head_dim * rope.rotary_fraction), dtype)
        for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(low.double(), high, rtol=1e-6, atol=0)
    assert (low.double() - high).abs().max() > 0


def test_far_positions_of_a_published_model():
    """131071 · the last bit of a frequency would show."""
    config = CONFIGS["llama-3.2-1b"]
    positions = torch.tensor([[0, 1, 8191, 131071]])
    cos, signed_sin = rotary_tables(config.ropes[FULL], config.head_dim, positions, torch.float32)
    angles = positions[0, :, None].float() * rotary_frequencies(config.ropes[FULL], 64, torch.float32)
    assert torch.equal(cos[0, :, 0, :32], angles.cos()) and torch.equal(cos[0, :, 0, 32:], angles.cos())
    assert torch.equal(signed_sin[0, :, 0, :32], -angles.sin())


def test_rotation_turns_each_pair():
    rope = CONFIGS["gemma3-1b"].ropes[SLIDING]
    x = torch.randn(2, 7, 3, 8, dtype=torch.float64, requires_grad=True)
    positions = torch.arange(7).expand(2, 7)
    turned = apply_rotary(x, *rotary_tables(rope, 8, positions, torch.float64))
    for position in range(7):
        for i in range(4):
            angle = position * 10_000.0 ** (-2 * i / 8)
            turn = complex(math.cos(angle), math.sin(angle))
            pair = torch.complex(x[:, position, :, i], x[:, position, :, i + 4]) * turn
            torch.testing.assert_close(turned[:, position, :, i], pair.real, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(turned[:, position, :, i + 4], pair.imag, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda t: apply_rotary(t, *rotary_tables(rope, 8, positions, torch.float64)), (x,))
