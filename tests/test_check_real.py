"""tools/check_real: rows run once each after those that they need, again where commands changed; pairs of answers."""

import json
import sys

import pytest

from tools import check_real, real_tasks


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Give the directory of two rows that append to a file, the second resting on the first."""
    for name, place in (("ROOT", tmp_path), ("BUILD", tmp_path / "build"), ("RUNS", tmp_path / "runs")):
        monkeypatch.setattr(check_real, name, place)
    monkeypatch.setattr(check_real, "PAGE", tmp_path / "real.md")
    (tmp_path / "build").mkdir()

    def row(name, text, *needs):
        command = f"echo {text} >> build/{name}"
        return check_real.Row(
            f"Row {name}", (command,), lambda: (tmp_path / "build" / name).read_text().split()[-1], needs
        )

    def set_rows(first):
        monkeypatch.setattr(check_real, "ROWS", {"b": row("b", "two", "a"), "a": row("a", first)})

    set_rows("one")
    return tmp_path / "build", set_rows


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["check_real", *words])
    check_real.main()


def lines(directory, name):
    return len((directory / name).read_text().splitlines())


@pytest.mark.processes
def test_rows_run_once_until_their_commands_change(rows, monkeypatch):
    directory, set_rows = rows
    run(monkeypatch)
    run(monkeypatch)
    assert (lines(directory, "a"), lines(directory, "b")) == (1, 1)
    text = (directory.parent / "real.md").read_text()
    assert text.index("| Row a | one |") < text.index("| Row b | two |") and "# b\necho two >> build/b" in text
    set_rows("three")
    run(monkeypatch)
    assert (lines(directory, "a"), lines(directory, "b")) == (2, 2)
    assert "| Row a | three |" in (directory.parent / "real.md").read_text()
    run(monkeypatch, "--again", "b")
    assert (lines(directory, "a"), lines(directory, "b")) == (2, 3)


@pytest.mark.processes
def test_a_row_that_fails_ends_the_tool_and_leaves_no_result(rows, monkeypatch):
    directory, set_rows = rows
    set_rows("one; exit 3; echo")
    with pytest.raises(SystemExit, match=r"a: the command ended with 3; .*a\.log says why"):
        run(monkeypatch)
    assert not (directory / "rows" / "a.json").exists() and not (directory.parent / "real.md").exists()


def test_pairs_are_a_right_answer_and_a_wrong_one_of_the_same_prompt(tmp_path):
    drawn = [
        {
            "prompt_index": number,
            "prompt": [{"role": "user", "content": f"q{number}"}],
            "completion": text,
            "reward": score,
        }
        for number, answers in enumerate(
            [[("5", 0.0), ("4", 1.0), ("6", 0.0)], [("1", 1.0)], [("2", 0.5), ("3", 0.01)]]
        )
        for text, score in answers
    ]
    (tmp_path / "drawn.jsonl").write_text("".join(json.dumps(row) + "\n" for row in drawn))
    real_tasks.write_pairs(tmp_path, tmp_path / "drawn.jsonl")
    (pair,) = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert pair["prompt"][0]["content"] == "q0"
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("4", "5")
