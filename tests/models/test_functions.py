"""The hand-written backward passes: gradients by finite differences, values by the formula, memory by what is kept."""

import pytest
import torch
import torch.nn.functional as F

from dtrain.models.common.functions import ACTIVATIONS, gated_activation, rms_norm


@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(weighted):
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True) if weighted else None
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), F.rms_norm(x, (8,), weight, 1e-3), rtol=1e-13, atol=0)
    inputs = (x, weight) if weighted else (x,)
    assert torch.autograd.gradcheck(lambda x, w=None: rms_norm(x, w, 1e-3), inputs)


def test_rms_norm_of_zeros():
    x = torch.zeros(1, 4, requires_grad=True)
    rms_norm(x, torch.ones(4), 1e-6).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated(name):
    reference = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
    }[name]
    gate, up = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.equal(gated_activation(gate, up, ACTIVATIONS[name]), reference(gate) * up)
    assert torch.autograd.gradcheck(lambda g, u: gated_activation(g, u, ACTIVATIONS[name]), (gate, up))


def test_they_keep_only_their_inputs():
    kept = []
    x = torch.randn(64, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()), lambda t: t):
        rms_norm(x, torch.ones(32), 1e-6)
        gated_activation(x, x, ACTIVATIONS["silu"])
    assert sum(kept) <= 3 * x.numel() + 64 + 32
