"""The kernel against attention written out, over the whole of what a mask can say."""

import math
from dataclasses import replace

import pytest
import torch

from dtrain.attention.blocks import Gradients, MaskedBlocks, Products
from dtrain.attention.kernels import SdpaKernel, Span
from dtrain.attention.visibility import Visibility


def written_out(q, k, v, seen, scale, sinks=None):
    """softmax(q·kᵀ · scale over the keys seen, and the head's sink) · v, head by head. seen [B, Q, K] bool."""
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., : k.shape[1]], v)


def brute_force(visibility, rows):
    """[B, Q, K] from the sentence in kernels.py, one pair at a time."""

    def listed(stream, count):
        return (torch.arange(count)[None] if stream is None else stream).expand(rows, -1).tolist()

    queries, keys = visibility.queries, visibility.keys
    at, of = listed(visibility.query_positions, queries), listed(visibility.key_positions, keys)
    mine, theirs = visibility.query_documents, visibility.key_documents
    mine, theirs = (None, None) if mine is None else (mine.tolist(), theirs.tolist())
    reach = visibility.window or queries + keys

    def sees(b, i, j):
        return (mine is None or mine[b][i] == theirs[b][j]) and 0 <= at[b][i] - of[b][j] < reach

    return torch.tensor([[[sees(b, i, j) for j in range(keys)] for i in range(queries)] for b in range(rows)])


def packed(lengths, padding):
    documents = [torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)]
    return torch.cat([torch.arange(n) for n in (*lengths, padding)]), torch.cat(documents)


def visibilities():
    for length in (1, 5, 64, 65, 150):
        for window in (None, 1, 7, 64, 200):
            yield f"plain-{length}-{window}", Visibility(length, length, window)
    rows = [packed([40, 1, 60], 49), packed([150], 0), packed([3, 3, 90], 54)]
    positions, documents = (torch.stack(stream) for stream in zip(*rows, strict=True))
    for window in (None, 9):
        yield f"packed-{window}", Visibility(150, 150, window, positions, positions, documents, documents)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    shuffled, owners = positions[:, order], documents[:, order]
    yield "permuted", Visibility(150, 150, 9, positions, shuffled, documents, owners)  # a context-parallel layout
    for window in (None, 4):
        at = torch.tensor([[3], [20], [9]])
        yield f"decode-{window}", Visibility(1, 21, window, at, torch.arange(21)[None])


VISIBILITIES = dict(visibilities())


@pytest.fixture(scope="module", params=VISIBILITIES)
def case(request):
    visibility = VISIBILITIES[request.param]
    return visibility, brute_force(visibility, 3)


@pytest.mark.parametrize(("heads", "value_size"), [((4, 4), 8), ((4, 2), 8), ((3, 1), 8), ((4, 4), 6), ((4, 2), 11)])
def test_sdpa_is_attention_written_out(case, heads, value_size):
    visibility, seen = case
    generator = torch.Generator().manual_seed(0)

    def random(length, count, size=8):
        return torch.randn(3, length, count, size, dtype=torch.float64, generator=generator, requires_grad=True)

    q, k = random(visibility.queries, heads[0]), random(visibility.keys, heads[1])
    v = random(visibility.keys, heads[1], value_size)
    kernel = SdpaKernel()
    assert torch.equal(visibility.visible(slice(0, visibility.queries), q.device).expand_as(seen), seen)
    grad = torch.randn(*q.shape[:3], value_size, dtype=q.dtype, generator=generator)
    scores = torch.linspace(-2, 4, heads[0], dtype=q.dtype, requires_grad=True)
    for sinks in ((), (scores,)):
        out = kernel(q, k, v, kernel.prepare(visibility, q.dtype, q.device), 0.3, *sinks)
        ours = (out, *torch.autograd.grad(out, (q, k, v, *sinks), grad))
        expected = written_out(q, k, v, seen, 0.3, *sinks)
        expected = (expected, *torch.autograd.grad(expected, (q, k, v, *sinks), grad))
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_blocks_skip_what_no_query_sees():
    def work(visibility):
        blocks = SdpaKernel().prepare(visibility, torch.float32, torch.device("cpu"))
        return sum((b.queries.stop - b.queries.start) * (b.keys.stop - b.keys.start) for b in blocks)

    assert work(Visibility(512, 512)) == 64 * sum(range(64, 513, 64))  # 9/16 of the square
    assert work(Visibility(512, 512, window=32)) < 512 * 96
    positions, documents = (stream[None] for stream in packed([64] * 8, 0))
    assert work(Visibility(512, 512, None, positions, positions, documents, documents)) == 512 * 64


def test_one_call_on_a_gpu():
    """No host reads there: causal by flag, anything else one mask, as long as that is small."""
    blocks = SdpaKernel().prepare(Visibility(512, 512), torch.bfloat16, torch.device("meta"))
    assert len(blocks) == 1 and blocks[0].is_causal and blocks[0].bias is None
    blocks = SdpaKernel().prepare(Visibility(512, 512, window=32), torch.bfloat16, torch.device("meta"))
    assert len(blocks) == 1 and blocks[0].bias.shape == (1, 1, 512, 512) and blocks[0].bias.dtype == torch.bfloat16


@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("packed", [True, False])
def test_a_large_mask_on_a_gpu_is_made_in_parts(packed, window):
    """At 32k tokens each part's distances take 64 MiB, nothing is held, and plain rows leave out keys beyond reach."""
    stream = torch.empty(2, 2**15, dtype=torch.int64, device="meta")
    streams = (stream,) * 4 if packed else (None,) * 4
    visibility = Visibility(2**15, 2**15, window, *streams, rows=2)
    blocks = SdpaKernel().prepare(visibility, torch.float32, torch.device("meta"))
    if visibility.is_causal:
        assert len(blocks) == 1 and blocks[0].is_causal
        return
    assert all(block.bias is None and block.visibility is visibility and not block.is_causal for block in blocks)
    assert [block.queries.start for block in blocks[1:]] == [block.queries.stop for block in blocks[:-1]]
    assert blocks[0].queries.stop == 2**26 // (4 * 2**15 * (2 if packed else 1)) and blocks[-1].queries.stop == 2**15
    assert all(block.keys.start % 16 == 0 for block in blocks), "what the kernel reads of a mask is aligned"
    reach = max(block.keys.stop - block.keys.start for block in blocks)
    assert reach == 2**15 if packed else 0 <= reach - (blocks[0].queries.stop + window - 1) < 16


@pytest.mark.parametrize("name", ["packed-9", "plain-150-7", "permuted"])
def test_parts_of_a_mask_are_the_whole(name):
    """A mask made for 40 queries at a time, again in the backward: SDPA's, and the steps of a ring."""
    visibility = replace(VISIBILITIES[name], rows=3)
    runs = visibility.runs(1, 40)
    assert [run.stop for run in runs] == [40, 80, 120, 150]
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(3, 150, n, 8, generator=draw, dtype=torch.float64).requires_grad_() for n in (4, 2, 2, 4)
    )
    expected = written_out(q, k, v, brute_force(visibility, 3), 0.3)
    right = (expected.detach(), *torch.autograd.grad(expected, (q, k, v), grad))
    spans = [Span(run, visibility.reach(run), visibility=visibility) for run in runs]
    sunk = written_out(q, k, v, brute_force(visibility, 3), 0.3, sinks := torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(SdpaKernel()(q, k, v, spans, 0.3, sinks), sunk, rtol=1e-11, atol=1e-12)
    narrow = [one.detach().float().requires_grad_() for one in (q, k, v)]  # float64 goes another way
    out = SdpaKernel()(*narrow, spans, 0.3)
    for mine, theirs in zip((out, *torch.autograd.grad(out, narrow, grad.float())), right, strict=True):
        assert (mine.double() - theirs).abs().max() <= 3e-6 * theirs.abs().max()
    (span,) = SdpaKernel().prepare(visibility, torch.float64, torch.device("meta"))
    out = SdpaKernel()(q, k, v, [span], 0.3)
    found = (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))
    with torch.no_grad():
        way = MaskedBlocks(Products(), 0.3, max_bytes=40 * 3 * 4 * 150 * 8)
        q, k, v, grad = (one.transpose(1, 2) for one in (q, k, v, grad))
        assert len(list(way._parts(q, k, visibility))) == 4
        merged = way.forward(q, k, v, visibility, None)
        gradients = Gradients(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
        way.backward(grad, q, k, v, merged, visibility, gradients)
    of_ring = [one.transpose(1, 2) for one in (merged.out, *gradients)]
    for results in (found, of_ring):
        for mine, theirs in zip(results, right, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)
