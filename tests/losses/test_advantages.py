"""Advantages against the definitions written with the statistics module, against numbers that TRL's own lines gave
(trl_policy.json, float64 by default, for TRL divides two counts in the default dtype), and their independence of
order."""

import json
import math
import statistics
from pathlib import Path

import pytest
import torch

from dtrain.losses import (
    advantages,
    decoupled_advantages,
    soft_overlong_penalty,
    without_truncated,
    zero_variance_groups,
)

TRL = json.loads(Path(__file__).with_name("trl_policy.json").read_text())
EXACT = {"rtol": 1e-12, "atol": 1e-13}


def vector(*values):
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)


PARTS = torch.stack([vector(*row) for row in TRL["rewards"]])
GROUPED = [0.0, 1.0, 1.0, 0.5, 2.0, 2.5, -1.0, 0.0, 3.0, 3.0, 3.0, 2.0]


@pytest.mark.parametrize(
    "case", TRL["advantage_cases"], ids=lambda c: f"{c['aggregation']}-{c['scale']}-{c['group_size']}"
)
def test_trls_own_numbers(case):
    size, expected = case["group_size"], vector(*case["advantages"])
    if case["aggregation"] == "normalize_then_sum":
        got = decoupled_advantages(PARTS, TRL["reward_weights"], size)
    else:
        rewards = vector(*case["rewards"])
        got = advantages(rewards, size, scale=case["scale"])
        if case["scale"] == "group":  # TRL sees no constant group where one reward alone is known
            alone = (~rewards.isnan()).view(-1, size).sum(1).repeat_interleave(size) < 2
            assert torch.equal(zero_variance_groups(rewards, size) & ~alone, torch.tensor(case["zero_std"]))
    torch.testing.assert_close(got, expected, **EXACT)


@pytest.mark.trap(
    "rewards normalised over the batch, not over the group",
    "XU-YIJIE/grpo-flat #2",
    "easy prompts are rewarded, hard ones punished",
    "each group has its own mean and spread",
)
@pytest.mark.parametrize("scale", ["group", "leave_one_out", "batch", "none"])
@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "batch", "none"])
def test_the_definitions(baseline, scale):
    expected = []
    for start in range(0, 12, 4):
        group = GROUPED[start : start + 4]
        for place, value in enumerate(group):
            mean = {
                "group": statistics.mean(group),
                "leave_one_out": statistics.mean(group[:place] + group[place + 1 :]),
                "batch": statistics.mean(GROUPED),
                "none": 0.0,
            }[baseline]
            spread = {
                "group": statistics.stdev(group),
                "leave_one_out": statistics.stdev(group[:place] + group[place + 1 :]) or 1 - 0.01,
                "batch": statistics.stdev(GROUPED),
                "none": 1 - 0.01,
            }[scale]
            expected.append((value - mean) / (spread + 0.01))
    got = advantages(vector(*GROUPED), 4, baseline=baseline, scale=scale, eps=0.01)
    torch.testing.assert_close(got, vector(*expected), **EXACT)


@pytest.mark.parametrize(
    "options",
    [{}, {"baseline": "batch", "scale": "batch"}, {"baseline": "leave_one_out"}, {"scale": "leave_one_out"}],
    ids=str,
)
def test_the_order_of_groups_and_completions_changes_nothing_to_the_last_bit(options):
    generator = torch.Generator().manual_seed(1)
    rewards = torch.rand(240, generator=generator, dtype=torch.float64)
    ids = torch.arange(240) // 6
    order = torch.randperm(240, generator=generator)
    straight = advantages(rewards, 6, **options)
    assert torch.equal(advantages(rewards, ids, **options), straight)
    assert torch.equal(advantages(rewards[order], ids[order], **options), straight[order])


def test_equal_rewards_give_exact_zeros_and_unknown_ones_count_nowhere():
    rewards = vector(0.1, 0.1, 0.1, 1.0, None, 0.0, None, None, None, 5.0, None, None)
    assert advantages(rewards, 3).tolist() == [0, 0, 0, *advantages(vector(1, 0), 2)[:1].tolist(), 0] + [
        advantages(vector(1, 0), 2)[1].item(), *[0] * 6
    ]  # fmt: skip
    assert zero_variance_groups(rewards, 3).tolist() == [True] * 3 + [False] * 3 + [True] * 6
    for baseline in ("group", "leave_one_out", "batch"):
        assert advantages(vector(0.7), 1, baseline=baseline).tolist() == [0.0]
    assert advantages(vector(2.0, None), 1, baseline="none", scale="none").tolist() == [2.0, 0.0]
    assert advantages(vector(), 4).tolist() == []


def nemo_rl(rewards, is_valid):
    """NeMo-RL's default for one prompt, by its definition: each of the valid rewards less the mean of the other valid
    ones, divided by their standard deviation (n - 1) + 1e-6 where that is above 0; 0 for a reward alone."""
    found = []
    for place, reward in enumerate(rewards):
        others = [r for at, r in enumerate(rewards) if at != place and is_valid[at]]
        gap = reward - statistics.mean(others) if others and is_valid[place] else 0.0
        spread = statistics.stdev(others) if len(others) > 1 else 0.0
        found.append(gap / (spread + 1e-6) if spread > 0 else gap)
    return found


@pytest.mark.parametrize(
    "rewards",
    [
        (1.0, 2.0, 3.0),
        (1.0, 0.0, 0.0, 0.0),  # the others of the first are all the same: it is not divided
        (0.3, 0.3, 0.3),
        (0.5, 2.0),  # one other: it has no spread
        (4.0,),
        (1.0, None, 3.0, 0.25, 3.0),
        (1.0, None, 2.0, None),
        (0.0, 1e-9, 1.0),
    ],
)
def test_nemo_rls_default(rewards):
    got = advantages(vector(*rewards), len(rewards), baseline="leave_one_out", scale="leave_one_out")
    known = [value is not None for value in rewards]
    expected = nemo_rl([value or 0.0 for value in rewards], known)
    torch.testing.assert_close(got, vector(*expected), **EXACT)


def test_nemo_rls_default_by_hand():
    got = advantages(vector(1, 2, 3), 3, baseline="leave_one_out", scale="leave_one_out")
    edge = 1.5 / (math.sqrt(0.5) + 1e-6)  # 2.121
    torch.testing.assert_close(got, vector(-edge, 0.0, edge), **EXACT)


def test_dtypes():
    rewards = vector(0.0, 1.0, 3.0, 0.5)
    for dtype, wide in ((torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        got = advantages(rewards.to(dtype), 2)
        assert got.dtype == wide
        torch.testing.assert_close(got, advantages(rewards, 2).to(wide))


def test_overlong_completions():
    lengths = torch.tensor([1, 80, 85, 90, 100, 130])
    assert soft_overlong_penalty(lengths, 100, 20).tolist() == [0, 0, -0.25, -0.5, -1, -1]
    with pytest.raises(ValueError, match="cache=0"):
        soft_overlong_penalty(lengths, 100, 0)
    kept = without_truncated(torch.ones(2, 3), torch.tensor([True, False]))
    assert kept.tolist() == [[False] * 3, [True] * 3]


def test_what_is_refused():
    rewards = vector(1, 2, 3)
    for arguments, message in (
        ({"groups": 2}, "groups of 2 do not divide 3 rewards"),
        ({"groups": [0, 1]}, "2 group ids for 3 rewards"),
        ({"groups": 3, "baseline": "mean"}, "baseline='mean' must be one of group, leave_one_out, batch, none"),
        ({"groups": 3, "scale": "std"}, "scale='std'"),
    ):
        with pytest.raises(ValueError, match=message):
            advantages(rewards, **arguments)
    with pytest.raises(ValueError, match="infinite"):
        advantages(vector(1, math.inf), 2)
    with pytest.raises(ValueError, match="1 weights"):
        decoupled_advantages(PARTS, [1.0], 4)
