"""A run that goes on on another mesh at every step: the same rows in the same order, the numbers of one process."""

from itertools import pairwise

import pytest

from tests.running import assert_same, interrupt, metrics, run, weights
from tests.tiny import tiny_recipe

# dp_replicate, dp_shard, cp, tp: of a step each. Every mesh is saved on and resumed on.
PACKED = [(1, 3, 1, 1), (1, 2, 1, 2), (2, 2, 1, 1), (1, 1, 4, 1)]
PADDED = [(1, 1, 1, 1), (1, 2, 2, 1), (1, 1, 2, 2), (1, 3, 1, 1)]
SHAPE = ("train.global_batch=12", "checkpoint.every=1", "train.steps=4", "scheduler.warmup_steps=0")


def mesh_keys(mesh):
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    sizes = [f"parallel.{name}={size}" for name, size in zip(names, mesh, strict=True)]
    return [*sizes, f"train.micro_batch={6 // (mesh[0] * mesh[1])}"]  # two or three of them a step


def ranks_of(mesh):
    size = 1
    for n in mesh:
        size *= n
    return size


@pytest.mark.parametrize(("packing", "meshes"), [("true", PACKED), ("false", PADDED)], ids=["packed", "padded"])
def test_a_run_goes_on_on_another_mesh_at_every_step(tmp_path, packing, meshes):
    assert all(before != after for before, after in pairwise(meshes))
    shape = (*SHAPE, f"data.packing={packing}")
    reference = run(tiny_recipe(tmp_path, *shape, "train.micro_batch=12", name="whole"))
    for step, mesh in enumerate(meshes, 1):
        recipe = tiny_recipe(tmp_path, *shape, *mesh_keys(mesh), name="moving")
        if step < len(meshes):
            with pytest.raises(Exception, match="stopped after step"):
                interrupt(recipe, ranks_of(mesh), step)
        else:
            run(recipe, ranks_of(mesh))
        assert len(metrics(recipe)) == step
    assert_same(recipe, reference, rtol=1e-9)
    expected = weights(reference, 4)
    for key, value in weights(recipe, 4).items():
        scale = expected[key].abs().max()
        assert (value - expected[key]).abs().max() <= 1e-9 * max(scale, 1e-30), key
