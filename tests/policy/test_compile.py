"""Compiled layers: few graphs for rows of all lengths, without a break, and eager's numbers. By aot_eager, which traces
as inductor does and compiles nothing."""

import pytest
import torch
from torch._dynamo.utils import counters

from dtrain import models
from dtrain.attention.packing import Packing
from dtrain.attention.varlen import VarlenKernel
from dtrain.parallel.runtime import Runtime, StopFlag
from dtrain.trainer import train
from tests.pretend.worlds import run_pretend
from tests.test_trainer import metrics
from tests.tiny import tiny_recipe, write_model
from tests.world import run_world

pytestmark = pytest.mark.turns(4)

ROWS = [(48, 48), (48, 48), (48, 16), (31, 9), (20, 7), (64, 13), (40, 40)]  # lengths of rows and of their documents
COMPILE = torch.nn.Module.compile


def by_aot_eager(module, **options):
    COMPILE(module, backend="aot_eager", **options)


def graphs():
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def lengths_on(rank, path, device, is_packed):
    """Hidden states and gradients of compiled layers and of eager ones, and the graphs after each row. The first length
    is the hidden size too."""
    made = []
    for is_compiled in (False, True):
        model = models.build(models.read_config(path))
        models.init_weights(model, 0)
        model = model.to(device, torch.bfloat16 if is_packed else torch.float32)
        if is_packed:
            model.use_kernel(VarlenKernel())
        if is_compiled:
            for layer in model.model.layers:
                by_aot_eager(layer)
        found, counts = [], []
        for length, document in ROWS:
            at = torch.arange(length)[None].expand(2, -1)
            ids = (7 * at % 60).to(device)
            rows = (at % document, at // document)
            packed = [*(one.to(device) for one in rows), None, Packing.of(*rows)] if is_packed else []
            hidden = model.model(ids, *packed)
            hidden.float().square().sum().backward()
            found += [hidden.detach().float().cpu(), model.model.layers[0].mlp.up_proj.weight.grad.float().cpu()]
            counts.append(graphs())
        made.append(found)
    return counts, max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*made, strict=True))


def model_at(root):
    return write_model(root / "model", "llama", hidden_size=48, intermediate_size=56, head_dim=8)


def test_rows_of_all_lengths_take_one_graph(tmp_path):
    [(counts, off)] = run_world(lengths_on, 1, model_at(tmp_path), "cpu", False)
    assert counts == [(1, 0)] * len(ROWS)
    assert off < 1e-5


def test_packed_rows_on_a_card_take_a_graph_more_for_each_number_that_varies(tmp_path):
    """The longest document and the row's length are numbers, which become variables where they first differ."""
    [(counts, off)] = run_pretend(lengths_on, 1, model_at(tmp_path), "cuda", True)
    assert counts == [(1, 0)] * 2 + [(2, 0)] + [(3, 0)] * (len(ROWS) - 3)
    assert off < 2**-6  # of bfloat16


class Counting(StopFlag):
    """Told before each micro-batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def tick(self, *_):
        super().tick()
        self.seen.append(graphs())


def on_rank(rank, recipe, size):
    torch.nn.Module.compile, stop = by_aot_eager, Counting()
    train(recipe, Runtime(rank=rank, local_rank=rank, world_size=size, stop=stop))
    return stop.seen


def test_a_run_compiles_nothing_after_its_third_step(tmp_path):
    """Under FSDP, with activation checkpointing around what is compiled."""
    keys = ("parallel.dp_shard=2", "train.activation_checkpointing=full", "data.packing=false", "train.steps=5")
    rows = []
    for is_compiled in ("false", "true"):
        name = f"compiled-{is_compiled}"
        recipe = tiny_recipe(tmp_path, *keys, f"train.compile={is_compiled}", family="llama", name=name)
        for seen in run_world(on_rank, 2, recipe, 2, timeout=180.0):
            assert {broken for _, broken in seen} == {0} and len(set(seen[len(seen) * 3 // 5 :])) == 1, seen
        rows.append([(row["loss"], row["grad_norm"]) for row in metrics(recipe) if "loss" in row])
    assert torch.allclose(*map(torch.tensor, rows), rtol=1e-6, atol=0)
