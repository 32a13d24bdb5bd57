"""The terminal's lines about a run before it begins and when it is done."""

import json
import re

import pytest

from dtrain.commands.cli import main
from dtrain.training.registry import build_method
from dtrain.training.summary import closing_lines
from tests.running import run
from tests.tiny import tiny_grpo, tiny_recipe


def last_lines(recipe, directory, *, has_export):
    return list(closing_lines(recipe, build_method(recipe), directory, has_export=has_export))


def test_a_run_says_its_sizes_first_and_what_it_learned_last(tmp_path, capfd):
    saves = ("checkpoint.every=2", "checkpoint.keep_last=2")
    recipe = tiny_recipe(tmp_path, "checkpoint.export=final", "scheduler.warmup_steps=null", *saves)
    run(recipe)
    lines = "".join(capfd.readouterr()).splitlines()
    told = [(line[:10].strip(), line[10:]) for line in lines if line[:1].isalpha() and line[9:10] == " "]
    table = dict(reversed(told))  # the first line of each kind
    assert table["model"].endswith("parameters, init scratch") and table["mesh"] == "one process, cpu"
    assert table["data"] == "60 samples, packed to 32 tokens"
    assert table["batch"] == "global batch 8 = micro batch 2 × accumulation 4 × dp 1"
    assert table["steps"] == "10; learning rate 0.01, cosine"
    rows = [json.loads(line)["loss"] for line in (recipe.run.directory / "metrics.jsonl").open()]
    first, last = sum(rows[:5]) / 5, sum(rows[5:]) / 5
    assert table["result"] == f"loss {first:.4g} → {last:.4g} (means of the first and last 5 of 10)"
    assert table["next"] == f"dtrain report {recipe.run.directory}"
    assert any(f'dtrain generate {recipe.run.directory} --prompt "..."' in line for line in lines)
    drawn = next(number for number, line in enumerate(lines) if line.startswith("loss "))
    assert "┤" in lines[drawn] and "⣀" in lines[drawn + 4] and lines[drawn + 5].split() == ["1", "10"]
    about = json.loads((recipe.run.directory / "about.json").read_text())
    assert about["steps"] == 10 and about["mesh"] == {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1}
    # Weights and Adam's two moments in float64; the third save is complete before the first is deleted.
    pattern = r"saves: ([\d.]+) KiB each, at most 3 at a time \(checkpoint.keep_last=2\): .*; [\d.,]+ GiB are free in "
    taken = next(float(match[1]) for line in lines if (match := re.match(pattern, line)))
    assert taken == pytest.approx(about["parameters"] * 3 * 8 / 1024, rel=0.01)
    assert about["device"] == "cpu" and about["parameters"] == about["trained"] > 1000
    assert main(["compare", str(recipe.run.directory)]) == 0
    told = capfd.readouterr().out
    assert f"loss              {first:.4g} → {last:.4g}\n" in told and "10 of 10" in told and "one process, cpu" in told


def test_the_end_of_grpo_tells_rewards_and_not_the_loss(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": n, "loss": 9.0, "reward_mean": n / 10}) + "\n" for n in range(3))
    )
    told = last_lines(tiny_grpo(tmp_path), tmp_path, has_export=True)
    assert told[0] == "result    reward 0 → 0.2 (the first and the last of 3)"
    assert f"dtrain eval {tmp_path} {tmp_path / 'prompts.jsonl'}" in told[3]
    assert last_lines(tiny_recipe(tmp_path), tmp_path, has_export=False) == [
        "result    loss 9 → 9 (the first and the last of 3)",
        f"next      dtrain report {tmp_path}",
    ]


def test_the_first_and_the_last_answer_to_one_prompt_are_shown(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    asked = [{"set": "s", "index": index, "sample": 0, "prompt": f"q{index}"} for index in (0, 1)]
    rows = [{"step": step, **one, "text": f"a{step}\n\x1b", "reward": 0.5} for step in (0, 5, 9) for one in asked]
    (tmp_path / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = last_lines(tiny_recipe(tmp_path), tmp_path, has_export=False)
    assert told[0] == "answers   step 0 (reward 0.5): q0 → a0 \\x1b"
    assert told[1] == "          step 9 (reward 0.5): q0 → a9 \\x1b"


def test_groups_that_are_all_alike_are_warned_of(tmp_path, capfd):
    run(tiny_grpo(tmp_path, "grpo.rewards=[{fn: tests.methods.judges.nothing}]", "train.steps=4", "grpo.show=0"))
    assert "".join(capfd.readouterr()).count("warning: in every group of the rollout before step 1 all rewards") == 1


def test_validation_is_told_by_its_first_and_last(tmp_path):
    rows = [{"step": n, "loss": 1.0, "val_loss": value} for n, value in enumerate((4.0, 3.0, 0.5, 1.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = last_lines(tiny_recipe(tmp_path), tmp_path, has_export=False)
    assert told[1] == "result    validation loss 4 → 1 (the first and the last of 4; the lowest 0.5)"
