"""Ten AdamW steps of SFT with an adapter beside the same steps by hand on PEFT's model: loss, grad norm and weights.

float32, relative: loss 1e-5, norm 1e-4.
"""

import pytest
import torch

from dtrain import models
from dtrain.checkpoint.peft_config import peft_name
from dtrain.models.adapter_config import AdapterConfig, is_adapter
from dtrain.models.adapters import add_adapters, init_adapters
from tests.test_oracle import LR, STEPS, by_hand, packed_batches, padded_batches, prepared
from tests.test_trainer import run, trajectory, weights

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "llama": ("llama", {"rank": 8}),
    "llama: rsLoRA of two": ("llama", {"rank": 4, "alpha": 8, "rslora": True, "target": ["q_proj", "v_proj"]}),
    "qwen2: DoRA, biases": ("qwen2", {"rank": 4, "dora": True}),
    "qwen3: patterns": (
        "qwen3",
        {"rank": 2, "rank_pattern": {"down_proj": 5}, "alpha_pattern": {"layers.0.self_attn.q_proj": 3}},
    ),
    "qwen3: tied embedding too": ("qwen3", {"rank": 2, "modules_to_save": ["embed_tokens"], "target": ["o_proj"]}),
    "llama: head and norms too": ("llama", {"rank": 2, "modules_to_save": ["lm_head", "norm"]}),
    "gemma3: a regular expression": (
        "gemma3",
        {"rank": 3, "target": r".*layers\.[02]\..*_proj", "exclude": ["k_proj"]},
    ),
    "gemma3: DoRA, rsLoRA": ("gemma3", {"rank": 3, "dora": True, "rslora": True}),
}


def peft_model(source, section, directory):
    """PEFT's model with the adapter that a recipe's `section` starts with."""
    target = section.get("target", LINEAR)
    exclude = section.get("exclude")
    saved = section.get("modules_to_save")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=section["rank"],
        lora_alpha=section.get("alpha", 32),
        target_modules=target,
        exclude_modules=exclude,
        use_rslora=section.get("rslora", False),
        use_dora=section.get("dora", False),
        rank_pattern=section.get("rank_pattern", {}),
        alpha_pattern=section.get("alpha_pattern", {}),
        modules_to_save=saved,
        ensure_weight_tying=source.config.tie_word_embeddings and bool(saved),
    )
    model = peft.get_peft_model(source, config)
    ours = models.build(models.read_config(directory), device="meta")
    add_adapters(ours, AdapterConfig.of(section))
    ours.to_empty(device="cpu")
    models.init_weights(ours, 1)  # DoRA's magnitudes are PEFT's own
    init_adapters(ours, 0)
    theirs = dict(model.named_parameters())
    adapters = {name for name, _ in ours.named_parameters() if is_adapter(name)}
    with torch.no_grad():
        for name in adapters:
            if name.endswith("lora_A"):
                theirs[_of_default(name)].copy_(ours.get_parameter(name))
    assert {_of_default(name) for name in adapters} == {name for name in theirs if "lora_" in name}
    return model


def _of_default(name):
    key = peft_name(name).replace("lora_magnitude_vector", "lora_magnitude_vector.default.weight")
    return key.replace("lora_A.weight", "lora_A.default.weight").replace("lora_B.weight", "lora_B.default.weight")


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_equal_peft(tmp_path, case, packing):
    family, section = CASES[case]
    source, recipe, path = prepared(
        tmp_path, family, packing, lora=section, checkpoint={"every": STEPS, "export": "none"}
    )
    batches = packed_batches(recipe) if packing else padded_batches(path)
    expected, theirs = by_hand(peft_model(source, section, recipe.model.path), batches)
    run(recipe)
    for (loss, norm, *_), (want, want_norm) in zip(trajectory(recipe), expected, strict=True):
        assert abs(loss - want) <= 1e-5 * want
        assert abs(norm - want_norm) <= 1e-4 * want_norm
    saved = {name.removeprefix("model."): one for name, one in weights(recipe).items() if name.startswith("model.")}
    assert any(is_adapter(name) for name in saved)
    for name, value in saved.items():
        module, _, parameter = name.rpartition(".")
        key = (
            _of_default(name) if is_adapter(name) else f"base_model.model.{module}.modules_to_save.default.{parameter}"
        )
        # Of the weight and of the way that Adam can go: it makes steps of a gradient that is zero but for rounding.
        scale = theirs[key].abs().max() + STEPS * LR
        assert (value - theirs[key]).abs().max() <= 1e-4 * scale, name
