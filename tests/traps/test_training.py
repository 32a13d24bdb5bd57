"""Steps that others got wrong, by name: how far weights move, by hand."""

import pytest
import torch

from dtrain.memory.low_bit_adam import LowBitAdam


@pytest.mark.trap(
    "weights in bfloat16 do not move at a rate of 1e-6",
    "meta-pytorch/torchtune #2254",
    "fine-tuning at a small rate learns nothing",
)
def test_weights_in_bfloat16_move_at_a_rate_of_1e_6():
    """By as much as float32's in the mean: AdamW moves each by its rate, and a hundred steps are 1e-4."""
    weight = torch.nn.Parameter(torch.ones(2**16, dtype=torch.bfloat16))
    optimizer = LowBitAdam([{"params": [weight]}], names={weight: "one.weight"}, seed=0, state="float32", lr=1e-6)
    theirs = torch.nn.Parameter(weight.detach().clone())
    plain = torch.optim.AdamW([theirs], lr=1e-6, weight_decay=0.0)
    for _ in range(100):
        weight.grad, theirs.grad = torch.ones_like(weight), torch.ones_like(theirs)
        optimizer.step()
        plain.step()
    assert (1 - weight.double()).mean().item() == pytest.approx(1e-4, rel=0.1)
    assert (theirs == 1).all()  # what the trap gives
