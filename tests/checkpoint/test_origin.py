"""The origin of a run is chosen once: the weights of `init_from`, and the checkpoint at the path of `resume`."""

import json
import shutil
from pathlib import Path

import pytest

from dtrain.base.errors import Stopped, UserError
from tests.checkpoint.processes import Processes, checkpoints, hold_after
from tests.methods.test_dpo_runs import fields_of, recipe_of, rows_of
from tests.problem_lines import preflight
from tests.running import assert_same, interrupt, metrics, run, trajectory
from tests.tiny import save_weights, tiny_grpo, tiny_recipe, write_model


def stop_at(recipe, step, world_size=1):
    with pytest.raises((Stopped, AssertionError), match="stopped after step"):
        interrupt(recipe, world_size, step)


def grpo(root, *overrides, name="run"):
    sizes = ("grpo.prompts_per_step=2", "grpo.group_size=4", "train.global_batch=4", "train.steps=6")
    return tiny_grpo(root, "grpo.beta=0.1", "optimizer.lr=0.1", *sizes, *overrides, name=name)


def dpo(root, *overrides, name="run"):
    return recipe_of(root, "optimizer.lr=0.1", *overrides, name=name)


def numbers(recipe):
    names = ("loss", "grad_norm", "kl", "rewards_margin", "reward_mean")
    return [[row.get(name) for name in names] for row in rows_of(recipe)]


@pytest.fixture
def method(request):
    if request.param == "precompute":
        return lambda root, *overrides, **more: dpo(root, "dpo.precompute=true", *overrides, **more)
    return grpo


def train_on(first, root, method):
    """The run whose weights others started from goes on, and keeps its old steps."""
    longer = method(root, "checkpoint.every=6", "checkpoint.keep_last=null", "train.steps=12", name="first")
    run(longer)
    assert checkpoints(first).published_steps() == [6, 12]


@pytest.mark.parametrize("method", ["precompute", "grpo"], indirect=True)
def test_the_start_stays_what_it_was_though_that_run_trained_on(tmp_path, method):
    first = method(tmp_path, "checkpoint.every=6", name="first")
    run(first)
    shape = (f"checkpoint.init_from={tmp_path}/runs/first", "checkpoint.every=3", "checkpoint.keep_last=null")
    whole, recipe = method(tmp_path, *shape, name="whole"), method(tmp_path, *shape)
    run(whole)
    stop_at(recipe, 3)
    train_on(first, tmp_path, method)
    run(recipe)
    assert numbers(recipe) == numbers(whole)
    # A step that is gone is told, with what to do; who wants the newest instead says so.
    shutil.rmtree(checkpoints(recipe).path(6))
    shutil.move(checkpoints(first).path(6), tmp_path / "put-away")
    with pytest.raises((UserError, AssertionError), match="began from step 6 there(.|\n)*put it back") as caught:
        run(recipe)
    section = recipe.method
    assert f"checkpoint.allow_changes=[checkpoint.init_from,{section}.reference]" in str(caught.value)
    allow = f"checkpoint.allow_changes=[checkpoint.init_from,{section}.reference]"
    run(method(tmp_path, *shape, allow))
    assert numbers(recipe)[:3] == numbers(whole)[:3] and numbers(recipe)[3:] != numbers(whole)[3:]
    shutil.rmtree(checkpoints(recipe).path(6))
    shutil.move(tmp_path / "put-away", checkpoints(first).path(6))
    shutil.move(tmp_path / "runs" / "first", tmp_path / "moved")
    run(method(tmp_path, f"checkpoint.init_from={tmp_path}/moved", *shape[1:]))
    assert numbers(recipe) == numbers(whole)


def test_the_start_is_found_again_on_another_mesh(tmp_path):
    sizes = ("train.global_batch=6", "data.packing=false", "train.micro_batch=1")
    run(dpo(tmp_path, *sizes, "checkpoint.every=6", name="first"))
    shape = (*sizes, f"checkpoint.init_from={tmp_path}/runs/first", "checkpoint.every=3", "checkpoint.keep_last=null")
    whole, recipe = dpo(tmp_path, *shape, name="whole"), dpo(tmp_path, *shape)
    run(whole)
    stop_at(recipe, 3, 3)
    run(dpo(tmp_path, *sizes, "checkpoint.every=6", "checkpoint.keep_last=null", "train.steps=9", name="first"))
    run(dpo(tmp_path, *shape, "parallel.tp=2"), 2)
    assert_same(recipe, whole, rtol=1e-9)
    for found, expected in zip(fields_of(recipe), fields_of(whole), strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "kind, world_size, mesh", [("start", 1, ()), ("reference", 2, ("parallel.tp=2",)), ("teacher", 2, ())]
)
def test_replaced_weights_of_a_reference_or_teacher_are_refused(tmp_path, kind, world_size, mesh):
    model, other = save_weights(write_model(tmp_path / "model")), save_weights(write_model(tmp_path / "other"), 1)
    shape = [f"model.path={model}", "model.init=pretrained", "checkpoint.every=2", *mesh]
    shape += ["train.steps=4", "train.global_batch=4"]
    if kind == "teacher":
        shape += ["method=distill", f"distill.teacher={other}"]
        recipe, key, changed = tiny_recipe(tmp_path, *shape), "distill.teacher", other
    else:
        shape += [f"dpo.reference={other}"] * (kind == "reference")
        recipe, key = dpo(tmp_path, *shape), "dpo.reference"
        changed = other if kind == "reference" else model
    stop_at(recipe, 2, world_size)
    kept = (changed / "model.safetensors").read_bytes()
    save_weights(changed, 7)
    with pytest.raises((UserError, AssertionError), match=rf"{key}: \w+ -> \w+") as caught:
        run(recipe, world_size)
    assert ("model.weights: " in str(caught.value)) == (kind == "start")
    (changed / "model.safetensors").write_bytes(kept)
    run(recipe, world_size)


def test_a_table_is_found_by_what_the_reference_is(tmp_path):
    """Another run's start at the same path, of the same size and time, is another reference."""
    first = dpo(tmp_path, "checkpoint.every=3", "train.steps=3", name="first")
    run(first)
    start = (
        f"checkpoint.init_from={tmp_path}/runs/first",
        "dpo.precompute=true",
        "optimizer.lr=1e-30",
        "dpo.sft_weight=0",
    )
    run(dpo(tmp_path, *start, name="one"))
    shutil.rmtree(tmp_path / "runs" / "first")
    run(dpo(tmp_path, "checkpoint.every=3", "train.steps=3", "run.seed=5", name="first"))
    for name, allowed in (("two", 2), ("three", 2)):  # the third finds the second's
        run(dpo(tmp_path, *start, name=name))
        assert [row["rewards_margin"] for row in rows_of(dpo(tmp_path, *start, name=name))] == pytest.approx(
            [0.0] * 6, abs=1e-9
        )
        assert len(list((tmp_path / "runs" / ".cache").glob("*/reference-*.bin"))) == allowed


# ---- checkpoint.resume=PATH


def lose(recipe, *, rows=None, steps=()):
    """Leave so many rows and these saves alone of a run, as a kill does."""
    directory = Path(recipe.run.dir) / recipe.run.name
    shutil.rmtree(directory / "export", ignore_errors=True)
    if rows is not None:
        lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
        (directory / "metrics.jsonl").write_text("".join(lines[:rows]))
    for step in checkpoints(recipe).published_steps():
        if step not in steps:
            shutil.rmtree(checkpoints(recipe).path(step))


SAVED = ("checkpoint.every=2", "checkpoint.keep_last=null", "train.global_batch=4")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run of 10 steps, saved every second."""
    root = tmp_path_factory.mktemp("source")
    return run(tiny_recipe(root, *SAVED, name="first"))


@pytest.fixture
def copied(tmp_path, source):
    shutil.copytree(Path(source.run.dir), tmp_path / "runs")
    return tmp_path, Path(source.run.dir).parent


def begun(copied, *overrides):
    """A run in another directory that begins from step 4."""
    root, model = copied
    return tiny_recipe(model, f"run.dir={root}/runs", *SAVED, *overrides, name="second")


@pytest.mark.parametrize(
    "rows, steps, again, of",
    [
        (0, (), "the same", "step"),
        (0, (), "auto", "run"),
        (1, (), "the same", "step"),
        (1, (), "the same", "run"),
        (1, (), "auto", "step"),
        (3, (6,), "the same", "run"),
        (5, (6, 8), "the same", "step"),
        (6, (6, 8, 10), "the same", "run"),
    ],
)
def test_the_same_command_goes_on_as_it_began(copied, source, rows, steps, again, of):
    root, _ = copied
    if of == "run":
        for step in (6, 8, 10):
            shutil.rmtree(root / "runs" / "first" / "checkpoints" / f"step-{step}")
    path = root / "runs" / "first" / ("checkpoints/step-4" if of == "step" else "")
    recipe = begun(copied, f"checkpoint.resume={path}")
    run(recipe)
    assert trajectory(recipe) == trajectory(source)[4:]
    lose(recipe, rows=rows, steps=steps)
    if of == "run":  # it trained on meanwhile
        shutil.copytree(Path(source.run.dir) / "first", root / "runs" / "first", dirs_exist_ok=True)
    if rows == 0:
        (root / "runs" / "second" / "metrics.jsonl").unlink()
    run(recipe if again == "the same" else begun(copied))
    assert trajectory(recipe) == trajectory(source)[4:]
    assert [row["step"] for row in metrics(recipe)] == [5, 6, 7, 8, 9, 10]


def test_a_run_goes_on_though_the_step_that_it_began_from_was_pruned(copied, source):
    root, _ = copied
    recipe = begun(copied, f"checkpoint.resume={root}/runs/first")
    shutil.rmtree(root / "runs" / "first" / "checkpoints" / "step-10")
    run(recipe)
    lose(recipe, rows=1, steps=())
    later = root / "runs" / "first" / "checkpoints"
    shutil.copytree(Path(source.run.dir) / "first" / "checkpoints" / "step-10", later / "step-10")
    shutil.rmtree(later / "step-8")
    with pytest.raises(UserError, match="checkpoint.resume=.*began from step 8 there.*is gone"):
        run(recipe)  # it has nothing of its own yet
    shutil.copytree(Path(source.run.dir) / "first" / "checkpoints" / "step-8", later / "step-8")
    run(recipe)
    assert trajectory(recipe) == trajectory(source)[8:]
    shutil.rmtree(later / "step-8")
    run(begun(copied, f"checkpoint.resume={root}/runs/first", "train.steps=12"))
    assert [row["step"] for row in metrics(recipe)] == [9, 10, 11, 12]


def test_a_directory_that_began_from_something_else_is_refused(copied, source):
    root, _ = copied
    steps = root / "runs" / "first" / "checkpoints"
    run(begun(copied, f"checkpoint.resume={steps}/step-4"))
    before = metrics(begun(copied))
    told = r"began from .*/first/checkpoints/step-4, and checkpoint\.resume=.*step-6 starts anew(.|\n)*resume=auto"
    with pytest.raises(UserError, match=told):
        run(begun(copied, f"checkpoint.resume={steps}/step-6"))
    with pytest.raises(UserError, match="resume=null starts anew"):
        run(begun(copied, "checkpoint.resume=null"))
    # The same path and step of another training is something else.
    shutil.rmtree(steps.parent)
    root_of_model = Path(source.run.dir).parent
    run(tiny_recipe(root_of_model, f"run.dir={root}/runs", *SAVED, "run.seed=3", name="first"))
    for path in (steps / "step-4", steps.parent):
        with pytest.raises(UserError, match="starts anew"):
            run(begun(copied, f"checkpoint.resume={path}"))
    assert metrics(begun(copied)) == before


def test_weights_of_init_from_are_those_of_the_first_try(tmp_path):
    first = run(tiny_recipe(tmp_path, "checkpoint.every=5", "checkpoint.keep_last=null", "train.steps=5", name="first"))
    shape = (f"checkpoint.init_from={tmp_path}/runs/first", "checkpoint.every=5")
    whole, recipe = (run(tiny_recipe(tmp_path, *shape, name=name)) for name in ("whole", "second"))
    lose(recipe, rows=2)
    run(tiny_recipe(tmp_path, "checkpoint.every=5", "checkpoint.keep_last=null", name="first"))
    run(recipe)
    assert trajectory(recipe) == trajectory(whole)
    lose(recipe, rows=2)
    shutil.rmtree(checkpoints(first).path(5))
    with pytest.raises(UserError, match="checkpoint.init_from=.*began from step 5 there.*delete the run's directory"):
        run(recipe)
    began = json.loads((tmp_path / "runs" / "second" / "began.json").read_text())
    assert began["checkpoint.init_from"]["step"] == 5


def test_going_back_within_a_run_goes_on_there(tmp_path):
    recipe = run(tiny_recipe(tmp_path, "checkpoint.every=2", "checkpoint.keep_last=null"))
    expected = trajectory(recipe)
    back = f"checkpoint.resume={checkpoints(recipe).path(4)}"
    with pytest.raises(UserError, match="already has step-6, step-8, step-10"):
        run(tiny_recipe(tmp_path, "checkpoint.every=2", "checkpoint.keep_last=null", back))
    for step in (6, 8, 10):
        shutil.rmtree(checkpoints(recipe).path(step))
    again = tiny_recipe(tmp_path, "checkpoint.every=2", "checkpoint.keep_last=null", back)
    stop_at(again, 7)
    run(again)
    assert trajectory(again) == expected


@pytest.mark.parametrize("gone", ["the step", "the run"])
def test_a_run_with_saves_of_its_own_needs_no_more_of_where_it_began(copied, source, gone):
    root, _ = copied
    first = root / "runs" / "first"
    recipe = begun(copied, f"checkpoint.resume={first}/checkpoints/step-4")
    run(recipe)
    lose(recipe, rows=3, steps=(6,))
    shutil.rmtree(first / "checkpoints" / "step-4" if gone == "the step" else first)
    assert preflight(recipe, 1) == []
    run(recipe)
    assert trajectory(recipe) == trajectory(source)[4:]
    with pytest.raises(UserError, match="which began from .*step-4, and .*resume=auto"):
        run(begun(copied, f"checkpoint.resume={root}/runs/third"))
    lose(recipe, rows=3)
    for again in (recipe, begun(copied)):
        with pytest.raises(UserError, match=r"began from step 4 there.*is gone|began from .*step-4, and.*resume=auto"):
            run(again)


def test_a_killed_run_that_began_from_a_path_goes_on(copied, source, monkeypatch):
    """kill -9 before the first save; its user starts it again by the same command."""
    root, _ = copied
    hold_after(monkeypatch, 6, root / "go")
    began = f"checkpoint.resume={root}/runs/first/checkpoints/step-4"
    recipe = begun(copied, began, "launch.nproc=2", "launch.max_restarts=2", "checkpoint.every=100")
    started = Processes(recipe)
    assert started.wait_for_rows(2), started.text()
    started.kill(started.pids())
    assert started.end() != 0 and checkpoints(recipe).published_steps() == []
    (root / "go").touch()
    started = Processes(recipe)
    assert started.end() == 0, started.text()
    assert started.text().count(f"resumed from {root}/runs/first/checkpoints/step-4") == 1
    for (loss, *_), (expected, *_) in zip(trajectory(recipe), trajectory(source)[4:], strict=True):
        assert loss == pytest.approx(expected, rel=1e-9)
    assert [row["step"] for row in metrics(recipe)] == [5, 6, 7, 8, 9, 10]
