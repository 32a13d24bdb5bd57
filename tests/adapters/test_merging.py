"""`dtrain export` of adapters: merged bit for bit as PEFT merges, alone, and folded."""

import json

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("peft")

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.base.model_directory import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from dtrain.checkpoint.huggingface.export import export
from dtrain.checkpoint.huggingface.merged import merge_adapter
from tests.adapters.by_peft import IDS, SHAPES, TIED, load_adapter, load_base, logits, save_adapter, save_base
from tests.adapters.test_step_adapters import DORA, SAVED, equal, trained
from tests.running import run
from tests.tiny import save_weights, tiny_recipe, write_model

CASES = [
    ("qwen3", "lora"),
    ("qwen3", "rslora"),
    ("qwen2", "patterns"),
    ("llama3", "saved"),
    ("gemma3", "regex"),
    ("qwen2", "dora patterns"),
]


@pytest.mark.parametrize("rank", [3, 300])
def test_rows_are_merged_as_the_whole_matrix_is(rank):
    weight, a, b = torch.randn(2050, 200), torch.randn(rank, 200), torch.randn(2050, rank)
    assert torch.equal(merge_adapter(weight, a, b, 0.7, None, torch.float32), weight + (b @ a) * 0.7)
    whole, lengths = weight + (b @ a) * 0.7, torch.rand(2050)
    expected = (lengths / torch.linalg.norm(whole, dim=1))[:, None] * whole
    assert torch.equal(merge_adapter(weight, a, b, 0.7, lengths, torch.bfloat16), expected.bfloat16())


@pytest.mark.trap(
    "DoRA's magnitude is lost in a merge",
    "unslothai/unsloth-zoo PR#828",
    "another model than was trained",
    "PEFT's merged weights to the bit",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("variant", "shape"), CASES)
def test_merged_weights_are_peft_s_bit_for_bit(tmp_path, variant, shape, dtype):
    base = save_base(tmp_path / "base", variant, dtype)
    theirs = save_adapter(base, tmp_path / "adapter", dtype, **SHAPES[shape])
    said = export(tmp_path / "adapter", tmp_path / "out")
    assert said == f"the adapter {tmp_path / 'adapter'}, merged into {base}"
    expected = theirs.merge_and_unload().state_dict()
    found = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(base / "model.safetensors")
    assert found.keys() == before.keys()
    assert any(not torch.equal(found[name], before[name]) for name in found)
    for name, tensor in found.items():
        assert tensor.dtype == dtype and torch.equal(tensor, expected[name].to(dtype)), name


@pytest.mark.trap(
    "config.json still says tied after a merge",
    "huggingface/peft #2777",
    "the trained head is overwritten",
    "merged as one tensor; transformers gives the same logits",
)
def test_a_tied_embedding_is_merged_as_one(tmp_path):
    base = save_base(tmp_path / "base", "qwen3-tied")
    theirs = save_adapter(base, tmp_path / "adapter", **TIED)
    export(tmp_path / "adapter", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == load_file(base / "model.safetensors").keys() and "lm_head.weight" not in found
    assert (logits(load_base(tmp_path / "out")) - logits(theirs)).abs().max() < 5e-5


@pytest.mark.slow
def test_a_vision_tower_goes_along(tmp_path):
    base = save_base(tmp_path / "base", "gemma3-vision")
    names = [name for name, _ in load_base(base).named_modules() if "language_model" in name]
    listed = [name for name in names if name.endswith(("q_proj", "down_proj"))]
    theirs = save_adapter(base, tmp_path / "adapter", target_modules=listed)
    export(tmp_path / "adapter", tmp_path / "out")
    before, found = (load_file(path / "model.safetensors") for path in (base, tmp_path / "out"))
    assert before.keys() == found.keys()
    assert (logits(load_base(tmp_path / "out")) - logits(theirs)).abs().max() < 5e-5


@pytest.mark.parametrize("shape", ["lora", "rslora", "patterns", "regex"])
def test_folded_adapters_say_the_same_without_a_scale(tmp_path, shape):
    base = save_base(tmp_path / "base", "qwen2")
    theirs = save_adapter(base, tmp_path / "adapter", **SHAPES[shape])
    assert "folded" in export(tmp_path / "adapter", tmp_path / "out", form="folded")
    config = json.loads((tmp_path / "out" / ADAPTER_CONFIG).read_text())
    assert config["r"] == config["lora_alpha"] and not config["use_rslora"]
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    # What reads lora_alpha and a tensor's own rank finds a scale of 1 everywhere.
    ranks = {t.shape[0] for n, t in load_file(tmp_path / "out" / ADAPTER_WEIGHTS).items() if "lora_A" in n}
    assert ranks == {config["r"]}
    assert (logits(load_adapter(base, tmp_path / "out")) - logits(theirs)).abs().max() < 5e-5
    model = models.from_pretrained(tmp_path / "out").eval()
    assert (model(IDS) - logits(theirs)).abs().max() < 5e-5


def test_an_adapter_is_copied(tmp_path):
    base = save_base(tmp_path / "base", "qwen3")
    (base / "tokenizer.json").write_text("{}")
    save_adapter(base, tmp_path / "adapter")
    export(tmp_path / "adapter", tmp_path / "out", form="adapter")
    assert equal(*(load_file(tmp_path / name / ADAPTER_WEIGHTS) for name in ("adapter", "out")))
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    export(tmp_path / "adapter", tmp_path / "half", "bfloat16", form="adapter")
    assert {one.dtype for one in load_file(tmp_path / "half" / ADAPTER_WEIGHTS).values()} == {torch.bfloat16}


def test_mistakes_are_named(tmp_path):
    base = save_base(tmp_path / "base", "qwen3")
    save_adapter(base, tmp_path / "dora", use_dora=True)
    save_adapter(base, tmp_path / "saved", modules_to_save=["lm_head"])
    for name, words in (("dora", "DoRA's magnitudes"), ("saved", "modules_to_save")):
        with pytest.raises(UserError, match=f"--folded: the adapter has .*{words}.*: export it --merged"):
            export(tmp_path / name, tmp_path / "out", form="folded")
    with pytest.raises(UserError, match="--adapter: .*base is a whole model"):
        export(base, tmp_path / "out", form="adapter")
    with pytest.raises(UserError, match="--original-base says what --merged merges into"):
        export(tmp_path / "dora", tmp_path / "out", form="adapter", original_base=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lora", [DORA, SAVED])
def test_a_run_s_step_is_merged_alone_and_loaded_by_peft(tmp_path, lora):
    recipe = trained(tmp_path, lora, "train.dtype=float32", ranks=2)
    base, directory = tmp_path / "qwen2-tied", recipe.run.directory
    assert export(directory, tmp_path / "merged") == f"step 2 of {directory}, its adapter merged into {base}"
    export(directory, tmp_path / "adapter", form="adapter")
    theirs = load_adapter(base, tmp_path / "adapter")
    assert (tmp_path / "adapter" / "tokenizer.json").is_file()
    expected = theirs.merge_and_unload().state_dict()
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert found.keys() == load_file(base / "model.safetensors").keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    export(directory / "checkpoints" / "step-1", tmp_path / "first")
    assert not equal(load_file(tmp_path / "first" / "model.safetensors"), found)
    export(directory / "export", tmp_path / "of-export")
    assert equal(load_file(tmp_path / "of-export" / "model.safetensors"), found)


def test_the_base_is_the_one_that_was_trained(tmp_path):
    recipe = trained(tmp_path, SAVED, "train.dtype=bfloat16")
    base, directory = tmp_path / "qwen2-tied", recipe.run.directory
    export(directory, tmp_path / "merged")
    export(directory, tmp_path / "original", original_base=True)
    before, merged, original = (
        load_file(path / "model.safetensors") for path in (base, tmp_path / "merged", tmp_path / "original")
    )
    norm = "model.norm.weight"
    before[norm] += 0.0
    bias = "model.layers.0.self_attn.q_proj.bias"
    for name in (norm, bias):
        assert torch.equal(merged[name], before[name].bfloat16().float()) and torch.equal(original[name], before[name])
    name = "model.layers.0.self_attn.q_proj.weight"
    moved = merged[name] - before[name].bfloat16().float()
    assert torch.allclose(moved, original[name] - before[name], atol=1e-6) and not torch.equal(
        merged[name], original[name]
    )


def test_another_base_is_refused(tmp_path):
    recipe = trained(tmp_path, SAVED, "train.steps=1", "scheduler.warmup_steps=0")
    base, directory = tmp_path / "qwen2-tied", recipe.run.directory
    save_weights(base, seed=1)
    with pytest.raises(UserError, match="merging onto a base that differs: .*qwen2-tied"):
        export(directory, tmp_path / "out")
    export(directory, tmp_path / "alone", form="adapter")
    (base / "model.safetensors").unlink()
    with pytest.raises(UserError, match="there are no weights at model.path=.*put that model there again"):
        export(directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_from_scratch_has_its_base_in_its_steps(tmp_path):
    recipe = run(tiny_recipe(tmp_path, DORA, "train.steps=2", "checkpoint.every=2", family="qwen2"))
    assert "the base that the step has" in export(recipe.run.directory, tmp_path / "out")
    merged = models.from_pretrained(tmp_path / "out", torch.float64)
    export(recipe.run.directory, tmp_path / "adapter", form="adapter")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert merged.state_dict()[name].dtype == torch.float64
    with pytest.raises(UserError, match="--original-base: the base of .* is only in its steps"):
        export(recipe.run.directory, tmp_path / "again", original_base=True)


def test_frozen_weights_come_from_the_base(tmp_path):
    recipe = trained(tmp_path, "train.train_only=['model.layers.1.*']", "train.dtype=float32")
    base, directory = tmp_path / "qwen2-tied", recipe.run.directory
    with pytest.raises(UserError, match="--merged: .* trained no adapter"):
        export(directory, tmp_path / "out", form="merged")
    assert export(directory, tmp_path / "out") == f"step 2 of {directory}"
    before, found, live = (
        load_file(path / "model.safetensors") for path in (base, tmp_path / "out", directory / "export")
    )
    assert equal(found, live)
    moved = {name for name in found if not torch.equal(found[name], before[name])}
    assert moved and all(name.startswith("model.layers.1.") for name in moved)


@pytest.mark.trap(
    "an adapter of a base in 4 bits merged into the whole base",
    "huggingface/trl PR#1193",
    "the adapter corrects errors that are not there",
    "merged into the weights that it was trained with",
)
def test_nf4_runs_are_merged_into_what_they_computed_with(tmp_path):
    from dtrain.adapters.nf4 import dequantize, quantize

    sizes = {"hidden_size": 64, "intermediate_size": 128}
    write_model(tmp_path / "qwen2-tied", "qwen2", **sizes)
    save_weights(tmp_path / "qwen2-tied")
    recipe = trained(tmp_path, "lora={rank: 2, quantize: nf4, target: [q_proj]}", "train.dtype=float32")
    directory = recipe.run.directory
    export(directory, tmp_path / "merged")
    export(directory, tmp_path / "original", original_base=True)
    before, merged, original = (
        load_file(path / "model.safetensors")
        for path in (tmp_path / "qwen2-tied", tmp_path / "merged", tmp_path / "original")
    )
    for name in before:
        if name.endswith("_proj.weight"):
            held = dequantize(*quantize(before[name]), torch.float32)
            is_adapted = "q_proj" in name
            assert (
                torch.equal(merged[name], held) != is_adapted
                and torch.equal(original[name], before[name]) != is_adapted
            )
            assert torch.allclose(merged[name] - held, original[name] - before[name], atol=1e-6)
        else:
            assert torch.equal(merged[name], before[name])
    found = models.from_pretrained(tmp_path / "merged")
    assert found(IDS).isfinite().all()


def test_an_adapter_of_a_base_that_is_in_4_bits(tmp_path):
    from dtrain.adapters.nf4 import dequantize
    from tests.adapters.test_nf4 import base as make_base, stored_as_bitsandbytes

    floats = make_base(tmp_path)
    base, held = stored_as_bitsandbytes(floats, tmp_path / "bnb", True)
    save_adapter(floats, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    file = tmp_path / "adapter" / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}))
    export(tmp_path / "adapter", tmp_path / "merged", "float32")
    found, plain = (load_file(path / "model.safetensors") for path in (tmp_path / "merged", floats))
    assert found.keys() == plain.keys()
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    for name, (codes, scales) in held.items():
        dense = dequantize(codes, scales, torch.float32)
        is_adapted = name.endswith(("q_proj", "down_proj"))
        assert torch.equal(found[f"{name}.weight"], dense) != is_adapted, name
    whole = models.from_pretrained(tmp_path / "merged").eval()
    mine = models.from_pretrained(tmp_path / "adapter").eval()
    assert (mine(IDS) - whole(IDS)).abs().max() < 5e-5


def test_the_command(tmp_path, capsys):
    base = save_base(tmp_path / "base", "qwen3")
    save_adapter(base, tmp_path / "adapter")
    from dtrain.commands.cli import main

    assert main(["export", str(tmp_path / "adapter"), str(tmp_path / "out"), "--folded"]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {tmp_path / 'out'} from the adapter {tmp_path / 'adapter'}")
    assert main(["export", str(tmp_path / "adapter"), str(tmp_path / "two"), "--original-base", "--adapter"]) == 1
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "adapter"), str(tmp_path / "two"), "--merged", "--adapter"])
    assert main(["export", str(tmp_path / "adapter"), str(tmp_path / "two")]) == 0
    assert "merged into" in capsys.readouterr().out
