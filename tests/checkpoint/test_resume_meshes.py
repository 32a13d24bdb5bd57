"""A run saved on one mesh goes on on another: the same rows in the same order, the numbers of one process."""

import itertools
import random

import pytest

from tests.running import assert_same, interrupt, metrics, run, weights
from tests.tiny import tiny_recipe

# dp_replicate, dp_shard, cp, tp
MESHES = [
    (1, 1, 1, 1), (1, 4, 1, 1), (1, 3, 1, 1), (1, 1, 1, 2), (1, 2, 2, 1),
    (2, 2, 1, 1), (1, 2, 1, 2), (1, 1, 2, 2), (2, 1, 1, 2), (1, 1, 4, 1), (1, 1, 1, 4),
]  # fmt: skip
NAMED = [((1, 1, 1, 2), (1, 2, 2, 1)), ((1, 3, 1, 1), (1, 2, 1, 2)), ((2, 2, 1, 1), (1, 1, 2, 2))]
SHAPE = ("train.global_batch=12", "train.micro_batch=1", "checkpoint.every=3", "train.steps=6")


def mesh_keys(mesh):
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    return [f"parallel.{name}={size}" for name, size in zip(names, mesh, strict=True)]


def world(mesh):
    size = 1
    for n in mesh:
        size *= n
    return size


@pytest.fixture(scope="module", params=[True, False], ids=["packed", "padded"])
def whole(request, tmp_path_factory):
    """The root of a run of one process in one piece, packed and padded."""
    root = tmp_path_factory.mktemp("meshes")
    shape = (*SHAPE, f"data.packing={str(request.param).lower()}")
    return root, shape, run(tiny_recipe(root, *shape, name="whole"))


def changes_mesh(whole, before, after):
    root, shape, reference = whole
    name = f"{before}-{after}".replace(" ", "")
    with pytest.raises(Exception, match="stopped after step"):
        interrupt(tiny_recipe(root, *shape, *mesh_keys(before), name=name), world(before), 3)
    resumed = tiny_recipe(root, *shape, *mesh_keys(after), name=name)
    assert len(metrics(resumed)) == 3
    run(resumed, world(after))
    assert_same(resumed, reference, rtol=1e-9)
    expected = weights(reference, 6)
    for key, value in weights(resumed, 6).items():
        scale = expected[key].abs().max()
        assert (value - expected[key]).abs().max() <= 1e-9 * max(scale, 1e-30), key


@pytest.mark.parametrize(("before", "after"), NAMED)
def test_a_run_goes_on_on_another_mesh(whole, before, after):
    changes_mesh(whole, before, after)


PAIRS = [pair for pair in itertools.permutations(MESHES, 2) if pair not in NAMED]


@pytest.mark.parametrize(("before", "after"), random.Random(0).sample(PAIRS, 40))
def test_a_run_goes_on_on_any_other_mesh(whole, before, after):
    changes_mesh(whole, before, after)
