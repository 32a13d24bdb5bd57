"""Whole DPO runs from files: meshes, resume, the reference that is precomputed, validation, what metrics.jsonl says."""

import json

import pytest

from tests.running import assert_same, interrupt, run, trajectory
from tests.tiny import tiny_recipe, write_pairs

FIELDS = {"rewards_chosen", "rewards_rejected", "rewards_margin", "accuracy"}


def recipe_of(root, *overrides, name="run", **more):
    pairs = root / "pairs.jsonl"
    if not pairs.exists():
        write_pairs(pairs)
        write_pairs(root / "val.jsonl", count=7, seed=1)
    fixed = ("method=dpo", f"data.train.path={pairs}", "data.max_length=16", "train.steps=6", "train.global_batch=4")
    return tiny_recipe(root, *fixed, "dpo.beta=0.5", "dpo.sft_weight=0.1", *overrides, name=name, **more)


def rows_of(recipe, kind="loss"):
    path = f"{recipe.run.dir}/{recipe.run.name}/metrics.jsonl"
    return [row for row in map(json.loads, open(path)) if kind in row]


def fields_of(recipe):
    return [[row[name] for name in sorted(FIELDS)] for row in rows_of(recipe)]


def test_a_pair_is_learnt_and_told(tmp_path):
    recipe = recipe_of(tmp_path, "train.steps=20", f"data.val.path={tmp_path}/val.jsonl", "train.validate_every=10")
    run(recipe)
    rows = rows_of(recipe)
    assert all(FIELDS <= row.keys() for row in rows)
    assert rows[0]["accuracy"] == 0.0 and rows[0]["rewards_margin"] == 0.0
    assert rows[-1]["rewards_margin"] > 0.5 and rows[-1]["accuracy"] > 0.7
    for row in rows_of(recipe, "val_loss"):
        assert row.keys() == {"step", "val_loss", *(f"val_{name}" for name in FIELDS)}


def test_validation_is_one_number_whatever_the_batch_and_the_mesh(tmp_path):
    fixed = (f"data.val.path={tmp_path}/val.jsonl", "train.validate_every=2", "train.steps=2", "optimizer.lr=1e-30")
    whole = recipe_of(tmp_path, *fixed, name="whole")
    split = recipe_of(tmp_path, *fixed, "train.global_batch=14", "train.micro_batch=1", name="split")
    run(whole)
    run(split, 2)
    (one,), (other,) = rows_of(whole, "val_loss"), rows_of(split, "val_loss")
    assert other == pytest.approx(one, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "world_size, packing, more",
    [(1, "true", ("dpo.precompute=true",)), (2, "false", ("dpo.sync_every=2", "dpo.sync_mix=0.3"))],
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, world_size, packing, more):
    shape = ("train.dtype=float32", f"data.packing={packing}", "checkpoint.every=3", *more)
    whole = recipe_of(tmp_path, *shape, name="whole")
    resumed = recipe_of(tmp_path, *shape, name="resumed")
    run(whole, world_size)
    with pytest.raises((Exception, AssertionError), match="stopped after step"):
        interrupt(resumed, world_size, 3)
    run(resumed, world_size)
    assert trajectory(resumed) == trajectory(whole) and fields_of(resumed) == fields_of(whole)


def test_a_run_that_starts_from_another_resumes_against_that_start(tmp_path):
    """The reference is what the run started from: not model.path's weights, nor those of the checkpoint."""
    first = recipe_of(tmp_path, "checkpoint.every=6", name="first")
    run(first)
    start = f"checkpoint.init_from={tmp_path}/runs/first"
    whole = recipe_of(tmp_path, start, "checkpoint.every=3", name="whole")
    resumed = recipe_of(tmp_path, start, "checkpoint.every=3", name="resumed")
    run(whole)
    assert rows_of(whole)[0]["rewards_margin"] == 0.0
    with pytest.raises((Exception, AssertionError), match="stopped after step"):
        interrupt(resumed, 1, 3)
    run(resumed)
    assert trajectory(resumed) == trajectory(whole) and fields_of(resumed) == fields_of(whole)


@pytest.mark.parametrize("harm", [lambda content: bytes(len(content)), lambda content: content[:-1]])
def test_a_damaged_table_is_made_again(tmp_path, harm):
    first, second = (recipe_of(tmp_path, "dpo.precompute=true", name=name) for name in ("first", "second"))
    run(first)
    (file,) = (tmp_path / "runs" / ".cache").glob("*/reference-*.bin")
    whole = file.read_bytes()
    file.write_bytes(harm(whole))
    run(second)
    assert trajectory(second) == trajectory(first) and file.read_bytes() == whole


@pytest.mark.parametrize("packing, more", [("true", ("dpo.ld_alpha=0.5",)), ("false", ("dpo.loss=aot_unpaired",))])
def test_what_is_precomputed_is_what_the_reference_says(tmp_path, packing, more):
    fixed = (f"data.packing={packing}", f"data.val.path={tmp_path}/val.jsonl", "train.validate_every=3", *more)
    live = recipe_of(tmp_path, *fixed, name="live")
    table = recipe_of(tmp_path, *fixed, "dpo.precompute=true", name="table")
    again = recipe_of(tmp_path, *fixed, "dpo.precompute=true", name="again")
    run(live)
    run(table, 2)
    files = list((tmp_path / "runs" / ".cache").glob("*/reference-*.bin"))
    assert len(files) == 2  # of train and val
    stamps = [file.stat().st_mtime_ns for file in files]
    run(again)
    assert [file.stat().st_mtime_ns for file in files] == stamps
    for other in (table, again):
        assert_same(other, live, rtol=1e-9)
        for found, expected in zip(rows_of(other, "val_loss"), rows_of(live, "val_loss"), strict=True):
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
