"""Tasksets of verifiers 0.4: their prompts as data, and completions that their own rewards score."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.base.errors import UserError
from dtrain.rl.environments.stepping import Environments, Turn
from dtrain.rl.environments.verifiers import load_tasks

pytest.importorskip("verifiers", minversion="0.4", reason="verifiers 0.4 is no package of the tests")

HERE = Path(__file__).parent
NAME = "someone/dtrain-doubles"


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))


def written(*given):
    command = [sys.executable, "-m", "dtrain.rl.environments.verifiers", NAME, *given]
    return subprocess.run(command, capture_output=True, text=True)


def test_completions_are_scored_by_the_rewards_of_their_task():
    args = {"count": 4}
    found = written(json.dumps(args))
    assert found.returncode == 0, found.stderr
    columns = [json.loads(line) for line in found.stdout.splitlines()]
    prompts = [row.pop("prompt") for row in columns]
    assert len(prompts) == 4
    assert prompts[3] == [{"role": "system", "content": "be short"}, {"role": "user", "content": "double 3"}]
    rows = [{"prompt": prompt, "columns": row} for prompt, row in zip(prompts, columns, strict=True)]
    options = (NAME, args, ["<|im_end|>"])
    path = "dtrain.rl.environments.verifiers:open_library"
    with Environments(path, options=options, whose="grpo.verifiers", threads=2) as environments:
        environments.make([(rows[3], 0), (rows[2], 1)])
        turns = [Turn(0, "6<|im_end|>", is_last=True), Turn(1, "about 4", is_last=False)]
        replies = environments.step(turns, lambda index, observation: [])
    assert [(reply.earned, reply.done, reply.metrics) for reply in replies] == [
        (2.0, True, {"right": 1.0, "length": 1.0}),
        (0.0, True, {"right": 0.0, "length": 7.0}),
    ]


def test_data_of_another_taskset_is_refused():
    row = json.loads(written().stdout.splitlines()[0])
    options = (NAME, {"count": 2}, [])
    path = "dtrain.rl.environments.verifiers:open_library"
    with Environments(path, options=options, whose="grpo.verifiers") as environments:
        with pytest.raises(UserError, match="the data's row is not a task of .* Write the data again"):
            environments.make([({"prompt": row["prompt"], "columns": row}, 0)])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"kind": "machine"}, "needs a machine to score each task, but dtrain supports only tasks"),
        ({"kind": "prepared"}, "prepares a machine for each task"),
        ({"count": 0}, "has no tasks"),
        ({"size": 1}, "grpo.verifiers.args={"),
    ],
)
def test_what_cannot_be_played_is_refused(args, says):
    with pytest.raises(UserError, match=says):
        load_tasks(NAME, args)
