"""Models as GGUF files, read back by transformers: the export's logits, hyper-parameters, types, and refusals."""

import json
import math
import shutil

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.checkpoint.gguf import export as gguf_file
from dtrain.checkpoint.gguf.export import _write_model, export_gguf
from dtrain.checkpoint.huggingface.export import ModelExport, export
from dtrain.checkpoint.huggingface.merged import full_weights
from dtrain.checkpoint.huggingface.write import layout_of
from dtrain.models.read_config import parse_config
from tests.checkpoint.gguf.models import ROWS, SHAPES, logits, make, model_of, values
from tests.running import run
from tests.tiny import tiny_recipe

IDS = torch.arange(40).view(2, 20) * 7 % ROWS


def difference(file, directory, rounded=lambda weight: weight):
    """How far transformers' logits of a file are from those of the model in `directory`, whose matrices are `rounded`,
    and how wide these are."""
    model = models.from_pretrained(directory)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(rounded(parameter))
        wanted = model(IDS)
    return (logits(model_of(file, directory), IDS) - wanted).abs().max().item(), wanted.std().item()


@pytest.mark.parametrize("family", SHAPES)
def test_a_file_of_every_family_has_the_model_s_logits(tmp_path, family):
    make(tmp_path / "model", family, tie_word_embeddings=family in ("qwen3", "gemma3"))
    assert "weights of" in export_gguf(tmp_path / "model", tmp_path / "m.gguf", "f32")
    off, width = difference(tmp_path / "m.gguf", tmp_path / "model")
    assert off < 1e-5 and width > 0.1


def blocks(weight):
    """A matrix [out, in] that is q8_0 where its rows are blocks of 32, else float16."""
    if weight.shape[1] % 32:
        return weight.half()
    kind = GGMLQuantizationType.Q8_0
    return torch.from_numpy(dequantize(quantize(weight.detach().numpy(), kind), kind))


TYPES = {"f16": (1, torch.Tensor.half), "bf16": (32, torch.Tensor.bfloat16), "q8_0": (7, blocks)}


@pytest.mark.parametrize("kind", TYPES)
def test_a_type_rounds_matrices_and_nothing_else(tmp_path, kind):
    number, rounded = TYPES[kind]
    make(tmp_path / "model", "llama", tie_word_embeddings=False)
    export_gguf(tmp_path / "model", tmp_path / "m.gguf", kind)
    assert values(tmp_path / "m.gguf")["general.file_type"] == number
    assert difference(tmp_path / "m.gguf", tmp_path / "model", rounded)[0] < 1e-5
    assert difference(tmp_path / "m.gguf", tmp_path / "model")[0] > 1e-4


def test_hyper_parameters_are_those_of_config_json(tmp_path):
    make(tmp_path / "gemma", "gemma3", layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    export_gguf(tmp_path / "gemma", tmp_path / "g.gguf")
    header = values(tmp_path / "g.gguf")
    wanted = {
        "context_length": 128,
        "embedding_length": 32,
        "block_count": 3,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.sliding_window": 6,
        "attention.sliding_window_pattern": [True, False, True],
        "rope.freq_base": 10000.0,
        "rope.freq_base_swa": 100.0,
        "rope.dimension_count": 16,
    }
    assert {key: header[f"gemma3.{key}"] for key in wanted} == wanted
    assert math.isclose(header["gemma3.attention.layer_norm_rms_epsilon"], 1e-6, rel_tol=1e-6)
    assert header["general.file_type"] == 1 and len(header["tokenizer.ggml.tokens"]) == ROWS


@pytest.mark.parametrize(
    ("rope", "keys"),
    [
        ({"rope_type": "linear"}, {"type": "linear", "factor": 4.0}),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 32},
            {"type": "yarn", "original_context_length": 32, "attn_factor": 1.0},
        ),
    ],
)
def test_rotary_scaling_is_told(tmp_path, rope, keys):
    make(tmp_path / "model", "qwen3", rope_parameters={**rope, "factor": 4.0, "rope_theta": 100.0})
    export_gguf(tmp_path / "model", tmp_path / "m.gguf")
    header = values(tmp_path / "m.gguf")
    assert {key: header[f"qwen3.rope.scaling.{key}"] for key in keys} == keys


def test_rotary_factors_are_tensors(tmp_path):
    make(tmp_path / "llama", "llama3")
    export_gguf(tmp_path / "llama", tmp_path / "l.gguf")
    (factors,) = [tensor for tensor in GGUFReader(tmp_path / "l.gguf").tensors if tensor.name == "rope_freqs.weight"]
    assert factors.data.min() == 1 and factors.data.max() == 8  # fast pairs stay, slow ones are divided by the factor
    factors = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 9.0]}
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.5, **factors}
    make(tmp_path / "phi", "phi3", rope_parameters=rope, original_max_position_embeddings=32)
    export_gguf(tmp_path / "phi", tmp_path / "p.gguf")
    named = {tensor.name: tensor.data.tolist() for tensor in GGUFReader(tmp_path / "p.gguf").tensors}
    assert [named[f"rope_factors_{kind}.weight"] for kind in ("short", "long")] == [*factors.values()]
    assert values(tmp_path / "p.gguf")["phi3.context_length"] == 128


def test_a_window_that_llama_cpp_does_not_have_is_the_context_length(tmp_path):
    make(tmp_path / "model", "mistral", sliding_window=9)
    assert "no sliding window" in export_gguf(tmp_path / "model", tmp_path / "m.gguf")
    assert values(tmp_path / "m.gguf")["llama.context_length"] == 9


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("olmo3", {}, "Olmo3ForCausalLM: no GGUF file is written of it"),
        ("qwen3-moe", {}, "Qwen3MoeForCausalLM: no GGUF file.*dtrain export RUN DIR"),
        ("llama", {"hidden_act": "gelu"}, "the activation gelu"),
        ("qwen3", {"attention_bias": True}, "a bias of o_proj"),
        ("qwen2", {"head_dim": 16}, "heads of 64 elements in all beside a hidden size of 32"),
        ("gemma3", {"query_pre_attn_scalar": 20}, "multiplied by 0.22"),
        ("qwen3", {"rope_parameters": SHAPES["llama3"]["rope_parameters"]}, "rotary scaling llama3"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused_by_name(tmp_path, family, fields, message):
    make(tmp_path / "model", family, **fields)
    with pytest.raises(UserError, match=f"(?s){message}"):
        export_gguf(tmp_path / "model", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_a_file_is_whole_or_absent(tmp_path, monkeypatch):
    directory = make(tmp_path / "model")
    (tmp_path / "there.gguf").write_text("mine")
    with pytest.raises(UserError, match="there.gguf is already there"):
        export_gguf(directory, tmp_path / "there.gguf")
    with pytest.raises(UserError, match="--type q4: choose one of f16, bf16, f32, q8_0"):
        export_gguf(directory, tmp_path / "m.gguf", "q4")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("gguf.GGUFWriter.write_tensor_data", full)
        with pytest.raises(UserError, match="m.gguf: No space left"):
            export_gguf(directory, tmp_path / "m.gguf")
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'dtrain\[gguf\]'"):
        export_gguf(directory, tmp_path / "m.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "there.gguf"]


def test_a_value_beyond_float16_is_no_infinity(tmp_path):
    directory = make(tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][3, 4] = 1e5
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UserError, match="token_embd.weight has values that float16 does not: choose --type bf16"):
        export_gguf(directory, tmp_path / "m.gguf")
    export_gguf(directory, tmp_path / "m.gguf", "bf16")


def test_of_a_multimodal_model_the_text_part_is_written(tmp_path):
    directory = make(tmp_path / "model", "gemma3")
    text = json.loads((directory / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    tensors = load_file(directory / "model.safetensors")
    tower = {name.replace("model.", "language_model.model.", 1): tensor for name, tensor in tensors.items()}
    shutil.copytree(directory, tmp_path / "tower")
    (tmp_path / "tower" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    save_file({**tower, "vision_tower.x": torch.ones(3)}, tmp_path / "tower" / "model.safetensors")
    assert "the text part alone" in export_gguf(tmp_path / "tower", tmp_path / "m.gguf", "f32")
    assert difference(tmp_path / "m.gguf", directory)[0] < 1e-5


def test_of_a_model_with_its_tower_the_text_part_is_written(tmp_path):
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": json.loads((make(tmp_path / "model", "gemma3") / "config.json").read_text()),
        "vision_config": {"image_size": 64, "hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 1},
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": True,
    }
    written = []
    for vision in (True, False):
        model = models.build(parse_config(config, vision=vision))
        models.init_weights(model, 0)
        layout = layout_of(tmp_path / "model", has_tower=vision)
        entries = [layout.entry(model, weight, None) for weight in full_weights(model).values()]
        _write_model(ModelExport("", model, layout, entries), tmp_path / "m.gguf", "f32")
        written.append((tmp_path / "m.gguf").read_bytes())
        (tmp_path / "m.gguf").unlink()
    assert written[0] == written[1]


def test_a_run_s_newest_checkpoint_is_written(tmp_path):
    directory = make(tmp_path / "qwen3-tied", "qwen3")
    shape = ["model.init=pretrained", f"model.path={directory}", "train.steps=1", "scheduler.warmup_steps=0"]
    run_directory = run(tiny_recipe(tmp_path, *shape, "checkpoint.every=1")).run.directory
    assert "step 1 of" in export_gguf(run_directory, tmp_path / "m.gguf", "f32")
    export(run_directory, tmp_path / "export", "float32")
    assert difference(tmp_path / "m.gguf", tmp_path / "export")[0] < 1e-5
    assert difference(tmp_path / "m.gguf", directory)[0] > 1e-3
