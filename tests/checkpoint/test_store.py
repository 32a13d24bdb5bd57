"""Saves are whole or absent, load on any mesh, and damage is named."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dtrain.base.errors import UserError
from dtrain.base.files import checksum
from dtrain.checkpoint.dcp.retention import Retention
from dtrain.checkpoint.dcp.store import CheckpointStore, locate_step
from dtrain.checkpoint.dcp.training_state import model_tensors
from tests.checkpoint.tiny import on_mesh, seeded, whole
from tests.world import run_world


def tensors():
    return {
        "a": torch.arange(12.0).reshape(4, 3),
        "step": torch.tensor(7.0),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "double": torch.tensor([0.1], dtype=torch.float64),
        "counts": torch.arange(3),
        "empty": torch.zeros(0, 3),
    }


def test_roundtrip_on_one_process(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.steps() == [] and store.latest() is None
    state = {"step": 3, "cursor": {"epoch": 1, "row": 5}, "lr": 0.1, "word": "é"}
    store.save(3, tensors(), state, {"mine": 1})
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    assert store.load(3, into) == state
    for name, tensor in tensors().items():
        assert torch.equal(into[name], tensor) and into[name].dtype == tensor.dtype
    assert store.read_rank_state(3) == ({"mine": 1}, 0)
    assert store.latest() == 3
    names = {path.name for path in store.path(3).iterdir()}
    assert names == {"__0_0.distcp", "tensors.json", "state.json", "rank-0.json", "manifest.json"}


def test_parameters_are_filled_in_place(tmp_path):
    store, model = CheckpointStore(tmp_path), seeded(0)
    store.save(1, model_tensors(model), {})
    other = seeded(1)
    parameter = other.lm_head.weight
    store.load(1, model_tensors(other))
    assert other.lm_head.weight is parameter and parameter.requires_grad
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)


def test_a_published_step_is_never_written_again(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, tensors(), {"first": True})
    with pytest.raises(UserError, match="never overwritten"):
        store.save(1, tensors(), {"first": False})
    assert store.read_state(1) == {"first": True}


def test_what_does_not_fit_is_listed_at_once_and_nothing_is_written(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, {"a": torch.ones(2, 3), "b": torch.ones(2), "gone": torch.ones(1), "d": torch.ones(2)}, {})
    into = {"a": torch.zeros(2, 3), "b": torch.zeros(3), "new": torch.zeros(1), "d": torch.zeros(2).double()}
    with pytest.raises(UserError) as caught:
        store.load(1, into)
    message = str(caught.value)
    for part in (
        "missing in the checkpoint: new",
        "only in the checkpoint: gone",
        "b: saved as [2], the run has [3]",
        "d: saved in torch.float32, the run has torch.float64",
    ):
        assert part in message
    assert not any(tensor.any() for tensor in into.values())
    a = torch.zeros(2, 3)
    store.load(1, {"a": a}, allow_extra=True)
    assert a.all()


@pytest.mark.parametrize("name", ["__0_0.distcp", "tensors.json", "state.json", "rank-0.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_damage_is_an_error_that_names_the_file(tmp_path, name, harm):
    store = CheckpointStore(tmp_path)
    store.save(1, tensors(), {"key": "value"}, {"key": "value"})
    path = store.path(1) / name
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[len(data) // 2] ^= 4
    path.write_bytes(data[: len(data) // 2] if harm == "cut" else data)
    if harm == "remove":
        path.unlink()
    with pytest.raises(UserError, match=name):
        store.load(1, {key: torch.zeros_like(value) for key, value in tensors().items()})
    if harm != "flip":
        assert store.steps() == [] and name in store.check_files(1)[0]


def test_leftovers_of_killed_saves_are_not_steps_and_go(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, tensors(), {})
    for name in (".partial-step-2", ".discarded-step-0"):
        shutil.copytree(store.path(1), tmp_path / name)
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-9").mkdir()
    assert store.steps() == [1] and store.latest() == 1
    store.save(2, tensors(), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-1", "step-2", "step-9"]


def test_prune_keeps_the_newest(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (5, 10, 100):
        store.save(step, tensors(), {})
    store.prune(Retention(None))
    assert store.steps() == [5, 10, 100]
    store.prune(Retention(2))
    assert store.steps() == [10, 100]


def test_a_full_disk_is_said_and_leaves_what_was_saved(tmp_path):
    # RLIMIT_FSIZE stands in for the full disk: the write fails inside torch.save, which hides the reason.
    code = textwrap.dedent(f"""
        import resource, signal, torch
        from dtrain.checkpoint.dcp.store import CheckpointStore
        from dtrain.base.errors import UserError
        store = CheckpointStore({str(tmp_path)!r})
        store.save(1, {{"a": torch.ones(1000)}}, {{}})
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            store.save(2, {{"a": torch.ones(100_000)}}, {{}})
        except UserError as error:
            print(error)
    """)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "File too large" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def forged(store, table):
    """Put `table` in place of a step's own, with a manifest that agrees."""
    path = store.path(1) / "tensors.json"
    path.write_text(json.dumps(table))
    from dtrain.checkpoint.dcp.store import _text_checksum

    manifest = json.loads((store.path(1) / "manifest.json").read_text())
    manifest["content"]["files"]["tensors.json"] = checksum(path)
    for data in store.path(1).glob("*.distcp"):
        manifest["content"]["files"][data.name] = checksum(data)
    manifest["crc32"] = _text_checksum(manifest["content"])
    (store.path(1) / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"file": "../elsewhere"}, "outside the checkpoint"),
        ({"offsets": [3, 0]}, "leaves"),
        ({"sizes": [2, 3]}, "do not cover"),
        ({"sizes": [-4, -3]}, "no sizes"),
        ({"length": 3}, "cannot hold"),
        ({"file": "__7_0.distcp"}, "does not list"),
    ],
)
def test_a_table_that_no_save_wrote_is_refused(tmp_path, change, said):
    store = CheckpointStore(tmp_path)
    store.save(1, {"a": torch.ones(4, 3)}, {})
    table = json.loads((store.path(1) / "tensors.json").read_text())
    table["tensors"]["a"]["chunks"][0].update(change)
    forged(store, table)
    with pytest.raises(UserError, match=said):
        store.load(1, {"a": torch.zeros(4, 3)})


@pytest.mark.parametrize("offsets", [[1, 0], [0, 0]])
def test_a_table_with_overlapping_chunks_is_refused(tmp_path, offsets):
    """Two chunks of 2 rows have the volume of 4 rows, but the last rows of the tensor are in neither of them."""
    store = CheckpointStore(tmp_path)
    store.save(1, {"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, {})
    table = json.loads((store.path(1) / "tensors.json").read_text())
    second_chunk = table["tensors"].pop("b")["chunks"][0] | {"offsets": offsets}
    table["tensors"]["a"]["size"] = [4, 3]
    table["tensors"]["a"]["chunks"].append(second_chunk)
    forged(store, table)
    with pytest.raises(UserError, match="overlap|two chunks at"):
        store.load(1, {"a": torch.zeros(4, 3)})


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("save", ["torch", "pickle"])
def test_loading_runs_no_code_of_the_files(tmp_path, save):
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(1, {"a": torch.ones(4, 3)}, {})
    data = store.path(1) / "__0_0.distcp"
    if save == "torch":
        torch.save(Bomb(str(tmp_path / "harm")), data)
    else:
        data.write_bytes(pickle.dumps(Bomb(str(tmp_path / "harm"))))
    table = json.loads((store.path(1) / "tensors.json").read_text())
    table["tensors"]["a"]["chunks"][0]["length"] = data.stat().st_size
    forged(store, table)
    (store.path(1) / ".metadata").write_bytes(pickle.dumps(Bomb(str(tmp_path / "harm"))))
    with pytest.raises(UserError, match="could not be read|cannot hold"):
        store.load(1, {"a": torch.zeros(4, 3)})
    assert not (tmp_path / "harm").exists()


def test_locate_takes_a_run_its_checkpoints_or_a_step(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (2, 10):
        store.save(step, tensors(), {})
    for path, step in ((tmp_path, 10), (tmp_path / "checkpoints", 10), (tmp_path / "checkpoints" / "step-2", 2)):
        found, number = locate_step(path)
        assert found.directory == store.directory and number == step
    with pytest.raises(UserError, match="step-3 is not a complete checkpoint"):
        locate_step(tmp_path / "checkpoints" / "step-3")
    with pytest.raises(UserError, match="no complete checkpoint"):
        locate_step(tmp_path / "nowhere")


def save_on(rank, directory, sizes, tied):
    model = on_mesh(seeded(0, tied=tied), **sizes)
    CheckpointStore(directory).save(4, model_tensors(model), {"saved": "on"}, {"rank": rank})


def load_on(rank, directory, sizes, tied):
    model = on_mesh(seeded(1, tied=tied), **sizes)
    store = CheckpointStore(directory)
    assert store.latest() == 4
    assert store.load(4, model_tensors(model)) == {"saved": "on"}
    full = {name: whole(tensor) for name, tensor in model_tensors(model).items()}
    reference = model_tensors(seeded(0, tied=tied))
    assert full.keys() == reference.keys()
    return all(torch.equal(full[name], reference[name]) for name in full), store.read_rank_state(4)


def sizes_of(mesh):
    return dict(zip(("replicate", "shard", "tp"), mesh, strict=True))


MOVES = [
    ((1, 3, 1), (1, 1, 1)), ((1, 3, 2), (2, 2, 1)), ((2, 2, 1), (1, 2, 3)),
    ((2, 1, 2), (1, 3, 1)), ((1, 1, 1), (1, 1, 4)),
]  # fmt: skip


@pytest.mark.parametrize("saved, loaded", MOVES)
def test_saved_on_one_mesh_loaded_on_another(tmp_path, saved, loaded):
    tied = saved == (1, 3, 2)
    run_world(save_on, saved[0] * saved[1] * saved[2], tmp_path, sizes_of(saved), tied)
    results = run_world(load_on, loaded[0] * loaded[1] * loaded[2], tmp_path, sizes_of(loaded), tied)
    assert all(equal for equal, _ in results)
    world = saved[0] * saved[1] * saved[2]
    for rank, (_, kept) in enumerate(results):
        assert kept == ({"rank": rank % world}, rank // world)


def test_replicas_are_written_once(tmp_path):
    run_world(save_on, 4, tmp_path, sizes_of((2, 2, 1)), False)
    table = json.loads((tmp_path / "step-4" / "tensors.json").read_text())
    for entry in table["tensors"].values():
        assert len(entry["chunks"]) == 2
    files = {chunk["file"] for entry in table["tensors"].values() for chunk in entry["chunks"]}
    assert len(files) == 4, "the replicas share the writing"


def fail_on_one_rank(rank, directory):
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    store = CheckpointStore(directory)
    store.save(1, {"a": tensor}, {})
    if rank == 0:
        path = store.path(1) / "__1_0.distcp"
        path.write_bytes(path.read_bytes()[:-1])
    torch.distributed.barrier()
    try:
        store.load(1, {"a": tensor})
    except UserError as error:
        return str(error)


def test_an_error_on_one_rank_is_raised_on_all(tmp_path):
    messages = run_world(fail_on_one_rank, 2, tmp_path)
    assert messages[0] == messages[1] and "__1_0.distcp: damaged" in messages[0]
