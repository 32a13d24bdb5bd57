"""`local_slices` against what FSDP2, with tensor parallelism below it, really holds: uneven sizes and empty shards."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtrain.parallel.placement import chunk_bounds, local_slices, local_tensor
from tests.cases import run_cases


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


SHAPES = ((3, 1, 2), (3, 2, 67), (3, 2, 7), (2, 3, 13), (6, 1, 5), (1, 6, 4))  # fsdp, tp, rows


@pytest.mark.parametrize("ranks", [3, 6])
def test_slices_are_what_the_rank_holds(ranks):
    cases = {
        f"fsdp {fsdp}, tp {tp}, {rows} rows, {style.__name__}": (fsdp, tp, rows, 6, style)
        for fsdp, tp, rows in SHAPES
        for style in (ColwiseParallel, RowwiseParallel)
        if fsdp * tp == ranks
    }
    for name, held in run_cases(held_slices, ranks, cases).items():
        assert sum(held) == cases[name][2] * 6, name


def test_plain_tensors_are_whole():
    assert local_slices(torch.empty(3, 2)) == (slice(0, 3), slice(0, 2))


def test_chunk_bounds_cut_as_torch_chunk_does():
    for length in range(12):
        for parts in range(1, 6):
            pieces = [chunk_bounds(length, parts, index) for index in range(parts)]
            sizes = [end - start for start, end in pieces if end > start]
            assert sizes == [len(c) for c in torch.arange(length).chunk(parts) if len(c)]
            assert all(left[1] == right[0] for left, right in zip(pieces, pieces[1:], strict=False))
