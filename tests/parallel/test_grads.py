"""Gradient norm and clipping on every mix of placements, against one process."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtrain.parallel.placement import (
    clip_grad_by_total_norm_,
    clip_grads_,
    get_grad_norm,
    grad_norm,
    local_slices,
    local_tensor,
    nonfinite_names,
)
from tests.cases import run_cases
from tests.world import run_world


def model_and_loss():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.randn(4, 5, dtype=torch.float64)


def reference(max_norm):
    model, inputs = model_and_loss()
    model(inputs).square().sum().backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    norm = flat.norm()
    scale = min(1.0, max_norm / (norm.item() + 1e-6))
    return norm.item(), {name: p.grad * scale for name, p in model.named_parameters()}


def sharded_norm(rank, replicate, shard, tp, max_norm):
    model = sharded_gradients(replicate, shard, tp)
    norm = grad_norm(model.parameters())
    clip_grads_(model.parameters(), max_norm, norm)
    expected_norm, expected = reference(max_norm)
    assert abs(norm.item() - expected_norm) <= 1e-12 * expected_norm
    for name, parameter in model.named_parameters():
        want = expected[name][local_slices(parameter)]
        assert torch.allclose(local_tensor(parameter.grad), want, rtol=1e-10, atol=0), name


def sharded_gradients(replicate, shard, tp):
    mesh = init_device_mesh("cpu", (replicate, shard, tp), mesh_dim_names=("replicate", "shard", "tp"))
    model, inputs = model_and_loss()
    if tp > 1:
        # The second bias stays replicated over tp: it must count once.
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if replicate > 1:
        fully_shard(model, mesh=mesh["replicate", "shard"])
    else:
        fully_shard(model, mesh=mesh["shard"])
    model(inputs).square().sum().backward()
    return model


MESHES = [(1, 1, 1), (1, 2, 1), (1, 3, 1), (2, 1, 1), (2, 2, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2)]


def norms_of_every_order(rank, replicate, shard, tp):
    """`get_grad_norm` for p = 1, 2, 3, inf, `grad_norm`, and clipping, on mixed placements."""
    gradients = sharded_gradients(replicate, shard, tp)
    dp = init_device_mesh("cpu", (replicate * shard, tp), mesh_dim_names=("dp", "tp"))
    flat = torch.cat([gradient.flatten() for gradient in reference(1e9)[1].values()])
    for p in (1, 2, 3, float("inf")):
        expected = torch.linalg.vector_norm(flat, p).item()
        if p == 2:
            assert abs(grad_norm(gradients.parameters()).item() - expected) <= 1e-12 * expected
        groups = dp["dp"].get_group(), dp["tp"].get_group() if tp > 1 else None
        norm = get_grad_norm(list(gradients.parameters()), *groups, norm_type=p)
        assert abs(norm - expected) <= 1e-12 * expected, p
        same = get_grad_norm(gradients.parameters(), dp_group=groups[0], tp_group=groups[1], norm_type=str(p))
        assert same == norm
    before = [local_tensor(parameter.grad).clone() for parameter in gradients.parameters()]
    clip_grad_by_total_norm_(gradients.parameters(), norm / 2, norm)
    for parameter, old in zip(gradients.parameters(), before, strict=True):
        assert torch.allclose(local_tensor(parameter.grad), old / 2, rtol=1e-5)


def norms_and_clips(rank, replicate, shard, tp):
    norms_of_every_order(rank, replicate, shard, tp)
    for max_norm in (0.1, 1e9):
        sharded_norm(rank, replicate, shard, tp, max_norm)


@pytest.mark.trap(
    "what tensor parallel replicates is counted on each of its ranks",
    "NVIDIA-NeMo/RL PR#3788",
    "clipping clips too much",
    "each element counts once",
)
@pytest.mark.parametrize("ranks", sorted({math.prod(mesh) for mesh in MESHES}))
def test_norms_and_clipping_equal_one_process(ranks):
    run_cases(norms_and_clips, ranks, {str(mesh): mesh for mesh in MESHES if math.prod(mesh) == ranks})


def test_plain_parameters_without_a_process_group():
    model, inputs = model_and_loss()
    model(inputs).square().sum().backward()
    expected_norm, expected = reference(0.5)
    norm = grad_norm(model.parameters())
    clip_grads_(model.parameters(), 0.5, norm)
    assert abs(norm.item() - expected_norm) <= 1e-12 * expected_norm
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], rtol=1e-10, atol=0)


def test_plain_gradients_are_every_ranks_and_nothing_is_sent():
    model, inputs = model_and_loss()
    model(inputs).square().sum().backward()
    groups = object(), object()  # that nothing may be sent over
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    for p in (1, 2, float("inf")):
        expected = torch.linalg.vector_norm(flat, p).item()
        assert abs(get_grad_norm(model.parameters(), *groups, norm_type=p) - expected) <= 1e-12 * expected


def test_low_precision_gradients_are_scaled_themselves_and_summed_in_float32():
    parameter = nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.01)
    gradient = parameter.grad
    norm = grad_norm([parameter])
    assert norm.dtype == torch.float32
    assert abs(norm.item() - gradient.double().norm().item()) < 1e-6
    clip_grads_([parameter], norm.item() / 2, norm)
    assert parameter.grad is gradient
    assert torch.allclose(gradient.float(), torch.full((100_000,), 0.005), rtol=1e-2)


def test_names_of_nonfinite_gradients():
    model = nn.Linear(2, 2)
    model.weight.grad = torch.tensor([[1.0, float("nan")], [0.0, 0.0]])
    model.bias.grad = torch.zeros(2)
    assert nonfinite_names(model.named_parameters()) == ["weight"]
    assert not torch.isfinite(grad_norm(model.parameters()))


@pytest.mark.parametrize("norm_type", [1, 2, 3])
def test_large_float32_tensors_lose_nothing(norm_type):
    """torch's own norm of these is wrong by 1e-3 and more: it adds one element after another."""
    parameter = nn.Parameter(torch.empty(5_000_037))
    parameter.grad = torch.rand_like(parameter)
    expected = torch.linalg.vector_norm(parameter.grad.double(), norm_type).item()
    if norm_type == 2:
        assert abs(grad_norm([parameter]).item() - expected) <= 2e-7 * expected
    assert abs(get_grad_norm(parameter, None, None, norm_type) - expected) <= 2e-7 * expected


def test_norms_of_nothing_and_of_small_and_mixed_gradients():
    small, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    assert grad_norm([small]).item() == get_grad_norm([small], None, None) == 0.0
    small.grad, other.grad = torch.tensor([3.0, 0.0, 0.0]), torch.tensor([[0.0, -4.0], [0.0, 0.0]], dtype=torch.float64)
    assert get_grad_norm([small, other], None, None) == 5.0
    assert get_grad_norm([small, other], None, None, float("inf")) == 4.0
    clip_grad_by_total_norm_([small, other], 1.0, 5.0)
    assert abs(get_grad_norm([small, other], None, None) - 1.0) < 1e-6
    clip_grad_by_total_norm_([small, other], 10.0, 1.0)  # shorter than allowed: left alone
    assert abs(get_grad_norm([small, other], None, None) - 1.0) < 1e-6


def a_nan_on_one_rank(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    found = []
    for bad in (0, 1):
        gradients = sharded_gradients(1, 2, 1)
        if rank == bad:
            local_tensor(next(gradients.parameters()).grad).fill_(float("nan"))
        found.append(grad_norm(gradients.parameters()).item())
        found += [get_grad_norm(gradients.parameters(), mesh.get_group(), None, p) for p in (2, math.inf)]
    return found


@pytest.mark.trap(
    "NaN on one rank reaches the others one step later",
    "allenai/OLMo-core PR#657",
    "some ranks step, others do not",
    "every rank sees it at once",
)
def test_a_nan_on_any_rank_makes_every_norm_not_finite():
    for norms in run_world(a_nan_on_one_rank, 2):
        assert not any(map(math.isfinite, norms))


def test_what_a_norm_cannot_be_asked_for():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    for groups in ({}, {"dp_cp_group": None}, {"tp_group": None}, {"dp_cp_group": None, "dp_group": None}):
        with pytest.raises(TypeError, match="needs tp_group and one of dp_cp_group and dp_group"):
            get_grad_norm([parameter], **groups)
    assert get_grad_norm([parameter], dp_group=None, tp_group=None) == pytest.approx(2**0.5)
    for p in (0, -1, -math.inf, math.nan):
        with pytest.raises(ValueError, match="norm_type"):
            get_grad_norm([parameter], None, None, p)
