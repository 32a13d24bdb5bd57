"""Small data trains: the batch of `train.global_batch=auto`, warm-up as a share, and runs that would train nothing."""

import pytest

from dtrain.base.errors import UserError
from dtrain.recipe.schema import Scheduler, Stage
from dtrain.recipe.world import choose_global_batch
from tests.running import assert_same, metrics, run, trajectory
from tests.tiny import check, tiny_grpo, tiny_recipe, write_model, write_rows

EPOCHS = ("train.steps=null", "data.packing=false", "scheduler.warmup_steps=null")


@pytest.mark.parametrize(
    ("rows", "batch"), [(1, 1), (63, 1), (64, 2), (127, 2), (128, 4), (511, 8), (512, 16), (1000, 16), (10**7, 16)]
)
def test_auto_takes_rows_for_a_sensible_number_of_steps(rows, batch):
    assert choose_global_batch(rows) == batch


@pytest.mark.parametrize(
    ("given", "steps", "warmup"),
    [
        ({}, 1000, 30),
        ({}, 20, 0),
        ({"warmup": 0.29}, 100, 29),  # 28.999999999999996 in floating point
        ({"warmup": 7}, 100, 7),
        ({"warmup": 0.5, "warmup_steps": 3}, 100, 3),
        ({"warmup": 0.5, "warmup_steps": 0}, 100, 0),
    ],
)
def test_a_warmup_below_1_is_a_share_and_a_whole_number_a_count(given, steps, warmup):
    assert Scheduler(**given).num_warmup_steps(steps) == warmup
    assert Stage().num_warmup_steps(steps) == 0


def test_the_recipe_tells_a_share_from_a_count(tmp_path):
    for text, value in (("0.1", 0.1), ("5", 5), ("0", 0)):
        warmup = tiny_recipe(tmp_path, f"scheduler.warmup={text}").scheduler.warmup
        assert warmup == value and type(warmup) is type(value)
    for text in ("1.0", "1.5", "-0.1", "-1"):
        problems = check(tiny_recipe(tmp_path, f"scheduler.warmup={text}"), 1)
        assert ["scheduler.warmup=" in problem and "share" in problem for problem in problems] == [True]
    for text in ("0", "-4", "many"):
        problems = check(tiny_recipe(tmp_path, f"train.global_batch={text}"), 1)
        assert any(f"train.global_batch={text} must be a whole number" in problem for problem in problems)


def test_auto_is_the_same_on_every_mesh_and_after_a_resume(tmp_path, capfd):
    """150 rows: 4 of them a step. A micro-batch of 3 does not divide a rank's 2, and becomes one of 2."""
    write_rows(tmp_path / "rows.jsonl", count=150, longest=6)
    write_model(tmp_path / "qwen3-tied", num_hidden_layers=1)
    shape = (*EPOCHS, "train.epochs=1", "train.global_batch=auto", "train.micro_batch=3", "checkpoint.every=20")
    one = run(tiny_recipe(tmp_path, *shape, name="one"))
    told = _told(capfd)
    assert "150 rows a pass" in told and "global batch 4 (auto) = micro batch 2 × accumulation 2 × dp 1" in told
    assert "train.micro_batch=3 becomes 2, since it does not divide the 4 rows" in told
    two = run(tiny_recipe(tmp_path, *shape, name="two"), 2)
    assert len(trajectory(one)) == 38
    assert_same(two, one, rtol=1e-9)
    number = run(tiny_recipe(tmp_path, *shape[:-3], "train.global_batch=4", "train.micro_batch=2", name="number"))
    assert_same(number, one, rtol=1e-12)

    _told(capfd)
    whole = run(tiny_recipe(tmp_path, *shape, "train.epochs=2", name="one"))  # goes on with the batch that it had
    assert "train.epochs: 1 -> 2" in (told := _told(capfd)) and "train.global_batch:" not in told
    assert len(trajectory(whole)) == 38 + 37 + 1  # 150 rows: 37 times 4, and 2


def test_ranks_that_cannot_share_the_batch_are_refused_before_the_model_is_built(tmp_path):
    write_rows(tmp_path / "rows.jsonl", count=60)
    shape = (*EPOCHS, "train.epochs=1", "train.global_batch=auto")
    with pytest.raises(AssertionError, match=r"auto is 1 for this data \(60 rows a pass\), which 2"):
        run(tiny_recipe(tmp_path, *shape), 2)


def test_a_run_of_few_steps_is_refused_with_what_would_make_more(tmp_path):
    write_rows(tmp_path / "rows.jsonl", count=60, longest=6)
    packed = ("train.steps=null", "train.epochs=3", "scheduler.warmup_steps=null", "data.max_length=128")
    with pytest.raises(UserError) as refused:
        run(tiny_recipe(tmp_path, *packed, "train.global_batch=64"))
    told = str(refused.value)
    assert told.startswith("train.epochs=3 is 1 step here (3 rows a pass, train.global_batch=64 of them a step)")
    for fix in ("train.global_batch=auto (1 a step)", "data.packing=false (60 rows a pass)", "train.steps=1"):
        assert fix in told
    run(tiny_recipe(tmp_path, *packed, "train.global_batch=64", "train.steps=1", "train.epochs=null", name="asked"))
    small = run(tiny_recipe(tmp_path, *packed, "train.global_batch=auto", name="small"))
    rates = [row["lr"] for row in metrics(small) if "loss" in row]
    assert len(rates) >= 5 and min(rates) > 0


def test_packing_auto_packs_what_makes_enough_rows(tmp_path, capfd):
    write_rows(tmp_path / "rows.jsonl", count=60, longest=6)
    shape = ("train.steps=2", "train.global_batch=auto", "data.packing=auto", "data.val=0.2", "train.validate_every=2")
    shape += ("scheduler.warmup_steps=0", "train.micro_batch=1")
    few = run(tiny_recipe(tmp_path, *shape, "data.max_length=128", name="few"))
    assert "data.packing=auto: false, since packed the data has 2 rows a pass" in _told(capfd)
    assert_same(
        few, run(tiny_recipe(tmp_path, *shape, "data.max_length=128", "data.packing=false", name="false")), 1e-12
    )
    _told(capfd)
    many = run(tiny_recipe(tmp_path, *shape, "data.max_length=8", name="many"))
    assert "packed to 8 tokens" in _told(capfd)
    assert_same(many, run(tiny_recipe(tmp_path, *shape, "data.max_length=8", "data.packing=true", name="true")), 1e-12)


def test_a_learning_rate_that_never_rises_is_refused(tmp_path):
    with pytest.raises(UserError, match="1 step, and scheduler.warmup_steps=2 begins with a learning rate of 0"):
        run(tiny_recipe(tmp_path, "train.steps=1"))
    start = run(tiny_recipe(tmp_path, "train.steps=1", "scheduler.warmup_steps=0", name="moves"))
    assert [row["lr"] for row in metrics(start) if "loss" in row] == [1e-2]
    with pytest.raises(UserError, match=r"8 steps, and its warm-up 50 .* Set scheduler.warmup=0.03"):
        run(tiny_recipe(tmp_path, *EPOCHS[:2], "train.epochs=1", "scheduler.warmup_steps=50", name="slow"))


def test_grpo_takes_its_whole_rollout(tmp_path, capfd):
    run(tiny_grpo(tmp_path, "train.global_batch=auto", "train.steps=2"))
    assert "global batch 16 (auto" in _told(capfd)


def _told(capfd) -> str:
    return "".join(capfd.readouterr())
