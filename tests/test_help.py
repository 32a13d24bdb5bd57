"""`dtrain help` and `dtrain --help`: the entry of each key, sections, metrics, commands, and near misses."""

import re
import subprocess
import sys

import pytest

from dtrain.commands.cli import main
from dtrain.training import recipe_keys
from tests.pages import ROOT


def printed(capsys, *words: str) -> str:
    assert main(["help", *words]) == 0
    return capsys.readouterr().out


def one_line(text: str) -> str:
    return " ".join(text.split())


def page_rows() -> dict[str, tuple[str, str, str]]:
    """Return type, default and meaning of each key in docs/recipe.md whose section has one place."""
    rows = {}
    for line in (ROOT / "docs" / "recipe.md").read_text().splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and re.fullmatch(r"`\w+(\.\w+)+`", cells[0]):
            rows[cells[0].strip("`")] = (cells[1].replace("`", ""), cells[2].strip("`"), cells[3])
    return rows


def test_a_key_has_its_type_range_default_and_text(capsys):
    text = printed(capsys, "scheduler.min_lr_ratio")
    assert text.startswith("scheduler.min_lr_ratio\n")
    assert re.search(r"type +number\n", text) and re.search(r"default +0.1\n", text)
    assert re.search(r"range +\S", text)
    assert "Final learning rate as a share of lr" in text
    assert re.search(r"type +auto, cpu, cuda\n +default +auto\n", printed(capsys, "launch.device"))
    # However a user has it at hand: with a value, with dashes, with the number of an entry.
    for word in ("launch.device=cuda", "--launch.device", "launch.device"):
        assert printed(capsys, word) == printed(capsys, "launch.device")
    assert printed(capsys, "grpo.rewards[3].fn") == printed(capsys, "grpo.rewards.fn")


def test_every_key_has_the_entry_of_the_page(capsys):
    rows = page_rows()
    assert len(rows) > 150
    for key, (kind, default, meaning) in rows.items():
        text = one_line(printed(capsys, key))
        assert text.startswith(key)
        assert meaning == "" or meaning in text, key
        if "[section]" not in kind:
            assert f"type {kind}" in text and f"default {default}" in text, key
    for key in recipe_keys():
        assert printed(capsys, key).startswith(key)


def test_a_section_lists_its_keys(capsys):
    text = printed(capsys, "optimizer")
    keys = [key for key in recipe_keys() if key.startswith("optimizer.")]
    assert re.findall(r"^  (optimizer\.\w+) ", text, flags=re.MULTILINE) == keys
    assert re.search(r"optimizer.lr +1e-5 +Maximum learning rate", text)
    assert "Stage of a `scheduler`" in printed(capsys, "scheduler")


def test_the_last_part_of_a_key_a_metric_and_a_name_of_another_tool(capsys):
    text = printed(capsys, "loss")
    for key in ("sft.loss", "dpo.loss", "grpo.loss", "loss (a field of metrics.jsonl)"):
        assert key in text
    assert "norm of the whole model's gradient" in printed(capsys, "grad_norm")
    assert "share of trained tokens" in one_line(printed(capsys, "val_token_accuracy"))
    text = printed(capsys, "per_device_train_batch_size")
    assert "dtrain's word for it is train.micro_batch" in text and "\ntrain.micro_batch\n" in text
    assert "dtrain cat lora-sft" in printed(capsys, "lora-sft")


def test_a_command_and_a_word_that_is_both(capsys):
    assert "usage: dtrain generate" in printed(capsys, "generate")
    text = printed(capsys, "eval")
    assert "usage: dtrain eval" in text and "eval.every" in text


def test_several_words_and_none(capsys):
    text = printed(capsys, "optimizer.lr", "train.steps")
    assert text.index("optimizer.lr\n") < text.index("train.steps\n")
    text = printed(capsys)
    assert "usage: dtrain" in text and "Sections of a recipe: method, run, launch" in text


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("optimizer.lrr", "optimizer.lr"),
        ("genrate", "generate"),
        # Another tool's `epsilon` does not explain a key of a section that dtrain does not have.
        ("poly.epsilon", "epsilon"),
    ],
)
def test_a_near_miss_is_named(word, near, capsys):
    assert main(["help", word]) == 1
    assert f"did you mean `dtrain help {near}`?" in capsys.readouterr().err
    assert main(["help", "xyzzy"]) == 1
    assert "`dtrain help` lists" in capsys.readouterr().err


def test_help_loads_no_torch_for_the_keys_of_any_method():
    code = "import sys; from dtrain.commands.cli import main\n"
    code += "assert main(['help', 'dpo.beta', 'grpo', 'reward.task']) == 0\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pull towards the reference" in one_line(done.stdout)


def test_the_help_groups_all_commands_by_task(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    groups = re.findall(r"^([a-z ]+):\n((?:  .*\n)+)", text, flags=re.MULTILINE)
    commands = {title: re.findall(r"^  (\w+) ", lines, flags=re.MULTILINE) for title, lines in groups}
    assert commands["train"][:2] == ["run", "validate"]
    assert "generate" in commands["use a model"] and "report" in commands["look at runs"]
    with pytest.raises(SystemExit):
        main(["nonsense"])
    known = re.findall(r"commands are (.*)", capsys.readouterr().err)[0].split(", ")
    listed = [name for title, names in commands.items() if title != "options" for name in names]
    assert sorted(listed) == sorted(known) and "other commands" not in commands
    assert all(len(line) <= 100 for line in text.splitlines())
