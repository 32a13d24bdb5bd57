"""Expressions for names: they mean what they mean in Python's `re`, and no name makes one of them slow."""

import random
import re
import time

import pytest

from dtrain.base.name_patterns import endmatch, fullmatch, pattern_error, python_error
from dtrain.data.sources.hub import _fits
from dtrain.models.common.quantization_config import skips, unquantized

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "model.layers.3.mlp.experts.gate_up_proj",
    "model.language_model.layers.2.linear_attn.in_proj_b",
    "model.visual.blocks.1.attn.qkv",
    "model.embed_tokens",
    "lm_head",
    "a",
    "aab",
    "Ab.b-0_9",
]
# As people write them in target_modules and rank_pattern.
WRITTEN = [
    r".*\.(q|v)_proj",
    r"model\.layers\.(0|1[0-9])\..*_proj",
    r"(?:.*?(?:language|text).*?(?:attn|mlp).*?(?:q_proj|in_proj_b).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:mlp)\.(?:(?:down_proj)))",
    r"^(model)(?!.*(lm_head|visual)).*",
    r"(?!lm_head).*",
    r"(?i:MODEL)\.(?:[^.]+\.)+q_PROJ|(?i:LM)_head",
    r"(?i)LM_HEAD|a{2}B",
    r"(?s).*self_attn\.[qkv]_proj$",
    r"(?P<part>model)\.layers\.\d+\.\w+\.\S+",
    r".*(?<=_)proj",
    r".*(?<!gate_up)_proj",
    r"\A\w+\Z",
    r"a{1,3}b?|[^\W\d]{3,}?",
    r"[^a-z]*(?:b|\.|-|\d|_|[0-9A-F])*b*",
    r"layers\.0\.self_attn\.q_proj",
    r"q_proj|down_proj|experts\.gate_up_proj",
]


@pytest.mark.parametrize("pattern", WRITTEN)
def test_an_expression_means_what_it_means_in_python(pattern):
    assert pattern_error(pattern) is None
    for name in NAMES:
        assert fullmatch(pattern, name) == (re.fullmatch(pattern, name) is not None), name
        if not pattern.startswith("(?"):
            assert endmatch(pattern, name) == (re.match(rf"(.*\.)?({pattern})$", name) is not None), name


def test_expressions_by_chance():
    """Against Python's own answer. Names are short and the nesting small: `re` must come to an end."""
    draw = random.Random(0)
    parts = r"a b . \. [ab] [^a] \d \w \b ^ $ \B 0 (?=a) (?!b) (?<=a) (?<!b.) \S [a-c0-9_] [^\d.] (?i:A) B".split()

    def drawn(depth):
        if depth == 0 or draw.random() < 0.3:
            return draw.choice(parts)
        one, other = drawn(depth - 1), drawn(depth - 1)
        repeat = draw.choice(["*", "+", "?", "{1,2}", "{2}", "*?", "{0,1}?", "{2,}"])
        return draw.choice([f"{one}{other}", f"(?:{one}|{other})", f"(?={one}){other}", f"(?:{one}){repeat}"])

    patterns = [drawn(3) for _ in range(1500)]
    for pattern in patterns:
        assert pattern_error(pattern) is None
        for _ in range(5):
            name = "".join(draw.choices("ab.0_B", k=draw.randrange(1, 7)))
            assert fullmatch(pattern, name) == (re.fullmatch(pattern, name) is not None), (pattern, name)


@pytest.mark.parametrize("pattern", [
    r"([a-z_.0-9]+)+!", r"(.*)*(.*)*(.*)*(.*)*!", r"(a|a|.)*!", ".*" * 40 + "!", "(?:.|..)+(?=!)", r"(?:(?=(.*)*!).)*!",
    "(.|.)" * 200 + "!",
])  # fmt: skip
def test_no_name_takes_long(pattern):
    start = time.monotonic()
    name = "model.layers.0.self_attn." + "a" * 60
    assert not fullmatch(pattern, name) and not endmatch(pattern, name)
    assert not skips([pattern], name) and not _fits(name, pattern)
    assert time.monotonic() - start < 10


def test_a_glob_of_a_dataset_takes_no_time():
    start = time.monotonic()
    assert not _fits("a" * 120, "*a" * 30 + "b") and _fits("data/train-0.jsonl", "**/train*.jsonl")
    assert _fits("a/b/c.txt", "a/**/*.txt") and not _fits("a/b/c.txt", "a/*.txt") and _fits("x[1", "x[1")
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("pattern, why", [
    (r"(a)\1", "a backreference is not supported"), ("(?>a+)a", "an atomic group is not supported"),
    (r"(?a)\w+", "the flag a is not supported"), (r"(?a:\w)+b", "the flag a is not supported"),
    ("a++", "a possessive repeat is not supported"), ("(a)?(?(1)b|c)", "a conditional group is not supported"),
    ("((a{1,999}){1,999}){1,999}", "more than 10,000 parts"), ("(" * 5000 + ")" * 5000, "nested too deep"),
    ("(?=" * 6 + "a" + ")" * 6, "more than 5 lookaheads"), ("a{99999999999}", "repetition number is too large"),
    ("(a", "missing )"),
])  # fmt: skip
def test_what_cannot_be_matched_says_why(pattern, why):
    assert why in pattern_error(pattern)


def test_an_expression_of_a_reward_may_use_all_of_python():
    assert python_error(r"(a)\1") is None and python_error("(" * 5000 + ")" * 5000) == "it is nested too deep"
    assert python_error("a{99999999999}") and python_error("(a")


@pytest.mark.parametrize("pattern", ["(" * 5000 + ")" * 5000, "x(?i)", "(a"])
def test_modules_left_unquantized(pattern):
    problems = []
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    assert unquantized(section | {"llm_int8_skip_modules": [pattern]}, problems) == ()
    assert problems == ["quantization_config llm_int8_skip_modules: must be a list of names or regular expressions"]
