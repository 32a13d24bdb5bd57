"""Gradient norm and clipping on every mix of placements, against one process."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtrain.parallel.grads import clip_grads_, grad_norm, nonfinite_names
from dtrain.parallel.placement import local_slices, local_tensor
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
    norm = grad_norm(model.parameters())
    clip_grads_(model.parameters(), max_norm, norm)
    expected_norm, expected = reference(max_norm)
    assert abs(norm.item() - expected_norm) <= 1e-12 * expected_norm
    for name, parameter in model.named_parameters():
        want = expected[name][local_slices(parameter)]
        assert torch.allclose(local_tensor(parameter.grad), want, rtol=1e-10, atol=0), name


@pytest.mark.parametrize(
    ("replicate", "shard", "tp"), [(1, 1, 1), (1, 2, 1), (1, 3, 1), (2, 1, 1), (2, 2, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2)]
)
@pytest.mark.parametrize("max_norm", [0.1, 1e9])
def test_norm_and_clip_equal_one_process(replicate, shard, tp, max_norm):
    run_world(sharded_norm, replicate * shard * tp, replicate, shard, tp, max_norm)


def test_plain_parameters_without_a_process_group():
    model, inputs = model_and_loss()
    model(inputs).square().sum().backward()
    expected_norm, expected = reference(0.5)
    norm = grad_norm(model.parameters())
    clip_grads_(model.parameters(), 0.5, norm)
    assert abs(norm.item() - expected_norm) <= 1e-12 * expected_norm
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], rtol=1e-10, atol=0)


def test_low_precision_gradients_are_scaled_themselves_and_summed_in_float32():
    parameter = nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.01)
    gradient = parameter.grad
    norm = grad_norm([parameter])
    assert norm.dtype == torch.float32
    assert abs(norm.item() - gradient.float().norm().item()) < 1e-5
    clip_grads_([parameter], norm.item() / 2, norm)
    assert parameter.grad is gradient
    assert torch.allclose(gradient.float(), torch.full((100_000,), 0.005), rtol=1e-2)


def test_names_of_nonfinite_gradients():
    model = nn.Linear(2, 2)
    model.weight.grad = torch.tensor([[1.0, float("nan")], [0.0, 0.0]])
    model.bias.grad = torch.zeros(2)
    assert nonfinite_names(model.named_parameters()) == ["weight"]
    assert not torch.isfinite(grad_norm(model.parameters()))
