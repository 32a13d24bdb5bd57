"""`dtrain push` to a hub on loopback, through huggingface_hub's own client: what is there after it, and what is not."""

import json
import shutil
import xml.etree.ElementTree as tree
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, constants
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from dtrain.commands.cli import main
from dtrain.commands.push import card
from dtrain.commands.push.card import public_recipe
from dtrain.launch import launch
from dtrain.training.metrics import records
from tests.loopback_hub import hub  # noqa: F401 (a fixture)
from tests.tiny import save_weights, tiny_recipe, write_model

NAME = "me/tiny"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    settings = ["train.steps=4", "data.val=0.2", "train.validate_every=2", "checkpoint.export=final"]
    recipe = tiny_recipe(root, *settings)
    launch(recipe)
    return recipe.run.directory


@pytest.fixture
def trained(tmp_path, run):
    return Path(shutil.copytree(run, tmp_path / "runs" / "run"))


@pytest.fixture
def logged_in(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_right")


def pushed(hub, branch="main"):  # noqa: F811
    return hub.models[NAME][branch]


def test_a_run_is_there_whole_and_nothing_else(tmp_path, hub, trained, logged_in, capsys):  # noqa: F811
    (trained / "export" / "rows.jsonl").write_text("data of the user")
    tool_use = trained / "export" / "additional_chat_templates" / "tool_use.jinja"
    tool_use.parent.mkdir()
    tool_use.write_text("{{ tools }}")
    assert main(["push", str(trained), NAME]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{hub.url}/{NAME}/commit/")
    assert [one["visibility"] for one in hub.made] == ["private"] and [one["id"] for one in hub.made] == [NAME]
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "README.md", "loss.svg"}
    assert pushed(hub)["additional_chat_templates/tool_use.jinja"] == b"{{ tools }}"
    assert names <= set(pushed(hub)) and not {"rows.jsonl", "dtrain.json"} & set(pushed(hub))
    for name in names - {"README.md", "loss.svg"}:
        assert pushed(hub)[name] == (trained / "export" / name).read_bytes()
    there = tmp_path / "there"
    there.mkdir()
    (there / "additional_chat_templates").mkdir()
    for name, content in pushed(hub).items():
        (there / name).write_bytes(content)
    weights = AutoModelForCausalLM.from_pretrained(there).state_dict()  # as a stranger reads it
    with safe_open(trained / "export" / "model.safetensors", "pt") as file:
        assert all(weights[name].equal(file.get_tensor(name).to(weights[name].dtype)) for name in file.keys())


def test_the_card_says_how_it_came_to_be(tmp_path, hub, trained, logged_in):  # noqa: F811
    assert main(["push", str(trained), NAME, "--base", "Qwen/Qwen3-0.6B"]) == 0
    text = pushed(hub)["README.md"].decode()
    data = ModelCard(text).data  # the hub's own reader
    assert data.base_model == "Qwen/Qwen3-0.6B" and data.library_name == "transformers" and data.license is None
    assert data.tags == ["dtrain", "sft"]
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    loss, val = ([row[name] for row in rows if name in row][-1] for name in ("loss", "val_loss"))
    assert f"| loss | {loss:.4g} |" in text and f"| val_loss | {val:.4g} |" in text and "after 4 steps" in text
    sides = json.loads((trained / "data.json").read_text())
    assert sides["train"]["rows"] + sides["val"]["rows"] == 60
    for split, one in sides.items():
        assert f"| {split} | {one['rows']} | {one['samples']} | {one['tokens']} | `{one['identity']}` |" in text
    recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert recipe["train"]["steps"] == 4 and recipe["data"]["train"]["path"] == "rows.jsonl"
    assert str(tmp_path) not in text and "/tmp/" not in text and "No license is named yet" in text


def test_nothing_of_the_rows_or_of_secrets_is_in_the_card():
    recipe = {"optimizer": {"kwargs": {"api_key": "sesame-1234567"}}, "run": {"dir": "/home/somebody/runs"},
              "data": {"train": {"path": ["/home/somebody/a.jsonl", "https://me:word@host/b.jsonl?X-Signature=feed"]}},
              "grpo": {"server": {"headers": {"Authorization": "Bearer abcdefgh12345"}}}}  # fmt: skip
    text = yaml.safe_dump(public_recipe(recipe))
    assert not any(word in text for word in ("sesame", "somebody", "me:word", "feed", "abcdefgh12345"))
    assert "a.jsonl" in text and "b.jsonl" in text


def test_the_picture_is_the_metrics(hub, trained, logged_in):  # noqa: F811
    assert main(["push", str(trained), NAME]) == 0
    picture = tree.fromstring(pushed(hub)["loss.svg"])
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    kind = "{http://www.w3.org/2000/svg}"
    [line] = picture.iter(f"{kind}polyline")
    heights = [float(point.split(",")[1]) for point in line.get("points").split()]
    losses = [row["loss"] for row in rows if "loss" in row]
    order = sorted(range(4), key=lambda at: losses[at])
    assert len(heights) == 4 and sorted(range(4), key=lambda at: -heights[at]) == order
    assert len(list(picture.iter(f"{kind}circle"))) == 2


@pytest.mark.parametrize(
    ("train", "val"),
    [([(1, 2.0)], []), ([], [(5, 0.0)]), ([(step, 1 / step) for step in range(1, 5000)], [(9, 3.0)]),
     ([(1, 1e-9), (2, 3e9)], []), ([(1, -5.0), (2, -5.0)], [])],
)  # fmt: skip
def test_every_curve_stays_in_its_picture(train, val):
    picture = tree.fromstring(card.svg(train, val))
    kind = "{http://www.w3.org/2000/svg}"
    points = [point.split(",") for line in picture.iter(f"{kind}polyline") for point in line.get("points").split()]
    points += [(dot.get("cx"), dot.get("cy")) for dot in picture.iter(f"{kind}circle")]
    assert points and len(points) <= card.MAX_POINTS + len(val)
    assert all(0 <= float(x) <= card.WIDTH and 0 <= float(y) <= card.HEIGHT for x, y in points)


def test_values_that_are_no_numbers_are_left_out():
    rows = [{"step": 1, "loss": float("nan")}, {"step": 2, "loss": None}, {"step": 3, "loss": 1.5}, {"loss": 2.0}]
    assert records.curve_points(rows, "loss") == [(3.0, 1.5)]


def test_again_and_on_a_branch(hub, trained, logged_in):  # noqa: F811
    """A license that the owner added stays; weights that the new export replaces go."""
    assert main(["push", str(trained), NAME]) == 0
    readme = pushed(hub)["README.md"].decode().replace("---\n", "---\nlicense: apache-2.0\n", 1)
    pushed(hub).update({"README.md": readme.encode(), "model-00001-of-00001.safetensors": b"old", "notes.txt": b"mine"})
    assert main(["push", str(trained), NAME]) == 0
    assert ModelCard(pushed(hub)["README.md"].decode()).data.license == "apache-2.0"
    assert "No license" not in pushed(hub)["README.md"].decode()
    assert "model-00001-of-00001.safetensors" not in pushed(hub) and pushed(hub)["notes.txt"] == b"mine"
    assert main(["push", str(trained), NAME, "--revision", "v2"]) == 0
    assert pushed(hub, "v2")["config.json"] == pushed(hub)["config.json"]


def test_public_is_asked_for_by_name(hub, trained, logged_in):  # noqa: F811
    assert main(["push", str(trained), NAME, "--public"]) == 0
    assert [one["visibility"] for one in hub.made] == ["public"]


def test_an_adapter_names_its_base_by_the_id(tmp_path, hub, logged_in):  # noqa: F811
    model = save_weights(write_model(tmp_path / "model"))
    settings = [
        f"model.path={model}",
        "model.init=pretrained",
        "lora.rank=2",
        "train.steps=2",
        "checkpoint.export=final",
    ]
    recipe = tiny_recipe(tmp_path, *settings, "optimizer.lr=1e-3")
    launch(recipe)
    assert main(["push", str(recipe.run.directory), NAME, "--base", "owner/base"]) == 0
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(pushed(hub))
    assert json.loads(pushed(hub)["adapter_config.json"])["base_model_name_or_path"] == "owner/base"
    data = ModelCard(pushed(hub)["README.md"].decode()).data
    assert data.library_name == "peft" and data.base_model == "owner/base"


@pytest.mark.parametrize(
    ("name", "token", "may_write", "said"),
    [
        (
            NAME,
            None,
            True,
            "the hub does not accept your token, or you have none. Run `hf auth login`, or set HF_TOKEN",
        ),
        (NAME, "hf_wrong", True, "the hub does not accept your token, or you have none"),
        ("org/tiny", "hf_right", False, "org/tiny: your token may not write to this repository"),
        ("tiny", "hf_right", True, "tiny is not the id of a model on the hub. Write it as OWNER/NAME"),
        ("me/a b", "hf_right", True, "me/a b could not be pushed"),
    ],
)
def test_refusals(hub, trained, monkeypatch, capsys, name, token, may_write, said):  # noqa: F811
    hub.may_write = may_write
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert main(["push", str(trained), name]) == 1
    assert said in capsys.readouterr().err and hub.models == {}


def test_no_network_is_said(hub, trained, logged_in, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["push", str(trained), NAME]) == 1
    assert f"{NAME} could not be pushed: " in capsys.readouterr().err


def test_a_run_without_an_export(tmp_path, trained, capsys):
    for file in (trained / "export").iterdir():
        file.unlink()
    assert main(["push", str(trained), NAME]) == 1
    assert f"{trained} has no export. Use the directory of a run. `dtrain export {trained}" in capsys.readouterr().err
    assert main(["push", str(tmp_path / "gone"), NAME]) == 1
    assert "is not a directory" in capsys.readouterr().err


def test_a_dry_run_sends_nothing(hub, trained, capsys):  # noqa: F811
    assert main(["push", str(trained), NAME, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "# tiny" in out and "model.safetensors" in out.splitlines() and hub.asked == []
