"""Activations in pinned memory on a card: the same bits, and no wait of the host more than without."""

from dtrain.memory import activation_offload, tiles
from tests.pretend.runs import rows_of, train_on_card
from tests.pretend.worlds import run_pretend
from tests.tiny import tiny_recipe

KEYS = "train.activation_offload=true", "train.tile=all"


def of_small_tensors(rank, recipe, size):
    """`train_on_card`, where tiny storages move and tiny rows are of several tiles; and what moved."""
    activation_offload.MIN_OFFLOAD_BYTES, tiles.TILE_TOKENS = 256, 40
    moved = []
    send = activation_offload.HostMemory.send

    class Counted(activation_offload.PinnedMemory):
        def send(self, flat):
            buffer = send(self, flat)
            moved.append(flat.is_cuda and buffer.is_pinned())
            return buffer

    activation_offload.PinnedMemory = Counted
    return train_on_card(rank, recipe, size), moved


def test_a_run_with_activations_on_the_host_is_the_one_without(tmp_path):
    """Under FSDP, tensor and context parallel; float64 to the bit, in tiles to 1e-12."""
    for number, (size, mesh, kind) in enumerate([(1, (), "none"), (2, ("parallel.cp=2",), "full")]):
        shape = *mesh, f"train.activation_checkpointing={kind}", "train.steps=2", "train.dtype=float64"
        rows, waits = {}, {}
        for name, keys in {"plain": (), "offload": KEYS[:1], "both": KEYS}.items():
            recipe = tiny_recipe(tmp_path, *shape, *keys, family="qwen3", name=f"{name}-{number}")
            felt, moved = run_pretend(of_small_tensors, size, recipe, size)[0]
            assert all(moved) and bool(moved) == bool(keys)
            rows[name] = [(row["loss"], row["grad_norm"]) for row in rows_of(recipe)]
            waits[name] = felt.count("sync") + felt.count("pageable")
        assert rows["offload"] == rows["plain"]
        for row, other in zip(rows["both"], rows["plain"], strict=True):
            assert all(abs(one - right) <= 1e-12 * right for one, right in zip(row, other, strict=True))
        assert waits["offload"] == waits["both"] == waits["plain"]
