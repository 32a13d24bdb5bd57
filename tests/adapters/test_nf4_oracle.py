"""Ten AdamW steps of SFT with the base in 4 bits, beside the same steps by hand in PEFT: on the weights that the codes
mean, and on bitsandbytes' own layers and files where it is installed. float32, relative: loss 1e-5, norm 1e-4."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from dtrain.adapters.nf4 import dequantize, quantize
from tests.adapters.test_nf4 import NF4, base
from tests.adapters.test_trajectories import peft_model
from tests.running import distance, run, trajectory
from tests.test_oracle import DECAY, LR, ROWS, STEPS, by_hand, padded_batches
from tests.tiny import tiny_recipe, write_rows

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")
SECTIONS = {"LoRA": {"rank": 4}, "DoRA": {"rank": 4, "dora": True}}


def recipe_of(root, model, rows, section, *overrides):
    shape = [f"model.path={model}", f"data.train.path={rows}", "data.shuffle=false", "data.max_length=20"]
    shape += ["data.packing=false", f"train.steps={STEPS}", f"train.global_batch={ROWS}", "train.micro_batch=3"]
    shape += ["train.dtype=float32", f"optimizer.lr={LR}", f"optimizer.weight_decay={DECAY}"]
    shape += ["scheduler.warmup_steps=3", *(f"lora.{key}={value}" for key, value in section.items())]
    return tiny_recipe(root, *NF4, *shape, *overrides)


def transformers_model(directory, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)


def assert_equal(recipe, source, section, directory, rows):
    expected, _ = by_hand(peft_model(source, section, directory), padded_batches(rows))
    run(recipe)
    found = trajectory(recipe)
    assert len(found) == STEPS
    for (loss, norm, *_), (want, want_norm, *_) in zip(found, expected, strict=True):
        assert distance(loss, want) <= 1e-5
        assert distance(norm, want_norm) <= 1e-4


@pytest.mark.parametrize(("family", "case"), [*zip(["llama", "gemma3"], SECTIONS, strict=True)])
def test_ten_steps_equal_peft_on_the_weights_that_the_codes_mean(tmp_path, family, case):
    directory, rows = base(tmp_path, family, head_dim=32), write_rows(tmp_path / "long.jsonl", STEPS * ROWS, 20)
    tensors = load_file(directory / "model.safetensors")
    rounded = {n: dequantize(*quantize(one), torch.float32) for n, one in tensors.items() if "_proj.weight" in n}
    dense = base(tmp_path / "dense", family, head_dim=32)
    save_file(tensors | rounded, dense / "model.safetensors")
    recipe = recipe_of(tmp_path, directory, rows, SECTIONS[case])
    assert_equal(recipe, transformers_model(dense), SECTIONS[case], directory, rows)


@pytest.mark.parametrize(("double", "case"), [*zip([False, True], SECTIONS, strict=True)])
def test_ten_steps_equal_peft_on_bitsandbytes_layers_and_files(tmp_path, case, double):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    directory, rows = base(tmp_path), write_rows(tmp_path / "long.jsonl", STEPS * ROWS, 20)
    options = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32,
    )
    stored = tmp_path / "stored"
    transformers_model(directory, quantization_config=options, device_map="cpu").save_pretrained(stored)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (stored / name).write_text((directory / name).read_text())
    source = transformers_model(stored, device_map="cpu").train()
    recipe = recipe_of(tmp_path, stored, rows, SECTIONS[case])
    assert_equal(recipe, source, SECTIONS[case], directory, rows)
