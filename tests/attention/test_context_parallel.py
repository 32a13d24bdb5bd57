"""The kernels of context parallel on 2, 3 and 4 ranks, forward and backward, against dense attention: by masks, and
by variable-length calls, where the host knows the packing and where positions are gathered and read."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dtrain.attention.blocks import CpuFlash, Products
from dtrain.attention.context import GatherKernel, RingKernel
from dtrain.attention.kernels import SdpaKernel
from dtrain.attention.packing import Packing
from dtrain.attention.varlen import VarlenKernel
from dtrain.attention.visibility import MaskStreams, Visibility
from dtrain.parallel.context.batch import shard_sequence
from tests.attention.dense import attention, packed_rows, tensors, visible
from tests.attention.flash import WrittenFlash
from tests.cases import run_cases
from tests.covering import covering, named
from tests.world import run_world

KERNELS_OF_CP = {
    "gather": lambda mesh: GatherKernel(SdpaKernel(), mesh),
    "ring": lambda mesh: RingKernel(SdpaKernel(), mesh),
    "ring by products": lambda mesh: RingKernel(SdpaKernel(), mesh, Products()),
    "ring by torch's kernel": lambda mesh: RingKernel(SdpaKernel(), mesh, CpuFlash()),
    "varlen gather": lambda mesh: VarlenKernel(WrittenFlash(), GatherKernel(SdpaKernel(), mesh)),
    "varlen ring": lambda mesh: VarlenKernel(WrittenFlash(), RingKernel(SdpaKernel(), mesh)),
}
EXTRA = 3  # tokens of sequence parallel's padding


def on_ranks(rank, kernel, size, length, heads, kv_heads, value_size, packed, windows, dtype, rtol):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))["cp"]
    kernel = KERNELS_OF_CP[kernel](mesh)
    assert kernel.is_context_parallel
    if packed:
        positions, documents = packed_rows(2, length)
    else:
        positions, documents = torch.arange(length)[None], None
    mine = [None if x is None else shard_sequence(x, rank, size) for x in (positions, documents)]
    keys = kernel.keys(MaskStreams(*mine))
    assert torch.equal(keys[0].expand_as(positions), positions)
    assert documents is None or torch.equal(keys[1], documents)
    for window in windows:
        q, k, v, grad = tensors(2, length, heads, kv_heads, 8, dtype, value_size=value_size)
        scores = torch.linspace(-2, 4, heads, dtype=dtype)
        wide = [x.double().clone().requires_grad_() for x in (q, k, v)]
        sinks = [x.requires_grad_() for x in (scores.double(), scores.clone())] if window != 5 else [None, None]
        expected = attention(*wide, visible(positions, documents, window), 0.25, sinks[0])
        expected.backward(grad.double())
        parts = [shard_sequence(x, rank, size).clone().requires_grad_() for x in (q, k, v)]
        seen = Visibility(parts[0].shape[1], length, window, mine[0], keys[0], mine[1], keys[1], rows=2)
        out = kernel(*parts, kernel.prepare(seen, dtype, torch.device("cpu")), 0.25, sinks[1])
        assert out.dtype == dtype
        if kernel.takes_packing:
            packing = Packing.of(positions.expand(2, -1), documents)
            assert kernel.keys(MaskStreams(*mine), packing) is None
            known = kernel.prepare(Visibility(1, 1, window, packing=packing), dtype, torch.device("cpu"))
            padded = (torch.nn.functional.pad(part, (0, 0, 0, 0, 0, EXTRA), value=9.0) for part in parts)
            more = kernel(*padded, known, 0.25, sinks[1])
            assert torch.equal(more[:, :-EXTRA], out) and bool((more[:, -EXTRA:] == 0).all())
            out = more[:, :-EXTRA]
        out.backward(shard_sequence(grad, rank, size))
        right = [expected.detach(), *(x.grad for x in wide)]
        for found, whole in zip([out, *(part.grad for part in parts)], right, strict=True):
            share = shard_sequence(whole, rank, size)
            assert (found.double() - share).abs().max() <= rtol * whole.abs().max()
        if sinks[1] is not None:
            dist.all_reduce(sinks[1].grad)
            assert (sinks[1].grad.double() - sinks[0].grad).abs().max() <= rtol * sinks[0].grad.abs().max()


CASES = covering(
    {
        "kernel": list(KERNELS_OF_CP),
        "ranks": [2, 3, 4],
        "length": [48, 24],
        "heads": [(4, 2), (4, 4), (3, 1)],
        "value_size": [8, 5, 12],
        "packed": [True, False],
        "dtype": [torch.float64, torch.float32],
    }
)
# Chunks of one token.
CASES += [dict(zip(CASES[0], (kernel, 3, 6, (4, 2), 8, True, torch.float64), strict=True)) for kernel in KERNELS_OF_CP]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_numbers_of_dense_attention(size):
    cases = {}
    for case in (case for case in CASES if case["ranks"] == size):
        kernel, _, length, heads, value_size, packed, dtype = case.values()
        rtol = 1e-12 if dtype == torch.float64 else 5e-6
        cases[named(case)] = kernel, size, length, *heads, value_size, packed, (None, 5, 30), dtype, rtol
    run_cases(on_ranks, size, cases)


def low_precision_sums(rank, size):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))["cp"]
    kernel, length = RingKernel(SdpaKernel(), mesh), 32 * size
    q, k, v, grad = tensors(1, length, 2, 1, 8, torch.bfloat16)
    positions = torch.arange(length)[None]
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    attention(*wide, visible(positions, None, None), 0.3).backward(grad.double())
    parts = [shard_sequence(x, rank, size).clone().requires_grad_() for x in (q, k, v)]
    mine = shard_sequence(positions, rank, size)
    seen = Visibility(length // size, length, None, mine, kernel.keys(MaskStreams(mine)).positions)
    kernel(*parts, kernel.prepare(seen, torch.bfloat16, torch.device("cpu")), 0.3).backward(
        shard_sequence(grad, rank, size)
    )
    shares = [shard_sequence(whole.grad, rank, size) for whole in wide]
    assert all(part.grad.dtype == torch.bfloat16 for part in parts)
    return [((part.grad - share).norm() / share.norm()).item() for part, share in zip(parts, shares, strict=True)]


def test_low_precision_gradients_are_summed_in_float32():
    """Eight blocks summed in bfloat16 are wrong by 0.005 and more, summed in float32 by 0.004: their own rounding."""
    assert max(run_world(low_precision_sums, 8, 8)[0]) <= 0.0045
