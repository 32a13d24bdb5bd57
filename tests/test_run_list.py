"""`dtrain ls --runs`: runs in each state, with their last step, loss, size and age."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from dtrain import recipe as config
from dtrain.base.errors import UserError
from dtrain.commands.cli import main
from dtrain.commands.run_list import list_runs
from tests.running import run
from tests.tiny import tiny_recipe


def listed(directory: Path) -> dict[str, dict]:
    """Return what another process lists as JSON: a process must not look at the lock of its own run."""
    words = [sys.executable, "-m", "dtrain", "ls", "--runs", str(directory), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return {entry["name"]: entry for entry in json.loads(done.stdout)}


def start(tmp_path: Path, name: str) -> subprocess.Popen:
    """Start a run of many steps, or continue it, and wait until it has made some."""
    metrics = tmp_path / "runs" / name / "metrics.jsonl"
    rows_before = metrics.read_text().count("\n") if metrics.is_file() else 0
    recipe = tmp_path / f"{name}.yaml"
    options = ["train.steps=100000", "checkpoint.every=null", "scheduler.warmup_steps=0"]
    recipe.write_text(config.to_yaml(tiny_recipe(tmp_path, *options, name=name)))
    process = subprocess.Popen(
        [sys.executable, "-m", "dtrain", "run", str(recipe)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 240
    while not metrics.is_file() or metrics.read_text().count("\n") < rows_before + 3:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    return process


def test_a_finished_and_a_failed_run(tmp_path, capsys):
    run(tiny_recipe(tmp_path, "train.steps=3", "scheduler.warmup_steps=0", name="good"))
    diverges = ["train.steps=9", "optimizer.lr=1e30", "scheduler.warmup_steps=0", "train.max_grad_norm=null"]
    try:
        run(tiny_recipe(tmp_path, *diverges, name="bad"))
        raise AssertionError("the run does not diverge")
    except UserError as error:
        message = str(error).partition("\n")[0]
    runs = {entry.name: entry for entry in list_runs(tmp_path / "runs")}
    good, bad = runs["good"], runs["bad"]
    assert good.state == "finished" and (good.step, good.total_steps) == (3, 3) and good.error is None
    rows = [json.loads(line) for line in (tmp_path / "runs" / "good" / "metrics.jsonl").read_text().splitlines()]
    assert good.loss == [row["loss"] for row in rows if "loss" in row][-1]
    files = [path for path in (tmp_path / "runs" / "good").rglob("*") if path.is_file()]
    assert good.size_bytes == sum(path.stat().st_size for path in files)
    assert bad.state == "failed" and bad.total_steps == 9 and bad.step < 9 and bad.error == message

    assert main(["ls", "--runs", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "state", "step", "loss", "size", "changed"]
    assert [line.split()[0] for line in lines[1:3]] == ["bad", "good"]  # the newest change comes first
    assert re.fullmatch(r"good +finished +3/3 +\d\.\d+ +[\d.]+ [KM]iB +\d+ (s|min) ago", lines[2])
    assert lines[3].startswith("bad failed: ")


def test_a_running_a_stopped_and_a_killed_run(tmp_path):
    first = start(tmp_path, "first")
    second = start(tmp_path, "second")
    try:
        runs = listed(tmp_path / "runs")
        assert {name: entry["state"] for name, entry in runs.items()} == {"first": "running", "second": "running"}
        first.send_signal(signal.SIGTERM)
        second.kill()
        assert first.wait(120) == 128 + signal.SIGTERM and second.wait(120) == -signal.SIGKILL
    finally:
        for process in (first, second):
            if process.poll() is None:
                process.kill()
    runs = listed(tmp_path / "runs")
    assert {name: entry["state"] for name, entry in runs.items()} == {"first": "stopped", "second": "failed"}
    assert runs["first"]["step"] >= 3 and runs["first"]["total_steps"] == 100000
    # A run that continues is not a failed one any more, and comes first.
    third = start(tmp_path, "first")
    try:
        runs = listed(tmp_path / "runs")
        assert list(runs) == ["first", "second"] and runs["first"]["state"] == "running"
    finally:
        third.kill()
        third.wait(60)


def test_directories_without_runs_and_damaged_files(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["ls", "--runs"]) == 1
    assert "runs is not a directory" in capsys.readouterr().err
    Path("runs/sweep/one").mkdir(parents=True)
    assert main(["ls", "--runs"]) == 0 and "there is no run in runs" in capsys.readouterr().out
    Path("runs/sweep/one/config.yaml").write_text("method: sft\n")
    Path("runs/sweep/one/about.json").write_text("{")
    Path("runs/sweep/one/end.json").write_text('{"state": "surprised"}')
    Path("runs/sweep/one/metrics.jsonl").write_bytes(b'{"step": 7, "loss": NaN}\n{"step": 7, "val_loss": 1.0}\n{"st')
    os.utime("runs/sweep/one", (0, 0))
    (entry,) = list_runs(Path("runs"))
    assert (entry.name, entry.state, entry.step, entry.loss) == ("sweep/one", "stopped", 7, None)
    assert [run.name for run in list_runs(Path("runs/sweep/one"))] == ["one"]


def test_recipes_as_json(capsys):
    assert main(["ls", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert {"sft", "lora-sft"} <= {entry["name"] for entry in entries} and all(entry["text"] for entry in entries)
