"""Both ways to compute a block, against dense attention, and merging blocks into the whole."""

import pytest
import torch

from dtrain.attention.blocks import (
    BlockByBlock,
    CpuFlash,
    Partial,
    Products,
    blocks_for,
    merge_by_log_sum_exp,
)
from dtrain.attention.visibility import additive
from tests.attention.dense import attention, packed_rows, tensors, visible

WAYS = [CpuFlash(), Products()]


def by_blocks(blocks, q, k, v, grad, seen, scale, cuts):
    """Forward merged over runs of keys, then each run's gradients summed: (out, dq, dk, dv), heads in front."""
    q, k, v, grad = (x.transpose(1, 2).contiguous() for x in (q, k, v, grad))
    merged = None
    runs = [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    biases = [additive(seen[:, :, run], q.dtype)[:, None] for run in runs]
    for run, bias in zip(runs, biases, strict=True):
        part = blocks.forward(q, k[:, :, run], v[:, :, run], bias, scale)
        assert part[0].dtype == part[1].dtype == torch.promote_types(q.dtype, torch.float32)
        unseen = (bias == float("-inf")).all(-1).expand(part[1].shape)
        assert bool((part[1][unseen] == float("-inf")).all()) and bool((part[0][unseen] == 0).all())
        merged = part if merged is None else merge_by_log_sum_exp(merged, part)
    merged_in_dtype = Partial(merged.out.to(q.dtype), merged.lse)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for run, bias in zip(runs, biases, strict=True):
        of_q, of_k, of_v = blocks.backward(grad, q, k[:, :, run], v[:, :, run], merged_in_dtype, bias, scale)
        assert of_q.dtype == of_k.dtype == of_v.dtype == q.dtype
        grads[0] += of_q
        grads[1][:, :, run] += of_k
        grads[2][:, :, run] += of_v
    return [x.transpose(1, 2) for x in (merged.out, *grads)]


@pytest.mark.parametrize("blocks", WAYS, ids=lambda blocks: type(blocks).__name__)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("value_size", [8, 5, 12])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
def test_merged_blocks_are_the_whole(blocks, heads, kv_heads, window, value_size, dtype, rtol):
    q, k, v, grad = tensors(2, 24, heads, kv_heads, 8, dtype, value_size=value_size)
    seen, scale = visible(*packed_rows(2, 24), window), 0.3
    wide = [x.double().clone().requires_grad_() for x in (q, k, v)]
    expected = attention(*wide, seen, scale)
    expected.backward(grad.double())
    found = by_blocks(blocks, q, k, v, grad, seen, scale, [0, 7, 8, 20, 24])
    for mine, right in zip(found, [expected.detach(), *(x.grad for x in wide)], strict=True):
        assert (mine.double() - right).abs().max() <= rtol * right.abs().max()


def test_rows_without_a_key_merge_to_nothing():
    nothing = Partial(torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), float("-inf")))
    out, lse = merge_by_log_sum_exp(nothing, nothing)
    assert bool((out == 0).all()) and bool((lse == float("-inf")).all())
    some = Partial(torch.ones(1, 1, 2, 3), torch.zeros(1, 1, 2))
    for out, lse in (merge_by_log_sum_exp(nothing, some), merge_by_log_sum_exp(some, nothing)):
        assert torch.equal(out, some[0]) and torch.equal(lse, some[1])


def test_the_choice_by_device():
    assert isinstance(blocks_for(torch.device("cpu")), CpuFlash)
    assert isinstance(blocks_for(torch.device("cuda")), Products)


class OrderOfRing:
    """A ring of three ranks with equal keys, and attention over its blocks, that note what is called."""

    def __init__(self):
        self.calls = []

    def around(self, k, v):
        yield from ((k, v), (k, v), (k, v))

    def pass_on(self, message):
        self.calls.append("send")
        return self._Incoming(self, message)

    class _Incoming:
        def __init__(self, ring, message):
            self._ring, self._message = ring, message

        def wait(self):
            self._ring.calls.append("wait")
            return self._message

    def forward(self, q, k, v, step, so_far):
        return Partial(q.clone(), q.new_zeros(q.shape[:-1]))

    def backward(self, grad, q, k, v, merged, step, gradients):
        self.calls.append("block")
        gradients.k.add_(1)
        gradients.v.add_(2)

    def by_head(self, out):
        return out


def test_a_gradient_travels_while_the_next_block_is_computed():
    ring = OrderOfRing()
    q = torch.zeros(1, 1, 2, 4, dtype=torch.float64, requires_grad=True)
    k = torch.zeros(1, 1, 2, 4, dtype=torch.float64, requires_grad=True)
    v = torch.zeros(1, 1, 2, 3, dtype=torch.float64, requires_grad=True)
    BlockByBlock.apply(q, k, v, [0, 0, 0], ring, ring, None).sum().backward()
    assert ring.calls == ["block", "send", "block", "wait", "send", "block", "wait", "send", "wait"]
    assert bool((k.grad == 3).all()) and bool((v.grad == 6).all())
