"""Trackers of `metrics.sinks`: the real libraries where they are installed, and the class of docs/trackers.md.

trackio and MLflow bring older releases of packages that dtrain's other tests use (pillow, protobuf), and MLflow needs
600 MB, so the extra `dev` does not have them. `pip install trackio mlflow swanlab` lets their tests run.
"""

import csv
import importlib.util
import io
import json
import os
import re
import sqlite3
import subprocess
import sys

import pytest
import yaml

import dtrain
from dtrain.base.errors import RecipeError, UserError
from dtrain.launch import validate
from dtrain.recipe.saved import to_yaml
from dtrain.training import load_recipe, metrics
from tests.pages import ROOT, Page
from tests.running import metrics as rows_of, run, run_directory
from tests.tiny import tiny_recipe

# Rows of a run that is killed after step 5 without any clean-up, and those of its continuation from step 3.
RUNS = """
import json, os, signal, sys, time
from pathlib import Path
from dtrain.recipe.saved import to_yaml
from dtrain.training import load_recipe, metrics

directory, sinks, start, stop, is_killed = json.loads(sys.argv[1])
recipe = load_recipe({"run": {"name": "mine"}, "metrics": {"tensorboard": False, "sinks": sinks}}, [])
recorder = metrics.build(recipe.metrics, Path(directory), to_yaml(recipe), True)
assert not metrics.option_problems(recipe.metrics)
recorder.resume_at(start)
recorder.start(start, 8)
for step in range(start + 1, stop + 1):
    recorder.train_row(step, loss=start + step / 10)
recorder.val_row(stop, val_loss=0.5, **{"eval_math_pass@1": float("nan")})
if is_killed:
    time.sleep(3)  # trackio and SwanLab write from another thread
    os.kill(os.getpid(), signal.SIGKILL)
recorder.close()
"""
KEPT = [(step, step / 10) for step in range(1, 6)] + [(step, 3 + step / 10) for step in range(6, 9)]


def need(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def start(directory, sinks, first, last, is_killed=False, **environment):
    argument = json.dumps([str(directory), sinks, first, last, is_killed])
    return subprocess.run(
        [sys.executable, "-c", RUNS, argument],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        cwd=directory.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )


def start_twice(directory, sinks, **environment):
    killed = start(directory, sinks, 0, 5, is_killed=True, **environment)
    assert killed.returncode == -9, killed.stderr
    resumed = start(directory, sinks, 3, 8, **environment)
    assert resumed.returncode == 0, resumed.stderr
    for ended in (killed, resumed):
        assert "warning" not in ended.stderr, ended.stderr


def test_trackio_has_each_step_once(tmp_path):
    need("trackio")
    sinks = [{"name": "trackio", "kwargs": {"project": "tests", "auto_log_cpu": False}}]
    places = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HOME": str(tmp_path / "hub")}
    start_twice(tmp_path / "mine", sinks, **places)
    (tmp_path / "another").mkdir()
    start(tmp_path / "another" / "mine", sinks, 0, 2, **places)  # of the same name, and a run of its own
    with sqlite3.connect(tmp_path / "trackio" / "tests.db") as database:
        stored = database.execute("select run_name, step, metrics from metrics order by step, id").fetchall()
        config, *others = [json.loads(row[0]) for row in database.execute("select config from configs")]
    losses = {}
    for name, step, fields in stored:
        if "train/loss" in json.loads(fields):
            losses.setdefault(name, []).append((step, json.loads(fields)["train/loss"]))
    (other,) = losses.keys() - {"mine"}
    assert losses == {"mine": KEPT, other: KEPT[:2]}
    assert config["run"]["name"] == "mine" and len(others) == 1
    assert [step for name, step, fields in stored if name == "mine" and "val/loss" in json.loads(fields)] == [5, 8]


def test_mlflow_has_each_step_once(tmp_path):
    need("mlflow")
    need("sqlalchemy")  # mlflow-skinny has no database
    options = {"tracking_uri": f"sqlite:///{tmp_path / 'ml.db'}", "experiment": "tests", "tags": {"by": "me"}}
    start_twice(tmp_path / "mine", [{"name": "mlflow", "kwargs": options}])
    with sqlite3.connect(tmp_path / "ml.db") as database:
        assert database.execute("select name, status from runs").fetchall() == [("mine", "FINISHED")]
        query = "select step, value from metrics where key = 'train/loss' order by step"
        assert database.execute(query).fetchall() == KEPT
        names = "select distinct key from metrics where key like 'eval%'"
        assert database.execute(names).fetchall() == [("eval/math_pass_1",)]
        assert ("run.name", "mine") in database.execute("select key, value from params").fetchall()
        assert ("by", "me") in database.execute("select key, value from tags").fetchall()


def test_swanlab_continues_its_run(tmp_path):
    need("swanlab")
    start_twice(tmp_path / "mine", [{"name": "swanlab", "kwargs": {"mode": "offline", "project": "tests"}}])
    first, second = sorted((tmp_path / "mine" / "swanlab").glob("run-*"))
    (file,) = first.glob("*.swanlab")
    assert [other.name for other in second.glob("*.swanlab")] == [file.name]  # its name is the run's id
    assert b"train/loss" in next(second.glob("*.swanlab")).read_bytes()
    assert yaml.safe_load((second / "files" / "config.yaml").read_text())["run"]["value"]["name"] == "mine"


def test_swanlab_leaves_ctrl_c_to_dtrain_and_asks_nothing(tmp_path):
    need("swanlab")
    code = RUNS.replace("recorder.close()", "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)")
    sinks = [{"name": "swanlab", "kwargs": {"mode": "offline"}}]
    argument = json.dumps([str(tmp_path / "mine"), sinks, 0, 2, False])
    ended = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, cwd=tmp_path)
    assert "True" in ended.stdout, ended.stderr
    online = start(tmp_path / "online", [{"name": "swanlab"}], 0, 2, SWANLAB_API_KEY="")
    assert online.returncode == 0 and "warning: SwanLab failed and is left out" in online.stderr


@pytest.mark.parametrize("name", ["trackio", "mlflow"])
def test_a_tracker_that_is_broken_does_not_end_the_run(name, tmp_path):
    need(name)
    (tmp_path / "file").write_text("")
    broken = {"trackio": {"project": "/"}, "mlflow": {"tracking_uri": f"sqlite:///{tmp_path}/file/ml.db"}}
    ended = start(tmp_path / "mine", [{"name": name, "kwargs": broken[name]}], 0, 3, TRACKIO_DIR=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    lines = (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 3]


@pytest.mark.parametrize(("name", "package"), [("trackio", "trackio"), ("mlflow", "mlflow"), ("swanlab", "swanlab")])
def test_an_unknown_option_is_reported_before_any_work(name, package, tmp_path):
    need(package)
    recipe = tiny_recipe(tmp_path, f"metrics.sinks=[{{name: {name}, kwargs: {{projct: x, tracking_url: y}}}}]")
    near = {"mlflow": "tracking_url is not an option of mlflow. Did you mean tracking_uri?"}
    expected = near.get(name, f"projct is not an option of {name}. Did you mean project?")
    assert expected in problems_of(recipe)


def problems_of(recipe):
    with pytest.raises(RecipeError) as raised:
        validate(yaml.safe_load(to_yaml(recipe)))
    return str(raised.value)


OWN = """
import csv


class Broken:
    def __init__(self, run, at=0):
        self.at = at

    def resume_at(self, step):
        pass

    def write(self, row):
        if row["step"] == self.at:
            raise KeyError("a bug of its author")

    def close(self):
        raise KeyError("another bug")


class Counted:
    def __init__(self, run):
        with (run.directory / "made.txt").open("a") as file:
            file.write(f"{run.name} {run.config['train']['steps']} {run.config['method']}\\n")

    def resume_at(self, step):
        pass

    write = close = resume_at


class Half:
    def __init__(self, run):
        pass

    def write(self, row):
        pass
"""


@pytest.fixture
def sinks(tmp_path, monkeypatch):
    """The module of docs/trackers.md, and one with classes that fail, in the working directory."""
    (shown,) = [block.text for block in Page(ROOT / "docs/trackers.md").blocks if block.language == "python"]
    (tmp_path / "my_sinks.py").write_text(shown)
    (tmp_path / "other_sinks.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # imports add the working directory
    yield tmp_path
    for name in ("my_sinks", "other_sinks"):
        sys.modules.pop(name, None)


def read_csv(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def test_a_class_of_ones_own_is_made_on_rank_0_and_gets_every_row(sinks):
    entries = "[{name: 'my_sinks:CsvSink', kwargs: {file: losses.csv}}, {name: 'other_sinks:Counted'}]"
    for ranks in (1, 2):
        recipe = tiny_recipe(sinks, "train.steps=4", f"metrics.sinks={entries}", name=f"of{ranks}")
        run(recipe, ranks)
        table = read_csv(run_directory(recipe) / "losses.csv")
        written = [(int(row["step"]), float(row["loss"])) for row in table]
        assert written == [(row["step"], row["loss"]) for row in rows_of(recipe)] and len(written) == 4
        assert (run_directory(recipe) / "made.txt").read_text() == f"of{ranks} 4 sft\n"


def build(directory, *entries, stream=None):
    recipe = load_recipe({"metrics": {"tensorboard": False, "sinks": list(entries)}}, [])
    return metrics.build(recipe.metrics, directory, "run: {name: x}", True, stream=stream or io.StringIO())


def test_a_class_of_ones_own_continues_after_a_crash(sinks):
    for start_step, stop in ((0, 5), (3, 6)):  # the first one is never closed
        recorder = build(sinks / "run", {"name": "my_sinks.CsvSink"})
        recorder.resume_at(start_step)
        for step in range(start_step + 1, stop + 1):
            recorder.train_row(step, loss=start_step + step / 10)
    rows = [(int(row["step"]), float(row["loss"])) for row in read_csv(sinks / "run" / "metrics.csv")]
    assert rows == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 3.4), (5, 3.5), (6, 3.6)]


def test_a_class_that_raises_is_left_out_and_the_run_goes_on(sinks):
    stream = io.StringIO()
    broken = [{"name": "other_sinks:Broken", "kwargs": {"at": step}} for step in (2, 9)]
    recorder = build(sinks / "run", *broken, "my_sinks:CsvSink", stream=stream)
    for step in range(1, 5):
        recorder.train_row(step, loss=1.0)
    assert stream.getvalue().count("warning: other_sinks:Broken failed") == 1
    recorder.close()
    assert stream.getvalue().count("warning: other_sinks:Broken failed") == 2
    assert "KeyError: 'a bug of its author'" in stream.getvalue() and "another bug" in stream.getvalue()
    assert len(read_csv(sinks / "run" / "metrics.csv")) == 4


def test_nothing_is_opened_before_the_first_row(sinks):
    recorder = build(sinks / "run", {"name": "other_sinks:Counted"}, "my_sinks:CsvSink")
    recorder.resume_at(0)
    recorder.start(0, 3)
    recorder.close()
    assert not (sinks / "run").exists()


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ("[{name: wandb}, {name: trackoi}]", "metrics.sinks[1].name=trackoi is unknown. Did you mean trackio?"),
        ("[{name: 'my_sinks:CsvSnk'}]", "my_sinks has no CsvSnk. Did you mean my_sinks:CsvSink?"),
        ("[{name: 'no_such:Sink'}]", "metrics.sinks[0].name=no_such:Sink cannot be imported"),
        (
            "[{name: 'other_sinks:Half'}]",
            "other_sinks:Half cannot be a sink, because it has no method resume_at and",
        ),
        ("[{name: 'my_sinks:CsvSink', kwargs: {fiel: x}}]", "CsvSink(run, **kwargs), and got an unexpected keyword"),
        ("[{kwargs: {a: 1}}]", "metrics.sinks[0].name is missing. Set it to tensorboard, wandb, trackio"),
        ("[tensorboard, {name: tensorboard}]", "metrics.sinks[1]: metrics.sinks[0] names tensorboard already"),
        (
            "[{name: tensorboard, kwargs: {flush_sec: 3}}]",
            "flush_sec is not an option of tensorboard. Did you mean",
        ),
        ("[{name: tensorboard, kwargs: {purge_step: 3}}]", "purge_step is not an option of tensorboard"),
        ("trackio", "write metrics.sinks=[{name: trackio}]"),
    ],
)
def test_mistakes_are_reported_before_any_work(sinks, entries, told):
    try:
        recipe = tiny_recipe(sinks, f"metrics.sinks={entries}")
    except RecipeError as error:
        assert told in str(error)
    else:
        assert told in problems_of(recipe)


def test_a_run_reports_mistakes_of_sinks_with_all_others(sinks):
    recipe = yaml.safe_load(to_yaml(tiny_recipe(sinks, "data.train.path=gone.jsonl", "metrics.sinks=['no_such:Sink']")))
    with pytest.raises(RecipeError) as raised:
        dtrain.run(recipe)
    assert [problem.key for problem in raised.value.problems] == ["data.train.path", "metrics.sinks[0].name"]


def test_a_missing_package_is_reported_with_its_installation(sinks):
    found = 0
    for name in ("wandb", "trackio", "mlflow", "swanlab"):
        if importlib.util.find_spec(name) is None:
            told = problems_of(tiny_recipe(sinks, f"metrics.sinks=[{name}]"))
            assert f"metrics.sinks[0].name={name} needs a package" in told and f"pip install 'dtrain[{name}]'" in told
            with pytest.raises(UserError, match=rf"pip install 'dtrain\[{name}\]'"):
                build(sinks / "run", name)
            found += 1
    if not found:
        pytest.skip("all of them are installed")


def test_secrets_of_a_tracker_are_not_saved(sinks, monkeypatch):
    monkeypatch.setenv("TRACKER_URL", "https://me:pa55word@host/x")
    kwargs = "{api_key: 0123abcd4567, url: 'https://me:hidden99@host', other: '${oc.env:TRACKER_URL}', n: 3}"
    saved = to_yaml(load_recipe({}, [f"metrics.sinks=[{{name: 'a:B', kwargs: {kwargs}}}]"]))
    assert not re.search("0123abcd4567|hidden99|pa55word", saved)
    (entry,) = yaml.safe_load(saved)["metrics"]["sinks"]
    assert entry["kwargs"]["other"] == "${oc.env:TRACKER_URL}" and entry["kwargs"]["n"] == 3


def test_options_of_tensorboard_and_a_directory_of_its_own(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = load_recipe({}, [f"metrics.sinks=[{{name: tensorboard, kwargs: {{log_dir: '{tmp_path / 'events'}'}}}}]"])
    recorder = metrics.build(recipe.metrics, tmp_path / "run", "{}", True, stream=io.StringIO())
    assert not recorder.choices  # metrics.tensorboard=auto opens no second writer
    recorder.train_row(1, loss=0.5)
    recorder.close()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5)]
    assert not (tmp_path / "run" / "tensorboard").exists()
