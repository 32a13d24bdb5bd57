"""Mistakes that a rank finds late, once its model is built or its data are read to the end: `validate` finds them."""

import json

import pytest

from dtrain import recipe as config
from dtrain.commands.cli import main
from dtrain.data.sources.sources import FileCheck
from dtrain.training.setup import first_rows
from tests.mistakes import write_sound
from tests.tiny import save_weights, tiny_recipe, write_model

LATE = (
    ("sft", ("model.attention=varlen", "train.dtype=bfloat16"), ("model.attention=varlen", "model.attention=auto")),
    ("grpo", ("grpo.cuda_graphs=true",), ("grpo.cuda_graphs=true", "leave it out")),
    ("sft", ("lora={rank: 2, modules_to_save: [lm_head]}", "checkpoint.init_from={root}/runs/adapter"),
     ("missing in the checkpoint: model.model.embed_tokens.weight",)),
    ("sft", ("lora={rank: 4}", "checkpoint.init_from={root}/runs/adapter"), ("its layers, ranks or scales",)),
    ("sft", ("lora={rank: 2}", "model.path={root}/other", "checkpoint.init_from={root}/runs/adapter"),
     ("Set model.path to the model that its run began from",)),
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Sound recipes of pretrained models, and a run that has trained an adapter."""
    root = tmp_path_factory.mktemp("late")
    write_sound(root)
    for seed, name in enumerate(("whole", "other")):
        save_weights(write_model(root / name), seed)
    recipe = tiny_recipe(root, f"model.path={root / 'whole'}", "model.init=pretrained")
    (root / "sft.yaml").write_text(config.to_yaml(recipe))
    words = ["lora={rank: 2}", "run.name=adapter", "checkpoint.every=2", "train.steps=2", "scheduler.warmup_steps=0"]
    assert main(["run", str(root / "sft.yaml"), *words]) == 0
    return root


@pytest.mark.parametrize(("base", "words", "says"), LATE, ids=lambda one: " ".join(one)[:60])
def test_both_commands_refuse(base, words, says, root, capsys):
    words = [word.replace("{root}", str(root)) for word in words]
    for command in ("validate", "run"):
        assert main([command, str(root / f"{base}.yaml"), *words]) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert not [one for one in says if one not in said], (command, said)


def write_many(path, wrong, row=None, megabytes=5):
    """Rows like `row` (text), of which one near the end is `wrong`."""
    row = json.dumps(row or {"text": "w3 w4 " * 1000})
    lines = [row] * -(-(megabytes << 20) // len(row))
    lines[-3] = wrong if isinstance(wrong, str) else json.dumps(wrong)
    path.write_text("\n".join(lines) + "\n")
    return len(lines) - 2


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"text": 5}, "text must be a string"),
        ({"txt": "w3"}, "text"),
        ("{not json", "is not JSON"),
        (["w3"], "a row must be a JSON object"),
    ],
    ids=str,
)
def test_a_row_far_behind_is_found(wrong, says, root, capsys):
    line = write_many(root / "many.jsonl", wrong)
    assert main(["validate", str(root / "sft.yaml"), f"data.train.path={root / 'many.jsonl'}"]) == 1
    said = capsys.readouterr().err
    assert f"many.jsonl:{line}: " in said and says in said


def test_what_was_not_read_is_said(root, capsys, monkeypatch):
    monkeypatch.setattr(first_rows, "MAX_SECONDS", 0.0)
    write_many(root / "many.jsonl", {"text": 5})
    assert main(["validate", str(root / "sft.yaml"), f"data.train.path={root / 'many.jsonl'}"]) == 0
    out = capsys.readouterr().out
    assert f"note: not looked at, for want of time: data.train: {root / 'many.jsonl'} from line 1 on" in out


def test_a_row_too_long_is_found_far_behind(root, capsys, monkeypatch):
    path = root / "long.jsonl"
    line = write_many(path, {"text": "w3 " * 40}, row={"text": " " * 5000})
    words = ["validate", str(root / "sft.yaml"), f"data.train.path={path}", "data.too_long=error"]
    assert main(words) == 1
    assert f"long.jsonl:{line}: the row has 41 tokens and data.max_length is 32" in capsys.readouterr().err
    monkeypatch.setattr(FileCheck, "only_shape_can_fail", True)
    assert main(words) == 0


def test_what_was_looked_at_by_its_shape_alone_is_said(root, capsys, monkeypatch):
    check_rows = FileCheck.check_rows
    monkeypatch.setattr(
        FileCheck, "check_rows", lambda check, until, whole: check_rows(check, 0.0 if whole else until, whole)
    )
    path = root / "shapes.jsonl"
    write_many(path, {"text": "w3"}, row={"text": " " * 5000})
    assert main(["validate", str(root / "sft.yaml"), f"data.train.path={path}", "data.too_long=error"]) == 0
    said = "note: looked at without the chat template and data.too_long, for want of time: data.train:"
    assert f"{said} {path} from line 1 on. The run reads it all" in capsys.readouterr().out


def test_ids_beyond_the_vocabulary_are_found_far_behind(root, capsys):
    lines = [json.dumps({"input_ids": [3, 4] * 1000})] * 1000 + [json.dumps({"input_ids": [3, 300]})]
    (root / "ids.jsonl").write_text("\n".join(lines))
    assert main(["validate", str(root / "sft.yaml"), f"data.train.path={root / 'ids.jsonl'}"]) == 1
    assert "ids.jsonl:1001: " in (said := capsys.readouterr().err) and "vocabulary of 67" in said
