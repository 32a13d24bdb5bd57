"""A stranger's recipe and directory: looking at them runs nothing of theirs, and a run says first what it will."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain import recipe as config
from dtrain.base.errors import UserError
from dtrain.commands.cli import main
from dtrain.commands.plan.background import PlannedPeak
from dtrain.commands.plan.hardware import GPUS
from dtrain.commands.plan.plan import make_plan
from dtrain.commands.plan.report import as_json, text
from dtrain.rl.rewards.catalog import find
from tests.checkpoint.processes import ROOT
from tests.problem_lines import preflight
from tests.running import run
from tests.serve.serving import make_model
from tests.tiny import tiny_grpo, tiny_recipe

CODE = """
import os
from pathlib import Path
Path({harm!r}).mkdir(exist_ok=True)
import torch
class Optimizer(torch.optim.SGD):
    pass
def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
plan = {{"model.layers.*.mlp": "block"}}
def reward(completions):
    return [1.0 for _ in completions]
"""
NAMED = [
    "optimizer.name=evil.code.Optimizer",
    "scheduler=[{name: evil.code.scheduler, steps: 5}, {name: constant}]",
    "parallel.custom_plan=evil.code.plan",
]


@pytest.fixture
def harm(tmp_path, monkeypatch):
    """The file that an import of the stranger's code makes; its package is in the working directory."""
    package = tmp_path / "evil"
    package.mkdir()
    (package / "__init__.py").write_text(CODE.format(harm=str(tmp_path / "harm")))
    (package / "code.py").write_text(CODE.format(harm=str(tmp_path / "harm")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "harm"
    for name in [name for name in sys.modules if name.split(".")[0] == "evil"]:
        del sys.modules[name]


def recipe_file(recipe, path):
    path.write_text(config.to_yaml(recipe))
    return str(path)


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_only_a_run_imports_what_a_recipe_names(tmp_path, harm, method, capfd):
    rewards = ["grpo.rewards=[{fn: evil.code.reward}]", "grpo.environment=evil.code.plan"] * (method == "grpo")
    recipe = (tiny_grpo if method == "grpo" else tiny_recipe)(tmp_path, *NAMED, *rewards)
    file = recipe_file(recipe, tmp_path / "r.yaml")
    assert main(["validate", file]) == 0
    search = ["--search", "train.global_batch=2", "train.micro_batch=1"] * (method == "sft")  # many plans
    assert main(["plan", file, "--world-size", "2", *search]) == 0
    said = capfd.readouterr().out
    assert "optimizer.name=evil.code.Optimizer is not imported" in said and "AdamW" in said
    assert "parallel.custom_plan=evil.code.plan is not imported" in said
    assert main(["preview", file]) == 0
    with PlannedPeak(recipe, 1, "cpu") as planned:
        told = planned.peak(300).words
    assert "planned peak" in told and "evil.code.Optimizer is not imported" in told
    assert not harm.exists()


def test_a_plan_counts_an_unknown_optimizer_as_adamw_and_torchs_own_as_they_are(tmp_path, harm):
    def planned(*words):
        return make_plan(tiny_recipe(tmp_path, *words), 1, GPUS["h100"])

    stranger, adamw = planned("optimizer.name=evil.code.Optimizer", "optimizer.kwargs={a: 1}"), planned()
    assert (
        stranger.step.optimizer_state == adamw.step.optimizer_state and stranger.assumptions and not adamw.assumptions
    )
    adagrad = planned("optimizer.name=torch.optim.Adagrad")
    assert not adagrad.assumptions and adagrad.step.optimizer_state < adamw.step.optimizer_state
    for name in ("torch.optim.lr_scheduler.warnings.sys.exit", "torch.optim.Optimizer.step", "torch.hub.load"):
        assert planned(f"optimizer.name={name}").assumptions
    assert as_json(stranger)["assumed"] == list(stranger.assumptions) and stranger.assumptions[0] in text(stranger)
    assert not harm.exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.name=evil.code.Optimiser", "defines no Optimiser; did you mean Optimizer?"),
        ("optimizer.name=nowhere.code.Optimizer", "there is no module nowhere"),
        ("scheduler=[{name: constant, steps: 1}, {name: evil.cod.x}]", "scheduler[1].name: scheduler evil.cod.x"),
        ("scheduler.name=evil.code.schedule", "scheduler.name: "),
        ("parallel.custom_plan=evil.code.plans", "defines no plans; did you mean plan?"),
        ("optimizer.name=broken.Optimizer", "is not valid Python"),
    ],
)
def test_validate_looks_for_the_code_without_running_it(tmp_path, harm, override, said):
    (tmp_path / "broken.py").write_text("class Optimizer(:")
    assert said in "\n".join(preflight(tiny_recipe(tmp_path, override), 1))
    assert not harm.exists()


def dtrain(cwd, *arguments):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "dtrain", *arguments], cwd=cwd, env=environ, capture_output=True, text=True, timeout=300
    )


def test_a_run_says_first_what_it_imports_and_from_where(tmp_path, harm):
    recipe = tiny_recipe(tmp_path, *NAMED[:2], "train.steps=1")
    done = dtrain(tmp_path, "run", recipe_file(recipe, tmp_path / "r.yaml"))
    assert done.returncode == 0 and harm.exists(), done.stderr
    named = "this run imports:\n  optimizer.name: evil.code.Optimizer, from " + str(tmp_path / "evil" / "code.py")
    assert named in done.stderr and "scheduler[0].name: evil.code.scheduler, from" in done.stderr


@pytest.mark.parametrize("command", ["preview", "eval"])
def test_files_in_the_working_directory_do_not_stand_in_for_libraries(tmp_path, command):
    recipe = tiny_recipe(tmp_path)
    place = tmp_path / "place"
    place.mkdir()
    for name in "yaml torch omegaconf json pathlib typing jinja2 tokenizers pickle signal asyncio numpy tqdm".split():
        (place / f"{name}.py").write_text(f"import os\nos.makedirs({str(tmp_path / 'harm')!r}, exist_ok=True)\n")
    arguments = [recipe_file(recipe, place / "r.yaml")]
    if command == "eval":
        make_model(tmp_path, 1)
        (place / "rows.jsonl").write_text('{"question": "w5 w6", "answer": "w7"}\n')
        arguments = [str(tmp_path / "model"), "rows.jsonl", "--max-new-tokens", "1", "--device", "cpu"]
    done = dtrain(place, command, *arguments)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "harm").exists()


def test_a_module_that_is_installed_comes_before_a_file_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "__init__.py").write_text("raise SystemExit\n")
    (tmp_path / "mine.py").write_text("def fn(): pass\n")
    monkeypatch.chdir(tmp_path)
    assert find("json.dumps") == ("json", "dumps") and find("mine.fn") == ("mine", "fn")
    with pytest.raises(UserError, match="there is no module yours"):
        find("yours.fn")


def test_a_run_directory_of_a_strangers_names_code_in_vain(tmp_path, harm):
    recipe = run(tiny_grpo(tmp_path, "train.steps=1", "scheduler.warmup_steps=0", "checkpoint.every=1"))
    directory = Path(recipe.run.dir) / recipe.run.name
    config_yaml = (directory / "config.yaml").read_text()
    config_yaml = re.sub(r"name: adamw", "name: evil.code.Optimizer", config_yaml)
    config_yaml = re.sub(r"fn: tests\.methods\.judges\.even", "fn: evil.code.reward", config_yaml)
    config_yaml = re.sub(r"environment: null", "environment: evil.code.plan", config_yaml)
    assert config_yaml.count("evil.code") == 3
    (directory / "config.yaml").write_text(config_yaml)
    assert main(["generate", str(directory), "--raw", "--prompt", "w3", "--max-new-tokens", "1"]) == 0
    assert main(["export", str(directory), str(tmp_path / "out")]) == 0
    assert not harm.exists()
