"""Files of models of the transformers library: read, trained, exported, and read by transformers again."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.huggingface.read import check_fit, read_weights
from dtrain.checkpoint.huggingface.safetensor_files import WeightFiles
from dtrain.checkpoint.huggingface.write import write_directory

IDS = torch.arange(24).view(2, 12) % 67 + 3
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
KINDS = {
    "llama": {},
    "cohere2": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v3": EXPERTS,  # files have the experts one by one
    "gpt_neox": {"tie_word_embeddings": False},  # other names of decoder and head
    "phi": {},  # a head with a bias
}


def save_model(kind, directory, **changes):
    """Write a model with random weights as transformers does, and return it."""
    config = hf.CONFIG_MAPPING[kind](**{**SIZES, **KINDS[kind], **changes})
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    return model


def read(directory, **options):
    """Read a model of transformers into dtrain, float64."""
    config = models.read_config(directory, implementation="transformers", **options)
    model = models.build(config, torch.float64)
    read_weights(model, directory)
    return model


def change(model):
    """Change all weights a little, as training does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def logits(directory):
    """Return transformers' logits of a directory, float64, and check that all of its tensors are used."""
    options = {"dtype": torch.float64, "experts_implementation": "eager", "output_loading_info": True}
    model, info = hf.AutoModelForCausalLM.from_pretrained(directory, **options)
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(IDS, use_cache=False).logits


@pytest.mark.parametrize("kind", KINDS)
def test_read_and_written_as_transformers_does(tmp_path, kind):
    save_model(kind, tmp_path / "source")
    model = read(tmp_path / "source")
    with torch.no_grad():
        assert (model(IDS) - logits(tmp_path / "source")).abs().max() < 1e-5
        change(model)
        write_directory(model, tmp_path / "out", tmp_path / "source", ranks=Ranks(single_process=True))
        assert (model(IDS) - logits(tmp_path / "out")).abs().max() < 1e-5
    out, source = load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "source/model.safetensors")
    assert {name: value.shape for name, value in out.items()} == {name: value.shape for name, value in source.items()}


def edit_weights(directory, edit):
    """Change the tensors of a file in place by a function."""
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def test_experts_that_do_not_fit_are_reported_by_their_names_in_files(tmp_path):
    save_model("deepseek_v3", tmp_path)
    expert = "model.layers.1.mlp.experts"

    def edit(tensors):
        del tensors[f"{expert}.2.up_proj.weight"]
        tensors[f"{expert}.4.down_proj.weight"] = tensors[f"{expert}.3.down_proj.weight"].clone()
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:16].clone()
        tensors["model.extra.weight"] = torch.ones(2)

    edit_weights(tmp_path, edit)
    model = models.build(models.read_config(tmp_path, implementation="transformers"), device="meta")
    with pytest.raises(UserError) as error:
        check_fit(model, WeightFiles(tmp_path))
    assert str(error.value).splitlines()[1:] == [
        f"  missing: {expert}.2.up_proj.weight",
        "  shape: model.norm.weight is [16], the model has [32]",
        "  unexpected: model.extra.weight",
        f"  unexpected: {expert}.4.down_proj.weight",
    ]


def test_layers_that_predict_further_tokens_are_not_read(tmp_path):
    save_model("deepseek_v3", tmp_path)

    def edit(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            tensors[name.replace("layers.1.", "layers.2.")] = tensors[name].clone()

    edit_weights(tmp_path, edit)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    with torch.no_grad():
        expected = hf.AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float64, experts_implementation="eager"
        )
        assert (read(tmp_path)(IDS) - expected(IDS).logits).abs().max() < 1e-5


def test_a_head_that_differs_from_its_embedding_is_refused(tmp_path):
    save_model("llama", tmp_path, tie_word_embeddings=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(UserError, match="differ: model.embed_tokens.weight and lm_head.weight"):
        read(tmp_path)


def test_a_classifier_loads_in_transformers(tmp_path):
    save_model("phi", tmp_path / "source")
    model = read(tmp_path / "source", labels=3)
    with torch.no_grad():
        model.score.weight.copy_(torch.randn(3, 32))
        write_directory(model, tmp_path / "out", tmp_path / "source", ranks=Ranks(single_process=True))
        loaded, info = hf.AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "out", dtype=torch.float64, output_loading_info=True
        )
        assert type(loaded).__name__ == "PhiForSequenceClassification" and not any(info.values())
        assert (model(IDS)[:, -1] - loaded.eval()(IDS).logits).abs().max() < 1e-5
        again = read(tmp_path / "out", labels=0)
        assert torch.equal(again(IDS), model(IDS))
    with pytest.raises(UserError, match="transformers has no Cohere2ForSequenceClassification"):
        save_model("cohere2", tmp_path / "other")
        read(tmp_path / "other", labels=3)
