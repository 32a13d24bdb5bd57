"""The head-tail layout: which tokens a rank holds, and gathering as the inverse and the adjoint of sharding."""

import pytest
import torch
import torch.distributed as dist

from dtrain.parallel.context.batch import gather_sequence, get_chunk_indices, shard_sequence
from tests.cases import run_cases


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_rank_holds_its_head_and_its_tail_chunk(size):
    stream = torch.arange(2 * 2 * size).view(1, -1)  # chunks of two tokens
    held = [shard_sequence(stream, rank, size)[0].tolist() for rank in range(size)]
    for rank, tokens in enumerate(held):
        mirror = 2 * size - 1 - rank
        assert tokens == [2 * rank, 2 * rank + 1, 2 * mirror, 2 * mirror + 1]
        assert get_chunk_indices(rank, size) == (rank, mirror)
    assert sorted(sum(held, [])) == stream[0].tolist()
    # Under a causal mask every rank has the same number of visible keys.
    assert len({sum(token + 1 for token in tokens) for tokens in held}) == 1


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_any_dimension_can_be_the_sequence(dim):
    stream = torch.arange(8**3).view(8, 8, 8)
    part = shard_sequence(stream, 1, 2, dim)
    assert torch.equal(part, stream.index_select(dim, torch.tensor([2, 3, 4, 5])))


def test_a_length_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="10 tokens cannot be cut into 4 equal chunks for cp=2: pad it"):
        shard_sequence(torch.zeros(1, 10), 0, 2)


def gathered(rank, size, dim, length):
    torch.manual_seed(0)
    shape = [3, 2, 5]
    shape[dim] = length
    whole, weights = torch.randn(shape, dtype=torch.float64), torch.randn(size, *shape, dtype=torch.float64)
    mine = shard_sequence(whole, rank, size, dim).clone().requires_grad_()
    back = gather_sequence(mine, dist.group.WORLD, dim)
    assert torch.equal(back, whole)
    (back * weights[rank]).sum().backward()  # a loss of this rank's own
    assert torch.allclose(mine.grad, shard_sequence(weights.sum(0), rank, size, dim), rtol=1e-12, atol=0)


@pytest.mark.trap(
    "the backward of an all-gather loses gradients of permuted tensors",
    "pytorch/pytorch PR#120582",
    "silently wrong gradients",
    "order and gradients by hand, along any dimension",
)
@pytest.mark.parametrize("size", [1, 3])
def test_gathering_restores_the_order_and_sums_the_gradients(size):
    run_cases(gathered, size, {f"dim {dim}": (size, dim, 2 * size * 3) for dim in (1, 2, -3)})
