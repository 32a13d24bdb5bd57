"""The Python API: docs/python.md lists its names, and the scripts of docs/examples run on two processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dtrain
from tests.pages import ROOT, Page
from tests.tiny import save_weights, tiny_recipe, write_model, write_pairs

EXAMPLES = ROOT / "docs" / "examples"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run_python(directory, *words):
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=directory, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def model_words(directory):
    model = write_model(directory / "model")
    return f"model.path={model}", "model.init=scratch", f"run.dir={directory / 'runs'}", "train.dtype=float64"


def numbers(output, label):
    return [float(text) for text in re.findall(rf"{label} ([\d.]+)", output)]


def test_the_page_lists_the_names_of_the_package():
    tables = [table for table in Page(ROOT / "docs" / "python.md").tables if table[0][0] == "name"]
    listed = [name for table in tables for row in table[1:] for name in re.findall(r"`(\w+)`", row[0])]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(dtrain.__all__) - set(dtrain.PACKAGES) - {"PACKAGES", "__version__"}
    for name in listed:
        value = getattr(dtrain, name)
        assert isinstance(value, dict) or value.__doc__, name


def test_importing_dtrain_loads_no_torch():
    code = "import sys, dtrain; assert 'torch' not in sys.modules; dtrain.UserError; assert 'torch' not in sys.modules"
    run_python(ROOT, "-c", code)


@pytest.mark.parametrize("mesh", [["parallel.tp=2"], ["parallel.cp=2"], []], ids=["tp", "cp", "dp"])
def test_an_own_loop_has_the_numbers_of_one_process_on_two(mesh, tmp_path):
    words = model_words(tmp_path)
    one = run_python(tmp_path, EXAMPLES / "own_loop.py", *words, "launch.nproc=1")
    two = run_python(tmp_path, EXAMPLES / "own_loop.py", *words, *mesh, "launch.nproc=2")
    losses = numbers(one, "loss")
    assert losses[-1] < losses[0] - 0.1
    assert numbers(two, "loss") == pytest.approx(losses, rel=1e-6)  # six digits are printed
    assert numbers(two, "norm") == pytest.approx(numbers(one, "norm"), abs=1e-4)


def test_an_own_loop_runs_under_torchrun(tmp_path):
    words = model_words(tmp_path)
    one = run_python(tmp_path, EXAMPLES / "own_loop.py", *words)
    two = run_python(tmp_path, *TORCHRUN, EXAMPLES / "own_loop.py", *words, "parallel.tp=2")
    assert numbers(two, "loss") == pytest.approx(numbers(one, "loss"), rel=1e-6)


def test_ppo_learns_its_reward_and_saves_both_models(tmp_path):
    words = model_words(tmp_path)
    rewards = numbers(run_python(tmp_path, EXAMPLES / "ppo.py", *words, "launch.nproc=2"), "mean reward")
    assert rewards[-1] > rewards[0] + 0.1
    saved = dtrain.CheckpointStore(tmp_path / "runs" / "ppo" / "checkpoints").tensor_specs(20)
    assert {name.split(".")[0] for name in saved} == {"model", "optim", "critic"}


@pytest.mark.parametrize("name", ["distributed_logprobs.py", "context_parallel.py"])
def test_a_distributed_example_finds_the_numbers_of_one_process(name, tmp_path):
    assert "2 ranks: " in run_python(tmp_path, *TORCHRUN, EXAMPLES / name)


def test_the_generation_example_completes_texts_and_ids(tmp_path):
    model = write_model(tmp_path / "model", "llama")
    save_weights(model)
    output = run_python(tmp_path, EXAMPLES / "generate.py", model)
    assert output.count("text:") == 2 and "ids: [[" in output and "logits: (1, 3, " in output


def test_the_own_method_is_a_recipe_of_any_process(tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    words = ["run", "sft", "method=own_method:OddsMethod", *model_words(tmp_path), f"data.train.path={pairs}"]
    words += ["odds.weight=0.2", "train.steps=15", "train.epochs=null", "train.global_batch=8", "train.micro_batch=2"]
    words += ["data.max_length=32", "optimizer.lr=1e-2", "checkpoint.export=none", "metrics.tensorboard=false"]
    losses = []
    for nproc in (1, 2):
        run_python(EXAMPLES, "-m", "dtrain", *words, f"run.name=odds-{nproc}", f"launch.nproc={nproc}")
        lines = (tmp_path / "runs" / f"odds-{nproc}" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert losses[0][-1] < losses[0][0]


def test_a_loop_must_be_importable_by_other_processes(tmp_path):
    recipe = tiny_recipe(tmp_path, "launch.nproc=2")
    with pytest.raises(dtrain.UserError, match="train is defined inside of the function .* Move it to the top"):
        dtrain.run(recipe, train=lambda recipe, runtime: None)


def test_a_recipe_of_an_own_loop_is_checked_but_for_its_data(tmp_path):
    recipe = {"model": {"path": str(write_model(tmp_path / "model"))}, "parallel": {"tp": 3}, "launch": {"nproc": 3}}
    with pytest.raises(dtrain.RecipeError, match=r"parallel\.tp=3") as error:
        dtrain.run(recipe, train=json.loads)
    assert "data.train.path" not in str(error.value)
    assert Path(recipe["model"]["path"]).is_dir()
