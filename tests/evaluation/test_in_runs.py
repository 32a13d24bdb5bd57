"""Evaluations within runs: what `dtrain eval` says of the same step, the same on a mesh, beside training, once."""

import json
import random
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from dtrain.base.errors import Stopped, UserError
from dtrain.checkpoint.dcp.retention import Patience
from dtrain.commands.cli import main
from dtrain.commands.plan.hardware import GPUS
from dtrain.commands.plan.plan import make_plan
from dtrain.parallel.mesh import Runtime, StopFlag
from dtrain.rl.remote.judge import Judge
from dtrain.training.evaluations import Evaluations
from dtrain.training.trainer import train
from tests.data.makers import write_jsonl
from tests.methods.test_dpo_runs import recipe_of as tiny_dpo
from tests.problem_lines import preflight
from tests.running import run, run_all
from tests.tiny import save_weights, tiny_grpo, tiny_recipe, write_model, write_prompts

JUDGES = "[{fn: tests.methods.judges.wanted}, {fn: tests.methods.judges.even, weight: 0.5}]"
CLOCKS = ("tokens_per_sec", "mem_gib", "step_time", "data_time", "rollout_time", "train_time")


def asked(root, *more):
    """Two sets: one greedy, and one of draws."""
    write_prompts(root / "asked.jsonl", count=7)
    return (
        f"eval={{sure: {{path: {root}/asked.jsonl, every: 2, rewards: {JUDGES}, sampling: {{max_new_tokens: 6}}}}, "
        f"drawn: {{path: {root}/asked.jsonl, limit: 5, samples: 3, at_start: false, every: 3, rewards: {JUDGES}, "
        "sampling: {max_new_tokens: 5, temperature: 1.3, top_k: 40}, show: 0}}",
        "train.steps=4",
        *more,
    )


def lines(recipe, name="metrics"):
    return [json.loads(line) for line in (recipe.run.directory / f"{name}.jsonl").read_text().splitlines()]


def evaluations(recipe):
    """Its rows of evaluations, without times."""
    rows = [row for row in lines(recipe) if any(name.startswith("eval_") for name in row)]
    return [{name: value for name, value in row.items() if not name.endswith("_time")} for row in rows]


def trained(recipe):
    rows = [row for row in lines(recipe) if "loss" in row or "val_loss" in row]
    return [{name: value for name, value in row.items() if name not in CLOCKS} for row in rows]


def test_a_row_is_what_dtrain_eval_says_of_the_step(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[2])
    recipe = run(tiny_recipe(tmp_path, *asked(tmp_path), "checkpoint.every=3", "run.seed=5"))
    rows = evaluations(recipe)
    done = [(row["step"], name) for row in rows for name in ("sure", "drawn") if f"eval_{name}_unknown" in row]
    assert done == [(0, "sure"), (2, "sure"), (3, "drawn"), (4, "sure"), (4, "drawn")]
    arguments = ["--limit", "5", "--samples", "3", "--temperature", "1.3", "--top-k", "40", "--max-new-tokens", "5"]
    arguments += ["--reward", "tests.methods.judges.wanted", "--reward", "tests.methods.judges.even", "--seed", "5"]
    arguments += ["--dtype", "float64", "--device", "cpu", "--out", str(tmp_path / "out.jsonl"), "--json"]
    step = recipe.run.directory / "checkpoints" / "step-3"
    capsys.readouterr()
    assert main(["eval", str(step), str(tmp_path / "asked.jsonl"), *arguments]) == 0
    report, told = json.loads(capsys.readouterr().out), [json.loads(line) for line in open(tmp_path / "out.jsonl")]
    answers = [row for row in lines(recipe, "evals") if (row["step"], row["set"]) == (3, "drawn")]
    names = {"prompt_index": "index", "sample_index": "sample", "completion": "text", "tokens": "completion_len"}
    for mine, theirs in zip(answers, told, strict=True):
        assert mine["truncated"] == (theirs["finish"] == "length")
        assert all(mine[names.get(key, key)] == theirs[key] for key in (*names, "prompt", "rewards"))
    (row,) = [row for row in evaluations(recipe) if row["step"] == 3]
    rewards = {f"reward/{name}": value for name, value in report["rewards"].items()}
    weighted = report["rewards"]["wanted"] + 0.5 * report["rewards"]["even"]
    passes = {f"pass@{k}": value for k, value in report["passes"].items()}
    assert len(passes) == 3 and {"unknown": 0} | rewards | passes | {
        name: report[name] for name in ("completion_len", "truncated_frac")
    } == {
        name.removeprefix("eval_drawn_"): value
        for name, value in row.items()
        if name not in ("step", "eval_drawn_reward_mean", "eval_drawn_reward_stderr")
    }
    assert row["eval_drawn_reward_mean"] == pytest.approx(weighted, abs=1e-12)


def test_answers_and_rows_are_the_same_on_a_mesh_and_training_is_untouched(tmp_path):
    """Against one process, and bit for bit against the same mesh without `eval`."""
    alone = ["train.global_batch=4", "train.steps=2", "scheduler.warmup_steps=0", "moe.balance=0.1"]
    shape = [*alone, "parallel.ep=2", "parallel.tp=2"]
    one = run(tiny_recipe(tmp_path, *asked(tmp_path), *alone, family="qwen3-moe", name="one"))
    mesh = tiny_recipe(tmp_path, *asked(tmp_path), *shape, family="qwen3-moe", name="mesh")
    plain = tiny_recipe(tmp_path, *shape, family="qwen3-moe", name="plain")
    run_all([mesh, plain], 4)
    assert lines(mesh, "evals") == lines(one, "evals") and len(lines(one, "evals")) == 2 * 7 + 15
    assert evaluations(mesh) == evaluations(one)
    assert trained(mesh) == trained(plain)


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo", "distill"])
def test_training_is_the_same_with_and_without(tmp_path, method):
    made = {"sft": tiny_recipe, "dpo": tiny_dpo, "grpo": tiny_grpo, "distill": tiny_recipe}[method]
    more = ["train.validate_every=2", f"data.val.path={tmp_path}/{'val' if method == 'dpo' else 'prompts'}.jsonl"]
    if method in ("sft", "distill"):
        more = ["lora={dropout: 0.1}"]
    if method == "distill":
        more += ["method=distill", f"distill.teacher={save_weights(write_model(tmp_path / 'teacher'), 1)}"]
    states = []
    for words, name in ((["train.steps=4"], "plain"), (asked(tmp_path), "evaluated")):
        torch.manual_seed(1)
        recipe = run(made(tmp_path, *words, *more, name=name))
        states.append((torch.get_rng_state().tolist(), random.getstate(), trained(recipe)))
    assert states[0] == states[1] and len(lines(recipe, "evals")) == 51


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An evaluated run in one piece."""
    root = tmp_path_factory.mktemp("whole")
    return run(tiny_recipe(root, *asked(root), "checkpoint.every=10", name="whole"))


@pytest.mark.parametrize("at", [0, 3, 4])
def test_a_resume_repeats_no_evaluation_and_loses_none(whole, monkeypatch, at):
    """Stopped before the first step, within an evaluation, and within that of the last step."""
    root = Path(whole.run.dir).parent
    recipe = tiny_recipe(root, *asked(root), "checkpoint.every=10", name=f"cut-at-{at}")
    stop, draw = StopFlag(), Evaluations._evaluate_set

    def stopped(self, one, step):
        if (one.set.name, step) == ("drawn" if at else "sure", at):
            stop.request(15)
        return draw(self, one, step)

    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(Evaluations, "_evaluate_set", stopped)
        train(recipe, Runtime(stop=stop))
    assert all(row["step"] < at or row["set"] == "sure" for row in (lines(recipe, "evals") if at else ()))
    with (recipe.run.directory / "evals.jsonl").open("a") as file:  # a kill before the row
        file.write(json.dumps({"step": at, "set": "drawn", "index": 0, "sample": 0}) + "\n")
    run(recipe)
    run(recipe)  # which has nothing to do
    assert evaluations(recipe) == evaluations(whole) and lines(recipe, "evals") == lines(whole, "evals")
    assert trained(recipe) == trained(whole)


@pytest.mark.parametrize("saves", [("step-4",), ("step-2", "step-4")])
def test_rows_beyond_the_resumed_step_are_cut_and_those_of_a_lost_start(tmp_path, saves):
    recipe = run(tiny_recipe(tmp_path, *asked(tmp_path), "checkpoint.every=2"))
    whole = evaluations(recipe), lines(recipe, "evals"), trained(recipe)
    for step in saves:
        (recipe.run.directory / "checkpoints" / step).rename(tmp_path / step)
    run(recipe)
    assert (evaluations(recipe), lines(recipe, "evals"), trained(recipe)) == whole


def test_patience_ends_the_run_and_the_best_save_stays(tmp_path, capsys):
    """The reward falls from step 2 on: 3 saves after the best one, of which two measures are not better."""
    (tmp_path / "worse.py").write_text(
        "import itertools\ncalls = itertools.count()\n"
        "def worse(completions):\n    return [[0.2, 0.9, 0.5, 0.8, 1.0, 1.0][next(calls)]] * len(completions)\n"
    )
    write_prompts(tmp_path / "asked.jsonl", count=3)
    words = [f"eval.path={tmp_path}/asked.jsonl", "eval.rewards=[{fn: worse.worse}]", "eval.every=1", "eval.show=0"]
    words += ["checkpoint.every=1", "checkpoint.keep_last=1", "checkpoint.keep_best=eval_reward_mean"]
    words += ["train.patience=2", "eval.sampling.max_new_tokens=2", "eval.at_start=true", "checkpoint.export=final"]
    recipe = tiny_recipe(tmp_path, *words)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        run(recipe)
        assert [row["step"] for row in lines(recipe) if "loss" in row] == [1, 2, 3]
        assert sorted(one.name for one in (recipe.run.directory / "checkpoints").iterdir()) == ["step-1", "step-3"]
        assert (recipe.run.directory / "export" / "config.json").is_file()
        capsys.readouterr()
        run(recipe)
    assert "train.patience ends the run" in capsys.readouterr().err and len(lines(recipe)) == 7


def test_patience_counts_measures_since_the_best():
    patience = Patience("val_loss", min, 2)
    seen = []
    for value in (3.0, 2.0, 2.0, float("nan"), 1.5, 1.6, 1.5):
        patience.record({"val_loss": value, "loss": 0.0})
        seen.append(patience.is_exhausted)
    assert seen == [False] * 6 + [True] and not Patience("val_loss", min, None, [1.0, 2.0]).is_exhausted


class JudgeServer(ThreadingHTTPServer):
    """Gives as many points as the answer has words, and what `says` holds instead where it has something."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.says = [], None
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def do_GET(self):
        self.answer({"data": [{"id": "wise"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        words = body["messages"][-1]["content"].rsplit("\n", 1)[-1].split()
        said = self.server.says or f'{len(words)} words. {{"score": {min(10, len(words))}}}'
        self.answer({"choices": [{"message": {"content": said}}]}, 500 if said == "500" else 200)

    def answer(self, body, status=200):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def server():
    with JudgeServer() as server:
        yield server
        server.shutdown()


@pytest.mark.slow
def test_a_judge_is_asked_once_for_the_same_words_and_its_failures_are_no_values(server, tmp_path):
    given = {"url": server.url, "model": "wise", "rubric": "long {ones}", "cache": str(tmp_path / "c" / "judged.jsonl")}
    judge = Judge(**given)
    judge.check_server()
    assert judge(["q", "q", "p"], ["a b", "a b", "a b c"], answer=["x", "x", None]) == [0.2, 0.2, 0.3]
    assert len(server.asked) == 2 and judge.missed is None
    for one in server.asked:
        question = one["messages"][1]["content"]
        assert one["temperature"] == 0 and "long {ones}" in one["messages"][0]["content"]
        assert ("The right answer:\nx" in question) == question.startswith("The question:\nq")
    server.says = "11 of 10: score: 11"
    assert judge(["q"] * 3, ["a", "a b", "c"], answer=["x"] * 3) == [None, 0.2, None]
    assert "has no score from 0 to 10" in judge.missed
    server.says, server.asked = "500", []
    assert judge(["q"] * 20, [f"w{n}" for n in range(20)]) == [None] * 20
    count = len(server.asked)
    assert count < 30  # of 40 tries: it is down
    assert Judge(**given)(["p"], ["a b c"]) == [0.3] and len(server.asked) == count
    with pytest.raises(UserError, match="has no model other. Set model to one of its models: wise"):
        Judge(**{**given, "model": "other"}).check_server()


def test_a_run_with_a_judge_that_fails_goes_on_and_counts_it(server, tmp_path, capsys):
    rows = [json.dumps({"prompt": f"w{n} w{n + 3}"}) + "\n" for n in range(5)]
    (tmp_path / "asked.jsonl").write_text("".join(rows))
    words = [f"eval.path={tmp_path}/asked.jsonl", "eval.every=1", "train.steps=2", "eval.sampling.max_new_tokens=3"]
    words += [f"eval.rewards=[{{fn: judge, url: '{server.url}', model: wise, rubric: many words}}]"]
    recipe = tiny_recipe(tmp_path, *words)
    assert preflight(recipe, 1) == []
    run(recipe)
    first = evaluations(recipe)[0]
    texts = [row["text"] for row in lines(recipe, "evals") if row["step"] == 0]
    assert first["eval_reward_mean"] == pytest.approx(sum(len(text.split()) for text in texts) / 50)
    server.says = "no"
    (tmp_path / "runs" / ".cache" / "judged.jsonl").unlink()
    capsys.readouterr()
    again = run(tiny_recipe(tmp_path, *words, name="again"))
    assert [row["eval_unknown"] for row in evaluations(again)] == [5, 5, 5]
    assert "eval_reward_mean" not in evaluations(again)[0] and len(trained(again)) == 2
    told = capsys.readouterr().err
    assert told.count("has no score") == 1 and "5 without reward" in told
    server.shutdown()
    server.server_close()
    (problem,) = preflight(recipe, 1)
    assert problem.startswith("eval.rewards[0]: ") and "does not answer" in problem


@pytest.mark.parametrize(
    "words, told",
    [
        (["eval.a.rewards=[{fn: math_exact}]"], "eval.a.rewards=[{fn: math_exact, kwargs: {column: ..}}]"),
        (
            ["eval.a.rewards=[{fn: math_exakt}]"],
            "eval.a.rewards[0].fn=math_exakt is not a reward; did you mean math_exact",
        ),
        (["eval.a.rewards=[{fn: judge, url: 'http://x', model: m}]"], "eval.a.rewards[0].rubric is required by judge"),
        (["eval.a.rewards=[{fn: regex, rubric: r, kwargs: {pattern: x}}]"], "rubric is read only by fn=judge"),
        (
            ["eval.a.rewards=[{fn: judge, url: 'http://127.0.0.1:9', model: m, rubric: r}]"],
            "the reward `judge` reads text",
        ),
        (["eval.a.samples=4"], "Set eval.a.sampling.temperature=1.0"),
        (["eval.a.every=0"], "eval.a.every=0 must be at least 1"),
        (["eval.a.path=nowhere.jsonl"], "eval.a.path: there is no file nowhere.jsonl"),
        (["eval.a.path={root}/empty.jsonl"], "the dataset is empty"),
        (["eval.a.format=text"], "eval.a.format=text has no prompts"),
        (["eval.a.sampling.max_new_tokens=128"], "leaves no room for a prompt within the model's 128 positions"),
        (
            ["eval.a.rewards=[{fn: text_exact}]", "eval.a.columns={answer: info}"],
            "asked.jsonl:1: reward text_exact: column 'answer' holds an object (name, truth), and an answer is a text",
        ),
        (["eval.a.columns={answer: info.gold}"], "names answer: info.gold, and the file has no such column; it has "),
        (["eval.a.columns={answer: gold}"], "eval.a.columns names answer: gold, and the file has no such column"),
        (["eval={'a b': {path: x}}"], "'a b' cannot be the name of a set"),
        (["checkpoint.keep_best=eval_a_pass@1", "checkpoint.every=4"], "Set eval.a.every=4"),
        (["checkpoint.keep_best=eval_b_reward_mean"], "did you mean eval_a_reward_mean?"),
        (["train.patience=2"], "train.patience=2 counts values of checkpoint.keep_best, which is null"),
        (["checkpoint.keep_best=eval_a_reward_mean", "train.patience=1"], "eval.a.every is null. Set eval.a.every"),
    ],
)
def test_mistakes_are_told_before_anything_starts(tmp_path, words, told):
    rows = [{"prompt_ids": [3, 4], "wanted": 5, "info": {"name": "x", "truth": "5"}}] * 2
    write_jsonl(tmp_path / "asked.jsonl", rows)
    (tmp_path / "empty.jsonl").write_text("")
    fixed = [f"eval.a.path={tmp_path}/asked.jsonl"]
    if not any("rewards" in word for word in words):
        fixed.append("eval.a.rewards=[{fn: tests.methods.judges.even}]")
    recipe = tiny_recipe(tmp_path, *fixed, *(word.replace("{root}", str(tmp_path)) for word in words))
    assert any(told in problem for problem in preflight(recipe, 1)), preflight(recipe, 1)


def test_a_plan_counts_the_keys_of_the_longest_answer(tmp_path):
    """Two layers of two key heads of 16, keys and values in bfloat16, slots of 64 and 32 positions, 4/5 of what is
    free; beside the weights and the optimizer's state."""
    words = [f"eval.path={tmp_path}/asked.jsonl", "eval.sampling.max_new_tokens=64", "data.max_length=90"]
    recipe = tiny_recipe(tmp_path, *words, "train.dtype=bfloat16")
    plan = make_plan(recipe, 1, GPUS["h100"])
    held = plan.step.parameters + plan.step.optimizer_state
    assert plan.evaluation_bytes == held + 2 * 2 * 2 * 16 * 2 * (64 + 32) * 5 // 4
    assert plan.fits and not replace(plan, budget=plan.evaluation_bytes - 1, step=replace(plan.step, peak=0)).fits


def test_prompts_that_are_too_long_and_rewards_that_fail_end_the_run_before_its_first_step(tmp_path):
    write_prompts(tmp_path / "asked.jsonl", count=2)
    with (tmp_path / "asked.jsonl").open("a") as file:
        file.write(json.dumps({"prompt_ids": [3] * 125}) + "\n")
    words = [f"eval.path={tmp_path}/asked.jsonl", "eval.rewards=[{fn: tests.methods.judges.even}]"]
    with pytest.raises(UserError, match=r"asked.jsonl:3: the prompt has 125 tokens. With 4 tokens for an answer"):
        run(tiny_recipe(tmp_path, *words, "eval.sampling.max_new_tokens=4", name="long"))
    fails = "eval.rewards=[{fn: tests.evaluation.test_in_runs.fails}]"
    late = tiny_recipe(tmp_path, *words, fails, "eval.limit=2", "eval.at_start=false", name="late")
    with pytest.raises(UserError, match=r"reward fails \(tests.evaluation.test_in_runs.fails\) failed"):
        run(late)
    assert not (late.run.directory / "metrics.jsonl").exists()


def fails(completions):
    raise RuntimeError("no luck")
