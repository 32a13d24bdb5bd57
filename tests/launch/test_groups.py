"""Process groups: how long ranks wait, what a run leaves in its process, and what is started beside it."""

import os
import signal
import time
import types
from datetime import timedelta

import torch
import torch.distributed as dist

from dtrain import recipe as config
from dtrain.commands.plan.processes import Child
from dtrain.data.rows.pool import Pool
from dtrain.launch import launch
from dtrain.launch.devices import start_device
from dtrain.launch.rank_info import RankInfo
from dtrain.parallel import mesh
from dtrain.parallel.mesh import Runtime, build_mesh, init_process_group, new_host_group
from dtrain.rl.rewards import Rewards
from tests.running import metrics, on_rank
from tests.tiny import tiny_recipe
from tests.world import run_world

SHAPE = {"dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp": 2}


def groups_of(number, wait):
    """Every group that a run has: the world's, the mesh's, and that of saves in the background."""
    built = build_mesh(Runtime(rank=number, world_size=4, collective_timeout=wait), **SHAPE)
    flat = [part.get_group() for part in (built.dp, built.dp_cp)]
    assert built.fsdp.ndim == 2, "HSDP: a flattened part and dp_replicate"
    of_fsdp = [built.fsdp.get_group(name) for name in built.fsdp.mesh_dim_names]
    return [dist.group.WORLD, *built.device_mesh.get_all_groups(), *flat, *of_fsdp, new_host_group(wait)]


def timeouts(number, wait):
    dist.barrier()
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    init_process_group("cpu", store, number, 4, wait)
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups_of(number, wait)}


def test_every_group_of_a_run_has_its_timeout():
    assert run_world(timeouts, 4, 7.0)[3] == {timedelta(seconds=7)}
    assert run_world(timeouts, 4, None)[0] == {timedelta(days=1)}


def waits(number, wait, late):
    """Rank 1 comes late, to a collective of tensors and to one of objects."""
    group = dist.group.WORLD
    mesh.set_timeouts(group, wait)
    dist.barrier()
    began = time.monotonic()
    for meet in (lambda: dist.all_reduce(torch.ones(1)), lambda: dist.all_gather_object([None] * 2, number)):
        if number == 1:
            time.sleep(late)
        try:
            meet()
        except RuntimeError as error:
            return f"{time.monotonic() - began:.1f} {error}"
    return None


def test_a_wait_ends_after_the_given_seconds_and_a_shorter_one_does_not():
    assert run_world(waits, 2, 3.0, 1.0) == [None, None]
    told = run_world(waits, 2, 1.0, 2.5)[0]
    assert "Timed out waiting 1000ms" in told or "imeout" in told
    assert 0.9 < float(told.split()[0]) < 2.0


def visible():
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_what_runs_beside_a_run_sees_no_device(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import os\ndef devices(completions):\n    return [float(os.environ['CUDA_VISIBLE_DEVICES'] == '')] * 2\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    with Rewards([config.schema.Reward(fn="mine.devices")]) as rewards:
        assert rewards.score(["1", "2"], ["1", "2"], [[1], [2]], {}).total == [1.0, 1.0]
    with Pool(Encoder(), 1) as pool:
        assert list(pool.encode([("chunk", "job")])) == [""]
    with Child(visible) as child:  # a plan, beside a run or not
        assert child.result() == ""
    assert visible() == "3,4"


class Encoder:
    """Stands in for the pool's; says what its process sees."""

    def encode_chunk(self, *_):
        return visible()


def losses(recipe):
    return [(row["loss"], row["grad_norm"]) for row in metrics(recipe) if "loss" in row]


def test_a_second_run_in_a_process_is_as_the_first_one(tmp_path):
    """In place, from one process: nothing of a run stays behind it, and what a process keeps changes no number."""
    names = ("first", "other", "again")
    families = ("llama", "gemma3", "llama")
    recipes = [tiny_recipe(tmp_path, "train.steps=3", family=f, name=n) for f, n in zip(families, names, strict=True)]
    apart = tiny_recipe(tmp_path, "train.steps=3", family="gemma3", name="apart")
    run_world(on_rank, 1, apart, 1)
    before = dict(os.environ), signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    for recipe in recipes:
        launch(recipe)
        assert not dist.is_initialized()
    torch.set_num_threads(before[2])
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before[:2]
    assert losses(recipes[0]) == losses(recipes[2])
    assert losses(recipes[1]) == losses(apart)


def cuda_begins(monkeypatch, **environ):
    """Return the calls of torch, in order, of a rank that begins on CUDA."""
    asked = []
    found = types.SimpleNamespace(name="H100", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    monkeypatch.setattr(torch.cuda, "init", lambda: asked.append("init"))
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (found.total_memory, found.total_memory))
    start_device(torch.device("cuda", 0), RankInfo(environ=environ))
    return asked


def test_the_allocator_grows_its_segments_unless_the_user_has_set_it(monkeypatch):
    expandable, device = "expandable_segments:True", torch.device("cuda", 0)
    with monkeypatch.context() as patch:
        assert cuda_begins(patch) == [expandable, "init", device]
    torch._C._accelerator_setAllocatorSettings(expandable)  # torch takes it
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert cuda_begins(monkeypatch, **{name: "max_split_size_mb:512"}) == ["init", device]
