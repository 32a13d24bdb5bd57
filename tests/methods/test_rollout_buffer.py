"""The buffer of a rollout: rows with their streams, what is computed of them back in its place, shares of like cost."""

import random
from dataclasses import replace

import pytest
import torch

from dtrain.base.batch import IGNORE_INDEX
from dtrain.base.errors import UserError
from dtrain.base.ranks import balance_by_cost
from dtrain.rl.rollouts import Buffer, Rollouts
from dtrain.rl.samples import Sample

SAMPLES = [
    Sample([5, 6], [7, 8, 9], [True, False, True], [-0.1, 0.0, -0.3], "stop"),
    Sample([4], [3], [True], [-0.5], "length"),
    Sample([2, 2, 2], [9, 1], [True, True], [-0.7, -0.8], "stop"),
]


def buffer(trains=(True, True, True)):
    flags = torch.tensor(trains)
    return Buffer.from_samples(SAMPLES, torch.tensor([1.0, -2.0, 0.5]), torch.ones(3, dtype=torch.bool), flags)


def test_a_row_has_its_streams_where_the_labels_stand():
    batch = buffer().batch([0, 1])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [4, 3, 0, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORE_INDEX, 7, IGNORE_INDEX, 9, IGNORE_INDEX], [3] + [IGNORE_INDEX] * 4]
    assert batch["advantages"].tolist() == [[0, 1, 0, 1, 0], [-2, 0, 0, 0, 0]]
    assert batch["sampling_logprobs"].tolist() == [[0, -0.1, 0, -0.3, 0], [-0.5, 0, 0, 0, 0]]
    assert batch["seq_ids"].tolist() == [[0] * 5, [0, 0, -1, -1, -1]]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3, 4]


def test_experts_stand_where_their_tokens_are_read():
    experts = [torch.randint(0, 9, (len(one.prompt) + len(one.ids), 2, 3), dtype=torch.int16) for one in SAMPLES]
    samples = [replace(one, routed=routed) for one, routed in zip(SAMPLES, experts, strict=True)]
    flags = torch.ones(3, dtype=torch.bool)
    whole = Buffer.from_samples(samples, torch.zeros(3), flags, flags)
    found = whole.batch([2, 1])["routed_experts"]
    assert found.shape == (2, 5, 2, 3) and torch.equal(found[0], experts[2])
    assert torch.equal(found[1, :2], experts[1]) and (found[1, 2:] == -1).all()
    assert whole.batch([])["routed_experts"].shape == (0, 1, 2, 3)
    empty = Buffer.empty({name: [*tensor.shape] for name, tensor in whole.tensors().items()})
    shapes = {name: (one.shape, one.dtype) for name, one in whole.tensors().items()}
    assert {name: (one.shape, one.dtype) for name, one in empty.tensors().items()} == shapes
    with pytest.raises(ValueError, match="experts for 7 tokens, but 12 tokens"):
        Buffer.from_samples(
            [samples[0], SAMPLES[1], replace(samples[2], routed=experts[1])], torch.zeros(3), flags, flags
        )


def test_a_sample_that_is_not_trained_has_no_label():
    batch = buffer((False, True, True)).batch([0])
    assert (batch["labels"] == IGNORE_INDEX).all() and not batch["advantages"].any()
    assert buffer().batch([])["input_ids"].shape[0] == 0


@pytest.mark.parametrize("shares", [[[0, 1, 2]], [[2], [0, 1]], [[1], [], [0, 2]]])
def test_what_ranks_compute_comes_back_in_its_place(shares):
    whole = buffer()
    parts = []
    for share in shares:
        batch = whole.batch(share)
        values = torch.where(batch["labels"] == IGNORE_INDEX, 0.0, batch["labels"] + 0.25)
        parts.append(whole.flatten(values, share))
    whole.set_stream("old_logprobs", torch.cat(parts), [index for share in shares for index in share])
    expected = torch.where(whole.trained, whole.tokens + 0.25, 0.0)
    assert torch.equal(whole.per_token["old_logprobs"], expected.double())


def test_room_for_one_of_that_size():
    whole = buffer()
    empty = Buffer.empty({name: [*tensor.shape] for name, tensor in whole.tensors().items()})
    shapes = {name: (one.shape, one.dtype) for name, one in whole.tensors().items()}
    assert {name: (one.shape, one.dtype) for name, one in empty.tensors().items()} == shapes


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("most", [None, 9])
def test_shares_hold_everything_once_and_are_even(ranks, most):
    draw = random.Random(ranks)
    costs = [draw.uniform(1, 5) for _ in range(9)]
    shares = balance_by_cost(costs, ranks, most)
    assert sorted(index for share in shares for index in share) == list(range(9))
    loads = [sum(costs[index] for index in share) for share in shares]
    assert max(loads) <= 4 / 3 * max(sum(costs) / ranks, max(costs)) + 1e-9


def test_a_share_has_at_most_so_many():
    assert max(map(len, balance_by_cost([10.0, 1.0, 1.0, 1.0], 2, 2))) == 2
    assert balance_by_cost([10.0, 1.0, 1.0, 1.0], 2) == [[0], [1, 2, 3]]


def test_a_rollout_that_another_version_saved_is_refused():
    rollouts = Rollouts(None, settings={}, prompts=1)
    state = {"step": 3, "settings": {}, "tokens": 7, "sequences": 3}
    with pytest.raises(UserError, match="step 3 was saved within a rollout by another version of dtrain"):
        rollouts.check_state(state)
