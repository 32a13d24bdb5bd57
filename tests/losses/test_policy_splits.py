"""The policy losses of packed rows, of any split of a batch and of context-parallel ranks."""

import pytest
import torch
import torch.distributed as dist

from dtrain.losses.policy.formulas import Documents
from dtrain.losses.policy.options import LOSSES
from dtrain.losses.policy.terms import Counts, PolicySpec, means, policy_terms, top_entropy_threshold
from tests.losses.test_policy_loss import CLIP, EVERYTHING, EXACT, OWN, completions, gradients, loss_of, trained
from tests.world import run_world


def packed(streams, lengths, order, width):
    """The completions in one row of `width`, in this order, padding at the end, and their document ids."""
    row = {name: torch.full((1, width), torch.nan, dtype=torch.float64) for name in streams if name != "mask"}
    ids = torch.full((1, width), -1)
    mask = torch.zeros(1, width, dtype=torch.bool)
    place = 0
    for document, source in enumerate(order):
        span = slice(place, place + lengths[source] + 1)  # one place without a label, as a prompt has
        ids[0, span] = document
        for name in row:
            row[name][0, place + 1 : span.stop] = streams[name][source, : lengths[source]]
        mask[0, place + 1 : span.stop] = True
        place = span.stop
    return row | {"mask": mask}, ids


def core(spec, streams, sequences, counts, **options):
    named = {key: streams[key] for key in ("ref_logps", "sampling_logps", "entropies")}
    arguments = (streams[key] for key in ("logps", "old_logps", "advantages", "mask"))
    return policy_terms(spec, *arguments, sequences, counts, **named, **options)


@pytest.mark.trap(
    "a mean over tokens taken for each micro-batch",
    "allenai/open-instruct PR#1137",
    "a token of a short completion weighs more",
    "the counts are those of the whole batch, at any split",
)
@pytest.mark.parametrize("name", LOSSES)
def test_packed_rows_and_any_split_give_the_padded_batchs_numbers(name):
    lengths = (6, 3, 5, 1, 4, 2)
    options = EVERYTHING | OWN.get(name, {})
    options = dict(options) if name == "gmpo" else options | {"top_entropy_quantile": 0.6}
    streams = completions(lengths, seed=9)
    whole = trained(streams)
    loss, metrics = loss_of(name, whole, max_completion_length=7, **options)
    expected = gradients(loss, whole)
    threshold, count = top_entropy_threshold(streams["entropies"][streams["mask"]], 0.6)
    spec = PolicySpec(name, CLIP.get(name, (0.2, 0.28)), 0.05, options)
    counts = Counts(sum(lengths), len(lengths), 7, None if name == "gmpo" else count)

    total, sums = 0.0, {}
    got = [torch.zeros_like(one) for one in expected]
    for order in ((4, 0), (2, 5, 1), (), (3,)):
        row, ids = packed(streams, lengths, order, 16)
        row = trained(row)
        documents = Documents(ids, len(order), row["mask"])
        part, parts = core(spec, row, documents, counts, entropy_threshold=threshold)
        slopes = gradients(part, row)
        for target, slope in zip(got, slopes, strict=True):
            assert not slope[~row["mask"]].any()
            for document, source in enumerate(order):
                target[source, : lengths[source]] = slope[(ids == document) & row["mask"]]
        total = total + part.detach()
        sums = {key: sums.get(key, 0) + value for key, value in parts.items()}
    torch.testing.assert_close(total, loss.detach(), **EXACT)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, **EXACT)
    assert means(sums).keys() == metrics.keys()
    for key, value in means(sums).items():
        torch.testing.assert_close(value, metrics[key], **EXACT)


def _on_two_cp_ranks(rank, names):
    group = dist.group.WORLD
    lengths, order = (6, 3, 5), (1, 0, 2)
    streams = completions(lengths, seed=11)
    row, ids = packed(streams, lengths, order, 20)
    counts, found = Counts(14, 3, 7), {}
    for name in names:
        spec = PolicySpec(name, CLIP.get(name, (0.2, 0.28)), 0.05, EVERYTHING | OWN.get(name, {}))
        whole = trained(row)
        loss, metrics = core(spec, whole, Documents(ids, 3, whole["mask"]), counts)
        expected = gradients(loss, whole)
        mine = torch.cat([torch.arange(5 * rank, 5 * rank + 5), torch.arange(15 - 5 * rank, 20 - 5 * rank)])
        part = trained({key: value[:, mine] for key, value in row.items()})
        documents = Documents(ids[:, mine], 3, part["mask"], group)
        share, sums = core(spec, part, documents, counts)
        slopes = gradients(share, part)
        sums = torch.stack([share.detach(), *sums.values()])
        dist.all_reduce(sums)
        worst = (sums - torch.stack([loss.detach(), *metrics.values()])).abs().max()
        for slope, right in zip(slopes, expected, strict=True):
            worst = torch.maximum(worst, (slope - right[:, mine]).abs().max())
        found[name] = worst.item()
    return found


@pytest.mark.trap(
    "labels counted once for each rank of context parallel",
    "NVIDIA-NeMo/Automodel #2432",
    "the loss is cp times too small",
    "the ranks add up to the loss of the whole row",
)
def test_ranks_of_context_parallel_add_up_to_the_whole():
    """Head-tail halves of a packed row on two ranks: documents cut in two, each rank's loss its own tokens'."""
    for found in run_world(_on_two_cp_ranks, 2, list(LOSSES)):
        assert max(found.values()) < 1e-13, found
