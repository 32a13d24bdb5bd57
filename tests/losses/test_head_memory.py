"""Memory of the head's gradient beside its accumulator: operands in bfloat16, sums in float32."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.commands.plan.planned_device import MetaKernels, PlannedDevice
from dtrain.losses.head.logprobs import logprobs_from_hidden_states
from dtrain.losses.head.sources import head_tile_rows
from dtrain.losses.head.vocabulary import add_product_
from dtrain.losses.head.weighted_sum import weighted_logprob_sum

N, V, D = 4096, 30_000, 64


class Made(TorchDispatchMode):
    """Counts new tensors of one shape and dtype."""

    def __init__(self, shape, dtype):
        super().__init__()
        self.wanted, self.count = (torch.Size(shape), dtype), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_new = isinstance(out, torch.Tensor) and not func.is_view and not func._schema.is_mutable
        self.count += is_new and (out.shape, out.dtype) == self.wanted
        return out


def from_sum(hidden, weight, ids):
    return weighted_logprob_sum(hidden, weight, ids, torch.ones(N, device="meta"), torch.arange(N, device="meta"))


def from_values(hidden, weight, ids):
    return logprobs_from_hidden_states(hidden, weight, ids, index=torch.arange(N, device="meta")).logprobs.sum()


@pytest.mark.parametrize("loss", [from_sum, from_values])
def test_a_gpu_adds_to_the_weights_gradient_in_place(loss):
    hidden = torch.empty(N, D, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(V, D, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with PlannedDevice(torch.device("cuda", 0)), MetaKernels(), Made((V, D), torch.float32) as made:
        loss(hidden, weight, torch.zeros(N, dtype=torch.int64, device="meta")).backward()
    assert made.count == 1, "the accumulator"
    assert weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("vocab", [32_000, 128_256, 151_936, 262_144])
def test_a_gpus_tile_is_half_a_gib_of_whole_blocks_of_a_product(vocab):
    rows = head_tile_rows(vocab, "cuda")
    assert rows % 128 == 0 and 0.95 < rows * vocab * 4 / 2**29 < 1.05


def test_a_cpu_adds_in_the_products_dtype():
    a, b, total = (torch.randn(shape, dtype=torch.float64) for shape in ((5, 7), (7, 3), (5, 3)))
    half = a.bfloat16(), b.bfloat16()
    for one, other, dtype in ((a, b, torch.float64), (a.float(), b.float(), torch.float32), (*half, torch.float32)):
        found, expected = total.to(dtype), total + one.double() @ other.double()
        add_product_(found, one, other)
        assert (found - expected).abs().max() < 1e-5
