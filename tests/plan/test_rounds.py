"""Loops of which a plan follows three rounds cost in it what all their rounds cost."""

from types import SimpleNamespace

import pytest
import torch

from dtrain.adapters.nf4 import dequantize
from dtrain.commands.plan.memory import Phase
from dtrain.commands.plan.plan import resolve_plan
from dtrain.commands.plan.planned_device import PlannedDevice
from dtrain.commands.plan.step import plan_step
from dtrain.commands.plan.tracer import Tracer
from dtrain.losses.head.logprobs import logprobs_from_hidden_states
from dtrain.losses.head.weighted_sum import weighted_logprob_sum
from tests.tiny import tiny_recipe

N, D, V = 30_000, 64, 50_000  # a dozen tiles or more, the last one smaller


def meta(*shape, dtype=torch.bfloat16, grad=False):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def four_bits():
    dequantize(meta(64, 1000, 512, dtype=torch.uint8), meta(64, 1000, 16, dtype=torch.int32), torch.bfloat16)


def summed():
    ids, index = torch.zeros(N, dtype=torch.int64, device="meta"), torch.arange(N, device="meta")
    weighted_logprob_sum(
        meta(N, D, grad=True), meta(V, D, grad=True), ids, torch.ones(N, device="meta"), index
    ).backward()


def each():
    ids, index = torch.zeros(N, dtype=torch.int64, device="meta"), torch.arange(N, device="meta")
    values = logprobs_from_hidden_states(meta(N, D, grad=True), meta(V, D, grad=True), ids, index=index)
    values.logprobs.sum().backward()


def traced(work, is_whole):
    """Costs, the bytes of the peak, and how many rounds were followed of a loop."""
    one, followed = SimpleNamespace(size=lambda: 1), []
    tracer = Tracer(SimpleNamespace(tp=one, ep=None, fsdp=SimpleNamespace(ndim=1)), on_host=False)

    def few(rounds):
        some = list(rounds) if is_whole else tracer.few(rounds)
        followed.append(0)
        for item in some:
            followed[-1] += 1
            yield item

    with PlannedDevice(torch.device("cuda", 0), few), tracer:
        work()  # makes what is made once
        tracer.counts.clear()
        tracer.memory.begin(Phase("all"))
        work()
    return tracer.counts, tracer.memory.peaks(), max(followed)


@pytest.mark.parametrize("work", [four_bits, summed, each])
def test_three_rounds_cost_what_all_of_them_cost(work):
    *few, followed = traced(work, is_whole=False)
    *whole, every = traced(work, is_whole=True)
    assert few == whole and followed == 3 and every > 6


@pytest.mark.slow
@pytest.mark.processes
def test_a_step_of_many_tiles_is_planned_by_three_of_them(tmp_path, monkeypatch):
    words = ["data.max_length=26000", "train.global_batch=2", "train.micro_batch=1", "train.dtype=bfloat16"]
    words += ["train.tile=all", "train.activation_checkpointing=full", "train.activation_offload=true"]
    spec = resolve_plan(tiny_recipe(tmp_path, *words), 1, "cuda")
    few = plan_step(spec)
    monkeypatch.setattr(Tracer, "few", lambda tracer, rounds: rounds)
    assert few == plan_step(spec)
