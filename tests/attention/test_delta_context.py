"""Linear attention under context parallel: the same numbers as every document by itself, whatever ranks hold it."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.attention.linear import chunks as delta_chunks
from dtrain.attention.linear.flash import FlashDelta
from dtrain.attention.linear.layer import LinearMask, causal_conv, gated_delta
from dtrain.attention.packing import Packing
from dtrain.parallel.context.batch import join_sequence, shard_sequence
from tests.attention.fla import chunk_gated_delta_rule
from tests.attention.recurrence import Sizes, alone, heads, inputs, packed
from tests.cases import run_cases
from tests.world import run_world

SIZES = Sizes()


def _computed(rank, documents, leaves, up, extra=0, flash=None):
    """This rank's outputs and gradients; the weight's are one rank's part. flash: "packing" or "documents", by which
    flash-linear-attention knows where documents lie."""
    size, group = dist.get_world_size(), dist.group.WORLD
    x, weight, g, beta = (
        one.clone() if one.dim() == 2 else shard_sequence(one, rank, size).contiguous() for one in leaves
    )
    mine = [one.requires_grad_() for one in (x, weight, g, beta)]
    tokens = x.shape[1]
    ids = None if documents is None else shard_sequence(documents, rank, size)
    if extra:
        x, g, beta = (torch.nn.functional.pad(one, (0, 0, 0, extra), value=0.5) for one in (x, g, beta))
        ids = None if ids is None else torch.nn.functional.pad(ids, (0, extra), value=-1)
    packing = Packing.of(_positions(documents), documents) if flash == "packing" else None
    rule = None if flash is None else FlashDelta(chunk_gated_delta_rule)
    mask = LinearMask.of(ids, tokens, SIZES.width, group, rule, packing)
    out, state = gated_delta(*heads(causal_conv(x, weight, mask), SIZES), g, beta, mask)
    assert state is None
    out = out[:, :tokens]
    (out * shard_sequence(up, rank, size)).sum().backward()
    return [one.numpy() for one in (out.detach(), *(one.grad for one in mine))]


def _positions(documents):
    counts = [ids.unique_consecutive(return_counts=True)[1] for ids in documents]
    return torch.stack([torch.cat([torch.arange(int(count)) for count in row]) for row in counts])


def _on_ranks(size, *args):
    return _of_numpy(run_world(_computed, size, *args))


def _of_numpy(ranks):
    return [[torch.from_numpy(one) for one in of_rank] for of_rank in ranks]


CASES = {
    "across pieces": packed((5, 1, 2, 17, 23)),
    "single tokens": packed((1, 1, 1, 45)),
    "at the borders": packed((12, 12, 6, 18)),
    "padded": packed((20, 7), padding=21),
    "two rows": torch.cat([packed((48,)), packed((3, 30), padding=15)]),
    "short pieces": torch.cat([packed((8,)), packed((1, 2, 4), padding=1)]),
    "longer than a chunk": packed((130, 1, 150, 71), padding=48),
}


@pytest.mark.trap(
    "linear attention under context parallel takes a row for one document",
    "PrimeIntellect-ai/prime-rl PR#3003",
    "states cross borders, and convolutions end at the ranks",
    "each document alone, wherever ranks cut it",
)
@pytest.mark.parametrize(("size", "rules"), [(2, (None, "packing", "documents")), (4, (None, "packing"))])
def test_ranks_compute_what_each_document_gives(size, rules):
    given, cases = {}, {}
    for case, documents in CASES.items():
        leaves = inputs(*documents.shape, SIZES)
        up = torch.randn(*documents.shape, SIZES.value_heads, SIZES.value, dtype=torch.float64)
        extra = 3 if case == "two rows" else 0  # what sequence parallel pads
        given[case] = leaves, up
        cases |= {f"{case}, {flash}": (documents, leaves, up, extra, flash) for flash in rules}
    found = run_cases(_computed, size, cases)
    for case, (leaves, up) in given.items():
        for flash in rules:
            _assert_computed(_of_numpy(found[f"{case}, {flash}"]), CASES[case], [one.clone() for one in leaves], up)


def _assert_computed(found, documents, leaves, up):
    real = (documents >= 0)[..., None, None]
    for one in leaves:
        one.requires_grad_()
    expected, _ = alone(*leaves, documents, SIZES)
    (expected * up * real).sum().backward()
    outputs, of_x, of_weight, of_g, of_beta = zip(*found, strict=True)
    torch.testing.assert_close(join_sequence(outputs), expected.detach(), rtol=0, atol=1e-12)
    for parts, leaf in zip((of_x, of_g, of_beta), (leaves[0], *leaves[2:]), strict=True):
        torch.testing.assert_close(join_sequence(parts), leaf.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(of_weight), leaves[1].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("flash", [None, "documents"])
def test_ranks_compute_whole_rows_without_documents(flash):
    leaves = inputs(2, 24, SIZES)
    up = torch.randn(2, 24, SIZES.value_heads, SIZES.value, dtype=torch.float64)
    found = _on_ranks(2, None, leaves, up, 0, flash)
    expected, _ = alone(*leaves, torch.zeros(2, 24, dtype=torch.int64), SIZES)
    torch.testing.assert_close(join_sequence([one[0] for one in found]), expected, rtol=0, atol=1e-12)


def test_what_is_computed_again_after_the_exchange_is_the_same(monkeypatch):
    documents = CASES["longer than a chunk"]
    leaves = inputs(*documents.shape, SIZES)
    up = torch.randn(*documents.shape, SIZES.value_heads, SIZES.value, dtype=torch.float64)
    held = _on_ranks(2, documents, leaves, up)
    monkeypatch.setattr(delta_chunks, "MAX_ELEMENTS", 1)
    monkeypatch.setattr(delta_chunks, "CACHE_ELEMENTS", 1)
    for one, other in zip(held, _on_ranks(2, documents, leaves, up), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


class _Sent(TorchDispatchMode):
    """(collective, bytes of this rank's input) in order."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "_c10d_functional" and "wait" not in func.name():
            self.calls.append((func.name().split("::")[1], args[0].nbytes))
        return func(*args, **(kwargs or {}))


def _sent(rank, length):
    documents = packed((length // 3, length - length // 3))
    with _Sent() as sent:
        _computed(rank, documents, inputs(1, length, SIZES), torch.ones(1, length, SIZES.value_heads, SIZES.value))
    return sent.calls


def test_what_ranks_send_does_not_grow_with_the_row():
    """maxtext #4932, where each rank got the whole sequence."""
    short, long = (run_world(_sent, 2, length) for length in (512, 4096))
    assert short == long
    pieces, value, (_, heads_, key, size, width) = 2, 8, SIZES
    ends = pieces * (width - 1) * SIZES.channels * value
    assert short[0] == [
        ("all_gather_into_tensor", pieces * (width - 1) * 8),  # ids, once per forward
        ("all_gather_into_tensor", ends),
        ("all_gather_into_tensor", pieces * heads_ * key * (key + size) * value),
        ("all_gather_into_tensor", pieces * heads_ * key * size * value),
        ("reduce_scatter_tensor", ends * 2),
    ]
