"""Files of other tools on the command line: `dtrain convert`, and `run`, `validate` and `preview` of such a file."""

import pytest
import yaml

from dtrain.commands.cli import main
from dtrain.training import load_recipe
from tests.tiny import write_model, write_rows

TRL = """\
model_name_or_path: {model}
dataset_name: {rows}
max_steps: 2
learning_rate: 1.0e-2
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
warmup_ratio: 0.1
save_steps: 0.5
wandb_entity: me
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("convert")
    model, rows = write_model(root / "model"), write_rows(root / "rows.jsonl")
    (root / "trl.yaml").write_text(TRL.format(model=model, rows=rows))
    return root


def with_line(root, line, name="other.yaml"):
    """A copy of the file with one more line."""
    file = root / name
    file.write_text((root / "trl.yaml").read_text() + line)
    return file


def tiny(root, name):
    """Overrides with which a run of two steps takes no time."""
    return ["model.init=scratch", "launch.device=cpu", "metrics.tensorboard=false", "checkpoint.export=none"] + [
        f"run.dir={root / 'runs'}",
        f"run.name={name}",
    ]


def test_convert_prints_the_recipe_alone_and_what_it_lacks_on_stderr(root, capsys):
    file = with_line(root, "neftune_noise_alpha: 5\n")
    assert main(["convert", str(file)]) == 0
    caught = capsys.readouterr()
    recipe = load_recipe(yaml.safe_load(caught.out))
    assert (recipe.train.steps, recipe.train.global_batch, recipe.scheduler.warmup_steps) == (2, 8, 1)
    assert "  betas: [0.9, 0.999]  # TRL 1.16's default\n" in caught.out
    assert "# not carried over, and may change numbers:\n#   neftune_noise_alpha: " in caught.out
    assert "may change numbers:\n  neftune_noise_alpha: " in caught.err
    assert "left out, because no number depends on it: save_steps" in caught.err


def test_convert_writes_a_new_file_that_loads_and_overwrites_none(root, capsys):
    made = root / "my.yaml"
    words = ["convert", str(root / "trl.yaml"), "-o", str(made)]
    assert main([*words, "train.epochs=3", "scheduler.name=cosine", "lora.rank=4"]) == 0
    assert capsys.readouterr().out == f"wrote {made}: {root / 'trl.yaml'} of TRL 1.16\n"
    text = made.read_text()
    recipe = load_recipe(made)
    assert (recipe.train.epochs, recipe.train.steps, recipe.lora.rank) == (3, None, 4)
    assert recipe.scheduler.name == "cosine" and "  name: cosine  # set on the command line\n" in text
    assert main(words) == 1
    assert "already exists" in capsys.readouterr().err and made.read_text() == text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trl.yaml", "lr=1"], "dtrain's word for it is optimizer.lr"),
        (["trl.yaml", "optimizer.lr=fast"], "optimizer.lr"),
        (["gone.yaml"], "gone.yaml"),
        (["trl.yaml", "-o", "nowhere/my.yaml"], "No such file or directory"),
    ],
)
def test_convert_reports_mistakes(words, said, root, capsys, monkeypatch):
    monkeypatch.chdir(root)
    assert main(["convert", *words]) == 1
    caught = capsys.readouterr()
    assert said in caught.err and caught.out == ""


def test_convert_answers_a_recipe_of_dtrain(root, capsys):
    file = root / "ours.yaml"
    file.write_text("model: {path: m}\ndata: {train: {path: d.jsonl}}\n")
    assert main(["convert", str(file)]) == 1
    assert f"dtrain validate {file}" in capsys.readouterr().err


def test_a_file_of_another_tool_runs_as_its_recipe_does_and_says_so(root, capsys):
    file = root / "trl.yaml"
    assert main(["run", str(file), *tiny(root, "direct")]) == 0
    first, second = capsys.readouterr().err.splitlines()[:2]
    assert first.startswith(f"{file} is a file of TRL 1.16, converted: `dtrain convert {file}` prints the recipe")
    assert "(method=sft; train.global_batch=8 is that of one GPU)" in first
    assert second == "left out, because no number depends on it: save_steps, wandb_entity"
    written = root / "written.yaml"
    assert main(["convert", str(file), "-o", str(written)]) == 0
    assert main(["run", str(written), *tiny(root, "written")]) == 0
    assert "converted" not in capsys.readouterr().err
    losses = [[row["loss"] for row in rows(root, name)] for name in ("direct", "written")]
    assert losses[0] == losses[1] and len(losses[0]) == 2


def rows(root, name):
    lines = (root / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(yaml.safe_load, lines) if "loss" in row]


@pytest.mark.parametrize("command", ["validate", "preview"])
def test_other_commands_take_the_file_too(command, root, capsys):
    assert main([command, str(root / "trl.yaml"), *tiny(root, "checked")]) == 0
    assert "is a file of TRL 1.16, converted" in capsys.readouterr().err


def test_a_key_that_may_change_numbers_stops_a_run_until_it_is_decided(root, capsys):
    file = with_line(root, "chat_template_path: chatml\n")
    assert main(["run", str(file), *tiny(root, "stopped")]) == 1
    said = capsys.readouterr().err
    assert "- chat_template_path: " in said and "TRL 1.16" in said
    assert f"`dtrain convert {file} -o my.yaml`" in said
    assert "dtrain's word for it" not in said  # no list of all keys of the file
    assert main(["run", str(file), *tiny(root, "decided"), "data.chat_template=null"]) == 0
    assert "converted" in capsys.readouterr().err


def test_a_method_that_dtrain_lacks_is_an_error_about_it(root, capsys):
    file = root / "verl.yaml"
    file.write_text("actor_rollout_ref: {model: {path: m}}\ndata: {train_files: d.jsonl}\n")
    assert main(["validate", str(file)]) == 1
    said = capsys.readouterr().err
    assert "method=ppo is not one of" in said and "algorithm.adv_estimator" in said and "dtrain convert" in said


def test_keys_of_a_tool_that_nobody_knows_are_reported_one_by_one(root, capsys):
    file = root / "unknown.yaml"
    lines = ["learning_rate: 1.0e-4", "num_epochs: 2", "lora_r: 8", "warmup_ratio: 0.1", "bf16: true", "seq_len: 64"]
    file.write_text("\n".join(lines))
    assert main(["validate", str(file)]) == 1
    said = capsys.readouterr().err
    assert "learning_rate: dtrain's word for it is optimizer.lr" in said and "none whose files dtrain knows" in said
    assert main(["convert", str(file)]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["optimizer"]["lr"] == 1e-4
