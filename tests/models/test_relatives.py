"""Families of one file: transformers loads what is exported; fields that would change the numbers are refused."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.checkpoint.huggingface.write import write_directory
from dtrain.inference.generate import generate
from dtrain.models.building import linear_shapes, module_names
from dtrain.training.preflight import load
from tests.models.oracle import VARIANTS, VOCAB, make, save
from tests.models.towers import TOWERS, make_tower
from tests.problem_lines import shapes

SOME = ["olmo2-biases", "olmo3", "smollm3-window", "granite", "granite4", "ministral3", "phi4-mini"]
LONGROPE = {
    "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, 1.2, 2.0], "long_factor": [2.0, 3.0, 4.0]}
}


@pytest.mark.parametrize("variant", SOME)
@torch.no_grad()
def test_transformers_loads_the_export_with_the_same_logits(variant, tmp_path):
    source = save(make(variant), tmp_path / "source")
    ours = models.from_pretrained(source)
    for parameter in ours.parameters():
        parameter.mul_(1.01)  # as after training
    write_directory(ours, tmp_path / "out", source)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    expected = theirs(ids).logits
    assert (ours(ids) - expected).abs().max() < 2e-5 * expected.abs().max()
    again = dict(models.from_pretrained(tmp_path / "out").named_parameters())
    assert all(torch.equal(again[name], parameter) for name, parameter in ours.named_parameters())


@pytest.mark.parametrize("variant", SOME)
def test_adapters_and_modules_to_save_name_transformers_modules(variant):
    theirs = make(variant)
    config = models.parse_config(VARIANTS[variant]().to_dict())
    layers = {name: tuple(one.weight.shape) for name, one in theirs.named_modules() if isinstance(one, torch.nn.Linear)}
    layers.pop("lm_head")
    assert linear_shapes(config) == layers
    assert sorted(module_names(config)) == sorted(name for name, one in theirs.named_modules() if one._parameters)


@pytest.mark.parametrize("name", TOWERS)
def test_a_text_tower_is_transformers_on_texts_and_its_export_has_the_other_parts(name, tmp_path):
    theirs = make_tower(name)
    source = save(theirs, tmp_path / "source")
    ours = models.from_pretrained(source)
    assert ours.config.is_text_tower
    ids = torch.randint(0, 89, (2, 40), generator=torch.Generator().manual_seed(0))
    more = {"token_type_ids": torch.zeros_like(ids)} if name == "gemma3" else {}
    expected, logits = theirs(input_ids=ids, **more).logits, ours(ids)
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    expected.backward(weights)
    logits.backward(weights)
    wanted = {one: grad.grad for one, grad in theirs.named_parameters() if grad.grad is not None}
    for one, parameter in ours.named_parameters():
        (grad,) = [wanted[called] for called in ours.checkpoint_names(one) if called in wanted]
        assert (parameter.grad - grad).abs().max() < 2e-5 * grad.abs().max(), one

    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(1.01)
        write_directory(ours, tmp_path / "out", source)
        again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32)
        expected = again(input_ids=ids, **more).logits
        assert (ours(ids) - expected).abs().max() < 2e-5 * expected.abs().max()
    trained = {called for one, _ in ours.named_parameters() for called in ours.checkpoint_names(one)}
    others = {one: value for one, value in again.named_parameters() if one not in trained}
    before = dict(theirs.named_parameters())
    assert others and all(torch.equal(before[one], value) for one, value in others.items())


@torch.no_grad()
def test_a_flat_config_of_qwen2_5_vl_and_whole_numbers_among_the_other_parts(tmp_path):
    """The first Qwen2.5-VL files describe the text beside the rest; a tower may hold buffers that are no floats."""
    source = save(make_tower("qwen2.5-vl"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    flat = {key: value for key, value in config.items() if key not in ("text_config", "tie_word_embeddings")}
    text = {key: value for key, value in config["text_config"].items() if key not in ("model_type", "architectures")}
    (source / "config.json").write_text(json.dumps(text | flat))
    weights = load_file(source / "model.safetensors")
    steps, mask = torch.arange(5), torch.tensor([True, False])
    save_file(weights | {"visual.steps": steps, "visual.mask": mask}, source / "model.safetensors", {"format": "pt"})
    ours = models.from_pretrained(source)
    write_directory(ours, tmp_path / "out", source)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == weights.keys() | {"visual.steps", "visual.mask"}
    assert torch.equal(written["visual.steps"], steps) and torch.equal(written["visual.mask"], mask)

    (source / "model.safetensors").unlink()  # of a model that started from its config alone
    write_directory(ours, tmp_path / "text", source)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32)
    ids = torch.randint(0, 89, (2, 40), generator=torch.Generator().manual_seed(0))
    expected = theirs(ids).logits
    assert type(theirs).__name__ == "Qwen2ForCausalLM"
    assert (ours(ids) - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "fp8", "weight_block_size": None}, "fp8 weights are not trained: take the model in bf"),
        ({"quant_method": "awq", "bits": 4}, "awq weights are not trained: take the model in bfloat16, by the same"),
        ({"quant_method": "gptq", "bits": 4}, "-GPTQ-Int4"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "compressed-tensors weights are not"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes weights in 8 bits are not trained"),
    ],
)
def test_weights_that_cannot_be_trained_are_refused_with_what_can(section, message):
    with pytest.raises(UserError) as error:
        models.parse_config({**TOWERS["ministral3"]().to_dict(), "quantization_config": section})
    assert message in str(error.value) and "-BF16" in str(error.value)


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv 8.0: not a field"),
        ("olmo2", {"layer_types": ["sliding_attention"] * 3}, "every layer is full_attention"),
        ("olmo3", {"rope_parameters": {"rope_type": "yarn"}}, "must be nested under full_attention and sliding"),
        ("olmo3", {"rope_theta": 10_000.0}, "say it in rope_parameters, under full_attention and under sliding"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers [1, 0]: must be a list of 0 and 1, one a layer"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 3}, "no sliding_window is set"),
        ("granite", {"logits_scaling": 0}, "logits_scaling 0: must be a number above 0"),
        ("granite4", {"num_local_experts": 8}, "num_local_experts 8: a mixture of experts; only Granite 4's dense"),
        ("granite4", {"layer_types": ["mamba", "attention", "mamba"]}, "layers of mamba; only Granite 4's dense"),
        ("granite4", {"position_embedding_type": None}, "position_embedding_type 'none' is not implemented"),
        ("granite", {"num_local_experts": 8}, "num_local_experts 8: not a field"),
        ("qwen3.5", {"hidden_act": "gelu"}, "hidden_act 'gelu': only 'silu'"),
        ("phi3", {"is_causal": False}, "is_causal False: only causal"),
        ("granite4", {"attention_multiplier": None}, "attention_multiplier null: must be a number"),
        ("granite4", {"mlp_bias": True}, "mlp_bias True: the MLPs"),
        (
            "phi4-mini",
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope type 'yarn' is not implemented; there are: ",
        ),
        ("phi4-mini", {"partial_rotary_factor": 1.0, **LONGROPE}, "has 3 numbers for the 6 pairs that are rotated"),
        ("phi4-mini", {"rope_parameters": {"rope_type": "su"}}, "short_factor None: must be a list of numbers"),
        ("phi4-mini", {"rope_parameters": {**LONGROPE["rope_parameters"], "beta": 2}}, "beta 2: not a field"),
    ],
)
def test_refused_by_name(variant, changes, message):
    with pytest.raises(UserError) as error:
        models.parse_config({**VARIANTS[variant]().to_dict(), **changes})
    assert message in str(error.value)


def test_longrope_refuses_what_its_short_factors_are_not_for(tmp_path):
    """transformers takes other positions for all of a batch with one row beyond the original length of 96."""
    model = models.from_pretrained(save(make("phi4-mini"), tmp_path))
    assert model.config.max_position_embeddings == 96
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, VOCAB, (1, 97), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        short, long = theirs(ids[:, :96]).logits, theirs(ids).logits[:, :96]
        assert (model(ids[:, :96]) - short).abs().max() < 2e-5 < 1e-2 < (long - short).abs().max()
    with pytest.raises(ValueError, match="97 tokens, and with LongRoPE this model takes documents of at most 96"):
        model(ids)
    asked = [ids[0, :90].tolist()]
    with pytest.raises(UserError, match="may come to 97 tokens.*takes at most 96. Lower max_new_tokens=7"):
        generate(model, asked, max_new_tokens=7, eos_ids=[])
    assert len(generate(model, asked, max_new_tokens=6, eos_ids=[])[0]) == 6
    paths = {"model": {"path": str(tmp_path)}, "data": {"train": {"path": "none"}}}
    found = [shapes(load(paths, ["train.steps=1", f"data.max_length={length}"]), 1) for length in (96, 97)]
    assert found[0] == [] and found[1] == [
        "data.max_length=97: the model takes documents of at most 96 tokens. Beyond, it has another table "
        "of positions (LongRoPE) or none. Set data.max_length=96 or less."
    ]
