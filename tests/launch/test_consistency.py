"""Hosts that differ are told so before anything is trained or saved.

Each rank of these worlds has a working directory of its own, with relative paths: the same path is another file.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtrain.base.errors import UserError
from dtrain.checkpoint.dcp.shards import TensorShard
from dtrain.checkpoint.dcp.store import CheckpointStore
from dtrain.launch.rank import check_hosts_agree, check_recipes_agree
from dtrain.launch.rank_info import RankInfo
from dtrain.parallel.mesh import Runtime
from dtrain.training import load_recipe
from dtrain.training.trainer import train
from tests.tiny import save_weights, tiny_recipe, write_model, write_rows
from tests.world import run_world


def two_hosts(root, act):
    """Return each of two ranks' error from act(rank), with `root`/rank as its working directory; None: none."""

    def on_rank(rank):
        (root / str(rank)).mkdir(parents=True, exist_ok=True)
        os.chdir(root / str(rank))
        try:
            act(rank)
        except UserError as error:
            return str(error)
        return None

    return run_world(on_rank, 2)


def compare(recipe, rank, store_file):
    """What a rank does where it has met the others, before anything is decided for all."""
    check_recipes_agree(recipe, RankInfo(rank, rank, 2, 2), torch.distributed.FileStore(str(store_file), 2))


def test_hosts_with_one_recipe_and_one_directory_are_the_same(tmp_path):
    recipe = tiny_recipe(tmp_path)

    def act(rank):  # what is read by one rank alone, or is a matter of speed, may differ
        compare(
            load_recipe(recipe, [f"launch.collective_timeout={60 + rank}", f"data.num_workers={rank}"]),
            rank,
            tmp_path / "store",
        )
        check_hosts_agree(recipe)

    assert two_hosts(tmp_path, act) == [None, None]
    assert not list((tmp_path / "runs" / "run").iterdir())


@pytest.mark.parametrize(
    "first, second, line",
    [
        ("optimizer.lr=0.01", "optimizer.lr=0.02", "optimizer.lr: 0.01 on rank 0, 0.02 here"),
        # What rank 0 decides must not hide it, and rank 1 must not wait for a decision that does not come.
        ("train.micro_batch=auto", "train.micro_batch=4", "train.micro_batch: auto on rank 0, 4 here"),
        ("train.micro_batch=4", "train.micro_batch=auto", "train.micro_batch: 4 on rank 0, auto here"),
    ],
)
def test_a_command_typed_otherwise_on_one_host_is_refused(tmp_path, first, second, line):
    recipe = tiny_recipe(tmp_path)
    told = two_hosts(
        tmp_path, lambda rank: compare(load_recipe(recipe, [(first, second)[rank]]), rank, tmp_path / "store")
    )
    assert told[0] == told[1]
    assert told[0].startswith("rank 1 on ") and "another recipe than rank 0" in told[0]
    assert told[0].splitlines()[1:] == [f"  {line}"]


def test_a_run_directory_that_hosts_do_not_share_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("dtrain.launch.rank.SEEN_SECONDS", 0.2)
    recipe = tiny_recipe(tmp_path)
    recipe = replace(recipe, run=replace(recipe.run, dir="runs"))
    told = two_hosts(tmp_path, lambda rank: check_hosts_agree(recipe))
    assert told[0] == told[1] and told[0].startswith("rank 1 on ")
    assert "does not see what rank 0 writes to runs/run: set run.dir to a directory that all hosts share" in told[0]
    assert not list((tmp_path / "0" / "runs" / "run").iterdir())


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_model_that_is_another_on_one_host_is_refused(tmp_path, name):
    """One byte tells: of the same size, at the same time, far from the file's ends."""
    write_model(tmp_path / "both")
    save_weights(tmp_path / "both")
    write_rows(tmp_path / "rows.jsonl")
    recipe = tiny_recipe(
        tmp_path, "model.path=model", "model.init=pretrained", "train.steps=1", "scheduler.warmup_steps=0"
    )

    def act(rank):
        shutil.copytree(tmp_path / "both", "model")
        if rank == 1 and differs:
            path = Path("model", name)
            stat, content = path.stat(), path.read_bytes()
            old, new = {"config.json": (b"128", b"127"), "tokenizer.json": (b"w41", b"v41")}.get(name, (None, None))
            at = content.index(old) if old else len(content) * 2 // 3
            path.write_bytes(content[:at] + (new or bytes([content[at] ^ 1])) + content[at + len(new or b"0") :])
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            assert path.stat().st_size == stat.st_size
        train(recipe, Runtime(rank=rank, local_rank=rank, world_size=2))

    differs = False
    assert two_hosts(tmp_path / "alike", act) == [None, None]
    differs = True
    told = two_hosts(tmp_path / "differing", act)
    assert told[0] == told[1] and "not the same" in told[0] and "on every host: that of rank 1 on" in told[0]
    assert name == "tokenizer.json" or "model.path=model is not the same model" in told[0]


@pytest.mark.parametrize("split", ["train", "val"])
def test_data_that_are_others_on_one_host_are_refused(tmp_path, split):
    both = write_rows(tmp_path / "both.jsonl")
    paths = {"train": str(both), "val": str(both), split: "rows.jsonl"}
    recipe = tiny_recipe(tmp_path, *(f"data.{name}.path={path}" for name, path in paths.items()))

    def act(rank):
        write_rows(Path("rows.jsonl"), seed=rank)
        train(recipe, Runtime(rank=rank, local_rank=rank, world_size=2))

    told = two_hosts(tmp_path, act)
    assert told[0] == told[1] and f"data.{split} is not the same on every host: that of rank 1 on" in told[0]


def test_a_step_whose_files_lie_on_several_hosts_is_not_published(tmp_path, monkeypatch):
    monkeypatch.setattr("dtrain.checkpoint.dcp.store.SEEN_SECONDS", 0.2)

    def act(rank):
        store = CheckpointStore(Path("checkpoints"))
        Path("checkpoints/.partial-step-3").mkdir(parents=True, exist_ok=rank == 0)
        shard = TensorShard.from_offsets(torch.full((2,), float(rank)), (4,), (2 * rank,))
        store.save(3, {"w": shard}, {"step": 3}, {"rank": rank})

    told = two_hosts(tmp_path, act)
    assert told[0] == told[1] and "all hosts must share run.dir" in told[0]
    assert [path.name for path in (tmp_path / "0" / "checkpoints").iterdir()] == []
