"""Resumes: the choice of `auto` when files are damaged, old saves, a method's own state, and weights alone."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from dtrain.base.errors import RecipeError, UserError
from dtrain.checkpoint.dcp.retention import Retention
from dtrain.checkpoint.dcp.shards import TensorShard
from dtrain.launch.start import validate
from dtrain.methods.sft import SftMethod
from dtrain.parallel.mesh import Runtime
from dtrain.training import METHODS, trainer
from tests.checkpoint.processes import checkpoints
from tests.problem_lines import preflight
from tests.running import metrics, run, trajectory, weights
from tests.tiny import tiny_recipe, write_rows
from tests.world import run_world


def harm(path, how):
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 4
    path.write_bytes(data[: len(data) // 2] if how == "cut" else data)
    if how == "remove":
        path.unlink()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 10 steps, saved every third."""
    return run(tiny_recipe(tmp_path_factory.mktemp("finished"), "checkpoint.every=3", "checkpoint.keep_last=null"))


def beside(finished, directory, *overrides, **kwargs):
    """A recipe like that of `finished`, with the same model and data, whose runs are in `directory`."""
    shape = ("checkpoint.every=3", "checkpoint.keep_last=null", f"run.dir={directory}")
    return tiny_recipe(Path(finished.run.dir).parent, *shape, *overrides, **kwargs)


@pytest.fixture
def saved(tmp_path, finished):
    """A copy of `finished` that may be damaged."""
    shutil.copytree(finished.run.dir, tmp_path, dirs_exist_ok=True)
    return beside(finished, tmp_path)


@pytest.mark.parametrize(
    ("name", "how"),
    [("__0_0.distcp", "flip"), ("tensors.json", "cut"), ("state.json", "flip"), ("rank-0.json", "remove"),
     ("manifest.json", "remove"), ("manifest.json", "cut")],
)  # fmt: skip
def test_auto_takes_the_checkpoint_before_a_damaged_one_and_says_so(saved, finished, capfd, name, how):
    store = checkpoints(saved)
    harm(store.path(10) / name, how)
    run(saved)
    said = capfd.readouterr().err
    assert f"{store.path(10)} is damaged and is left out: {store.path(10) / name}" in said
    assert f"resumed from {store.path(9)}" in said
    assert trajectory(saved) == trajectory(finished)
    expected = weights(finished)
    assert all(torch.equal(value, expected[key]) for key, value in weights(saved).items())
    assert {path.name for path in store.directory.iterdir()} == {
        "step-3", "step-6", "step-9", "step-10", "damaged-step-10",
    }  # fmt: skip


@pytest.mark.trap(
    "a save that is not found means a new start",
    "pytorch/torchtitan PR#1311",
    "the run begins again and overwrites",
    "an error says what there is",
)
def test_auto_does_not_start_over_by_itself(saved):
    store = checkpoints(saved)
    for step in store.published_steps():
        harm(store.path(step) / "state.json", "flip")
    before = metrics(saved)
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        run(saved)
    assert metrics(saved) == before and store.published_steps() == [3, 6, 9, 10]


def test_a_checkpoint_of_a_newer_dtrain_is_refused_and_not_left_out(saved):
    from dtrain.checkpoint.dcp.store import _text_checksum

    path = checkpoints(saved).path(10) / "manifest.json"
    content = json.loads(path.read_text())["content"] | {"format": 2}
    path.write_text(json.dumps({"content": content, "crc32": _text_checksum(content)}))
    with pytest.raises(UserError, match="manifest.json: written in format 2, this dtrain reads 1"):
        run(saved)


def test_the_path_of_a_damaged_checkpoint_is_an_error_that_names_the_file(saved, finished, tmp_path):
    path = checkpoints(saved).path(6)
    harm(path / "__0_0.distcp", "flip")
    other = beside(finished, tmp_path, f"checkpoint.resume={path}", name="other")
    with pytest.raises(UserError, match="step-6/__0_0.distcp: damaged"):
        run(other)


# ---- retention


@pytest.mark.parametrize(
    ("retention", "dropped"),
    [
        (Retention(), []),
        (Retention(2), [1, 2, 3, 4]),
        (Retention(1, keep_every=2), [1, 3, 5]),
        (Retention(1, keep_best="val_loss"), [1, 2, 4, 5]),
        (Retention(1, keep_best="val_loss", better=max), [2, 3, 4, 5]),
        (Retention(1, keep_best="absent"), [1, 2, 3, 4, 5]),
        (Retention(9), []),
    ],
)
def test_what_is_dropped(retention, dropped):
    losses = {1: 9.0, 2: float("nan"), 3: 1.0, 4: 2.0, 5: 8.0}
    measured = {step: {"val_loss": value} for step, value in losses.items()} | {6: {}}
    assert retention.steps_to_delete(measured) == dropped


def test_of_equally_good_saves_the_newest_stays():
    assert Retention(1, keep_best="loss").steps_to_delete({1: {"loss": 2.0}, 2: {"loss": 2.0}, 3: {"loss": 3.0}}) == [1]


@pytest.mark.trap(
    "the best save is deleted with the old ones",
    "huggingface/transformers #15089",
    "it cannot be had again",
    "the last, every nth and the best stay",
)
@pytest.mark.parametrize("async_save", ["true", "false"])
def test_a_run_keeps_the_last_every_nth_and_the_best(tmp_path, async_save):
    write_rows(tmp_path / "val.jsonl", count=9, seed=3)
    recipe = tiny_recipe(
        tmp_path,
        f"data.val.path={tmp_path / 'val.jsonl'}",
        "train.validate_every=1",
        "checkpoint.every=1",
        "checkpoint.keep_last=2",
        "checkpoint.keep_every=4",
        "checkpoint.keep_best=val_loss",
        "optimizer.lr=0.3",
        f"checkpoint.async_save={async_save}",
    )
    assert preflight(recipe, 1) == []
    run(recipe)
    losses = {row["step"]: row["val_loss"] for row in metrics(recipe) if "val_loss" in row}
    best = min(losses, key=losses.get)
    assert best not in (4, 8, 9, 10), "an lr at which the best step is one that nothing else keeps"
    assert checkpoints(recipe).published_steps() == sorted({4, 8, 9, 10, best})


# ---- a method's own state


class Counting(SftMethod):
    """Keeps a table of which ranks hold a piece each, a whole tensor, and a number, and lets them enter its loss."""

    def __init__(self, recipe):
        super().__init__(recipe)
        self.calls, self.average, self.table = 0, torch.zeros(2, dtype=torch.float64), None

    def loss(self, source, batch, global_seqs, global_tokens):
        loss, measured = super().loss(source, batch, global_seqs, global_tokens)
        if self.table is None:
            self._make_table(6)
        if torch.is_grad_enabled():
            self.calls += 1
            self.average.mul_(0.5).add_(self.calls)
            self.table += self.rows * self.calls
        return loss * (1 + self.average[0] / 100), measured

    def _make_table(self, length):
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.rows = torch.arange(length).chunk(size)[rank]
        self.table = torch.zeros(len(self.rows), dtype=torch.int64)

    def state(self):
        return {"calls": self.calls, "length": 6}

    def tensors(self):
        piece = TensorShard.from_offsets(self.table, (6,), (int(self.rows[0]),))
        return {"average": self.average, "table": piece}

    def load(self, state):
        self.calls = state["calls"]
        self._make_table(state["length"])


def with_counting(rank, recipe, world_size):
    METHODS["sft"] = Counting
    try:
        trainer.train(recipe, Runtime(rank=rank, local_rank=rank, world_size=world_size))
    finally:
        METHODS["sft"] = "dtrain.methods.sft:SftMethod"


def counted(recipe, world_size):
    if world_size == 1:
        with_counting(0, recipe, 1)
    else:
        run_world(with_counting, world_size, recipe, world_size)
    return recipe


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3)])
def test_a_methods_own_state_goes_on_with_the_run(tmp_path, before, after):
    shape = ("train.global_batch=6", "train.micro_batch=1", "checkpoint.every=2", "data.packing=false")
    shape += ("scheduler.name=constant", "scheduler.warmup_steps=0")
    part = counted(tiny_recipe(tmp_path, *shape, "train.steps=2", name="part"), before)
    state = checkpoints(part).read_state(2)["method"]
    table = {"method.table": torch.zeros(6, dtype=torch.int64)}
    checkpoints(part).load(2, table, allow_extra=True)
    calls = state["calls"]
    assert calls == 2 * 6 // before
    assert table["method.table"].tolist() == [row * calls * (calls + 1) // 2 for row in range(6)]
    counted(tiny_recipe(tmp_path, *shape, "train.steps=4", name="part"), after)
    assert checkpoints(part).read_state(4)["method"]["calls"] == calls + 2 * 6 // after
    checkpoints(part).load(4, table, allow_extra=True)
    last = calls + 2 * 6 // after
    assert table["method.table"].tolist() == [row * last * (last + 1) // 2 for row in range(6)]
    if before == after:
        whole = counted(tiny_recipe(tmp_path, *shape, "train.steps=4", name="whole"), before)
        assert trajectory(part) == trajectory(whole)


# ---- weights alone


@pytest.mark.parametrize("of", ["a run", "a step"])
def test_init_from_takes_the_weights_and_nothing_else(tmp_path, of):
    few = ("checkpoint.every=1", "train.steps=2", "train.global_batch=4", "scheduler.warmup_steps=0")
    first = run(tiny_recipe(tmp_path, *few, name="first"), 2)
    path = Path(first.run.dir) / "first"
    step, path = (2, path) if of == "a run" else (1, path / "checkpoints" / "step-1")
    shape = (f"checkpoint.init_from={path}", "run.seed=7", "checkpoint.every=1", "checkpoint.keep_last=null")
    second = tiny_recipe(tmp_path, *shape, "optimizer.lr=1e-30", "train.steps=2", name="second")
    assert preflight(second, 1) == []
    run(second)
    expected = weights(first, step)
    found = weights(second, 1)
    for name, value in found.items():
        if name.startswith("model."):
            assert torch.equal(value, expected[name]), name
    assert found["optim.model.norm.weight.step"] == 1
    assert [row["step"] for row in metrics(second)] == [1, 2]
    # Later it resumes from its own checkpoints, though the other run's are gone.
    shutil.rmtree(Path(first.run.dir) / "first")
    run(tiny_recipe(tmp_path, *shape, "optimizer.lr=1e-30", "train.steps=3", name="second"))
    assert [row["step"] for row in metrics(second)] == [1, 2, 3]


def test_init_from_what_does_not_fit_is_refused_by_name(tmp_path):
    first = run(tiny_recipe(tmp_path, "checkpoint.every=10", family="llama", name="first"))
    path = Path(first.run.dir) / "first"
    with pytest.raises(UserError, match=r"step-10 does not fit this run:(.|\n)*q_proj.weight: saved as \[32, 32\]"):
        run(tiny_recipe(tmp_path, f"checkpoint.init_from={path}", name="second"))
    model = first.model.path
    assert preflight(tiny_recipe(tmp_path, f"checkpoint.init_from={model}"), 1) == [
        f"checkpoint.init_from={model} is a model, not a run. Set model.path={model} instead."
    ]
    assert "no such directory" in preflight(tiny_recipe(tmp_path, "checkpoint.init_from=nowhere"), 1)[0]


# ---- the guard


def test_a_refused_change_of_data_names_the_files(tmp_path):
    """In a run and in `dtrain validate`, by content: a file of another name with the same rows is no other data."""
    one, two, three = (write_rows(tmp_path / f"{name}.jsonl", seed=seed) for seed, name in enumerate("abc"))
    shape = ("checkpoint.every=10", "train.steps=12")

    def refusal(*overrides):
        recipe = tiny_recipe(tmp_path, *shape, *overrides)
        with pytest.raises(UserError, match="data.fingerprint: ") as caught:
            run(recipe)
        with pytest.raises(RecipeError) as dry:
            validate(recipe)
        assert str(caught.value) in str(dry.value)
        lines = str(caught.value).splitlines()
        start = next(number for number, line in enumerate(lines) if "data.fingerprint: " in line)
        return [line.strip() for line in lines[start + 1 :] if line.startswith("    ")]

    run(tiny_recipe(tmp_path, "checkpoint.every=10", f"data.train.path=[{one}, {two}]"))
    assert refusal(f"data.train.path=[{one}, {three}]") == [
        f"{two}: is no longer among the files",
        f"{three}: was not among the files",
    ]
    assert refusal(f"data.train.path=[{one}, {two}]", "data.max_length=8")[0].startswith("no file has changed")
    moved = two.rename(tmp_path / "moved.jsonl")
    run(tiny_recipe(tmp_path, "checkpoint.every=10", "train.steps=11", f"data.train.path=[{one}, {moved}]"))
    write_rows(moved, seed=7)
    assert refusal(f"data.train.path=[{one}, {moved}]") == [f"{moved}: its content has changed"]
    renamed = one.rename(tmp_path / "renamed.jsonl")
    assert refusal(f"data.train.path=[{renamed}, {moved}]") == [f"{moved}: its content has changed"]


def test_the_override_that_the_guard_names_makes_the_change_deliberate(tmp_path):
    run(tiny_recipe(tmp_path, "checkpoint.every=10"))
    write_rows(tmp_path / "rows.jsonl", seed=1)
    longer = ("checkpoint.every=10", "train.steps=12", "optimizer.betas=[0.8, 0.9]")
    with pytest.raises(UserError) as caught:
        run(tiny_recipe(tmp_path, *longer))
    override = re.search(r"set (checkpoint\.allow_changes=\[\S*\])\.", str(caught.value))[1]
    assert override == "checkpoint.allow_changes=[optimizer.betas,data.fingerprint]"
    allowed = tiny_recipe(tmp_path, *longer, override)
    assert preflight(allowed, 1) == []
    run(allowed)
    assert [row["step"] for row in metrics(allowed)] == list(range(1, 13))


@pytest.mark.parametrize("change", ["optimizer.name=muon", "optimizer.name=torch.optim.SGD", "train.dtype=float64"])
def test_another_optimizer_or_float64_is_a_new_run_and_the_advice_works(tmp_path, change):
    shape = ("train.dtype=float32", "checkpoint.every=3", "train.steps=3")
    first = run(tiny_recipe(tmp_path, *shape))
    with pytest.raises(UserError) as caught:
        run(tiny_recipe(tmp_path, *shape, change, "train.steps=5", "checkpoint.allow_changes=[optimizer,train]"))
    key, _, _ = change.partition("=")
    assert f"  {key}: " in str(caught.value) and len(str(caught.value).splitlines()) == 3
    start = f"checkpoint.init_from={first.run.directory}"
    again = run(tiny_recipe(tmp_path, *shape, change, start, name="again"))
    assert [row["step"] for row in metrics(again)] == [1, 2, 3]
