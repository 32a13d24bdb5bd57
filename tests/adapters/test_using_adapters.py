"""`generate`, `eval` and `serve` of an adapter's directory, and of a run that trained one."""

import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft")

from dtrain import models
from dtrain.checkpoint.export import export
from dtrain.checkpoint.peft_config import ADAPTER_CONFIG
from dtrain.cli import main
from dtrain.errors import UserError
from dtrain.rollout.generate import load
from tests.adapters.test_step_adapters import DORA, SAVED, trained
from tests.test_trainer import run
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
    with pytest.raises(UserError, match="names no base"):
        load(recipe.run.directory / "checkpoints" / "step-2" / "adapter", torch.float32, CPU)


def test_a_run_in_4_bits(tmp_path):
    write_model(tmp_path / "qwen2-tied", "qwen2", hidden_size=64, intermediate_size=128)
    save_weights(tmp_path / "qwen2-tied")
    recipe = trained(tmp_path, "lora={rank: 2, quantize: nf4}", "train.dtype=float32")
    export(recipe.run.directory, tmp_path / "merged")
    found, expected = (logits(path, torch.float32) for path in (recipe.run.directory, tmp_path / "merged"))
    assert (found - expected).abs().max() < 5e-5
    assert (found - logits(recipe.run.directory / "export", torch.float32)).abs().max() > 1e-3


def test_an_adapter_s_own_tokenizer_comes_first(tmp_path):
    directory = trained(tmp_path, DORA, "train.steps=1").run.directory
    adapter, base = directory / "export", tmp_path / "qwen2-tied"
    (adapter / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w3"}))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [4]}))
    _, tokenizer = load(adapter, torch.float32, CPU)
    assert tokenizer.directory == adapter and tokenizer.eos_ids == [3, 4, 1]
    (adapter / "tokenizer.json").unlink()
    assert load(adapter, torch.float32, CPU)[1].directory == base


def test_the_commands_take_an_adapter(tmp_path, capsys):
    directory = trained(tmp_path, DORA, "train.steps=1").run.directory
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
    directory = trained(tmp_path, DORA, "train.steps=1").run.directory
    model = models.from_pretrained(directory / "export", torch.float64).eval()
    with torch.no_grad():
        assert torch.equal(model(IDS), logits(directory))
