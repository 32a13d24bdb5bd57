"""Methods and model families from outside of dtrain, as users have them: import paths, installed plugins, scripts.

The package `outside` stands on PYTHONPATH. The distribution `installed` has entry points, in a .dist-info folder.
"""

import json
import os
import re
import subprocess
import sys
import traceback
import urllib.request
from pathlib import Path

import pytest
import torch
import yaml

from dtrain.base.errors import UserError
from dtrain.base.plugins import plugins
from dtrain.launch import validate
from dtrain.models.read_config import parse_config
from tests.running import assert_same_rows
from tests.tiny import VOCAB, write_model, write_rows

ROOT = Path(__file__).parents[1]

METHOD = '''
from dataclasses import dataclass

import torch
from dtrain.methods import Method


@dataclass
class PolyKeys:
    """`poly`: read by method poly."""

    epsilon: float = 1.0
    """Weight of the term 1 - p."""


class PolyMethod(Method):
    Section = PolyKeys
    section: PolyKeys
    about = "supervised fine-tuning with PolyLoss"

    def loss(self, source, batch, global_seqs, global_tokens):
        def poly_loss(logprobs):
            return -logprobs + self.section.epsilon * (1 - logprobs.exp())

        loss_sum, _ = source.token_loss_sums(poly_loss)
        trained = torch.full((), batch["label_index"].shape[0], device=loss_sum.device)
        return loss_sum / global_tokens, {"loss_sum": loss_sum.detach(), "trained": trained}

    def val_metrics(self, sums):
        return {"val_loss": sums["loss_sum"] / max(sums["trained"], 1)}


class SftMethod(PolyMethod):
    pass


NOT_A_METHOD = 7
'''

FAMILY = """
from dtrain.models.common.decoder import CausalLM, Decoder, PreNormLayer
from dtrain.models.common.functions import RMSNorm


class DoublingDecoder(Decoder):
    def _scale_embeddings(self, hidden):
        return 2 * super()._scale_embeddings(hidden)


class {name}(CausalLM):
    def __init__(self, config):
        super().__init__(config, DoublingDecoder(config, PreNormLayer, RMSNorm))

    @classmethod
    def read(cls, fields):
        return fields.build_config(**fields.read_common(cls.__name__, bias=False))
"""

ENTRY_POINTS = """
[dtrain.plugins]
method.poly = installed.methods:PolyMethod
model.family.InstalledForCausalLM = installed.models:InstalledForCausalLM
optimizer.name.slow = installed.optimizers:Slow
rewards.short = installed.rewards:short
metod.poly2 = installed.methods:PolyMethod
sft.los.focal = installed.losses:focal
optimiser.name.fast = installed.optimizers:Slow
reward.long = installed.rewards:short
"""

SCRIPT = """
import sys

import dtrain
from dtrain.models.registry import FAMILIES, Family
from dtrain.training import METHODS
from outside.methods import PolyMethod
from outside.models import OutsideForCausalLM


class ScriptedMethod(PolyMethod):
    pass


class ScriptedForCausalLM(OutsideForCausalLM):
    pass


METHODS["scripted"] = ScriptedMethod
FAMILIES["ScriptedForCausalLM"] = Family("scripted", __name__)

{guard}
    dtrain.run(sys.argv[1], sys.argv[2:])
"""


class World:
    """A directory with the packages, models, data and recipes of these tests, and commands that run in it."""

    def __init__(self, root: Path):
        self.root = root
        for package, architecture in (("outside", "OutsideForCausalLM"), ("installed", "InstalledForCausalLM")):
            folder = root / "packages" / package
            folder.mkdir(parents=True)
            (folder / "__init__.py").touch()
            (folder / "methods.py").write_text(METHOD)
            (folder / "models.py").write_text(FAMILY.format(name=architecture))
        installed = root / "packages" / "installed"
        (installed / "optimizers.py").write_text("import torch\n\n\nclass Slow(torch.optim.SGD):\n    pass\n")
        (installed / "rewards.py").write_text(
            "def short(completions):\n    return [-float(len(text)) for text in completions]\n"
        )
        info = root / "packages" / "installed-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(ENTRY_POINTS)
        for name in ("Outside", "Installed", "Scripted"):
            architecture = {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}
            write_model(root / name.lower(), "llama", tied=False, **architecture)
        write_rows(root / "rows.jsonl", count=24, longest=20)
        questions = [json.dumps({"prompt": f"w{n}", "answer": f"w{n + 1}"}) for n in range(5, 8)]
        (root / "questions.jsonl").write_text("\n".join(questions))

    def recipe(self, name: str, directory: str, **sections) -> str:
        """Write a recipe of three steps in float64 from random weights, and return its path."""
        tree = {
            "run": {"name": name},
            "model": {"path": str(self.root / directory), "init": "scratch"},
            "data": {"train": {"path": str(self.root / "rows.jsonl")}, "max_length": 20, "packing": False},
            "train": {"steps": 3, "global_batch": 4, "micro_batch": 2, "dtype": "float64"},
            "optimizer": {"lr": 0.01},
            "scheduler": {"name": "constant", "warmup": 0},
            "checkpoint": {"every": 3},
            "metrics": {"tensorboard": False},
            "launch": {"device": "cpu"},
        }
        for section, values in sections.items():
            tree[section] = {**tree.get(section, {}), **values} if isinstance(values, dict) else values
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree))
        return str(path)

    def environment(self) -> dict[str, str]:
        """Return the environment of a command, with dtrain and the packages on PYTHONPATH."""
        path = os.pathsep.join([str(ROOT), str(self.root / "packages")])
        return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def python(self, *words: str) -> subprocess.CompletedProcess:
        """Run Python in the directory."""
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=self.root, env=self.environment(), capture_output=True, text=True)

    def dtrain(self, *words: str) -> str:
        """Run a command that succeeds, and return what it printed."""
        done = self.python("-m", "dtrain", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def refused(self, *words: str) -> str:
        """Run a command that fails with an error of one user, not with a traceback, and return the error."""
        done = self.python("-m", "dtrain", *words)
        assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
        return done.stderr

    def torchrun(self, *words: str) -> None:
        """Run `dtrain run` in two processes of torchrun."""
        options = ["--standalone", "--nproc-per-node", "2", "-m", "dtrain", "run"]
        done = self.python("-m", "torch.distributed.run", *options, *words)
        assert done.returncode == 0, done.stderr

    def rows(self, name: str) -> list:
        """Return loss, gradient norm and tokens of each step of a run."""
        lines = (self.root / "runs" / name / "metrics.jsonl").read_text().splitlines()
        steps = [row for row in map(json.loads, lines) if "loss" in row]
        return [(row["loss"], row["grad_norm"], row["tokens"]) for row in steps]

    def config(self, name: str) -> dict:
        """Return the saved recipe of a run."""
        return yaml.safe_load((self.root / "runs" / name / "config.yaml").read_text())


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("plugins"))


@pytest.fixture(scope="module")
def outside(world) -> str:
    """The recipe of a finished run with a method and a family by import path."""
    recipe = world.recipe(
        "outside",
        "outside",
        model={"family": "outside.models:OutsideForCausalLM"},
        method="outside.methods:PolyMethod",
        poly={"epsilon": 2.0},
    )
    printed = world.dtrain("run", recipe)
    for key, file in (("method: outside.methods:PolyMethod", "methods"), ("model.family: outside.models", "models")):
        assert key in printed and f"from {world.root / 'packages' / 'outside' / file}.py" in printed
    return recipe


@pytest.fixture(scope="module")
def installed(world) -> str:
    """The recipe of a finished run with a method, a family and an optimizer of an installed package."""
    recipe = world.recipe("installed", "installed", method="poly", poly={"epsilon": 2.0}, optimizer={"name": "slow"})
    world.dtrain("run", recipe)
    return recipe


@pytest.fixture
def importable(world, monkeypatch):
    """The packages are importable, and installed, in this process."""
    monkeypatch.syspath_prepend(world.root / "packages")
    plugins.cache_clear()
    yield
    plugins.cache_clear()


def assert_same_run(world: World, name: str, expected: str) -> None:
    """Check that two runs have the same losses and gradient norms in float64."""
    rows = world.rows(expected)
    assert len(rows) == 3 and rows[0] != rows[-1]
    assert_same_rows(world.rows(name), rows, 1e-9, 1e-9, name)


def test_import_paths_train_alike_in_two_processes_and_under_torchrun(world, outside):
    world.dtrain("run", outside, "launch.nproc=2", "run.name=outside-2")
    world.torchrun(outside, "run.name=outside-torchrun")
    for name in ("outside-2", "outside-torchrun"):
        assert_same_run(world, name, "outside")
        saved = world.config(name)
        assert saved["method"] == "outside.methods:PolyMethod" and saved["poly"]["epsilon"] == 2.0
        assert saved["model"]["family"] == "outside.models:OutsideForCausalLM" and "sft" not in saved
    other = world.recipe("plain", "outside", model={"family": "outside.models:OutsideForCausalLM"}, method="sft")
    world.dtrain("run", other, "train.steps=1")
    assert world.rows("plain")[0] != world.rows("outside")[0]  # the loss of the method counts


def test_plugins_train_alike_in_two_processes_and_under_torchrun(world, installed):
    world.dtrain("run", installed, "launch.nproc=2", "run.name=installed-2")
    world.torchrun(installed, "run.name=installed-torchrun")
    for name in ("installed-2", "installed-torchrun"):
        assert_same_run(world, name, "installed")
        assert world.config(name)["method"] == "poly"


def test_a_run_with_import_paths_resumes(world, outside):
    world.dtrain("run", outside, "run.name=resumed", "train.steps=2", "checkpoint.every=2")
    world.dtrain("run", outside, "run.name=resumed", "train.steps=3", "checkpoint.every=2")
    assert world.rows("resumed") == world.rows("outside")
    other = world.recipe("resumed", "outside", model={"family": "outside.models:OutsideForCausalLM"})
    error = world.refused("run", other, "train.steps=4")
    assert "method=outside.methods:PolyMethod" in error and "Another method is a new run" in error


def test_the_other_commands_know_the_method_and_the_family(world, outside):
    assert "ok: " in world.dtrain("validate", outside)
    world.dtrain("preview", outside)
    assert "outside.methods:PolyMethod of " in world.dtrain("plan", outside)
    prompt = ("--prompt", "w5 w6", "--raw", "--max-new-tokens", "4", "--dtype", "float64")
    expected = world.dtrain("generate", "runs/outside/checkpoints/step-3", *prompt).splitlines()
    assert expected[0].count("w") >= 1
    world.dtrain("report", "runs/outside", "--out", "outside.html")
    assert "PolyMethod" in world.dtrain("push", "runs/outside", "someone/model", "--dry-run")

    # The directory of a model has no recipe, so it needs the option.
    world.dtrain("export", "runs/outside", "copy")
    exported = json.loads((world.root / "copy" / "config.json").read_text())
    assert exported["architectures"] == ["OutsideForCausalLM"]
    error = world.refused("generate", "copy", *prompt)
    assert "architecture OutsideForCausalLM is not supported" in error and "--family" in error
    family = ("--family", "outside.models:OutsideForCausalLM")
    assert world.dtrain("generate", "copy", *family, *prompt).splitlines()[0] == expected[0]
    world.dtrain("eval", "copy", "questions.jsonl", *family, "--max-new-tokens", "2", "--prompts-as", "text")


def test_the_other_commands_know_plugins(world, installed):
    assert "ok: " in world.dtrain("validate", installed)
    world.dtrain("plan", installed)
    world.dtrain("export", "runs/installed", "copy-installed")
    prompt = ("--prompt", "w5 w6", "--raw", "--max-new-tokens", "4")
    assert "w" in world.dtrain("generate", "copy-installed", *prompt)
    reward = ("--reward", "short", "--max-new-tokens", "2", "--prompts-as", "text")
    assert "short" in world.dtrain("eval", "copy-installed", "questions.jsonl", *reward)
    assert "Did you mean slow?" in world.refused("validate", installed, "optimizer.name=slo")


def test_help_knows_the_keys_of_plugins(world):
    assert re.match(
        r"poly.epsilon\n\n +type +number\n +default +1.0\n\n +Weight of", world.dtrain("help", "poly.epsilon")
    )
    assert "poly.epsilon  1.0" in world.dtrain("help", "poly")
    assert "did you mean `dtrain help poly.epsilon`?" in world.refused("help", "poly.epsilom")


@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("metod.poly2", "method=poly2"),
        ("sft.los.focal", "sft.loss=focal"),
        ("optimiser.name.fast", "optimizer.name=fast"),
        ("reward.long", "grpo.rewards=[{fn: long}]"),
    ],
)
@pytest.mark.usefixtures("importable")
def test_a_name_that_is_registered_for_a_misspelt_key(world, key, override):
    recipe = world.recipe("misspelt", "outside", method="grpo" if "grpo" in override else "sft")
    with pytest.raises(UserError) as raised:
        validate(recipe, [override])
    assert f"; an installed package registers {key}, which should be " in str(raised.value)


def test_serve(world, outside):
    options = ["--port", "0", "--device", "cpu", "--max-length", "20"]
    command = [sys.executable, "-m", "dtrain", "serve", "runs/outside", *options]
    process = subprocess.Popen(
        command, cwd=world.root, env=world.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("serving "):
                break
        assert lines and lines[-1].startswith("serving "), lines
        url = lines[-1].split(" at ")[1].split()[0]
        body = json.dumps({"prompt": "w5 w6", "max_tokens": 2}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] >= 1
    finally:
        process.terminate()
        process.wait(30)


def test_a_teacher_of_a_family_from_outside(world, outside):
    world.dtrain("export", "runs/outside", "teacher")
    recipe = world.recipe(
        "distilled",
        "outside",
        model={"family": ["outside.models:OutsideForCausalLM"]},
        method="distill",
        distill={"teacher": str(world.root / "teacher")},
    )
    world.dtrain("run", recipe, "run.name=distilled-1")
    world.dtrain("run", recipe, "run.name=distilled-2", "launch.nproc=2")
    assert_same_run(world, "distilled-2", "distilled-1")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("poly.epsilom=1", "poly.epsilom is not a key of a recipe; did you mean poly.epsilon?"),
        ("poly.epsilon=much", "poly.epsilon=much must be a number"),
        ("method=outside.methods:Gone", "method=outside.methods:Gone: outside.methods has no Gone"),
        ("method=nowhere:Gone", "method=nowhere:Gone cannot be imported: No module named 'nowhere'"),
        ("method=outside.methos:PolyMethod", "'outside.methos'. Did you mean outside.methods:PolyMethod?"),
        ("method=outsid.methods.PolyMethod", "'outsid'. Did you mean outside.methods.PolyMethod?"),
        ("method=outside.methods:NOT_A_METHOD", "is not a method. Derive a class from dtrain.methods.Method"),
        ("method=outside.methods:SftMethod", "its section cannot be named sft. Set SftMethod.name to another"),
        ("model.family=outside.models:Gone", "defines no Gone"),
        ("model.family=OutsideForCausalLM", "model.family=OutsideForCausalLM is not a family"),
        ("model.family=outside.models:LlamaForCausalLM", "dtrain has a family LlamaForCausalLM"),
    ],
)
@pytest.mark.usefixtures("importable")
def test_mistakes(outside, override, message):
    with pytest.raises(UserError) as raised:
        validate(outside, [override])
    assert message in str(raised.value)
    # A script that calls dtrain.run shows one traceback, which ends with the message.
    assert "".join(traceback.format_exception(raised.value)).count("Traceback") == 1


def test_a_run_s_own_directory_is_not_searched_for_code(world, outside):
    run = world.root / "runs" / "stranger"
    run.mkdir(exist_ok=True)
    (run / "models.py").write_text("Evil = 1\nraise SystemExit('imported')\n")
    config = {"model": {"path": str(world.root / "outside"), "family": "runs.stranger.models:Evil"}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    error = world.refused("generate", "runs/stranger", "--prompt", "w5")
    assert "names code inside of the run's own directory" in error and "imported" not in error.split("which is not")[0]


def test_what_a_script_adds_works_in_processes_that_the_launcher_starts(world):
    script = world.root / "train_scripted.py"
    script.write_text(SCRIPT.format(guard='if __name__ == "__main__":'))
    recipe = world.recipe("scripted", "scripted", method="scripted", scripted={"epsilon": 2.0})
    for nproc in (1, 2):
        done = world.python(str(script), recipe, f"launch.nproc={nproc}", f"run.name=scripted-{nproc}")
        assert done.returncode == 0, done.stderr
    assert_same_run(world, "scripted-2", "scripted-1")
    bare = world.root / "train_bare.py"
    bare.write_text(SCRIPT.format(guard="if True:"))
    done = world.python(str(bare), recipe, "launch.nproc=2", "run.name=bare")
    assert done.returncode != 0
    assert 'Put its call of dtrain.run below `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]
    dashed = world.root / "train-dashed.py"
    dashed.write_text(script.read_text())
    done = world.python(str(dashed), recipe, "launch.nproc=2", "run.name=dashed")
    assert "Name the file train_dashed.py" in done.stderr.splitlines()[-1]
    assert not (world.root / "runs" / "bare" / "checkpoints").exists()


def test_the_family_counts(world, outside):
    """Its embeddings are doubled: the exported weights give other logits as a Llama."""
    sys.path.append(str(world.root / "packages"))
    try:
        from dtrain.models.registry import FAMILIES, register_family

        assert register_family("outside.models:OutsideForCausalLM") == "OutsideForCausalLM"
        fields = json.loads((world.root / "outside" / "config.json").read_text())
        assert parse_config(fields).architecture == "OutsideForCausalLM"
        from dtrain import models

        export = world.root / "runs" / "outside" / "export"
        ids = torch.arange(8).unsqueeze(0) % VOCAB
        with torch.no_grad():
            own = models.from_pretrained(export, dtype=torch.float64)(ids)
            llama = models.build(parse_config({**fields, "architectures": ["LlamaForCausalLM"]}), torch.float64)
            llama.load_state_dict(models.from_pretrained(export, dtype=torch.float64).state_dict())
            assert not torch.allclose(own, llama(ids))
            llama.model.embed_tokens.weight.mul_(2)
            torch.testing.assert_close(own, llama(ids), rtol=1e-9, atol=1e-12)
    finally:
        sys.path.remove(str(world.root / "packages"))
        FAMILIES.pop("OutsideForCausalLM", None)
