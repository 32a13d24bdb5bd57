"""Rotary tables of positions with several axes are those of transformers' vision-language models."""

import pytest
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from dtrain.models.common.functions import rotary_tables
from dtrain.models.common.rope_config import Rope, Sections

FAMILIES = {
    "qwen2.5-vl": (Qwen2_5_VLTextConfig, Qwen2_5_VLRotaryEmbedding, Sections((2, 3, 3), False), 1.0),
    "qwen3-vl": (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, Sections((3, 3, 2), True), 1.0),
    "qwen3-vl, uneven": (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, Sections((5, 1, 2), True), 1.0),
    "qwen3.5": (Qwen3_5TextConfig, Qwen3_5TextRotaryEmbedding, Sections((2, 1, 1), True), 0.5),
}
HEAD = 16


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_are_those_of_transformers(family):
    config_class, rotary_class, sections, share = FAMILIES[family]
    parameters = {
        "rope_type": "default",
        "rope_theta": 500.0,
        "mrope_section": list(sections.sizes),
        "partial_rotary_factor": share,
    }
    config = config_class(
        hidden_size=4 * HEAD, num_attention_heads=4, head_dim=HEAD, num_key_value_heads=2, rope_parameters=parameters
    )
    positions = torch.randint(0, 300, (2, 7, 3), generator=torch.Generator().manual_seed(0))
    expected = rotary_class(config)(torch.zeros(1), positions.permute(2, 0, 1))
    rope = Rope(theta=500.0, rotary_fraction=share, sections=sections)
    cos, signed_sin = rotary_tables(rope, HEAD, positions, torch.float32)
    half = cos.shape[-1] // 2
    assert cos.shape == (2, 7, 1, int(HEAD * share))
    torch.testing.assert_close(cos[:, :, 0], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(signed_sin[:, :, 0, half:], expected[1][..., half:], rtol=0, atol=0)
    torch.testing.assert_close(-signed_sin[:, :, 0, :half], expected[1][..., :half], rtol=0, atol=0)
    alike = positions[..., :1].expand(-1, -1, 3)
    plain, by_axis = (rotary_tables(rope, HEAD, ids, torch.float64) for ids in (alike[..., 0], alike))
    assert all(map(torch.equal, plain, by_axis))


def test_a_rope_of_one_axis_refuses_positions_of_several():
    with pytest.raises(ValueError, match="several axes"):
        rotary_tables(Rope(), HEAD, torch.zeros(1, 2, 3, dtype=torch.int64), torch.float32)
    with pytest.raises(ValueError, match="add up to the 8 pairs"):
        rotary_tables(
            Rope(sections=Sections((2, 2, 2), False)), HEAD, torch.zeros(1, 2, 3, dtype=torch.int64), torch.float32
        )
