"""Whole GRPO runs from files: meshes, resume in the middle of a rollout, minibatches, validation, what is written."""

import math
import signal
import socket
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dtrain.base.errors import Stopped, UserError
from dtrain.inference.native import NativeEngine
from dtrain.parallel.mesh import Runtime, StopFlag, init_one_process_group
from dtrain.training.metrics import Recorder
from dtrain.training.trainer import Trainer
from tests.methods.comparing import assert_same_metrics, rows_of, samples_of
from tests.running import assert_same, interrupt, metrics, run, trajectory
from tests.tiny import tiny_grpo, write_prompts
from tests.world import run_world

FIELDS = {"reward_mean", "reward_std", "entropy", "clip_frac", "completion_len", "truncated_frac", "mismatch_kl"}
# Everything at once: a reference that moves, two passes, a filter, a term by sequence, lengths that are punished.
RICH = (
    "grpo.beta=0.1",
    "grpo.sync_every=3",
    "grpo.updates_per_rollout=2",
    "grpo.sampling.top_p=0.9",
    "grpo.sampling.temperature=0.8",
    "grpo.overlong_cache=2",
    "grpo.mask_truncated=true",
    "grpo.kwargs={entropy_coef: 0.01}",
)


def test_the_entropies_of_the_whole_minibatch_decide(tmp_path):
    fixed = ("grpo.kwargs={top_entropy_quantile: 0.3, entropy_coef: 0.1}", "train.steps=4")
    whole = tiny_grpo(tmp_path, *fixed, "data.packing=false", "train.micro_batch=8", name="whole")
    split = tiny_grpo(tmp_path, *fixed, "train.micro_batch=1", "parallel.cp=2", name="split")
    run(whole)
    run(split, 4)
    assert_same(split, whole, rtol=1e-9)


@pytest.mark.trap(
    "prompts that were being drawn are lost at a resume",
    "NVIDIA-NeMo/RL PR#3599",
    "a third of the prompts of a run, the long ones first",
    "the resumed run is the uninterrupted one to the bit",
)
@pytest.mark.parametrize("world_size, stop", [(1, 3), (2, 4)])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, world_size, stop):
    """Stopped within a rollout's passes, and in the second rollout."""
    shape = ("train.dtype=float32", "train.steps=7", "checkpoint.every=20", *RICH)
    whole = tiny_grpo(tmp_path, *shape, name="whole")
    resumed = tiny_grpo(tmp_path, *shape, name="resumed")
    run(whole, world_size)
    with pytest.raises((Exception, AssertionError), match="stopped after step"):
        interrupt(resumed, world_size, stop)
    run(resumed, world_size)
    assert trajectory(resumed) == trajectory(whole) and rows_of(resumed) == rows_of(whole)
    assert samples_of(resumed) == samples_of(whole)


def test_a_resume_on_another_mesh(tmp_path):
    shape = ("train.steps=6", "checkpoint.every=20", *RICH)
    whole = tiny_grpo(tmp_path, *shape, name="whole")
    run(whole)
    resumed = tiny_grpo(tmp_path, *shape, name="resumed")
    with pytest.raises((Exception, AssertionError), match="stopped after step"):
        interrupt(resumed, 2, 3)
    run(tiny_grpo(tmp_path, *shape, "parallel.cp=2", name="resumed"), 4)
    assert_same_metrics(resumed, whole)


class SoonStopped(StopFlag):
    """Says that a signal came, the third time that it is asked after `arm`."""

    asked = None

    def arm(self):
        self.asked = 0

    @property
    def signum(self):
        if self.asked is not None:
            self.asked += 1
        return signal.SIGTERM if (self.asked or 0) > 2 else 0

    @signum.setter
    def signum(self, value):
        pass


def stopped_while_drawing(rank, recipe, world_size, step, told, where=""):
    """A run of which the ranks `told` are sent a signal while they draw the completions that follow `step`; what it
    says begins with `where` that step is saved."""
    flag = SoonStopped()

    class Armed(Recorder):
        def train_row(self, at, **fields):
            super().train_row(at, **fields)
            if at == step and rank in told:
                flag.arm()

    runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size, stop=flag)
    with ExitStack() as stack:
        if world_size == 1:
            init_one_process_group("cpu")
            stack.callback(dist.destroy_process_group)
        trainer = Trainer.open(recipe, runtime, stack)
        trainer.metrics.__class__ = Armed
        start = trainer.resume()
        if step == start.step:
            flag.arm()
        with pytest.raises(Stopped, match=f"^stopped after step {step}, which is saved in {where}"):
            trainer.loop(start)
    assert flag.asked is None or flag.asked < 10  # a rollout's draws would ask more often


@pytest.mark.parametrize(
    "world_size, told, shape",
    [
        (1, (0,), ()),
        (2, (1,), ("grpo.unshard=false",)),
    ],
)
def test_a_rollout_is_given_up_for_a_signal_and_drawn_again(tmp_path, world_size, told, shape):
    shape = ("train.steps=6", "checkpoint.every=20", *RICH, "grpo.sampling.max_new_tokens=20", *shape)
    whole = tiny_grpo(tmp_path, *shape, name="whole")
    resumed = tiny_grpo(tmp_path, *shape, name="resumed")
    run(whole, world_size)
    if world_size == 1:
        stopped_while_drawing(0, resumed, 1, 4, told)
    else:
        run_world(stopped_while_drawing, world_size, resumed, world_size, 4, told)
    assert len(samples_of(resumed)) == 16
    run(resumed, world_size)
    assert trajectory(resumed) == trajectory(whole) and rows_of(resumed) == rows_of(whole)
    assert samples_of(resumed) == samples_of(whole)


@pytest.mark.parametrize("answers", [False, True])
def test_a_signal_ends_the_wait_for_servers(tmp_path, answers):
    flag = StopFlag()
    flag.request(signal.SIGTERM)
    with socket.socket() as nobody, ExitStack() as stack:
        nobody.bind(("127.0.0.1", 0))
        if answers:  # takes the call, and says nothing to it
            nobody.listen()
        server = f"grpo.server.urls=['http://127.0.0.1:{nobody.getsockname()[1]}']"
        recipe = tiny_grpo(tmp_path, "grpo.engine=http", server, "grpo.server.start_timeout=20")
        init_one_process_group("cpu")
        stack.callback(dist.destroy_process_group)
        trainer, began = Trainer.open(recipe, Runtime(stop=flag), stack), time.monotonic()
        with pytest.raises(Stopped, match="stopped before the first step: nothing is lost") as caught:
            trainer.resume()
        assert caught.value.signum == signal.SIGTERM and time.monotonic() - began < 10


def test_a_run_that_began_at_another_ones_checkpoint_says_where_it_goes_on(tmp_path):
    one = tiny_grpo(tmp_path, "train.steps=2", "checkpoint.every=2", name="one")
    run(one)
    begin = tmp_path / "runs/one/checkpoints/step-2"
    shape = ("train.steps=6", "checkpoint.every=20", f"checkpoint.resume={begin}", "checkpoint.allow_changes=[train.*]")
    two = tiny_grpo(tmp_path, *shape, name="two")
    stopped_while_drawing(0, two, 1, 2, (0,), f"{begin}; the same command goes on there")
    here = tmp_path / "runs/two/checkpoints/step-4"
    stopped_while_drawing(0, two, 1, 4, (0,), f"{here}; the same command goes on there")
    assert here.is_dir()


def test_what_a_run_writes(tmp_path):
    write_prompts(tmp_path / "val.jsonl", count=9, seed=1)
    recipe = tiny_grpo(
        tmp_path,
        f"data.val.path={tmp_path}/val.jsonl",
        "train.validate_every=2",
        "train.steps=4",
        "grpo.rewards=[{fn: tests.methods.judges.even}, {fn: tests.methods.judges.wanted, weight: 2.0}]",
    )
    run(recipe)
    rows = [row for row in metrics(recipe) if "loss" in row]
    assert all(FIELDS <= row.keys() for row in rows) and all(row["tokens"] > 0 for row in rows)
    assert ["rollout_time" in row for row in rows] == [True, False, True, False]
    assert all(row["train_time"] > 0 for row in rows)
    samples = samples_of(recipe)
    assert [row["step"] for row in samples] == [1] * 16 + [3] * 16
    for row in samples:
        assert row["reward"] == pytest.approx(row["rewards"]["even"] + 2 * row["rewards"]["wanted"])
    for row in rows:
        mine = torch.tensor([s["reward"] for s in samples if s["step"] == row["step"] - (row["step"] + 1) % 2])
        assert row["reward_mean"] == pytest.approx(mine.double().mean().item())
        assert row["reward_std"] == pytest.approx(mine.double().view(4, 4).std(1).mean().item())
    val = [row for row in metrics(recipe) if "loss" not in row]
    assert [row["step"] for row in val] == [2, 4]
    names = {"step", "val_reward_mean", "val_completion_len", "val_truncated_frac"}
    assert all(row.keys() == names for row in val)


def test_a_reward_is_learnt(tmp_path):
    recipe = tiny_grpo(tmp_path, "train.steps=40", "grpo.group_size=8", "train.global_batch=32", "optimizer.lr=3e-2")
    run(recipe)
    rewards = [row["reward_mean"] for row in rows_of(recipe)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.25


@pytest.mark.parametrize("mode", ["drop", "refill"])
def test_groups_that_teach_nothing_are_left_out(tmp_path, mode):
    """One token a completion: many groups of two are alike."""
    fixed = ("grpo.group_size=2", "train.global_batch=8", "grpo.sampling.max_new_tokens=1", "train.steps=3")
    recipe = tiny_grpo(tmp_path, f"grpo.dynamic_sampling={mode}", *fixed, name=mode)
    run(recipe, 2)
    plain = tiny_grpo(tmp_path, *fixed, name="plain")
    run(plain)
    rows, counted = rows_of(recipe), []
    assert 0 < rows[0]["frac_zero_std"] < 1
    for step in (1, 2, 3):
        rewards = torch.tensor([row["reward"] for row in samples_of(recipe) if row["step"] == step]).view(-1, 2)
        assert len(rewards) == 4
        counted.append(int((rewards[:, 0] != rewards[:, 1]).sum()))
    if mode == "drop":
        assert [row["epoch"] for row in rows] == [row["epoch"] for row in rows_of(plain)]
        assert any(count < 4 for count in counted)
    else:
        assert rows[0]["epoch"] > rows_of(plain)[0]["epoch"] and max(counted) == 4
    groups = [row["group"] for row in samples_of(recipe) if row["step"] == 1]
    assert groups == sorted(groups)


def test_epochs_end_with_a_short_rollout(tmp_path):
    """24 + 12 prompts by 5: seven rollouts of 20 completions and one of 4, 10 a step."""
    recipe = tiny_grpo(
        tmp_path, "train.steps=null", "train.epochs=1.5", "grpo.prompts_per_step=5", "train.global_batch=10", name="one"
    )
    run(recipe)
    rows = rows_of(recipe)
    assert len(rows) == 15 and rows[-1]["epoch"] == 1.5
    assert len(samples_of(recipe)) == 36 * 4


@pytest.mark.trap(
    "engine and trainer disagree and nobody sees it",
    "NVIDIA-NeMo/RL #3743",
    "every ratio is wrong",
    "the run stops at grpo.max_mismatch",
)
def test_a_disagreement_of_engine_and_trainer_stops_the_run(tmp_path, monkeypatch, capsys):
    exact = NativeEngine.generate

    def off(self, requests, should_stop, **version):
        drawn = exact(self, requests, should_stop, **version)
        return [replace(one, logprobs=[value - 0.2 for value in one.logprobs]) for one in drawn]

    monkeypatch.setattr(NativeEngine, "generate", off)
    recipe = tiny_grpo(tmp_path, "train.steps=2")
    with pytest.raises(UserError, match=r"disagree by 0\.2 .* more than grpo.max_mismatch=0\.1"):
        run(recipe)
    assert not any("loss" in row for row in metrics(recipe)) if (tmp_path / "runs/run/metrics.jsonl").exists() else True
    capsys.readouterr()
    drifted = tiny_grpo(tmp_path, "train.steps=2", "grpo.max_mismatch=0.3", name="other")
    run(drifted)
    drift = [row["mismatch_kl"] for row in metrics(drifted) if "loss" in row]
    assert drift == pytest.approx([math.expm1(0.2) - 0.2] * 2, rel=1e-6)
    assert capsys.readouterr().err.count("warning: mismatch_kl at step 1 is 0.021, more than 0.01") == 1


@pytest.mark.parametrize(
    "change, told",
    [
        ("train.global_batch=4", r"within a rollout.*\n  train.global_batch: 8 -> 4"),
        ("grpo.sampling.temperature=0.5", r"\n  grpo.sampling.temperature: 1.0 -> 0.5"),
        ("grpo.beta=0.1", r"\n  grpo.beta: 0.0 -> 0.1"),
    ],
)
def test_what_a_rollouts_updates_depend_on_cannot_change_within_it(tmp_path, change, told):
    """Stopped after one of its two steps. After the second any of these may change."""
    shape = ("train.steps=4", "checkpoint.every=20")
    with pytest.raises((Exception, AssertionError), match="stopped after step"):
        interrupt(tiny_grpo(tmp_path, *shape), 1, 1)
    with pytest.raises(UserError, match=told):
        run(tiny_grpo(tmp_path, *shape, change))
    with pytest.raises((Exception, AssertionError), match="stopped after step"):
        interrupt(tiny_grpo(tmp_path, *shape), 1, 2)
    changed = run(tiny_grpo(tmp_path, *shape, change))
    assert [row["step"] for row in rows_of(changed)] == [1, 2, 3, 4]


def test_whether_the_reference_moves_cannot_change(tmp_path):
    shape = ("train.steps=4", "checkpoint.every=20", "grpo.beta=0.1")
    with pytest.raises((Exception, AssertionError), match="stopped after step"):
        interrupt(tiny_grpo(tmp_path, *shape), 1, 2)
    with pytest.raises(UserError, match="grpo.sync_every=3: the checkpoint holds no reference"):
        run(tiny_grpo(tmp_path, *shape, "grpo.sync_every=3"))


def test_a_rollout_without_a_known_reward_is_told_and_trains_nothing(tmp_path, capfd):
    fixed = ("grpo.rewards=[{fn: tests.methods.judges.FallsSilent}]", "optimizer.weight_decay=0", "train.steps=4")
    recipe = run(tiny_grpo(tmp_path, *fixed, "grpo.beta=0.1"), 2)
    assert "".join(capfd.readouterr()).count("step 3 trains nothing: none of its rewards is known") == 1
    assert [(row["loss"], row["grad_norm"]) == (0, 0) for row in rows_of(recipe)] == [False, False, True, True]
    assert [row["reward"] is None for row in samples_of(recipe)] == [False] * 16 + [True] * 16


@pytest.mark.parametrize("name", ["silent", "not_a_number"])
def test_a_run_whose_first_rewards_are_all_unknown_ends_with_an_error(tmp_path, name):
    recipe = tiny_grpo(tmp_path, f"grpo.rewards=[{{fn: tests.methods.judges.{name}}}]", "train.steps=3")
    with pytest.raises(UserError, match=rf"none of the first rollout's 16 completions has a known reward \({name}\)"):
        run(recipe)
    assert not (recipe.run.directory / "metrics.jsonl").exists()


def test_a_reward_that_takes_completions_for_messages_is_told_by_its_name(tmp_path):
    recipe = tiny_grpo(tmp_path, "grpo.rewards=[{fn: tests.methods.judges.of_messages}]", "train.steps=4")
    with pytest.raises(UserError) as raised:
        run(recipe)
    text = str(raised.value)
    assert text.startswith("reward of_messages (tests.methods.judges.of_messages) failed:\n")
    assert "completions are strings" in text
    assert "TypeError: string indices must be integers" in text
