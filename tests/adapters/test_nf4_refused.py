"""Checkpoints and sizes that a base in 4 bits does not fit: each is refused by name."""

import json

import pytest
import torch

from dtrain import models
from dtrain.adapters.nf4 import find_block_problems, quantize_weights
from dtrain.base.errors import UserError
from dtrain.checkpoint.huggingface.quantized import convert_to_4_bits
from dtrain.checkpoint.huggingface.read import check_fit
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles
from dtrain.models import building
from dtrain.models.common.flops import flops_per_token
from tests.adapters.test_nf4 import (
    FIXTURE,
    SIZES,
    base,
    linears,
    made_by_bitsandbytes,
    quantized_model,
    stored_as_bitsandbytes,
)
from tests.adapters.test_nf4_experts import OWN, SHAPE
from tests.problem_lines import lines, preflight
from tests.running import run
from tests.tiny import save_weights, tiny_recipe, write_model


def change(name, value):
    def apply(tensors):
        found = next(one for one in tensors if one.endswith(name))
        tensors[found] = value(tensors[found])

    return apply


def with_state(**changes):
    def apply(tensor):
        state = json.loads(bytes(tensor.tolist())) | changes
        return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change("quant_state.bitsandbytes__nf4", apply)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (with_state(blocksize=128), "was quantized with blocksize 128, dtrain reads 64"),
        (with_state(quant_type="fp4"), "was quantized with quant_type fp4, dtrain reads nf4"),
        (with_state(shape=[1, 2]), r"with shape \[1, 2\], dtrain reads \["),
        (change("quant_map", lambda one: one + 0.1), "quant_map holds other levels than NF4's"),
        (change("absmax", lambda one: one[:-1].clone()), r"absmax is F32 \[\d+\], its layer needs F32 \[\d+\]"),
        (
            change("down_proj.weight", lambda one: one[:-1].clone()),
            r"down_proj.weight is U8 \[16383, 1\], its layer ne",
        ),
        (lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight.absmax"), "missing: .*up_proj.weight.absmax"),
        (
            lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"),
            "missing: model.layers.0.mlp.up_proj.weight",
        ),
        (
            change("quant_state.bitsandbytes__nf4", lambda one: one[:-3].clone()),
            r"is U8, and model.*bitsandbytes__nf4 does not say how to read it",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, broken, message):
    directory, _ = stored_as_bitsandbytes(base(tmp_path), tmp_path / "bnb", False, broken)
    with pytest.raises(UserError, match=message):
        quantized_model(directory)


def test_codes_whose_config_does_not_tell_of_them_are_refused(tmp_path):
    directory, _ = stored_as_bitsandbytes(base(tmp_path), tmp_path / "bnb", False)
    values = json.loads((directory / "config.json").read_text())
    del values["quantization_config"]
    (directory / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"down_proj.weight is U8, codes of 4 bits; they are read where config.json"):
        models.from_pretrained(directory)


def test_codes_of_experts_are_refused_before_they_are_read(tmp_path):
    floats = save_weights(write_model(tmp_path / "moe", "qwen3-moe", tied=False, **SHAPE, **OWN["qwen3-moe"]))
    directory, _ = stored_as_bitsandbytes(floats, tmp_path / "bnb", False)
    values = json.loads((directory / "config.json").read_text())
    del values["quantization_config"]
    (directory / "config.json").write_text(json.dumps(values))
    model = models.build(models.read_config(directory), device="meta")
    convert_to_4_bits(model, directory, torch.float32, nf4=True)
    with pytest.raises(UserError, match=r"experts.0.gate_proj.weight is U8, codes of 4 bits"):
        check_fit(model, WeightFiles(directory))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["lora=null"], "weights in 4 bits, which cannot be trained without an adapter. Set lora={}"),
        (["model.init=scratch"], "is of a model in 4 bits. Set model.init=pretrained"),
    ],
)
def test_what_codes_cannot_do_is_refused(tmp_path, overrides, words):
    directory, _ = stored_as_bitsandbytes(base(tmp_path), tmp_path / "bnb", False)
    options = [f"model.path={directory}", "model.init=pretrained", "lora.rank=4", *overrides]
    assert words in "\n".join(preflight(tiny_recipe(tmp_path, *options), 1))


@pytest.mark.parametrize(
    ("sizes", "overrides", "words"),
    [
        ({}, ["lora.modules_to_save=[down_proj]"], "for layers that are not fully trained"),
        ({"intermediate_size": 96}, [], "bitsandbytes made blocks of 64 inputs, which do not divide the 96 of down_pr"),
    ],
)
def test_codes_that_do_not_fit_are_refused_before_any_step(tmp_path, sizes, overrides, words):
    directory, _ = stored_as_bitsandbytes(base(tmp_path, **sizes), tmp_path / "bnb", False)
    options = [f"model.path={directory}", "model.init=pretrained", "lora.rank=4", *overrides]
    with pytest.raises(UserError, match=words):
        run(tiny_recipe(tmp_path, *options))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type 'fp4': of quantized weights only bitsandbytes' nf4"),
        ({"load_in_4bit": False, "load_in_8bit": True}, "of quantized weights only bitsandbytes' nf4, mxfp4"),
        ({"quant_method": "gptq"}, "fp8 in blocks of 128 × 128 are read; use the original"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage 'bfloat16': only uint8 is read"),
        ({"llm_int8_skip_modules": ["("]}, "llm_int8_skip_modules"),
    ],
)
def test_other_quantization_is_refused_by_name(tmp_path, section, message):
    directory, _ = stored_as_bitsandbytes(base(tmp_path), tmp_path / "bnb", False, config=section)
    with pytest.raises(UserError, match=message):
        models.read_config(directory)


@pytest.mark.parametrize(
    ("sizes", "tp", "words"),
    [
        ({}, 1, []),
        ({}, 2, []),
        ({}, 4, ["parallel.tp=4 does not divide the 2 blocks of 64 inputs", "o_proj's 128", "Use 1 or 2"]),
        ({"hidden_size": 96}, 1, ["do not divide the 96 of q_proj", "of gate_proj. Set lora.quantize=none"]),
        ({"intermediate_size": 320}, 2, ["does not divide the 5 blocks", "down_proj's 320"]),
    ],
)
def test_sizes_that_blocks_do_not_fit_are_named(tmp_path, sizes, tp, words):
    config = models.read_config(write_model(tmp_path / "model", "llama", **SIZES | sizes))
    problems = "\n".join(lines(find_block_problems(config, building.linear_shapes(config), tp)))
    assert all(word in problems for word in words) and bool(problems) == bool(words), problems


def test_a_quantized_weight_counts_whole_and_takes_its_own_bytes(tmp_path):
    directory = base(tmp_path)
    plain = models.build(models.read_config(directory), device="meta")
    model = models.build(models.read_config(directory), device="meta")
    quantize_weights(model, torch.float32, building.linear_shapes(model.config))
    for one in plain.parameters():
        one.requires_grad_(False)
    for one in model.parameters():
        one.requires_grad_(False)
    assert flops_per_token(model, 16) == flops_per_token(plain, 16)
    held = sum(one.numel() * one.itemsize for layer in linears(model).values() for one in layer.parameters())
    assert held == sum(layer.out_features * layer.in_features * 9 // 16 for layer in linears(model).values())


if __name__ == "__main__":
    FIXTURE.write_text(json.dumps(made_by_bitsandbytes(), indent=1) + "\n")
