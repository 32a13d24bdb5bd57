"""Regular expressions for module names match as PEFT and Python match them."""

import pytest
from peft.utils.other import get_pattern_key

from dtrain.base.name_patterns import matches_suffix, pattern_error
from dtrain.models.common.config_fields import read_unquantized_modules

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "model.layers.3.mlp.experts.gate_up_proj",
    "model.language_model.layers.2.linear_attn.in_proj_b",
    "model.visual.blocks.1.attn.qkv",
    "model.embed_tokens",
    "lm_head",
]


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        r"layers\.0\.self_attn\.q_proj",
        r"q_proj|down_proj|experts\.gate_up_proj",
        r"model\.layers\.(0|1[0-9])\..*_proj",
        r".*(?<!gate_up)_proj",
        r"(?!lm_head).*",
        r"proj",
    ],
)
def test_rank_patterns_match_as_in_peft(pattern):
    for name in NAMES:
        found_by_peft = get_pattern_key([pattern], name) == pattern
        assert matches_suffix(pattern, name) == found_by_peft, name


@pytest.mark.parametrize(
    ("pattern", "error"),
    [
        (r"(a)\1", None),
        ("(a", r"missing \), unterminated subpattern"),
        ("a{99999999999}", "repetition number is too large"),
        ("(" * 5000 + ")" * 5000, "it is nested too deeply"),
    ],
)
def test_the_error_of_an_expression(pattern, error):
    if error is None:
        assert pattern_error(pattern) is None
    else:
        assert error.replace("\\", "") in pattern_error(pattern)


@pytest.mark.parametrize("pattern", ["(" * 5000 + ")" * 5000, "x(?i)", "(a"])
def test_modules_left_unquantized(pattern):
    problems = []
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert read_unquantized_modules(section | {"llm_int8_skip_modules": [pattern]}, problems) == ()
    assert problems == ["quantization_config llm_int8_skip_modules: must be a list of names or regular expressions"]
