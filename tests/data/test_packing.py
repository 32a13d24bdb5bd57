"""Best-fit-decreasing packing, and the orders of the epochs, against brute force."""

import random
from collections import Counter

import pytest
import torch

from dtrain.data.rows.cache import SourceSamples
from dtrain.data.rows.rows import EpochOrder, pack, permute


def best_fit_decreasing(lengths, capacity):
    """The textbook's algorithm, looking through all bins."""
    bins = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        room = [(capacity - sum(lengths[i] for i in bin), number) for number, bin in enumerate(bins)]
        fitting = [pair for pair in room if pair[0] >= lengths[index]]
        if fitting:
            bins[min(fitting)[1]].append(index)
        else:
            bins.append([index])
    return sorted(sorted(bin) for bin in bins)


@pytest.mark.trap(
    "packing that packs nothing at some lengths",
    "huggingface/trl #3887",
    "each row holds one sample",
    "best fit as in the textbook, at any length",
)
@pytest.mark.parametrize("seed", range(5))
def test_equals_the_textbook(seed):
    draw = random.Random(seed)
    capacity = draw.randint(5, 60)
    lengths = [draw.randint(1, capacity) for _ in range(draw.randint(1, 120))]
    bins = pack(lengths, capacity)
    assert bins == best_fit_decreasing(lengths, capacity)
    assert sorted(index for bin in bins for index in bin) == list(range(len(lengths)))
    assert max(sum(lengths[index] for index in bin) for bin in bins) <= capacity


def test_rows_of_a_full_window_are_full():
    draw = random.Random(0)
    lengths = [min(2048, int(draw.lognormvariate(5.5, 0.8)) + 1) for _ in range(4096)]
    bins = pack(lengths, 2048)
    assert sum(lengths) / (2048 * len(bins)) > 0.98


@pytest.mark.trap(
    "packing cuts what is longer than a row",
    "huggingface/trl #4554",
    "up to 99 % of the tokens of long texts",
    "packing cuts nothing: data.too_long decides before",
)
def test_too_long_is_an_error():
    with pytest.raises(ValueError, match="11 tokens does not fit into a row of 10"):
        pack([3, 11], 10)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 64, 65, 1000, 5000])
def test_permutations_are_permutations(size):
    seen = set()
    for key in range(4):
        order = permute(torch.arange(size), size, key)
        assert sorted(order.tolist()) == list(range(size))
        seen.add(tuple(order.tolist()))
    assert size < 5 or len(seen) == 4
    some = torch.arange(0, size, 3)
    assert torch.equal(permute(some, size, 3), order[some])


def test_permutations_are_even():
    """Over many keys every sample comes to every place about equally often (chi-square, 99.9 %)."""
    size, keys = 7, 400
    counts = torch.zeros(size, size)
    for key in range(keys):
        counts[torch.arange(size), permute(torch.arange(size), size, key * 7919)] += 1
    expected = keys / size
    assert ((counts - expected) ** 2 / expected).sum() < 70.7  # 36 degrees of freedom


def test_weights():
    shares = [
        SourceSamples(0, 10, 2.3),
        SourceSamples(10, 5, 1.0),
        SourceSamples(15, 4, 0.5),
        SourceSamples(19, 6, 0.0),
    ]
    visits = Counter()
    for epoch in range(10):
        order = EpochOrder(shares, seed=1, epoch=epoch, shuffle=True)
        samples = order.samples(0, order.total + 5).tolist()
        assert len(samples) == order.total == 23 + 5 + 2
        count = Counter(samples)
        assert all(count[i] in (2, 3) for i in range(10)) and all(count[i] == 1 for i in range(10, 15))
        assert all(count[i] in (0, 1) for i in range(15, 19)) and not any(i >= 19 for i in samples)
        visits += count
    assert {visits[i] for i in range(10)} == {23} and {visits[i] for i in range(15, 19)} == {5}


def test_order_depends_on_seed_and_epoch_alone():
    def samples(seed, epoch, shuffle=True):
        return EpochOrder([SourceSamples(0, 100)], seed=seed, epoch=epoch, shuffle=shuffle).samples(0, 100).tolist()

    assert samples(1, 1) == samples(1, 1)
    assert len({tuple(samples(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert samples(3, 2, shuffle=False) == list(range(100))
    order = EpochOrder([SourceSamples(0, 100)], seed=1, epoch=1, shuffle=True)
    assert torch.cat([order.samples(at, at + 7) for at in range(0, 100, 7)]).tolist() == samples(1, 1)
