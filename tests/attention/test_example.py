"""The example of attention/README.md and the calls in packing.py: two ranks compute the numbers that they show."""

import math
import re
from fractions import Fraction
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

import dtrain
from dtrain.attention import packing
from dtrain.attention.blocks import Partial, Products, merge_by_log_sum_exp
from dtrain.attention.context import GatherKernel, RingKernel
from dtrain.attention.kernels import SdpaKernel
from dtrain.attention.linear.chunks import chunked
from dtrain.attention.packing import Packing
from dtrain.attention.visibility import MaskStreams, Visibility, additive
from dtrain.parallel.context.batch import shard_sequence
from tests.world import run_world

README = Path(dtrain.__file__).parent / "attention" / "README.md"
LENGTH = 8
TOKENS = ([0, 1, 6, 7], [2, 3, 4, 5])  # of each rank
LOSS_OF = (6, 5)  # the query of each rank whose output is in the loss


def example():
    """Return q, k and v [1, 8, 1, 2 or 1]."""
    tokens = torch.arange(LENGTH, dtype=torch.float64)
    zeros, ones = torch.zeros(LENGTH, dtype=torch.float64), torch.ones(LENGTH, dtype=torch.float64)
    return [
        part.view(1, LENGTH, 1, -1) for part in (torch.stack([zeros, ones], 1), torch.stack([tokens, zeros], 1), tokens)
    ]


def on_a_rank(rank, kernel_type):
    """Return the tokens of this rank, the output of its query in the loss, and the gradients of q, k and v."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))["cp"]
    kernel = kernel_type(SdpaKernel(), mesh)
    positions = shard_sequence(torch.arange(LENGTH)[None], rank, 2)
    q, k, v = [shard_sequence(part, rank, 2).requires_grad_() for part in example()]
    keys = kernel.keys(MaskStreams(positions)).positions
    seen = Visibility(4, LENGTH, None, positions, keys)
    out = kernel(q, k, v, kernel.prepare(seen, torch.float64, torch.device("cpu")), 1.0)
    tokens = positions[0].tolist()
    loss = out[0, tokens.index(LOSS_OF[rank]), 0, 0]
    loss.backward()
    return tokens, loss.item(), *(part.grad[0, :, 0].tolist() for part in (q, k, v))


def dense():
    """Return the outputs and the gradients by plain autograd, over the full row."""
    q, k, v = [part[0, :, 0].requires_grad_() for part in example()]
    scores = (q @ k.T).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf)
    out = scores.softmax(-1) @ v
    (out[6] + out[5]).sum().backward()
    return out.detach()[:, 0], q.grad, k.grad, v.grad


def test_two_ranks_compute_the_example():
    out, *right = dense()
    torch.testing.assert_close(out[[6, 5]], torch.tensor([3, 2.5], dtype=torch.float64))
    for kernel in (GatherKernel, RingKernel):
        ranks = run_world(on_a_rank, 2, kernel)
        for rank, (tokens, loss, *grads) in enumerate(ranks):
            assert tokens == TOKENS[rank] and abs(loss - out[LOSS_OF[rank]].item()) < 1e-12
            for found, whole in zip(grads, right, strict=True):
                torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), whole[tokens])
    # The numbers of the page: gradients of the values, and the query's gradient 4.
    expected = [Fraction(1, 7) + Fraction(1, 6)] * 6 + [Fraction(1, 7), Fraction(0)]
    torch.testing.assert_close(right[2][:, 0], torch.tensor([float(x) for x in expected], dtype=torch.float64))
    assert abs(right[0][6, 0].item() - 4) < 1e-12
    text = README.read_text()
    for shown in ("13/42 13/42 1/7 0", "16/7", "12/7", "28/7 = 4"):
        assert shown in text


def test_the_blocks_of_query_6():
    """Step 0 over keys 0 1 6, step 1 over 2 3 4 5, and their gradients, computed block by block."""
    q, k, v = [part.transpose(1, 2) for part in example()]  # [1, 1, 8, 2 or 1]
    query, grad, products = q[:, :, 6:7], torch.ones(1, 1, 1, 1, dtype=torch.float64), Products()
    steps = [[0, 1, 6], [2, 3, 4, 5]]
    bias = [additive(torch.ones(1, 1, 1, len(step), dtype=torch.bool), torch.float64) for step in steps]
    parts = [products.forward(query, k[:, :, s], v[:, :, s], b, 1.0) for s, b in zip(steps, bias, strict=True)]
    outs, lses = [part.out.item() for part in parts], [part.lse.item() for part in parts]
    merged = merge_by_log_sum_exp(*parts)
    close = dict(rel_tol=1e-12)
    assert math.isclose(outs[0], 7 / 3, **close) and math.isclose(outs[1], 7 / 2, **close)
    assert math.isclose(lses[0], math.log(3), **close) and math.isclose(lses[1], math.log(4), **close)
    assert math.isclose(merged.out.item(), 3, **close) and math.isclose(merged.lse.item(), math.log(7), **close)
    q_grads = []
    for step, mask in zip(steps, bias, strict=True):
        q_grad, k_grad, v_grad = products.backward(
            grad, query, k[:, :, step], v[:, :, step], Partial(merged.out, merged.lse), mask, 1.0
        )
        q_grads.append(q_grad[0, 0, 0, 0].item())
        assert all(math.isclose(value, 1 / 7, **close) for value in v_grad.flatten().tolist())
        expected = [(token - 3) / 7 for token in step]
        torch.testing.assert_close(k_grad[0, 0, :, 1], torch.tensor(expected, dtype=torch.float64))
    assert math.isclose(q_grads[0], 16 / 7, **close) and math.isclose(q_grads[1], 12 / 7, **close)


def test_the_example_of_blocks():
    """Scores 0 and ln 3 with values 1 and 5, and ln 4 with value 8, as in the docstring of `blocks`."""
    products = Products()
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    blocks = [([0.0, math.log(3)], [1.0, 5.0]), ([math.log(4)], [8.0])]
    inputs = []
    for scores, values in blocks:
        k, v = (torch.tensor(numbers, dtype=torch.float64).view(1, 1, -1, 1) for numbers in (scores, values))
        inputs.append((k, v, torch.zeros(1, 1, 1, len(scores), dtype=torch.float64)))
    parts = [products.forward(one, *block, 1.0) for block in inputs]
    merged = merge_by_log_sum_exp(*parts)
    assert [round(part.out.item(), 12) for part in (*parts, merged)] == [4, 8, 6]
    found = []
    for block in inputs:
        k, v, bias = block
        _, k_grad, v_grad = products.backward(one, one, k, v, merged, bias, 1.0)
        found += zip(k_grad.flatten().tolist(), v_grad.flatten().tolist(), strict=True)
    expected = [(-5 / 8, 1 / 8), (-3 / 8, 3 / 8), (1, 4 / 8)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))


def shown_calls(name):
    """Return the lengths and windows of the lines below a name in the docstring of `packing`."""
    lines = packing.__doc__.split(f"`{name}`")[1].split("\n\n")[0].splitlines()
    return [
        (re.search(r"lengths? (.*?) +\(", line)[1], re.search(r"\((-?\d), (-?\d)\)$", line).groups()) for line in lines
    ]


def as_shown(call):
    over = [f"{q} over {k}" for q, k in zip(call.query_lengths, call.key_lengths, strict=True)]
    if len(over) > 1 and call.query_lengths == call.key_lengths:
        counts = " ".join(map(str, call.query_lengths))
        over = [f"{counts} over {counts}"]
    return ", ".join(over), tuple(map(str, call.window))


def test_the_calls_of_the_packing_example():
    packed = Packing(((0, 5),), LENGTH)
    assert [as_shown(call) for call in packed.over_gathered(None, 1, 2)] == shown_calls("over_gathered")
    steps = packed.in_ring(None, 1, 2)
    assert [len(step) for step in steps] == [2, 2]
    assert [as_shown(call) for step in steps for call in step] == shown_calls("in_ring")
    own, between = steps[0]
    assert own.queries == [slice(0, 4)] and between.queries == [slice(2, 3)] and between.keys == [slice(0, 2)]


def test_the_example_of_the_chunked_rule():
    """Two tokens with k = q = 1, β = 1/2, v = 4 and 2, decays 1 and 1/2, from the state 2, as in `linear.chunks`."""
    ones = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    v = torch.tensor([4.0, 2.0], dtype=torch.float64).view(1, 2, 1, 1)
    g = torch.tensor([1.0, 0.5], dtype=torch.float64).log().view(1, 2, 1)
    state = torch.full((1, 1, 1, 1), 2.0, dtype=torch.float64)
    out, last = chunked(ones, ones, v, g, torch.full_like(g, 0.5), state=state)
    # The norm of k is that of transformers, sqrt(1 + 1e-6).
    assert [round(value, 4) for value in (*out.flatten().tolist(), last.item())] == [3, 1.75, 1.75]
