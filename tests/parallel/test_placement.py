"""`local_slices` against what FSDP2, with tensor parallelism below it, really holds: uneven sizes and empty shards."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtrain.parallel.placement import chunk_bounds, local_slices, local_tensor
from tests.world import run_world


def numbered(rows, columns):
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)


def held_slices(rank, fsdp, tp, rows, columns, style):
    mesh = init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("fsdp", "tp"))
    model = nn.Sequential(nn.Linear(columns, rows, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(numbered(rows, columns))
    if tp > 1:
        parallelize_module(model, mesh["tp"], {"0": style()})
    fully_shard(model, mesh=mesh["fsdp"])
    weight = model[0].weight
    assert torch.equal(local_tensor(weight), numbered(rows, columns)[local_slices(weight)])
    return local_tensor(weight).numel()


@pytest.mark.parametrize(
    ("fsdp", "tp", "rows"),
    [(2, 1, 7), (3, 1, 2), (4, 1, 5), (3, 2, 67), (3, 2, 7), (2, 3, 13), (4, 2, 9), (2, 2, 8), (2, 4, 3)],
)
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
def test_slices_are_what_the_rank_holds(fsdp, tp, rows, style):
    held = run_world(held_slices, fsdp * tp, fsdp, tp, rows, 6, style)
    assert sum(held) == rows * 6


def test_plain_tensors_are_whole():
    assert local_slices(torch.empty(3, 2)) == (slice(0, 3), slice(0, 2))


def test_chunk_bounds_cut_as_torch_chunk_does():
    for length in range(12):
        for parts in range(1, 6):
            pieces = [chunk_bounds(length, parts, index) for index in range(parts)]
            sizes = [end - start for start, end in pieces if end > start]
            assert sizes == [len(c) for c in torch.arange(length).chunk(parts) if len(c)]
            assert all(left[1] == right[0] for left, right in zip(pieces, pieces[1:], strict=False))
