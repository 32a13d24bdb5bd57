"""config.json in both spellings to one ModelConfig, against transformers' own reading; refusals by their message."""

import copy
import json
import resource
import subprocess
import sys

import pytest
from transformers import AutoConfig

from dtrain.base.errors import UserError
from dtrain.models import parse_config, read_config
from dtrain.models.common.config import FULL, SLIDING
from tests.models.oracle import VARIANTS
from tests.models.published import CONFIGS, PUBLISHED

GEMMA3_1B = CONFIGS["gemma3-1b"]
GEMMA3_4B = CONFIGS["gemma3-4b"]
LLAMA_2_7B = CONFIGS["llama-2-7b"]
LLAMA_3_2_1B = CONFIGS["llama-3.2-1b"]
MISTRAL_7B_V01 = CONFIGS["mistral-7b-v0.1"]
QWEN3_0_6B = CONFIGS["qwen3-0.6b"]
QWEN_2_5_0_5B = CONFIGS["qwen2.5-0.5b"]
QWEN_2_5_7B_YARN = CONFIGS["qwen2.5-7b-yarn"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_transformers_reads_it(name):
    values = PUBLISHED[name]
    ours = parse_config(values)
    theirs = AutoConfig.for_model(**copy.deepcopy(values)).get_text_config()
    for field in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "initializer_range",
        "tie_word_embeddings",
        "pad_token_id",
        "bos_token_id",
    ):
        assert getattr(ours, field) == getattr(theirs, field), field
    heads = theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or heads)
    everywhere = SLIDING if name == "mistral-7b-v0.1" else FULL
    assert list(ours.layer_types) == (getattr(theirs, "layer_types", None) or [everywhere] * theirs.num_hidden_layers)
    assert ours.sliding_window == (theirs.sliding_window if SLIDING in ours.layer_types else None)
    for kind, rope in ours.ropes.items():
        expected = theirs.rope_parameters.get(kind, theirs.rope_parameters)
        assert (rope.kind, rope.theta) == (expected["rope_type"], expected["rope_theta"])
        assert rope.factor == expected.get("factor", 1.0)
        if rope.kind in ("llama3", "yarn"):
            assert rope.original_max_positions == expected["original_max_position_embeddings"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_both_spellings_are_one_model(name, tmp_path):
    values = PUBLISHED[name]
    AutoConfig.for_model(**copy.deepcopy(values)).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in written and "torch_dtype" not in written  # transformers 5 wrote it
    assert read_config(tmp_path) == parse_config(values)


@pytest.mark.parametrize("variant", VARIANTS)
def test_whatever_transformers_5_writes_is_read(variant):
    config = VARIANTS[variant]()
    for written in (config.to_dict(), config.to_diff_dict()):
        parse_config(json.loads(json.dumps(written, default=str)))


def test_late_transformers_4():
    """The last releases of 4: layer_types beside the pattern, both names of the rope's type, dtype without torch_."""
    late = {key: value for key, value in GEMMA3_1B.items() if key not in ("sliding_window_pattern", "torch_dtype")}
    late |= {
        "_sliding_window_pattern": 6,
        "dtype": "bfloat16",
        "use_bidirectional_attention": False,
        "layer_types": [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(26)],
    }
    assert parse_config(late) == parse_config(GEMMA3_1B)
    both = {**QWEN_2_5_7B_YARN, "rope_scaling": {**QWEN_2_5_7B_YARN["rope_scaling"], "rope_type": "yarn"}}
    assert parse_config(both) == parse_config(QWEN_2_5_7B_YARN)


def test_pattern_without_layer_types():
    assert parse_config({**GEMMA3_1B, "sliding_window_pattern": 2}).layer_types == (SLIDING, FULL) * 13


def test_text_tower_has_its_defaults_and_the_files_tokens():
    config = parse_config(GEMMA3_4B)
    assert config.is_text_tower and config.vocab_size == 262_208 and config.head_dim == 256
    assert config.eos_token_ids == (1, 106) and config.dtype == "bfloat16" and config.tie_word_embeddings
    assert config.ropes[FULL].kind == "linear" and config.ropes[SLIDING].kind == "default"


def test_model_type_stands_in_for_architectures():
    values = {key: value for key, value in QWEN3_0_6B.items() if key != "architectures"}
    assert parse_config(values) == parse_config(QWEN3_0_6B)


def test_harmless_fields_change_nothing():
    extra = {
        "_attn_implementation_autoset": True,
        "auto_map": {"AutoModelForCausalLM": "modeling_x.X"},
        "temperature": 0.6,
        "max_length": 4096,
        "id2label": {"0": "LABEL_0"},
        "unsloth_version": "2025.1",
        "pretraining_tp": 2,  # the same sum in another order
        "router_aux_loss_coef": 0.0,
        "num_experts": None,
    }
    assert parse_config({**LLAMA_3_2_1B, **extra}) == parse_config(LLAMA_3_2_1B)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (
            LLAMA_2_7B,
            {"architectures": ["Qwen2MoxForCausalLM"], "model_type": "qwen2_mox"},
            "architecture Qwen2MoxForCausalLM is not supported. For a family of your own, set model.family, or "
            "--family of a command, to its import path. Similar families of dtrain are Qwen2ForCausalLM, ",
        ),
        (
            LLAMA_2_7B,
            {"architectures": ["Qwen2MoeForCausalLM"]},
            "architectures names Qwen2MoeForCausalLM, and the model_type llama is LlamaForCausalLM in transformers",
        ),
        (
            LLAMA_2_7B,
            {"architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification with\n  - a head of 2 outputs",
        ),
        (LLAMA_2_7B, {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not implemented"),
        (LLAMA_2_7B, {"attention_dropout": 0.1}, "attention_dropout 0.1: dropout is not implemented"),
        (LLAMA_2_7B, {"quantization_config": {"quant_method": "awq"}}, "quantization_config {'quant_method': 'awq'}"),
        (LLAMA_2_7B, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not implemented"),
        (LLAMA_2_7B, {"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not implemented"),
        (LLAMA_2_7B, {"rope_scaling": {"type": "linear"}}, "rope_parameters.factor is missing"),
        (LLAMA_2_7B, {"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 3}}, "rope_parameters.beta 3: not a"),
        (LLAMA_2_7B, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        (LLAMA_2_7B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5: only whole heads"),
        (LLAMA_2_7B, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "only whole heads"),
        (LLAMA_2_7B, {"sliding_window": 128}, "sliding_window 128: not a field that dtrain knows"),
        (LLAMA_2_7B, {"layer_types": [SLIDING] * 32}, "every layer is full_attention"),
        (LLAMA_2_7B, {"num_local_experts": 8}, "num_local_experts 8: not a field that dtrain knows"),
        (LLAMA_2_7B, {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA_2_7B, {"hidden_size": "big"}, "hidden_size 'big': must be a whole number"),
        (LLAMA_2_7B, {"num_key_value_heads": 5}, "is not a multiple of num_key_value_heads 5"),
        (LLAMA_2_7B, {"num_attention_heads": 31, "num_key_value_heads": 31}, "hidden_size 4096 is not a multiple"),
        (LLAMA_2_7B, {"head_dim": 33}, "head_dim 33 is odd"),
        (LLAMA_2_7B, {"pad_token_id": 32000}, "pad_token_id 32000 outside of the vocabulary"),
        (LLAMA_2_7B, {"per_layer_config": {"0": {}}}, "per_layer_config"),
        (MISTRAL_7B_V01, {"attention_bias": True}, "attention_bias True: not a field"),
        (QWEN_2_5_0_5B, {"attention_bias": False}, "Qwen2 always has biases"),
        (QWEN_2_5_0_5B, {"use_mrope": True}, "use_mrope True: not a field"),
        (QWEN_2_5_0_5B, {"layer_types": [SLIDING] * 24}, "no sliding_window is set"),
        (QWEN3_0_6B, {"layer_types": ["linear_attention"] * 28}, "entries must be full_attention or sliding_attention"),
        (QWEN3_0_6B, {"layer_types": [FULL] * 3}, "layer_types has 3 entries for num_hidden_layers 28"),
        (GEMMA3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0: capping"),
        (GEMMA3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention True: only causal"),
        (GEMMA3_1B, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope type 'yarn' is not implemented"),
        (GEMMA3_1B, {"rope_parameters": {"rope_type": "default"}}, "must be nested under full_attention"),
        (GEMMA3_1B, {"hidden_act": "silu"}, "Gemma3 reads hidden_activation"),
        (GEMMA3_4B, {"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4}: of quantized weights only"),
        (GEMMA3_4B, {"text_config": {"moe": True}}, "text_config.moe True: not a field"),
        (GEMMA3_4B, {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, "not the same"),
    ],
)
def test_refused_by_name(base, changes, message):
    with pytest.raises(UserError) as error:
        parse_config({**base, **changes})
    assert message in str(error.value)


def test_the_modules_of_transformers_are_offered_where_native_excludes_them():
    values = {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2"}
    with pytest.raises(UserError, match="native excludes the modules of the transformers library. Set it to auto"):
        parse_config(values, implementation="native")


NUMBERS = {
    "rms_norm_eps": LLAMA_2_7B,
    "rope_theta": LLAMA_2_7B,
    "initializer_range": LLAMA_2_7B,
    "final_logit_softcapping": GEMMA3_1B,
    "query_pre_attn_scalar": GEMMA3_1B,
    "rope_local_base_freq": GEMMA3_1B,
    "partial_rotary_factor": LLAMA_2_7B,
}
WHOLE = {
    "vocab_size": 10**12,
    "hidden_size": 10**9,
    "intermediate_size": 10**10,
    "num_hidden_layers": 10**9,
    "num_attention_heads": 10**6,
    "head_dim": 10**6,
    "max_position_embeddings": 10**15,
    "sliding_window": 2**63,
    "pad_token_id": 2**40,
    "eos_token_id": 2**70,
    "bos_token_id": -(2**40),
}
NO_NUMBERS = [float("nan"), float("inf"), float("-inf"), -1.0, 1e300, 10**400, "1e-6", True, [1e-6], {}]


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_has_a_range(key):
    for value in [*NO_NUMBERS, 0][: -1 if key == "initializer_range" else None]:
        with pytest.raises(UserError, match=key):
            parse_config({**NUMBERS[key], key: value})


@pytest.mark.parametrize(
    ("base", "key"),
    [
        (LLAMA_3_2_1B, "factor"),
        (LLAMA_3_2_1B, "low_freq_factor"),
        (LLAMA_3_2_1B, "high_freq_factor"),
        (LLAMA_3_2_1B, "original_max_position_embeddings"),
        (QWEN_2_5_7B_YARN, "factor"),
        (QWEN_2_5_7B_YARN, "attention_factor"),
        (QWEN_2_5_7B_YARN, "beta_fast"),
        (QWEN_2_5_7B_YARN, "mscale"),
    ],
)
def test_every_number_of_a_rope_has_a_range(base, key):
    for value in NO_NUMBERS:
        with pytest.raises(UserError, match=key):
            parse_config({**base, "rope_scaling": {**base["rope_scaling"], key: value}})


@pytest.mark.parametrize("key", WHOLE)
def test_sizes_beyond_any_model_are_refused_before_anything_is_built(key):
    base = {**MISTRAL_7B_V01, "head_dim": 128}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for value in (WHOLE[key], 10**4000, 0.5, *([] if "token" in key else [0, -1])):
        with pytest.raises(UserError, match=key) as error:
            parse_config({**base, key: value})
        assert len(str(error.value)) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_a_model_that_no_memory_holds_is_told_its_size():
    large = {"hidden_size": 2**20, "intermediate_size": 2**22, "num_hidden_layers": 2000, "head_dim": 128}
    with pytest.raises(UserError, match=r"sizes of [\d,]+ parameters, [\d,]+ TiB in bfloat16"):
        parse_config({**LLAMA_2_7B, **large})
    assert parse_config(LLAMA_2_7B).num_parameters == pytest.approx(6.74e9, rel=1e-3)
    assert parse_config(GEMMA3_1B).num_parameters == pytest.approx(1.0e9, rel=1e-2)


def test_all_problems_at_once():
    bad = {**LLAMA_2_7B, "hidden_act": "x", "attention_dropout": 0.1, "moe": 2, "rope_scaling": {"type": "su"}}
    with pytest.raises(UserError) as error:
        parse_config(bad, "here/config.json")
    lines = str(error.value).splitlines()
    assert lines[0] == "here/config.json: LlamaForCausalLM with" and len(lines) == 5


def test_directories(tmp_path):
    with pytest.raises(UserError, match="dtrain download Qwen/Qwen3-0.6B"):
        read_config("Qwen/Qwen3-0.6B")
    with pytest.raises(UserError, match="no config.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{,")
    with pytest.raises(UserError, match="config.json is not JSON.*line 1"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="not a JSON object"):
        read_config(tmp_path)


def test_needs_no_torch():
    code = "import sys, dtrain.models, dtrain.models.common.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
