"""A family is one file and one row of `FAMILIES`: a new one trains alike on one process and two, and is exported."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.checkpoint.huggingface.model_files import has_untrained_parts
from dtrain.models.common.decoder import CausalLM
from dtrain.models.registry import FAMILIES, Family, architecture_of_model_type, load_class
from dtrain.parallel.parallelize import PARALLIZE_FUNCTIONS, _parallelize_llama
from tests.models.test_families import relative
from tests.running import run, trajectory, weights
from tests.tiny import VOCAB, tiny_recipe, write_model

FILE = Path(__file__).with_name("centred_llama.py")
NAME = "CentredLlamaForCausalLM"
MOST_LINES = 80
CHANGES = {"architectures": [NAME], "model_type": "centred_llama", "layer_norm_eps": 1e-3}


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, NAME, Family("centred_llama", "tests.models.centred_llama"))
    write_model(tmp_path / "llama-untied", "llama", tied=False, **CHANGES)
    return tmp_path


def recipe_of(root, name, *overrides):
    shape = ["train.steps=2", "scheduler.warmup_steps=0", "checkpoint.every=2", "checkpoint.export=final"]
    return tiny_recipe(root, *shape, *overrides, family="llama", tied=False, name=name)


def in_transformers(directory):
    """transformers' Llama with nn.LayerNorm in the place of its norms, and one after its embeddings."""
    config = json.loads((directory / "config.json").read_text())
    sizes = {key: value for key, value in config.items() if key not in CHANGES}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attn_implementation="eager")).double()

    def norm():
        return torch.nn.LayerNorm(config["hidden_size"], config["layer_norm_eps"], dtype=torch.float64)

    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = norm(), norm()
    model.model.norm = norm()
    tensors = load_file(directory / "model.safetensors")
    after = norm()
    after.load_state_dict({part: tensors.pop(f"model.embed_norm.{part}") for part in ("weight", "bias")})
    model.load_state_dict(tensors)
    model.model.embed_tokens.register_forward_hook(lambda module, inputs, out: after(out))
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_every_row_has_its_class_and_reader_in_one_file(name):
    row, family = FAMILIES[name], load_class(name)
    assert issubclass(family, CausalLM) and family.__name__ == name and family.__module__ == row.module
    assert family.read.__func__ is not CausalLM.read.__func__
    assert architecture_of_model_type(row.model_type) == name
    assert (row.text_tower is not None) == name.endswith("ForConditionalGeneration")
    assert has_untrained_parts({"architectures": [name]}) == (row.text_tower is not None)
    assert row.text_tower is None or architecture_of_model_type(row.text_tower).endswith("ForCausalLM")


def test_a_family_of_llama_s_class_is_parallelized_as_llama():
    assert PARALLIZE_FUNCTIONS[load_class("MistralForCausalLM")] is _parallelize_llama


def test_it_is_one_file_of_few_lines():
    assert len(FILE.read_text().splitlines()) <= MOST_LINES


def test_without_its_row_it_is_refused_and_its_fields_are_its_own(root, monkeypatch):
    path = root / "llama-untied"
    assert models.read_config(path).rms_norm_eps == 1e-3
    with pytest.raises(UserError, match=f"{NAME} with\n  - layer_norm_eps 'x': must be a number"):
        models.parse_config({**json.loads((path / "config.json").read_text()), "layer_norm_eps": "x"})
    monkeypatch.delitem(FAMILIES, NAME)
    with pytest.raises(UserError, match=f"architecture {NAME} is not supported. For a family of your own, set"):
        models.read_config(path)


def test_two_ranks_train_as_one_and_the_export_is_what_transformers_computes(root):
    alone = run(recipe_of(root, "one"))
    together = run(recipe_of(root, "two", "parallel.tp=2", "train.micro_batch=4"), 2)
    assert len(trajectory(alone)) == 2
    for expected, row in zip(trajectory(alone), trajectory(together), strict=True):
        assert row == pytest.approx(expected, rel=1e-12)
    held = weights(together, 2)
    for name, expected in weights(alone, 2).items():
        assert name.startswith("optim.") or relative(held[name], expected) < 1e-11, name

    exports = [Path(recipe.run.dir) / recipe.run.name / "export" for recipe in (alone, together)]
    ids = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    for export in exports:
        with torch.no_grad():
            expected = in_transformers(export)(ids).logits
            logits = models.from_pretrained(export, dtype=torch.float64)(ids)
        assert relative(logits, expected) < 1e-7  # transformers' rotary tables are in float32
