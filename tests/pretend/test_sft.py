"""SFT on pretend cards against the same run on the CPU: equal in float64 on every mesh, near float32 in half."""

import pytest
import torch

from dtrain.parallel.mesh import Runtime
from dtrain.training.trainer import train
from tests.pretend.runs import rows_of, train_on_card
from tests.pretend.worlds import run_pretend
from tests.tiny import tiny_recipe, write_model

EXACT = 1e-12  # relative, of loss and norm: the same sums in another order
ROUNDING = {"bfloat16": 0.02, "float16": 0.003}  # of a loss, after three steps; norms five times as much
STEPS = "train.steps=3"
MESHES = {
    "one": (1, ()),
    "fsdp": (2, ()),
    "tp": (2, ("parallel.tp=2",)),
    "cp": (2, ("parallel.cp=2",)),
    "ring": (2, ("parallel.cp=2", "parallel.cp_rotate=ring")),
    "hsdp": (4, ("parallel.dp_replicate=2", "parallel.dp_shard=1", "parallel.tp=2")),
}


def on_cpu(recipe):
    train(recipe, Runtime())
    return rows_of(recipe)


def on_card(recipe, size=1, **options):
    """The rows of metrics, and what rank 0's card felt."""
    felt = run_pretend(train_on_card, size, recipe, size, **options)
    return rows_of(recipe), felt[0]


def all_tokens(row):
    """The tokens of a step's sequences. How many of a prompt are shared depends on the mesh."""
    return row["tokens"] + row.get("shared_tokens", 0)


def assert_close(rows, expected, rtol, of_norm=None):
    assert len(rows) == len(expected) > 0
    for row, other in zip(rows, expected, strict=True):
        assert all_tokens(row) == all_tokens(other)
        for name, bound in (("loss", rtol), ("grad_norm", of_norm or rtol)):
            assert abs(row[name] - other[name]) <= bound * abs(other[name]), (name, row["step"], row[name], other[name])


@pytest.mark.parametrize("packing", ["true", "false"])
def test_float64_is_the_cpus_on_every_mesh(tmp_path, packing):
    shape = STEPS, f"data.packing={packing}"
    expected = on_cpu(tiny_recipe(tmp_path, *shape, family="gemma3", name="cpu"))
    for mesh in ("fsdp", "tp", "cp") if packing == "true" else ("one", "ring", "hsdp"):
        size, keys = MESHES[mesh]
        rows, felt = on_card(tiny_recipe(tmp_path, *shape, *keys, family="gemma3", name=mesh), size)
        assert_close(rows, expected, EXACT)
        assert felt.count("nccl") > 0 or size == 1


def test_weights_and_states_on_the_host_give_the_same(tmp_path):
    expected = on_cpu(tiny_recipe(tmp_path, STEPS, name="cpu"))
    keys = ("parallel.cpu_offload=true", "train.activation_checkpointing=full")
    rows, _ = on_card(tiny_recipe(tmp_path, STEPS, *keys, name="card"), 2)
    assert_close(rows, expected, EXACT)


@pytest.mark.parametrize(
    ("family", "packing", "meshes"),
    [("gemma3", "true", ("one", "tp")), ("gemma3", "false", ("cp", "ring")), ("qwen3", "true", ("tp", "ring"))],
)
def test_half_precision_is_near_float32(tmp_path, family, packing, meshes):
    """Packed, padded and windowed rows; by the variable-length kernel where rows hold several documents."""
    shape = STEPS, f"data.packing={packing}", "model.attention=auto"
    expected = on_cpu(tiny_recipe(tmp_path, *shape, "train.dtype=float32", family=family, name="cpu"))
    for mesh in meshes:
        size, keys = MESHES[mesh]
        recipe = tiny_recipe(tmp_path, *shape, *keys, "train.dtype=bfloat16", family=family, name=mesh)
        rows, felt = on_card(recipe, size)
        assert_close(rows, expected, ROUNDING["bfloat16"], 5 * ROUNDING["bfloat16"])
        assert felt.count("kernel", within="varlen flash") or packing == "false" or mesh not in ("one", "tp")


def test_sinks_in_half_precision_are_near_float32(tmp_path):
    """By the variable-length kernel, its proof told of them, whole and in a ring."""
    write_model(tmp_path / "gpt-oss-tied", "gpt-oss", intermediate_size=16)  # rows of 16 bytes, halved by tp
    expected = on_cpu(tiny_recipe(tmp_path, STEPS, "train.dtype=float32", family="gpt-oss", name="cpu"))
    for mesh in ("tp", "ring"):
        size, keys = MESHES[mesh]
        recipe = tiny_recipe(tmp_path, STEPS, *keys, "train.dtype=bfloat16", family="gpt-oss", name=mesh)
        rows, felt = on_card(recipe, size)
        assert_close(rows, expected, ROUNDING["bfloat16"], 5 * ROUNDING["bfloat16"])
        assert felt.count("kernel", within="varlen flash")


def test_float16_scales_its_loss_until_the_norm_is_finite(tmp_path):
    shape = "train.steps=8", "train.dtype=float16", "scheduler.warmup_steps=0"
    rows, _ = on_card(tiny_recipe(tmp_path, *shape, name="card"))
    finite = [row for row in rows if row["grad_norm"] == row["grad_norm"]]
    assert len(finite) >= 4 and finite[-1]["loss"] < rows[0]["loss"]
    [first] = on_cpu(
        tiny_recipe(tmp_path, "train.steps=1", "scheduler.warmup_steps=0", "train.dtype=float32", name="cpu")
    )
    assert abs(rows[0]["loss"] - first["loss"]) <= ROUNDING["float16"] * first["loss"]


def test_torch_is_left_alone_in_this_process():
    assert not torch.cuda.is_available() and torch.cuda.device_count.__module__.startswith("torch")
