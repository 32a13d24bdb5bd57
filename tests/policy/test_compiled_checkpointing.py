"""Selective checkpointing inside compiled layers: what the backward computes and sends, what is kept, eager's numbers.

Compiled graphs count their products and collectives each time they run: a compiled kernel shows its own to nobody.
"""

from collections import Counter
from functools import partial

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain import models
from dtrain.memory import compilation as compiling
from dtrain.memory.activation_checkpointing import checkpoint_activations
from dtrain.models.common.micro_batch import MicroBatchContext
from dtrain.parallel.fsdp import mixed_precision, shard_model
from dtrain.parallel.mesh import Runtime, StopFlag, build_mesh
from dtrain.parallel.placement import local_tensor
from dtrain.training.trainer import train_checked
from tests.policy.test_compile import (
    COMPILE,
    PAD,
    ROWS,
    SELECTIVE,
    by_aot_eager,
    forget_compiled,
    graphs,
    kept_for_backward,
    model_at,
    sft,
)
from tests.pretend.worlds import run_pretend
from tests.running import metrics
from tests.tiny import write_model
from tests.world import run_world

LAYERS, FORWARD, BACKWARD = 2, 7, 14  # matrix products of a layer
COUNTED = ("mm.default", "all_gather_into_tensor", "reduce_scatter_tensor")


def by_counting():
    """Compile as aot_eager does. Returns the counts of the operations that compiled graphs have run."""
    calls = Counter()

    def counted(graph, inputs):
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        counts = Counter(short for name in names for short in COUNTED if short in name)

        def run(*arguments):
            calls.update(counts)
            return graph(*arguments)

        return make_boxed_func(run)

    backend = aot_autograd(fw_compiler=counted, partition_fn=min_cut_rematerialization_partition)
    torch.compile = partial(COMPILE, backend=backend)
    return calls


def under(kind, path, is_compiled):
    """For each row the products of a layer, forward and backward, and the bytes kept; gradients; the graphs."""
    forget_compiled()
    calls, found = by_counting(), []
    model = models.build(models.read_config(path))
    models.init_weights(model, 0)
    model = model.double()
    if is_compiled:
        compiling.compile_layers(model, is_selective=kind == "selective")
    checkpoint_activations(model, kind, layers=[] if is_compiled and kind == "selective" else None)
    mesh = build_mesh(Runtime())
    shard_model(model, mesh.fsdp, mixed_precision(torch.float64, torch.float64))
    for length, _ in ROWS:
        hooks, held = kept_for_backward(model)
        with hooks:
            hidden = model(7 * torch.arange(length).expand(2, -1) % 60)
        forward = calls["mm.default"] / LAYERS
        (hidden * torch.linspace(-1, 1, hidden.numel(), dtype=torch.float64).view_as(hidden)).sum().backward()
        found.append((forward, calls["mm.default"] / LAYERS - forward, sum(held.values())))
        calls.clear()
    return found, [local_tensor(parameter.grad) for parameter in model.parameters()], graphs()


def kinds_on(rank, path):
    """Whether gradients are the same bits as of compiled layers that keep all, how far they are from eager ones, and
    the rest of `under` by kind."""
    _, eager, _ = under("none", path, False)
    plain, told = None, {}
    for kind in ("none", "selective", "full"):
        found, gradients, count = under(kind, path, True)
        plain = plain or gradients
        off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(gradients, eager, strict=True))
        told[kind] = found, count, all(map(torch.equal, gradients, plain)), off
    return told


@pytest.mark.slow
def test_the_backward_computes_no_product_again_in_two_graphs_for_all_lengths(tmp_path):
    [told] = run_world(kinds_on, 1, model_at(tmp_path), timeout=240.0)
    for kind, (found, count, is_equal, off) in told.items():
        again = FORWARD if kind == "full" else 0
        assert [products[:2] for products in found] == [(FORWARD, BACKWARD + again)] * len(ROWS), kind
        assert count == 2 and is_equal and off < 1e-12, (kind, count, is_equal, off)
    kept = {kind: [held for *_, held in found] for kind, (found, *_) in told.items()}
    for full, selective, none in zip(kept["full"], kept["selective"], kept["none"], strict=True):
        assert full < selective < 0.75 * none


def counts_of_a_run(rank, recipe, size):
    forget_compiled()
    calls = by_counting()
    train_checked(recipe, Runtime(rank=rank, local_rank=rank, world_size=size, stop=StopFlag()))
    return calls, graphs()


@pytest.mark.slow
def test_a_run_over_tp_sends_nothing_again_and_has_the_numbers_of_one_eager_process(tmp_path):
    steps = 3
    same = "train.dtype=float64", SELECTIVE, PAD, f"train.steps={steps}", "train.micro_batch=4"
    eager = sft(tmp_path, *same, name="eager")
    run_world(counts_of_a_run, 1, eager, 1, timeout=240.0)
    recipe = sft(tmp_path, *same, "train.compile=true", "parallel.tp=2", name="compiled")
    for calls, count in run_world(counts_of_a_run, 2, recipe, 2, timeout=240.0):
        assert calls["all_gather_into_tensor"] == calls["reduce_scatter_tensor"] == 4 * LAYERS * steps
        assert calls["mm.default"] == (FORWARD + BACKWARD) * LAYERS * steps and count == 2
    ones, both = (
        torch.tensor([(row["loss"], row["grad_norm"]) for row in metrics(one) if "loss" in row], dtype=torch.float64)
        for one in (eager, recipe)
    )
    assert torch.allclose(both, ones, rtol=1e-9, atol=0)


class Grouped(TorchDispatchMode):
    """Counts grouped products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    @classmethod
    def is_infra_mode(cls):
        return True  # else compiled layers refuse to run

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._grouped_mm.default
        return func(*args, **(kwargs or {}))


def grouped_products_on(rank, path):
    """Grouped products of a backward, and gradients, of layers as written and compiled."""
    counts, gradients = [], []
    for is_compiled in (False, True):
        forget_compiled()
        by_aot_eager()
        model = models.build(models.read_config(path))
        models.init_weights(model, 0)
        model = model.to("cuda", torch.bfloat16)
        if is_compiled:
            compiling.compile_layers(model, is_selective=True)
        else:
            checkpoint_activations(model, "selective")
        for _ in range(2):  # the first compiles
            model.zero_grad()
            hidden = model.model(torch.arange(30, device="cuda")[None], MicroBatchContext())
            with Grouped() as products:
                (hidden.float() * torch.linspace(-1, 1, hidden.numel(), device="cuda").view_as(hidden)).sum().backward()
        counts.append(products.count)
        gradients.append([parameter.grad.float().cpu() for parameter in model.parameters()])
    off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*gradients, strict=True))
    return counts, graphs(), off


@pytest.mark.slow
def test_grouped_products_are_not_computed_again(tmp_path):
    """A mixture has one graph, of what lies before attention."""
    sizes = {"moe_intermediate_size": 16, "hidden_size": 32, "num_hidden_layers": LAYERS, "mlp_only_layers": []}
    path = write_model(tmp_path / "model", "qwen3-moe", **sizes)
    [(counts, count, off)] = run_pretend(grouped_products_on, 1, path, timeout=240.0)
    assert counts == [6 * LAYERS, 6 * LAYERS] and count == 1
    assert off < 2**-5  # of bfloat16
