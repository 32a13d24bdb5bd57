"""Micro-batches of every making: what they hold, and that loss, gradient and log-probabilities do not depend on it."""

import pytest
import torch

from dtrain.base.batch import IGNORE_INDEX, collate, num_rows, num_trained_tokens
from dtrain.methods.sft import SftMethod
from dtrain.policy.batching import (
    DynamicShapes,
    Fixed,
    Packed,
    build_micro_batches,
    merge_micro_batch_values,
    row_lengths,
)
from tests.policy.test_policy import policy_of, rows
from tests.stepping import bare_worker, train_step
from tests.test_batch import row
from tests.tiny import tiny_recipe
from tests.world import run_world

MAKINGS = [Fixed(2), Fixed(64), DynamicShapes(24), DynamicShapes(1), Packed(24), Packed(3), Packed(1000)]


def test_fixed_ones_are_trimmed_and_ranks_without_rows_get_padding():
    batch = collate([row(2), row(3), row(7)])
    pieces = build_micro_batches(batch, Fixed(2).plan(row_lengths(batch)), 3, is_packed=False)
    assert [tuple(piece["input_ids"].shape) for piece in pieces] == [(2, 3), (1, 7), (1, 1)]
    assert num_trained_tokens(pieces[2]) == 0 and sum(map(num_trained_tokens, pieces)) == num_trained_tokens(batch)
    (piece,) = build_micro_batches(collate([]), [], 1, is_packed=False)
    assert piece["labels"].tolist() == [[IGNORE_INDEX]] and piece["seq_ids"].tolist() == [[-1]]
    with pytest.raises(ValueError, match="the plan has 2 micro-batches, and only 1"):
        build_micro_batches(batch, [[0], [1]], 1, is_packed=False)


@pytest.mark.parametrize("making", MAKINGS)
@pytest.mark.parametrize("lengths", [[5, 1, 9, 24, 3, 3, 30], [4], []])
def test_every_row_is_in_one_place_and_none_is_too_full(making, lengths):
    plan = making.plan(lengths)
    assert sorted(index for members in plan for index in members) == list(range(len(lengths)))
    for members in plan:
        own = [lengths[index] for index in members]
        full = {Fixed: 0, DynamicShapes: len(own) * max(own), Packed: sum(own)}[type(making)]
        assert len(own) == 1 or full <= getattr(making, "tokens", full)


def test_the_rows_of_a_sample_stay_neighbours():
    lengths = [3, 4, 9, 1, 2, 2, 5, 8, 1, 1]
    plan = DynamicShapes(2 * 10, 2).plan(lengths)
    assert plan == [[2, 3], [6, 7], [0, 1, 4, 5], [8, 9]]


@pytest.mark.parametrize("making", MAKINGS)
def test_what_was_gathered_goes_back_to_its_place(making):
    batch = collate([row(length, start=10 * length) for length in (5, 1, 9, 2)]) | {"reward": torch.arange(4.0)}
    plan = making.plan(row_lengths(batch))
    pieces = build_micro_batches(batch, plan, len(plan) + 1, making.is_packed)
    assert [piece["reward"].tolist() for piece in pieces[:-1]] == [[float(i) for i in members] for members in plan]
    real = batch["seq_ids"] >= 0
    for name in ("input_ids", "position_ids"):
        back = merge_micro_batch_values([piece[name] for piece in pieces], batch, plan, making.is_packed)
        assert torch.equal(back[real], batch[name][real])


def with_each(rank, recipe, world_size):
    """Loss, norm and log-probabilities of this rank's rows, by each making; one rank of three has few rows."""
    made = rows(9)[: 7 if rank == 0 else 1] if world_size > 1 else rows(9)
    found = []
    for making in MAKINGS:
        policy = policy_of(recipe, rank, world_size, bare_worker)
        policy.init_optimizer(4)
        batch = collate(made)
        logprobs = policy.get_logprobs(batch, making)["logprobs"]
        top = policy.get_topk_logits(batch, 3, making)
        result = train_step(policy, batch, SftMethod(recipe).loss, making)
        assert num_rows(batch) == len(made)
        found.append(
            [result.loss, result.grad_norm, *logprobs.flatten().tolist()]
            + top["topk_logits"].flatten().tolist()
            + top["topk_indices"].flatten().tolist()
        )
    return found


@pytest.mark.trap(
    "loss and norm multiplied by the number of micro-batches",
    "axolotl-ai-cloud/axolotl #2262",
    "clipping and logs of another batch",
    "the same numbers however micro-batches are made",
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_numbers_do_not_depend_on_the_making(tmp_path, world_size):
    for found in run_world(with_each, world_size, tiny_recipe(tmp_path, "train.global_batch=12"), world_size):
        for other in found[1:]:
            assert other == pytest.approx(found[0], rel=1e-9, abs=1e-12)


def masked(rank, recipe):
    """Rows that masks leave out count nowhere."""
    made = collate(rows(4))
    del made["labels"]
    lengths = torch.tensor(row_lengths(made))
    bare = {"input_ids": made["input_ids"], "input_lengths": lengths, "sample_mask": torch.tensor([1, 0, 1, 0])}
    results = []
    for batch in (bare, {name: tensor[::2] for name, tensor in made.items()}):
        policy = policy_of(recipe)
        policy.init_optimizer(4)
        result = train_step(policy, batch, SftMethod(recipe).loss)
        results.append((result.loss, result.grad_norm, result.result.counts.trained_tokens))
    return results


def test_a_masked_row_is_no_row(tmp_path):
    one, other = run_world(masked, 1, tiny_recipe(tmp_path))[0]
    assert one == pytest.approx(other, rel=1e-12)
