"""Opening what a stranger may have written runs nothing of it: every kind of file that dtrain reads, with a bomb."""

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.base.files import checksum
from dtrain.checkpoint.dcp.store import _text_checksum
from dtrain.checkpoint.huggingface.export import export
from dtrain.data.text.template import choose_template
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.inference.generate import generate_text
from tests.checkpoint.processes import checkpoints
from tests.running import run
from tests.tiny import tiny_recipe, write_model


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def pickled(harm):
    return pickle.dumps(Bomb(harm))


def saved_by_torch(harm, tmp_path):
    path = tmp_path / "bomb.pt"
    torch.save({"a": Bomb(harm)}, path)
    return path.read_bytes()


def archive(harm, tmp_path):
    """A zip of torch's layout whose pickle is the bomb."""
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled(harm))
        file.writestr("archive/version", "3\n")
    return path.read_bytes()


def test_the_bomb_goes_off_where_something_unpickles_it(tmp_path):
    pickle.loads(pickled(tmp_path / "harm"))
    assert (tmp_path / "harm").is_dir()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(tiny_recipe(tmp_path_factory.mktemp("finished"), "checkpoint.every=5", "train.steps=5"))


@pytest.fixture
def saved(tmp_path, finished):
    """A run whose checkpoint may be crafted, and that has steps left to do."""
    shutil.copytree(finished.run.dir, tmp_path / "runs", dirs_exist_ok=True)
    root = Path(finished.run.dir).parent
    return tiny_recipe(root, "checkpoint.every=5", "train.steps=10", f"run.dir={tmp_path / 'runs'}")


def forge(directory):
    """A manifest that agrees with the files as they are now, the extra ones included."""
    path = directory / "manifest.json"
    content = json.loads(path.read_text())["content"]
    names = [file.name for file in directory.iterdir() if file.name != "manifest.json"]
    content["files"] = {name: checksum(directory / name) for name in names}
    path.write_text(json.dumps({"content": content, "crc32": _text_checksum(content)}))


def refused_everywhere(recipe, out):
    directory = checkpoints(recipe).path(5)
    for act in (
        lambda: run(recipe),
        lambda: export(directory, out),
        lambda: generate_text(Path(recipe.run.dir) / recipe.run.name, ["w3 w4"], max_new_tokens=1, raw=True),
    ):
        try:
            act()
        except UserError:
            continue


def bare(harm, tmp_path):
    return pickled(harm)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        *(("__0_0.distcp", make) for make in (bare, saved_by_torch, archive)),
        ("tensors.json", bare),
        ("state.json", archive),
        ("rank-0.json", saved_by_torch),
        ("manifest.json", bare),
    ],
)
def test_no_file_of_a_checkpoint_is_run(saved, tmp_path, name, make):
    directory, harm = checkpoints(saved).path(5), tmp_path / "harm"
    bomb = make(harm, tmp_path)
    for extra in (".metadata", "optimizer.pt", "rng.pkl"):
        (directory / extra).write_bytes(bomb)
    (directory / name).write_bytes(bomb)
    if name == "__0_0.distcp":
        table = json.loads((directory / "tensors.json").read_text())
        for entry in table["tensors"].values():
            for chunk in entry["chunks"]:
                chunk.update(start=0, length=max(len(bomb), chunk["length"]))
        (directory / "tensors.json").write_text(json.dumps(table))
    if name != "manifest.json":
        forge(directory)
    with pytest.raises(UserError):
        run(saved)
    refused_everywhere(saved, tmp_path / "out")
    assert not harm.exists()


@pytest.mark.parametrize("key", ["recipe", "policy", "method", "cursor", "metrics"])
def test_no_word_of_a_state_is_run(saved, tmp_path, key):
    directory, harm = checkpoints(saved).path(5), tmp_path / "harm"
    words = [
        f"!!python/object/apply:os.mkdir ['{harm}']",
        f"__import__('os').mkdir('{harm}')",
        "${oc.env:HOME}",
        {"__reduce__": ["os.mkdir", [str(harm)]], "optimizer": f"os.mkdir('{harm}')", "scheduler": {"_fn": "os.mkdir"}},
    ]
    for word in words:
        state = json.loads((directory / "state.json").read_text())
        state[key] = word
        (directory / "state.json").write_text(json.dumps(state))
        forge(directory)
        try:
            run(saved)
        except UserError:
            pass
        assert not harm.exists()


def test_no_config_of_a_run_is_run(saved, tmp_path):
    harm, path = tmp_path / "harm", Path(saved.run.dir) / "run"
    shutil.rmtree(path / "model", ignore_errors=True)
    (path / "config.yaml").write_text(f"model: {{path: !!python/object/apply:os.mkdir ['{harm}']}}\n")
    with pytest.raises(UserError, match="config.yaml"):
        export(path, tmp_path / "out")
    assert not harm.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
def test_no_weights_of_a_model_are_run(tmp_path, name):
    harm, directory = tmp_path / "harm", write_model(tmp_path / "model")
    for bomb in (pickled(harm), saved_by_torch(harm, tmp_path), archive(harm, tmp_path)):
        (directory / name).write_bytes(bomb)
        with pytest.raises(UserError):
            models.from_pretrained(directory)
    assert not harm.exists()


def test_no_code_beside_a_model_is_run(tmp_path):
    harm, directory = tmp_path / "harm", write_model(tmp_path / "model", "llama")
    code = f"import os\nos.mkdir({str(harm)!r})\nclass Config: pass\nclass Model: pass\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py"):
        (directory / name).write_text(code)
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": ["tokenization_evil.Tokenizer", None]}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    try:
        models.build(models.read_config(directory), device="meta")
    except UserError:
        pass
    Tokenizer.from_directory(directory)
    (directory / "tokenizer.json").write_bytes(pickled(harm))
    with pytest.raises(UserError):
        Tokenizer.from_directory(directory)
    assert not harm.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.mkdir('HARM') }}",
        "{{ self.__init__.__globals__.__builtins__.__import__('os').mkdir('HARM') }}",
        "{% set f = messages.append %}{{ f.__self__.__class__.__base__.__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{% include 'tokenizer.json' %}",
    ],
)
def test_no_template_reaches_the_machine(tmp_path, template):
    harm, directory = tmp_path / "harm", write_model(tmp_path / "model")
    (directory / "chat_template.jinja").write_text(template.replace("HARM", str(harm)))
    tokenizer = Tokenizer.from_directory(directory)
    with pytest.raises(UserError):
        chosen = choose_template(directory, tokenizer, None, {})
        chosen.render([{"role": "user", "content": "w3"}])
    assert not harm.exists()
