"""SFT on the pretend card against the same run on the CPU: equal in float64 on every mesh, near float32 in half."""

import pytest

from dtrain.parallel.runtime import Runtime
from dtrain.trainer import train
from tests.pretend.runs import rows_of, train_on_card
from tests.pretend.worlds import run_pretend
from tests.tiny import tiny_recipe

EXACT = 1e-12  # relative: the same sums in another order


def on_cpu(recipe):
    train(recipe, Runtime())
    return rows_of(recipe)


def on_card(recipe, size=1, **options):
    felt = run_pretend(train_on_card, size, recipe, size, **options)
    return rows_of(recipe), felt


def assert_close(rows, expected, rtol):
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        assert row["tokens"] == other["tokens"]
        for name in ("loss", "grad_norm"):
            assert abs(row[name] - other[name]) <= rtol * abs(other[name]), (name, row["step"], row[name], other[name])


MESHES = {
    "one": (1, ()),
    "fsdp": (2, ()),
    "tp": (2, ("parallel.tp=2",)),
    "cp": (2, ("parallel.cp=2",)),
    "ring": (2, ("parallel.cp=2", "parallel.cp_rotate=ring")),
    "hsdp": (4, ("parallel.dp_replicate=2", "parallel.dp_shard=1", "parallel.tp=2")),
}
STEPS = "train.steps=3"


@pytest.mark.parametrize("mesh", MESHES)
def test_float64_is_the_cpus_on_every_mesh(tmp_path, mesh):
    size, keys = MESHES[mesh]
    expected = on_cpu(tiny_recipe(tmp_path, STEPS, family="gemma3", name="cpu"))
    rows, felt = on_card(tiny_recipe(tmp_path, STEPS, *keys, family="gemma3", name="card"), size)
    assert_close(rows, expected, EXACT)
