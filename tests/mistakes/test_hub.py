"""Ids that are not in the hub's cache: `validate` asks the hub for what `run` would fetch, and both answer alike."""

import json

import pytest

from dtrain import recipe as config
from dtrain.commands.cli import main
from tests.loopback_hub import hub  # noqa: F401 (a fixture)
from tests.tiny import save_weights, tiny_recipe, write_model

MODEL, DATA = "someone/Tiny-0.1B", "someone/tiny-rows"


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def recipe(tmp_path, hub):  # noqa: F811
    """A recipe of a model of the hub, which has three: a whole one, one without weights and one of another family."""
    whole = save_weights(write_model(tmp_path / "whole"))
    named = {"chat_template.jinja": b"{{ messages }}", "additional_chat_templates/tool_use.jinja": b"{{ tools }}"}
    named["original/tokenizer.model"] = b"for another program"
    hub.models[MODEL] = {"main": files_of(whole) | named}
    hub.models["someone/bare"] = {"main": files_of(write_model(tmp_path / "bare"))}
    hub.models["someone/bert"] = {"main": {**files_of(whole), "config.json": b'{"architectures": ["BertModel"]}'}}
    rows = b"".join(json.dumps({"input_ids": [3, 4, 5, index % 9 + 3]}).encode() + b"\n" for index in range(40))
    hub.datasets[DATA] = {"main": {"train.jsonl": rows}}
    path = tmp_path / "mine.yaml"
    path.write_text(config.to_yaml(tiny_recipe(tmp_path, f"model.path={MODEL}", "model.init=pretrained")))
    return path


def answered(command, recipe, capsys, *words):
    status = main([command, str(recipe), *words])
    caught = capsys.readouterr()
    return status, caught.out, caught.err


def test_validate_asks_for_small_files_and_says_what_the_run_downloads(recipe, hub, tmp_path, capsys):  # noqa: F811
    status, out, _ = answered("validate", recipe, capsys)
    assert status == 0 and f"model.path={MODEL}: the run downloads its weights from the hub, 0.00 GiB" in out
    assert not any("model.safetensors" in line for line in hub.asked) and not (tmp_path / "runs").exists()
    assert any("tool_use.jinja" in line for line in hub.asked) and not any("original" in line for line in hub.asked)
    assert answered("run", recipe, capsys)[0] == 0
    assert any("model.safetensors" in line for line in hub.asked)
    assert "downloads" not in answered("validate", recipe, capsys, "run.name=again")[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("model.path=someone/nobody",), "model.path=someone/nobody: there is no directory"),
        (
            ("model.path=someone/bare",),
            "model.path=someone/bare: someone/bare has no weights in safetensors",
        ),
        (("model.path=someone/bert",), "architecture BertModel is not supported"),
        (("data.train.path=someone/nothing",), "data.train.path=someone/nothing: there is no file"),
        ((f"data.train.path={DATA}", "data.train.split=tset"), "tset"),
        ((f"data.train.path={DATA}", "train.global_batch=3"), "train.global_batch=3"),
    ],
)
def test_both_refuse_what_the_hub_does_not_give(recipe, capsys, words, says):
    status, _, said = answered("validate", recipe, capsys, *words)
    assert status == 1 and says in said
    status, _, told = answered("run", recipe, capsys, *words)
    assert status == 1 and says in told


def test_a_dataset_is_looked_at_by_the_run(recipe, hub, capsys):  # noqa: F811
    status, out, _ = answered("validate", recipe, capsys, f"data.train.path={DATA}")
    assert status == 0 and f"data.train.path={DATA}: the run downloads 1 file from the hub" in out
    assert not any("train.jsonl" in line for line in hub.asked)
    assert answered("run", recipe, capsys, f"data.train.path={DATA}")[0] == 0
