"""Whole runs: the same numbers on one rank and several, resumed and uninterrupted, and what a run leaves behind."""

import gc
import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from dtrain.base.errors import Stopped, UserError
from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.commands.plan.background import Peak
from dtrain.parallel.mesh import Runtime
from dtrain.training.spec import resolve
from dtrain.training.trainer import train
from tests.running import assert_same, interrupt, metrics, run, run_all, trajectory, weights
from tests.tiny import tiny_recipe, write_rows

SAVE_LAST = "checkpoint.every=10"


@pytest.mark.trap(
    "the schedule goes on once for each process",
    "huggingface/transformers PR#24088",
    "warm-up and decay end too early",
    "one step of the schedule a step of the optimizer: the rates of one process",
)
@pytest.mark.trap(
    "loss averaged per micro-batch",
    "huggingface/transformers PR#34191",
    "short rows weigh more",
    "the trained tokens of the whole batch are the divisor",
)
def test_ranks_and_accumulation_give_the_trajectory_of_one_process(tmp_path):
    family, shape = "gemma3", ("data.packing=true", "train.steps=4", SAVE_LAST)
    one = run(tiny_recipe(tmp_path, *shape, "train.micro_batch=8", family=family, name="one"))
    accumulated = run(tiny_recipe(tmp_path, *shape, "train.micro_batch=1", family=family, name="accumulated"))
    two = run(tiny_recipe(tmp_path, *shape, family=family, name="two"), 2)
    four = run(tiny_recipe(tmp_path, *shape, family=family, name="four"), 4)
    expected = weights(one)
    for other in (accumulated, two, four):
        assert_same(other, one, rtol=1e-9)
        for name, value in weights(other).items():
            if name.startswith("model."):
                assert (value - expected[name]).abs().max() <= 1e-9 * expected[name].abs().max(), name


def test_validation_rows_lie_as_the_training_rows_do(tmp_path, capsys):
    write_rows(tmp_path / "few.jsonl", 20)  # less than 16 packed rows, and of val more
    write_rows(tmp_path / "val.jsonl", 100, seed=1)
    paths = [f"data.train.path={tmp_path / 'few.jsonl'}", f"data.val.path={tmp_path / 'val.jsonl'}"]
    recipe = tiny_recipe(tmp_path, *paths, "data.packing=auto")
    with ExitStack() as stack:
        spec = resolve(recipe, Runtime(), stack).spec
    assert [rows.packing for rows in spec.rows.values()] == [False, False]
    assert "data.packing=auto: false" in capsys.readouterr().err


@pytest.mark.trap(
    "loss averaged over ranks, not over tokens",
    "huggingface/transformers #39392",
    "a rank with one label weighs as much as the others",
    "the trained tokens of all ranks are the divisor",
)
def test_three_ranks_with_uneven_shards_and_a_short_last_batch(tmp_path):
    write_rows(tmp_path / "rows.jsonl", count=31)
    shape = ("train.steps=null", "train.epochs=2", "data.packing=false", "train.global_batch=12")
    one = run(tiny_recipe(tmp_path, *shape, name="one"))
    three = run(tiny_recipe(tmp_path, *shape, name="three"), 3)
    assert len(trajectory(one)) == 6  # 62 rows
    assert_same(three, one, rtol=1e-9)


@pytest.mark.parametrize("change", ["train.epochs=3", "train.global_batch=4"])
def test_epochs_of_a_changed_recipe_end_with_their_last_row_saved(tmp_path, change):
    write_rows(tmp_path / "rows.jsonl", count=18)
    shape = ("train.steps=null", "data.packing=false", "checkpoint.every=3")
    recipe = tiny_recipe(tmp_path, *shape, "train.epochs=2")  # 36 rows, 8 a step
    if change == "train.epochs=3":  # the short batch of the second epoch is done
        run(recipe)
        batches = [8, 8, 8, 8, 4, 8, 8, 2]
    else:
        with pytest.raises(Stopped):
            interrupt(recipe, 1, 1)
        batches = [8, 4, 4, 4, 4, 4, 4, 4]
    changed = run(tiny_recipe(tmp_path, *shape, "train.epochs=2", change))
    done = [sum(batches[: step + 1]) / 18 for step in range(len(batches))]
    assert [row["epoch"] for row in metrics(changed) if "loss" in row] == pytest.approx(done)
    assert max(CheckpointStore(Path(changed.run.dir) / "run" / "checkpoints").steps()) == len(batches)


def test_a_warmup_that_never_ends_and_rows_beyond_the_models_positions_are_said(tmp_path, capfd):
    run(tiny_recipe(tmp_path, "train.steps=2", "data.max_length=256"))  # warm-up 2, positions 128
    told = "".join(capfd.readouterr())
    assert "all 2 steps are warm-up (scheduler.warmup_steps=2)" in told and "more than the 128 positions" in told
    run(tiny_recipe(tmp_path, "train.steps=3", name="other"))
    assert "note:" not in "".join(capfd.readouterr())


@pytest.mark.trap(
    "a resume trains on the rows of before",
    "allenai/open-instruct PR#1523",
    "rows twice, others never",
    "the resumed run is the uninterrupted one to the bit",
)
@pytest.mark.parametrize(("world_size", "packing", "stop_at", "steps"), [(1, "true", 8, 10), (2, "false", 2, 5)])
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, world_size, packing, stop_at, steps):
    if packing == "false":
        write_rows(tmp_path / "rows.jsonl", count=20)  # an epoch ends within the third step
    shape = ("train.dtype=float32", f"data.packing={packing}", f"checkpoint.every={stop_at}", f"train.steps={steps}")
    whole = run(tiny_recipe(tmp_path, *shape, name="whole"), world_size)
    resumed = tiny_recipe(tmp_path, *shape, name="resumed")
    with pytest.raises((Stopped, AssertionError), match="stopped after step"):
        interrupt(resumed, world_size, stop_at)
    run(resumed, world_size)
    assert trajectory(resumed) == trajectory(whole)
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())


def test_resume_on_another_world_size_keeps_the_data_and_the_numbers(tmp_path):
    shape = (
        "data.packing=false",
        "train.global_batch=12",
        "train.micro_batch=2",
        "checkpoint.every=2",
        "train.steps=4",
    )
    whole = run(tiny_recipe(tmp_path, *shape, name="whole"))
    resumed = tiny_recipe(tmp_path, *shape, name="resumed")
    with pytest.raises((Stopped, AssertionError), match="stopped after step"):
        interrupt(resumed, 3, 2)
    run(resumed, 2)
    assert_same(resumed, whole, rtol=1e-9)


def test_a_finished_run_says_so_and_does_nothing(tmp_path, capfd):
    recipe = run(tiny_recipe(tmp_path, SAVE_LAST))
    before = metrics(recipe)
    run(recipe)
    assert metrics(recipe) == before
    assert "step 10 of 10 is saved already" in capfd.readouterr().err


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_stopped_between_its_last_save_and_the_export_makes_up_for_it(tmp_path, capfd, world_size):
    shape = (SAVE_LAST, "checkpoint.export=final", "train.dtype=float32", "train.steps=3")
    stopped = tiny_recipe(tmp_path, *shape)
    with pytest.raises((Stopped, AssertionError), match="stopped after step 3"):
        interrupt(stopped, world_size, 3)
    export = Path(stopped.run.dir) / "run" / "export"
    assert not export.exists()
    run(stopped, world_size)
    assert "only the export is left" in capfd.readouterr().err
    expected = run(tiny_recipe(tmp_path, *shape, name="whole"), world_size)
    weights = "model.safetensors"
    assert (export / weights).read_bytes() == (Path(expected.run.dir) / "whole" / "export" / weights).read_bytes()
    run(stopped, world_size)
    assert "nothing left to do" in capfd.readouterr().err


@pytest.mark.trap(
    "a resume with another data set leaves out its first rows",
    "NVIDIA-NeMo/RL PR#2519",
    "rows that are never seen",
    "it is refused with its key",
)
def test_resuming_with_other_data_or_optimizer_is_refused_by_key(tmp_path):
    run(tiny_recipe(tmp_path, SAVE_LAST))
    told = r"optimizer\.lr: 0\.01 -> 0\.5(.|\n)*checkpoint\.allow_changes=\[optimizer\.lr\]"
    with pytest.raises(UserError, match=told):
        run(tiny_recipe(tmp_path, SAVE_LAST, "train.steps=12", "optimizer.lr=0.5"))
    write_rows(tmp_path / "rows.jsonl", seed=1)
    with pytest.raises(UserError, match=r"data\.fingerprint"):
        run(tiny_recipe(tmp_path, SAVE_LAST, "train.steps=12"))
    allowed = tiny_recipe(tmp_path, SAVE_LAST, "train.steps=12", "checkpoint.allow_changes=[data]")
    run(allowed)
    assert [row["step"] for row in metrics(allowed)] == list(range(1, 13))


def test_resume_null_refuses_a_used_directory_and_a_path_starts_from_it(tmp_path):
    first = run(tiny_recipe(tmp_path, "checkpoint.every=5", name="first"))
    with pytest.raises(UserError, match="resume=null starts anew"):
        run(tiny_recipe(tmp_path, "checkpoint.resume=null", name="first"))
    path = Path(first.run.dir) / "first" / "checkpoints" / "step-5"
    second = run(tiny_recipe(tmp_path, f"checkpoint.resume={path}", "checkpoint.every=5", name="second"))
    assert trajectory(second) == trajectory(first)[5:]


@pytest.mark.trap(
    "validation loss depends on the batch size",
    "huggingface/transformers #39241",
    "runs cannot be compared",
    "one mean over all trained tokens",
)
def test_validation_is_the_mean_over_all_trained_tokens(tmp_path):
    write_rows(tmp_path / "val.jsonl", count=13, seed=3)
    shape = (f"data.val.path={tmp_path / 'val.jsonl'}", "train.validate_every=2", "train.steps=3")
    one = run(tiny_recipe(tmp_path, *shape, "train.global_batch=4", name="one"))
    four = run(tiny_recipe(tmp_path, *shape, "train.global_batch=4", "train.micro_batch=1", name="four"), 4)
    values = [[(row["step"], row["val_loss"]) for row in metrics(r) if "val_loss" in row] for r in (one, four)]
    assert [step for step, _ in values[0]] == [2, 3]
    for (_, value), (_, expected) in zip(values[1], values[0], strict=True):
        assert abs(value - expected) <= 1e-9 * expected


def test_a_resumed_step_is_validated_if_it_was_not(tmp_path):
    write_rows(tmp_path / "val.jsonl", count=13, seed=3)
    shape = (f"data.val.path={tmp_path / 'val.jsonl'}", "train.steps=4", "checkpoint.every=2")

    def validations(recipe):
        return [(row["step"], row["val_loss"]) for row in metrics(recipe) if "val_loss" in row]

    expected = validations(run(tiny_recipe(tmp_path, *shape, "train.validate_every=2", name="expected")))
    assert [step for step, _ in expected] == [2, 4]

    late = run(tiny_recipe(tmp_path, *shape, "train.validate_every=null", name="late"))
    assert validations(late) == []
    for _ in range(2):  # the second resume finds the validation of the first one
        late = run(tiny_recipe(tmp_path, *shape, "train.validate_every=2", name="late"))
        assert validations(late) == expected[1:]

    path = Path(late.run.dir) / "late" / "checkpoints" / "step-2"
    other = run(tiny_recipe(tmp_path, *shape, "train.validate_every=2", f"checkpoint.resume={path}", name="other"))
    assert validations(other) == expected


def test_a_gradient_that_is_not_finite_ends_the_run_before_the_optimizer(tmp_path):
    recipe = tiny_recipe(tmp_path, "optimizer.lr=1e200", "scheduler.warmup_steps=0", "checkpoint.every=1")
    with pytest.raises(UserError, match="gradient norm is nan.*(.|\n)*train.skip_nonfinite"):
        run(recipe)
    last = max(CheckpointStore(Path(recipe.run.dir) / "run" / "checkpoints").steps())
    assert last == len(trajectory(recipe))


def test_export_every_and_final_write_a_directory(tmp_path):
    recipe = run(tiny_recipe(tmp_path, "checkpoint.export=final", "train.dtype=float32"))
    from dtrain.models import from_pretrained

    model = from_pretrained(Path(recipe.run.dir) / "run" / "export")
    assert torch.isfinite(model(torch.arange(5)[None])).all()


def test_a_run_shows_its_planned_peak_beside_what_it_holds_once_the_optimizer_has_its_state(tmp_path, capsys):
    answers = iter([None, Peak("planned peak 1.25 GiB", 5 << 28)])
    asked = []

    def planned(wait):
        asked.append(wait)
        return next(answers)

    train(tiny_recipe(tmp_path, "train.steps=4"), Runtime(wait_for_plan=planned))
    shown = [line for line in capsys.readouterr().err.splitlines() if "planned peak" in line]
    assert len(shown) == 1
    assert re.search(r"planned peak 1.25 GiB; the process holds \d+\.\d+ GiB, \d+\.\d+ GiB of it before", shown[0])
    assert asked == [0.0, 0.0]
    about = json.loads((tmp_path / "runs" / "run" / "about.json").read_text())
    assert (about["planned"], about["steps"], about["world_size"]) == (5 << 28, 4, 1)
    assert about["parameters"] == about["trained"] > 0 and about["mesh"]["dp_shard"] == 1
    train(
        tiny_recipe(tmp_path, "train.steps=1", "scheduler.warmup_steps=0", name="short"),
        Runtime(wait_for_plan=lambda wait: Peak(f"waited {wait}")),
    )
    assert "waited 5.0" in capsys.readouterr().err


def test_gradients_reduced_after_every_micro_batch_are_the_same(tmp_path):
    copies = ("parallel.dp_replicate=2", "parallel.tp=2", "parallel.dp_shard=1")
    fixed = ("train.micro_batch=1", "train.global_batch=4", "train.steps=3", *copies)
    once = tiny_recipe(tmp_path, *fixed, name="once")
    each = tiny_recipe(tmp_path, *fixed, "parallel.reduce_each=true", name="each")
    run_all([once, each], 4)
    assert_same(each, once, rtol=1e-9)


def test_garbage_is_collected_between_steps_alone_and_after_the_run_as_before(tmp_path, monkeypatch):
    collected = []
    monkeypatch.setattr("dtrain.training.trainer.COLLECT_EVERY", 2)
    monkeypatch.setattr(gc, "collect", lambda generation=2: collected.append((generation, gc.isenabled())))
    train(tiny_recipe(tmp_path, "train.steps=5", "checkpoint.every=4"), Runtime())
    assert collected == [(1, False), (2, False), (2, False)] and gc.isenabled()
