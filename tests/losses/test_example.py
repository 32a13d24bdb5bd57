"""The example of losses/README.md and head/softmax.py, the gradient over a sharded vocabulary: two ranks compute it."""

from pathlib import Path

import torch
import torch.distributed as dist

import dtrain
from dtrain.losses.head.logprobs import logprobs_from_hidden_states
from dtrain.losses.head.softmax import RequestedStatistics, tile_statistics
from dtrain.losses.head.vocabulary import Stats, VocabShard, merge_over, on_shard
from dtrain.losses.head.weighted_sum import weighted_logprob_sum
from tests.world import run_world

PACKAGE = Path(dtrain.__file__).parent
HIDDEN = [[1.0, 2.0]]
WEIGHT = [[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]
TARGET = 2
FIRST_ID = (0, 2, 3)  # of rank 0, of rank 1, and the end


def on_a_rank(rank):
    """Return what this rank computes: its statistics, the merged ones, and the gradients of both ways of training."""
    hidden = torch.tensor(HIDDEN, dtype=torch.float64)
    rows = slice(FIRST_ID[rank], FIRST_ID[rank + 1])
    weight = torch.tensor(WEIGHT, dtype=torch.float64)[rows]
    shard = VocabShard(rows.start, dist.group.WORLD)
    target = torch.tensor([TARGET])
    columns, is_mine = on_shard(target[:, None], rows.start, len(weight))
    found = tile_statistics(hidden @ weight.t(), columns, is_mine, RequestedStatistics())
    merged = merge_over(Stats(*found.stats), len(weight), shard.group, found.at_ids.t())
    results = {
        "own": [*found.stats[:, 0].tolist(), found.at_ids.item()],
        "merged": [merged.stats.m.item(), merged.stats.l.item(), merged.extra.item()],
    }
    for name in ("formed", "computed again"):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        if name == "formed":
            loss = weighted_logprob_sum(*leaves, target, torch.ones(1), torch.tensor([0]), shard=shard)
        else:
            loss = logprobs_from_hidden_states(*leaves, target, shard=shard).logprobs.sum()
        loss.backward()
        results[name] = [loss.item(), leaves[1].grad.tolist(), leaves[0].grad[0].tolist()]
    return results


def rounded(numbers):
    return [f"{number:.3f}" for number in numbers]


def test_the_example_of_the_pages_is_what_two_ranks_compute():
    ranks = run_world(on_a_rank, 2)
    leaves = [torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in (HIDDEN, WEIGHT)]
    loss = (leaves[0] @ leaves[1].t()).log_softmax(-1)[0, TARGET]
    loss.backward()
    for name in ("formed", "computed again"):
        assert [one[name][0] for one in ranks] == [ranks[0][name][0]] * 2
        torch.testing.assert_close(torch.tensor(ranks[0][name][0], dtype=torch.float64), loss.detach())
        of_weight = [row for one in ranks for row in one[name][1]]
        of_hidden = [sum(parts) for parts in zip(*(one[name][2] for one in ranks), strict=True)]
        torch.testing.assert_close(torch.tensor(of_weight, dtype=torch.float64), leaves[1].grad)
        torch.testing.assert_close(torch.tensor([of_hidden], dtype=torch.float64), leaves[0].grad)

    assert [one["own"][0] for one in ranks] == [3, 2] and [one["own"][2] for one in ranks] == [0, 2]
    assert ranks[0]["merged"] == ranks[1]["merged"] and ranks[0]["merged"][0::2] == [3, 2]
    # In the example h is [1, 2], so the first column of the weight's gradient is dL/dz.
    of_logits = [row[0] for one in ranks for row in one["formed"][1]]
    p = [-of_logits[0], -of_logits[1], 1 - of_logits[2]]
    numbers = rounded([ranks[0]["own"][1], ranks[0]["merged"][1], loss.item(), *p, *of_logits])
    numbers += rounded([value for one in ranks for row in one["formed"][1] for value in row])
    numbers += rounded([value for one in ranks for value in one["formed"][2]])
    for page in ("losses/README.md", "losses/head/softmax.py"):
        text = (PACKAGE / page).read_text().replace("−", "-")
        missing = [number for number in numbers if number.replace("0.000", "0") not in text]
        assert not missing, (page, missing)
