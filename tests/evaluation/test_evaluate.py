"""`dtrain eval`: the engine's answers, judged; what is printed adds up to what is written; mistakes are told."""

import json
import subprocess
import sys
from itertools import combinations
from statistics import fmean

import pytest
import torch

from dtrain import models
from dtrain.commands.cli import main
from dtrain.commands.eval.evaluate import read_reward
from dtrain.inference.engine import Engine
from dtrain.inference.request import Request, SamplingParams
from dtrain.rl.rewards.scoring import pass_at_k
from dtrain.training.setup.evals import usual_reward
from tests.serve.serving import make_model, naive

JUDGE = """
def word(completions, answer, **_):
    return [None if one is None else float(one in text.split()) for text, one in zip(completions, answer)]
"""


FORMATS = """
def quiz(row):
    return {"question": row["ask"], "answer": row["key"]}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("eval")
    make_model(root, 1)
    (root / "judge.py").write_text(JUDGE)
    (root / "quiz_formats.py").write_text(FORMATS)
    rows = [
        {"question": "w5 w6", "answer": "w7"},
        {"messages": [{"role": "user", "content": "w9"}, {"role": "assistant", "content": "w30"}]},
        {"prompt": "w11 w12", "answer": "w13"},
        {"prompt_ids": [8, 40, 9]},
    ]
    for index, row in enumerate(rows):
        (root / f"rows-{index}.jsonl").write_text(json.dumps(row) + "\n")
    return root


def run(root, monkeypatch, capsys, *arguments):
    monkeypatch.chdir(root)
    status = main(["eval", "model", *arguments, "--dtype", "float64", "--device", "cpu"])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_answers_are_the_engines_and_the_report_adds_up(root, monkeypatch, capsys):
    arguments = ["--samples", "4", "--temperature", "1.5", "--top-k", "30", "--max-new-tokens", "16", "--seed", "3"]
    arguments += ["--reward", "judge.word", "--reward", 'regex={"pattern": "w1"}', "--out", "out.jsonl", "--json"]
    status, out, _ = run(root, monkeypatch, capsys, "rows-*.jsonl", *arguments)
    assert status == 0
    report = json.loads(out)
    rows = [json.loads(line) for line in (root / "out.jsonl").read_text().splitlines()]

    prompts = [[8, 5, 6, 9], [8, 9, 9], [8, 11, 12, 9], [8, 40, 9]]  # three by the template, one as it is
    sampling = SamplingParams(16, temperature=1.5, top_k=30, stop_ids=(1,))
    requests = [Request(ids, sampling, 3, i, j) for i, ids in enumerate(prompts) for j in range(4)]
    expected = Engine(models.from_pretrained(root / "model", torch.float64)).generate(requests)
    assert [(row["prompt_index"], row["sample_index"]) for row in rows] == [(i, j) for i in range(4) for j in range(4)]
    for row, completion in zip(rows, expected, strict=True):
        assert row["completion"] == " ".join(f"w{token}" for token in completion.ids)
        assert (row["tokens"], row["finish"]) == (len(completion.ids), completion.finish)
        answer = {0: "w7", 1: "w30", 2: "w13", 3: None}[row["prompt_index"]]
        word = None if answer is None else float(answer in row["completion"].split())
        regex = float("w1" in row["completion"])
        assert row["rewards"] == {"word": word, "regex": regex}
        assert row["reward"] == (word or 0.0) + regex
    assert report["reward"] == pytest.approx(fmean(row["reward"] for row in rows), abs=1e-12)
    known = [row["rewards"]["word"] for row in rows if row["prompt_index"] != 3]
    assert report["rewards"]["word"] == pytest.approx(fmean(known), abs=1e-12)
    assert report["completion_len"] == fmean(row["tokens"] for row in rows)
    assert report["truncated_frac"] == fmean(row["finish"] == "length" for row in rows)
    groups = [rows[start : start + 4] for start in range(0, 16, 4)]
    assert set(report["passes"]) == {"1", "2", "4"}
    for k, value in report["passes"].items():
        tries = [[any(row["reward"] >= 1 for row in some) for some in combinations(group, int(k))] for group in groups]
        assert value == pytest.approx(fmean(fmean(found) for found in tries), abs=1e-12)
    assert (report["prompts"], report["samples"], report["unknown"], report["cut_prompts"]) == (4, 4, 0, 0)


def test_the_table_and_what_stays_unknown(root, monkeypatch, capsys):
    """Greedy by default; a completion without reward counts nowhere; long prompts lose their beginning."""
    (root / "long.jsonl").write_text(json.dumps({"prompt_ids": [3] * 120 + [5, 6, 7]}) + "\n")
    arguments = ["rows-0.jsonl", "rows-3.jsonl", "long.jsonl", "--reward", "judge.word", "--max-new-tokens", "12"]
    status, out, _ = run(root, monkeypatch, capsys, *arguments, "--out", "out.jsonl")
    assert status == 0
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    assert lines["prompts"].strip() == "3 × 1" and lines["without reward"].strip() == "2"
    assert lines["prompts cut"].strip().startswith("1,")
    rows = [json.loads(line) for line in (root / "out.jsonl").read_text().splitlines()]
    assert [row["reward"] is None for row in rows] == [False, True, True]
    ids, _ = naive(root / "model", ([3] * 120 + [5, 6, 7])[-116:], 12)
    assert rows[2]["completion"].split() == [f"w{token}" for token in ids]
    status, out, _ = run(root, monkeypatch, capsys, *arguments, "--limit", "1", "--json")
    assert json.loads(out)["prompts"] == 1 and json.loads(out)["reward_stderr"] is None


def test_a_format_of_ones_own_reads_as_the_rows_that_it_returns(root, monkeypatch, capsys):
    (root / "quiz.jsonl").write_text('{"ask": "w5 w6", "key": "w7"}\n')
    arguments = ["--samples", "2", "--temperature", "1.0", "--max-new-tokens", "8", "--reward", "judge.word"]
    for file, more in (("rows-0.jsonl", []), ("quiz.jsonl", ["--format", "quiz_formats:quiz"])):
        status, _, err = run(root, monkeypatch, capsys, file, *more, *arguments, "--out", f"{file}.out")
        assert status == 0, err
    assert (root / "quiz.jsonl.out").read_text() == (root / "rows-0.jsonl.out").read_text() != ""


def test_pass_at_k_is_the_chance_of_a_draw_without_replacement():
    for right in range(6):
        for k in range(1, 6):
            draws = [any(index < right for index in some) for some in combinations(range(5), k)]
            assert pass_at_k(k, 5, right) == pytest.approx(fmean(draws), abs=1e-12)


def test_words_are_judged_as_words_where_nothing_else_is_asked_for(root, monkeypatch, capsys):
    """math_exact finds no number in "tac", so that a right answer would earn nothing."""
    ids, _ = naive(root / "model", [8, 5, 6, 9], 3)
    right = {"question": "w5 w6", "answer": " ".join(f"w{token}" for token in ids)}
    plain = [
        {"question": "q", "answer": "tac"},
        {"question": "q", "answer": "red"},
        {"question": "q", "answer": "7 men"},
    ]
    kinds = {"numbers": [{"question": "q", "answer": "#### 4"}, {"question": "q", "answer": "x"}], "words": plain}
    for name, rows in {**kinds, "right": [{**right, "answer": "x"}, {**right, "answer": "y"}, right]}.items():
        (root / f"kind-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(root)
    assert [usual_reward([root / f"kind-{name}.jsonl"]) for name in kinds] == ["math_exact", "text_exact"]
    status, out, _ = run(root, monkeypatch, capsys, "kind-right.jsonl", "--max-new-tokens", "3")
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    assert status == 0 and lines["reward"].strip() == "0.3333 ± 0.3333 by text_exact"
    assert lines["truncated"].strip() == "100.0%; raise --max-new-tokens"


def test_options_of_a_reward():
    assert read_reward("math_exact").kwargs == {} and read_reward("math_exact").fn == "math_exact"
    spec = read_reward('regex={"pattern": "a=b"}')
    assert (spec.fn, spec.kwargs) == ("regex", {"pattern": "a=b"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.jsonl"], "there is no file nowhere.jsonl"),
        (["columns.jsonl"], "Rename the columns of the file, such as body to question\n"),
        (["rows-0.jsonl", "--format", "questoin"], "--format=questoin is not one of"),
        (["rows-0.jsonl", "--format", "text"], "--format=text has no prompts for the model to answer"),
        (["rows-0.jsonl", "--format", "quiz_format:quiz"], "Did you mean quiz_formats:quiz?"),
        (["rows-0.jsonl", "--reward", "math_exakt"], "did you mean math_exact"),
        (["rows-0.jsonl", "--reward", "regex={"], "are not JSON"),
        (["rows-0.jsonl", "--reward", "regex=[1]"], "must be a JSON object"),
        (["rows-0.jsonl", "--out", "no/such/out.jsonl"], "there is no directory"),
        (["rows-0.jsonl", "--temperature", "-1"], "temperature=-1.0"),
        (["bad.jsonl"], "bad.jsonl:1: no known format"),
        (["empty.jsonl"], "there is no row"),
        (["foreign.jsonl"], "foreign.jsonl:1: "),
        (["rows-0.jsonl", "--max-new-tokens", "100000"], "--max-new-tokens 100000 leaves no room for a prompt within"),
    ],
)
def test_mistakes_are_told(root, monkeypatch, capsys, arguments, words):
    (root / "bad.jsonl").write_text('{"text": "w5"}\n')
    (root / "empty.jsonl").write_text("")
    (root / "columns.jsonl").write_text('{"body": "w5", "x": 1}\n')
    (root / "foreign.jsonl").write_text('{"prompt_ids": [9999]}\n')
    arguments = [*arguments, "--reward", "judge.word"] if "--reward" not in arguments else arguments
    arguments = [*arguments, "--max-new-tokens", "4"] if "--max-new-tokens" not in arguments else arguments
    status, out, err = run(root, monkeypatch, capsys, *arguments)
    assert status == 1 and out == "" and words in err


def test_help_loads_no_torch():
    code = "import sys; from dtrain.commands.cli import main\ntry: main(sys.argv[1:])\n"
    code += "except SystemExit as e: assert not e.code\n"
    code += "assert 'torch' not in sys.modules"
    for command in ("eval", "serve"):
        done = subprocess.run(
            [sys.executable, "-c", code, command, "--help"], capture_output=True, text=True, check=True
        )
        assert f"usage: dtrain {command}" in done.stdout
