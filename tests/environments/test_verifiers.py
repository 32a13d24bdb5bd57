"""Environments of the library `verifiers`: by the library where it is installed, and by what stands in for it."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain import recipe as config
from dtrain.base.errors import UserError
from dtrain.commands.cli import main
from dtrain.data.text.tool_calls import learn_tool_format
from dtrain.rl.environments.episodes import Observations, run_episodes
from dtrain.rl.environments.stepping import Environments
from tests.environments.test_environment import Scripted, requests_for
from tests.environments.test_tools import TINY, calls_of, family
from tests.methods.comparing import assert_same_samples, rows_of, samples_of
from tests.running import assert_same, interrupt, run
from tests.tiny import tiny_grpo

HERE = Path(__file__).parent
NAME = "someone/dtrain-trials"
IS_INSTALLED = importlib.util.find_spec("verifiers") is not None


@pytest.fixture(params=["stand_in", "library"])
def library(request, monkeypatch):
    if request.param == "library":
        pytest.importorskip("verifiers", reason="verifiers is no package of the tests: `pip install dtrain[verifiers]`")
    else:
        monkeypatch.syspath_prepend(str(HERE / "stand_in"))
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE / "stand_in"))
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))


def written(*given):
    command = [sys.executable, "-m", "dtrain.rl.environments.verifiers", NAME, *given]
    return subprocess.run(command, capture_output=True, text=True)


def rows_for(kind, **more):
    found = written(json.dumps({"kind": kind, **more}))
    assert found.returncode == 0, found.stderr
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    return [{"prompt": row.pop("prompt"), "columns": row} for row in rows]


def environments_of(kind, said, **more):
    options = (NAME, {"kind": kind, **more}, ["<|im_end|>"])
    return Environments("dtrain.rl.environments.verifiers:RolloutMaker", options=options, whose="grpo.verifiers",
                        timeout=30.0, print_line=said.append)  # fmt: skip


CALL = '<tool_call>\n{"name": "power", "arguments": {"base": 3, "exponent": 2}}\n</tool_call>'
FAULT = '<tool_call>\n{"name": "power", "arguments": {"basis": 3}}\n</tool_call>'


def test_conversations_and_tools_token_by_token(tmp_path, library):
    """Tokens are the template's of the whole conversation; rewards are the rubric's: 1 · right + 0.5 / (1 + length of
    the last message + hint), and the same where an episode ends by dtrain's limits."""
    tokenizer, template = family(tmp_path, "qwen25")
    said: list[str] = []

    def play(kind, script, rows, calls=None, **limits):
        with environments_of(kind, said, system="be w5", count=2) as environments:
            environments.make([(row, 0) for row in rows])
            prompt = tokenizer.encode(template.render(rows[0]["prompt"], rows[0]["columns"].get("tools"), True))
            engine = Scripted(tokenizer, dict(enumerate(script)))
            return run_episodes(engine.generate, requests_for(prompt, len(rows), 200), environments,
                                Observations(tokenizer, template, calls), **limits)  # fmt: skip

    rows = rows_for("multi", system="be w5", count=2)
    asked = rows[0]["prompt"]
    assert asked == [{"role": "system", "content": "be w5"}, {"role": "user", "content": "w40 w5"}]
    first, cut = play("multi", [["no", "", "w10"], ["no", "", "no"]], [rows[0]] * 2, max_turns=3, max_length=999)
    parts = {"right": 1.0, "brief": 1 / 6, "turns": 3.0, "num_turns": 3.0}
    assert (first.finish, first.turns, first.earned, first.metrics) == ("stop", 3, 1 + 0.5 / 6, parts)
    assert (cut.finish, cut.earned, cut.metrics["turns"]) == ("turns", 0.5 / 3, 3.0)
    talk = [("assistant", "no"), ("user", "w5 w1 w0"), ("assistant", ""), ("user", "w5 w2 w0"), ("assistant", "w10")]
    whole = template.render([*asked, *({"role": role, "content": text} for role, text in talk)])
    assert [*first.prompt, *first.ids] == tokenizer.encode(whole.rstrip("\n"))
    room = len(first.prompt) + len(tokenizer.encode("no")) + 4
    (full,) = play("multi", [["no"]], rows[:1], max_turns=9, max_length=room)
    assert (full.finish, full.turns, full.earned) == ("length", 1, 0.5 / 3)

    rows = rows_for("tools", system="be w5", count=2)
    tools = rows[0]["columns"]["tools"]
    calls = learn_tool_format(template, tools)
    rows = [{**row, "columns": {**row["columns"], "calls": (calls.form, calls.is_single)}} for row in rows]
    script = [["Look.\n" + CALL, "It is 9."], [FAULT, "No."]]
    first, failed = play("tools", script, rows, calls, max_turns=5, max_length=9999)
    assert (first.finish, first.earned, first.metrics["answered"]) == ("stop", 1 + 0.5 / 9, 1.0)
    talk = [
        {"role": "assistant", "content": "Look.", "tool_calls": calls_of(("power", {"base": 3, "exponent": 2}))},
        {"role": "tool", "name": "power", "content": "9"},
        {"role": "assistant", "content": "It is 9."},
    ]
    whole = template.render([*rows[0]["prompt"], *talk], tools)
    assert [*first.prompt, *first.ids] == tokenizer.encode(whole.rstrip("\n"))
    assert failed.earned == 1 + 0.5 / 5 and "unexpected keyword argument 'basis'" in tokenizer.decode(failed.ids)
    assert said == []


def test_calls_in_a_prompt_reach_the_library_as_openai_s_api_has_them(tmp_path, stand_in):
    """A row's calls have objects as arguments once they are read; the library expects JSON text."""
    (row,) = rows_for("calls", count=1)
    called = {"role": "assistant", "content": "", "tool_calls": calls_of(("power", {"base": 3}))}
    row["prompt"] += [called, {"role": "tool", "tool_call_id": "call00000", "content": "9"}]
    tokenizer, template = family(tmp_path, "qwen25")
    with environments_of("calls", [], count=1) as environments:
        environments.make([(row, 0)])
        engine = Scripted(tokenizer, {0: ["no"]})
        (sample,) = run_episodes(engine.generate, requests_for([7], 1), environments,
                                 Observations(tokenizer, template), max_turns=1, max_length=999)  # fmt: skip
    assert sample.earned == 1.0


def test_what_cannot_be_trained_is_refused(tmp_path, stand_in):
    for args, says in (
        ('{"kind": "group"}', "rewards all completions of a group together"),
        ('{"level": 3}', "unexpected keyword argument 'level'.* .grpo.verifiers.args="),
        ('{"count": 0}', "the data set of .* is empty"),
    ):
        found = written(args)
        assert found.returncode and re.search(says, found.stderr), found.stderr
    rows = rows_for("rewrites")
    with environments_of("rewrites", []) as environments:
        environments.make([(rows[0], 0)])
        tokenizer, template = family(tmp_path, "qwen25")
        with pytest.raises(UserError, match="changes earlier messages of the conversation"):
            run_episodes(Scripted(tokenizer, {0: ["no", "no"]}).generate, requests_for([7], 1), environments,
                         Observations(tokenizer, template), max_turns=3, max_length=999)  # fmt: skip
    with (
        environments_of("multi", []) as environments,
        pytest.raises(UserError, match="Write the data again: python -m"),
    ):
        environments.make([(rows[0], 0)])
    with pytest.raises(UserError, match="unexpected keyword argument 'level'"):
        environments_of("multi", [], level=3)


def tiny(root, *overrides, name):
    recipe = tiny_grpo(
        root,
        f"grpo.verifiers={{name: {NAME}, args: {{kind: multi, count: 24}}}}",
        "grpo.rewards=[]",
        "grpo.max_turns=3",
        "grpo.sampling.stop=[w1,w2]",
        "data.max_length=40",
        "train.micro_batch=2",
        "train.steps=4",
        *overrides,
        name=name,
    )
    (recipe.model.directory / "chat_template.jinja").write_text(TINY)
    (root / "prompts.jsonl").write_text(written('{"kind": "multi", "count": 24}').stdout)
    return recipe


def test_a_run_is_the_same_on_a_mesh_and_after_a_resume(tmp_path, stand_in):
    one, mesh = (
        tiny(tmp_path, *more, "checkpoint.every=20", "grpo.prompts_per_step=2", "train.global_batch=4", name=name)
        for name, more in (("one", ()), ("mesh", ("parallel.tp=2",)))
    )
    run(one)
    with pytest.raises((Exception, AssertionError), match="stopped after step"):
        interrupt(mesh, 2, 3)  # within its second rollout
    run(mesh, 2)
    assert_same(mesh, one, rtol=1e-9)
    assert_same_samples(mesh, one)
    samples = samples_of(one)
    assert all(row["reward"] == row["environment"]["right"] + 0.5 * row["environment"]["brief"] for row in samples)
    assert {"stop", "turns"} <= {row["finish"] for row in samples}
    measured = sum(row["environment"]["num_turns"] for row in samples[:8]) / 8
    assert 1 < rows_of(one)[0]["environment/num_turns"] == measured


def test_recipes(tmp_path, monkeypatch, capfd, stand_in):
    recipe = tiny(tmp_path, "checkpoint.every=20", name="one")
    (tmp_path / "one.yaml").write_text(config.to_yaml(recipe))
    monkeypatch.chdir(tmp_path)
    assert main(["validate", "one.yaml"]) == 0
    assert main(["preview", "one.yaml", "--samples", "1"]) == 0
    capfd.readouterr()
    for given, says in (
        (
            "grpo.verifiers.name=gone-env",
            "there is no package gone_env: pip install its package, or: prime env",
        ),
        ("grpo.environment=a.b", "grpo.environment and grpo.verifiers both answer a completion"),
        ("grpo.rewards=[{fn: math_exact}]", "grpo.verifiers has rewards of its own"),
        ("grpo.system_prompt=be", "grpo.system_prompt would change the prompts"),
        ("grpo.verifiers.name=null", "grpo.verifiers.args are given without an environment"),
    ):
        assert main(["validate", "one.yaml", given]) == 1
        assert says in capfd.readouterr().err, given
    (tmp_path / "prompts.jsonl").write_text(written('{"kind": "tools"}').stdout)
    (recipe.model.directory / "chat_template.jinja").write_text(TINY.replace("tool.function.name", "''"))
    assert main(["validate", "one.yaml", "data.max_length=400"]) == 1
    assert "does not tell the model of the tools" in capfd.readouterr().err


@pytest.mark.skipif(IS_INSTALLED, reason="it is installed")
def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    with pytest.raises(UserError, match=r"there is no package verifiers: pip install 'dtrain\[verifiers\]'"):
        from dtrain.rl.rewards.catalog import find_verifiers

        find_verifiers(NAME)
