"""`generate`, `eval` and `serve` of an adapter's directory, and of a run that trained one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("peft")

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.base.model_directory import ADAPTER_CONFIG
from dtrain.checkpoint.huggingface.export import export
from dtrain.commands.cli import main
from dtrain.inference.generate import load
from tests.adapters.test_step_adapters import DORA, SAVED, equal, trained
from tests.running import run
from tests.tiny import save_weights, tiny_recipe, write_model

IDS = torch.arange(24).view(2, 12)
CPU = torch.device("cpu")


def logits(directory, dtype=torch.float64):
    model, tokenizer = load(Path(directory), dtype, CPU)
    assert tokenizer.encode("w5 w7") == [5, 7] and 1 in tokenizer.eos_ids
    with torch.no_grad():
        return model.eval()(IDS)


@pytest.mark.parametrize("lora", [DORA, SAVED])
def test_a_run_a_step_its_adapter_and_its_export_are_one_model(tmp_path, lora):
    recipe = trained(tmp_path, lora)
    directory = recipe.run.directory
    step = directory / "checkpoints" / "step-2"
    export(directory, tmp_path / "merged", "float64")
    expected = logits(tmp_path / "merged")
    assert (expected - logits(tmp_path / "qwen2-tied")).abs().max() > 1e-3
    for one in (directory, step, step / "adapter", directory / "export"):
        assert (logits(one) - expected).abs().max() < 1e-12, one
    assert (logits(directory / "checkpoints" / "step-1") - expected).abs().max() > 1e-6
    shutil.rmtree(directory / "checkpoints")
    assert (logits(directory) - expected).abs().max() < 1e-12


def test_a_run_of_frozen_parts(tmp_path):
    recipe = trained(tmp_path, "train.train_only=['model.layers.1.*']", "checkpoint.export=none")
    export(recipe.run.directory, tmp_path / "whole", "float64")
    assert (logits(recipe.run.directory) - logits(tmp_path / "whole")).abs().max() < 1e-12


def test_a_run_from_scratch_whose_base_is_in_its_steps(tmp_path):
    recipe = run(tiny_recipe(tmp_path, DORA, "train.steps=2", "checkpoint.every=2", "checkpoint.export=final"))
    export(recipe.run.directory, tmp_path / "merged", "float64")
    assert (logits(recipe.run.directory) - logits(tmp_path / "merged")).abs().max() < 1e-12
    # No file holds its base, so that the run's own export is merged too.
    assert (logits(recipe.run.directory / "export") - logits(tmp_path / "merged")).abs().max() < 1e-12
    adapter = recipe.run.directory / "checkpoints" / "step-2" / "adapter"
    assert (logits(adapter) - logits(tmp_path / "merged")).abs().max() < 1e-12  # whose base is in the step around it
    shutil.copytree(adapter, tmp_path / "elsewhere")
    with pytest.raises(UserError, match="names no base"):
        load(tmp_path / "elsewhere", torch.float32, CPU)


def test_a_run_in_4_bits(tmp_path):
    write_model(tmp_path / "qwen2-tied", "qwen2", hidden_size=64, intermediate_size=128)
    save_weights(tmp_path / "qwen2-tied")
    recipe = trained(tmp_path, "lora={rank: 2, quantize: nf4}", "train.dtype=float32")
    export(recipe.run.directory, tmp_path / "merged")
    expected = logits(tmp_path / "merged", torch.float32)
    assert (expected - _of_the_original_base(recipe.run.directory, tmp_path)).abs().max() > 1e-3
    for one in places(recipe.run.directory):
        assert (logits(one, torch.float32) - expected).abs().max() < 5e-5, one


def places(directory):
    """Return the directories that mean the adapter of a run's last step."""
    step = directory / "checkpoints" / "step-2"
    return directory, step, step / "adapter", directory / "export"


def _of_the_original_base(directory, root):
    export(directory, root / "original", original_base=True)
    return logits(root / "original", torch.float32)


@pytest.mark.parametrize("lora", [SAVED, "lora={rank: 2, quantize: nf4}"])
def test_wherever_an_adapter_of_a_run_is_found_it_is_merged_into_one_base(tmp_path, lora):
    """The base in files is float32, and was bfloat16, or that in 4 bits, in training: bit for bit the same files, and
    the same logits to 1e-12. Those of the files, which are merged in float32, are theirs to 1e-6; in 4 bits they are
    rounded to bfloat16."""
    write_model(tmp_path / "qwen2-tied", "qwen2", hidden_size=64, intermediate_size=128)
    save_weights(tmp_path / "qwen2-tied")
    directory = trained(tmp_path, lora, "train.dtype=bfloat16").run.directory
    found, drawn = [], []
    for number, one in enumerate(places(directory)):
        said = export(one, tmp_path / f"merged-{number}", "float64")
        assert "merged into" in said and ("as it was in training" in said) == (one.name == "export")
        found.append(load_file(tmp_path / f"merged-{number}" / "model.safetensors"))
        drawn.append(logits(one))
    assert all(equal(found[0], other) for other in found[1:])
    export(directory / "export", tmp_path / "original", "float64", original_base=True)
    assert not equal(found[0], load_file(tmp_path / "original" / "model.safetensors"))
    assert all((one - drawn[0]).abs().max() < 1e-12 for one in drawn)
    if "nf4" not in lora:
        assert (drawn[0] - logits(tmp_path / "merged-0")).abs().max() < 1e-6
    assert (drawn[0] - logits(tmp_path / "original")).abs().max() > 1e-4
    shutil.copytree(directory / "export", tmp_path / "elsewhere")
    assert "as its run trained" not in export(tmp_path / "elsewhere", tmp_path / "of-elsewhere", "float64")
    assert equal(*(load_file(tmp_path / one / "model.safetensors") for one in ("of-elsewhere", "original")))


def test_an_adapter_s_own_tokenizer_comes_first(tmp_path):
    directory = trained(tmp_path, DORA, "train.steps=1", "scheduler.warmup_steps=0").run.directory
    adapter, base = directory / "export", tmp_path / "qwen2-tied"
    (adapter / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w3"}))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [4]}))
    _, tokenizer = load(adapter, torch.float32, CPU)
    assert tokenizer.directory == adapter and tokenizer.eos_ids == [3, 4, 1]
    (adapter / "tokenizer.json").unlink()
    assert load(adapter, torch.float32, CPU)[1].directory == base


def test_the_commands_take_an_adapter(tmp_path, capsys):
    directory = trained(tmp_path, DORA, "train.steps=1", "scheduler.warmup_steps=0").run.directory
    rows = tmp_path / "prompts.jsonl"
    rows.write_text(json.dumps({"prompt_ids": [3, 4], "answer": "w5"}) + "\n")
    said = []
    for source in (directory / "export", directory):
        assert main(["generate", str(source), "--prompt", "w3 w4", "--max-new-tokens", "5", "--dtype", "float64"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""
    reward = ["--reward", "numeric", "--max-new-tokens", "3", "--json"]
    assert main(["eval", str(directory / "export"), str(rows), *reward]) == 0, capsys.readouterr().err
    shutil.rmtree(tmp_path / "qwen2-tied")
    assert main(["generate", str(directory / "export"), "--prompt", "w3"]) == 1
    error = capsys.readouterr().err
    assert f"{directory / 'export' / ADAPTER_CONFIG}: base_model_name_or_path is" in error
    assert main(["generate", str(directory), "--prompt", "w3"]) == 1
    assert "put that model there again" in capsys.readouterr().err


def test_from_pretrained_takes_an_adapter(tmp_path):
    directory = trained(tmp_path, DORA, "train.steps=1", "scheduler.warmup_steps=0").run.directory
    model = models.from_pretrained(directory / "export", torch.float64).eval()
    with torch.no_grad():
        assert torch.equal(model(IDS), logits(directory))
