"""Bytes of a compiled region, counted by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dtrain.commands.plan.compiled import CompiledRegions
from dtrain.commands.plan.hardware import GPUS
from dtrain.commands.plan.plan import make_plan
from dtrain.commands.plan.tracer import Cost, Tracer
from tests.tiny import tiny_recipe

T, D, F = 64, 32, 48
WIDTH = 2  # bytes of a bfloat16


def moved(regions):
    """Bytes that elementwise operations move in `gated`, forward, and backward."""

    def gated(x, weight):
        scaled = x * 2  # [T, D]
        inner = scaled @ weight  # [T, F]
        return inner.sigmoid() * 3

    one = SimpleNamespace(size=lambda: 1)
    tracer = Tracer(SimpleNamespace(tp=one, ep=None, fsdp=SimpleNamespace(ndim=1)), on_host=False)
    tracer.regions = regions
    x, weight = (
        torch.empty(size, dtype=torch.bfloat16, device="meta", requires_grad=True) for size in ((T, D), (D, F))
    )
    grad = torch.empty(T, F, dtype=torch.bfloat16, device="meta")
    counts = []
    with tracer:
        out = (gated if regions is None else regions.region(gated))(x, weight)
        out.detach().mul_(2)  # outside: it reads and writes what the region has written
        counts.append(tracer.counts[Cost(None, "moved")])
        out.backward(grad)
        counts.append(tracer.counts[Cost(None, "moved")] - counts[0])
    return [count / WIDTH / T for count in counts]


def test_a_region_s_tensors_are_counted_where_they_enter_and_leave_a_chain():
    # As written: x and scaled; inner and its sigmoid; that and the output; the output outside. Backward: the output's
    # gradient and the sigmoid's; that, the sigmoid and inner's gradient; scaled's gradient and that of x.
    assert moved(None) == [2 * D + 2 * F + 2 * F + F, 2 * F + 3 * F + 2 * D]
    # Fused: x, scaled for the product; inner, the output for others, and these. Backward: the output's gradient; the
    # sigmoid, saved and read again; inner's gradient for two products; scaled's gradient, which comes of one.
    assert moved(CompiledRegions()) == [2 * D + 2 * F + F, F + 2 * F + F + D]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_layers_move_fewer_bytes_and_all_else_is_as_it_was(tmp_path, checkpointing):
    words = ["data.max_length=64", f"train.activation_checkpointing={checkpointing}", "train.dtype=bfloat16"]
    eager, compiled, dropped = (
        make_plan(tiny_recipe(tmp_path, *words, *more), 1, GPUS["h100"]).step
        for more in ([], ["train.compile=true"], ["train.compile=true", "lora={rank: 2, dropout: 0.1}"])
    )
    assert 0.3 * eager.bytes_moved < compiled.bytes_moved < 0.8 * eager.bytes_moved
    assert replace(compiled, bytes_moved=eager.bytes_moved) == eager
    uncompiled = tiny_recipe(tmp_path, *words, "lora={rank: 2, dropout: 0.1}")
    assert dropped == make_plan(uncompiled, 1, GPUS["h100"]).step  # layers with dropout are not compiled


def test_sources_end_with_their_region_and_those_of_the_outer_one_go_on():
    regions, seen = CompiledRegions(), []

    def fails(tensor):
        seen.append(regions.sources)
        raise ValueError

    inner = regions.region(fails, is_selective=True)

    def outer(tensor):
        seen.append(regions.sources)
        with pytest.raises(ValueError):
            inner(tensor)
        assert regions.sources is seen[0]

    regions.region(outer, is_selective=True)(torch.zeros(1))
    assert regions.sources is None and None not in seen and len({*seen}) == 2
