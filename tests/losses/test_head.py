"""`logprobs_from_hidden_states` and the sequence-first faces against dense float64: values, gradients, what they leave
alone and what they may exchange."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from dtrain.losses import ChunkedDistributedHiddenStatesToLogprobs, from_parallel_hidden_states_to_logprobs
from dtrain.losses.head.logprobs import logprobs_from_hidden_states
from dtrain.losses.head.vocabulary import VocabShard
from dtrain.losses.head.weighted_sum import weighted_logprob_sum
from dtrain.parallel.collectives import all_reduce
from dtrain.parallel.context.batch import shard_sequence
from tests.losses import dense
from tests.world import run_world

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# batch, length, vocabulary, hidden size, tile, cut, temperature, softcap
CASES = [
    (2, 6, 24, 7, (3, 5), "chunk", 1.0, None),
    (3, 4, 13, 5, (100, 4), "random", 0.7, None),
    (2, 5, 5, 6, (4, 100), "chunk", 1.0, 3.0),
    (1, 1, 9, 3, None, "random", 1.6, 2.0),
]
DIFFERENTIABLE = ("logprobs", "entropy")


def problem(case, dtype, seed):
    batch, length, vocab, size, *_ = case
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, length, size, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, size, generator=generator, dtype=torch.float64).to(dtype)
    targets = dense.random_targets((batch, length), vocab, seed)
    return hidden, weight, targets


def reference(hidden, weight, targets, temperature, softcap):
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    valid = (targets >= 0) & (targets < len(weight))
    p = logits.softmax(-1)
    return {
        "logprobs": dense.logprob_at(logits, targets[..., None]).squeeze(-1),
        "entropy": torch.where(valid, -dense.neg_entropy(logits), 0),
        "log_p2": torch.where(valid, p.square().sum(-1).log(), 0),
    }


def reference_grads(hidden, weight, targets, temperature, softcap, upstreams):
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    values = reference(hidden, weight, targets, temperature, softcap)
    sum((values[name] * upstream.double()).sum() for name, upstream in upstreams.items()).backward()
    return values, hidden.grad, weight.grad


def check(rank, tp, case, dtype, seed):
    *_, tile, kind, temperature, softcap = case
    hidden, weight, targets = problem(case, dtype, seed)
    group = dense.everyone()
    start, end = dense.cut(len(weight), tp, rank, kind)
    shard = None if group is None else VocabShard(start, group)
    generator = torch.Generator().manual_seed(seed)
    upstreams = {name: torch.randn(targets.shape, generator=generator) for name in DIFFERENTIABLE}
    options = dict(temperature=temperature, softcap=softcap, shard=shard, tile=tile)
    failures = []

    def say(name, size, tolerance):
        if not size <= tolerance:
            failures.append(f"{name} {case} {dtype} tp={tp} rank={rank}: {size:.2e}")

    # What is asked for, and which of the two carries the loss.
    for asked, losses in (
        ({"entropy": True, "log_p2": True}, ("logprobs", "entropy")),
        ({}, ("logprobs",)),
        ({"entropy": True}, ("entropy",)),
    ):
        own_hidden = hidden.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        own_weight = weight[start:end].t().contiguous().t().requires_grad_()
        values = logprobs_from_hidden_states(own_hidden, own_weight, targets, **asked, **options)
        used = {name: upstreams[name] for name in losses}
        expected, hidden_grad, weight_grad = reference_grads(hidden, weight, targets, temperature, softcap, used)
        for name in ("logprobs", *asked):
            value = getattr(values, name)
            say(name, dense.error(value, expected[name]), dense.hidden_tolerance(dtype, gradient=False))
        sum((getattr(values, name) * upstream).sum() for name, upstream in used.items()).backward()
        tolerance = dense.hidden_tolerance(dtype, gradient=True)
        got = own_hidden.grad.double() if group is None else all_reduce(own_hidden.grad.double(), group)
        say(f"hidden grad {losses}", dense.error(got, hidden_grad), tolerance * (1 if group is None else tp))
        scale = weight_grad.abs().max()
        if end > start:
            size = ((own_weight.grad.double() - weight_grad[start:end]).abs().max() / scale).item()
            say(f"weight grad {losses}", size, tolerance)
        if own_hidden.grad.dtype != dtype or own_weight.grad.dtype != dtype:
            failures.append("gradient dtypes")
        if not torch.equal(own_hidden.detach(), hidden) or not torch.equal(own_weight.detach(), weight[start:end]):
            failures.append("inputs modified")
    if temperature == 1.0:
        failures += check_weighted(case, dtype, seed, start, end, shard, softcap)
    return failures


def check_weighted(case, dtype, seed, start, end, shard, softcap):
    """The sum with weights that are known before, on the same cuts."""
    hidden, weight, targets = problem(case, dtype, seed)
    index = ((targets >= 0) & (targets < len(weight))).flatten().nonzero().squeeze(1)
    weights = torch.randn(len(index), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    own_hidden, own_weight = hidden.clone().requires_grad_(), weight[start:end].clone().requires_grad_()
    total = weighted_logprob_sum(
        own_hidden.flatten(0, 1),
        own_weight,
        targets.flatten()[index],
        weights,
        index,
        softcap=softcap,
        shard=shard,
        rows_per_tile=3,
    )
    total.backward()
    upstream = torch.zeros(targets.numel(), dtype=torch.float64).index_copy(0, index, weights).view(targets.shape)
    expected, hidden_grad, weight_grad = reference_grads(hidden, weight, targets, 1.0, softcap, {"logprobs": upstream})
    got = own_hidden.grad.double() if shard is None else all_reduce(own_hidden.grad.double(), shard.group)
    tolerance = dense.hidden_tolerance(dtype, gradient=True) * (1 if shard is None else 4)
    sizes = [
        dense.error(total, (expected["logprobs"] * upstream).sum()) / dense.hidden_tolerance(dtype, gradient=False),
        dense.error(got, hidden_grad) / tolerance,
        ((own_weight.grad - weight_grad[start:end]).abs().max() / weight_grad.abs().max()).item() / tolerance
        if end > start
        else 0.0,
    ]
    return [f"weighted sum {case} {dtype}: {sizes}"] if max(sizes) > 1 else []


def check_faces(rank, tp, case, dtype, seed):
    """Sequence-first, the sequence cut over tp: hidden's gradient is complete."""
    *_, kind, _, _ = case
    hidden, weight, targets = problem((case[0], 4 * tp, *case[2:]), dtype, seed)
    hidden = hidden.transpose(0, 1).contiguous()  # [S, B, H]
    group = dense.everyone()
    start, end = dense.cut(len(weight), tp, rank, kind)
    mine = slice(rank * 4, (rank + 1) * 4)
    tolerance = dense.hidden_tolerance(dtype, gradient=True)
    failures = []
    for chunk in (None, 1, 3, 100):
        own_hidden, own_weight = (part.clone().requires_grad_() for part in (hidden[mine], weight[start:end]))
        value = ChunkedDistributedHiddenStatesToLogprobs.apply(
            own_hidden, targets, own_weight, start, end, chunk, group
        )
        upstream = torch.randn(targets.shape, generator=torch.Generator().manual_seed(seed))
        expected, hidden_grad, weight_grad = reference_grads(
            hidden, weight, targets.t(), 1.0, None, {"logprobs": upstream.t()}
        )
        (value * upstream).sum().backward()
        scale = hidden_grad.abs().max()
        errors = [
            dense.error(value, expected["logprobs"].t()) / dense.hidden_tolerance(dtype, gradient=False),
            ((own_hidden.grad - hidden_grad[mine]).abs().max() / scale).item() / tolerance / tp,
            dense.error(own_weight.grad, weight_grad[start:end]) / tolerance if end > start else 0.0,
        ]
        if max(errors) > 1:
            failures.append(f"face chunk={chunk} {case} {dtype} tp={tp} rank={rank}: {errors}")
        shifted = from_parallel_hidden_states_to_logprobs(
            own_hidden, own_weight, None, None, targets, start, end, group, True, None, chunk
        )
        following = torch.cat([targets[:, 1:], torch.full_like(targets[:, :1], -1)], 1)
        expected = reference(hidden.double(), weight.double(), following.t(), 1.0, None)["logprobs"].t()[:, :-1]
        if shifted.requires_grad or dense.error(shifted, expected) > dense.hidden_tolerance(dtype, gradient=False):
            failures.append(f"shifted {case} {dtype} tp={tp}")
    return failures


def failures_of_cases(rank, tp, cases):
    failures = []
    for seed, (case, dtype) in enumerate(cases):
        failures += check(rank, tp, case, dtype, seed) + check_faces(rank, tp, case, dtype, seed)
    return failures


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_hidden_states_to_logprobs_equal_dense_float64(tp):
    """Every case in float64 and in another dtype, which differs between the sizes."""
    cases = [(case, dtype) for n, case in enumerate(CASES) for dtype in (DTYPES[0], DTYPES[1 + (n + tp) % 3])]
    failures = run_world(failures_of_cases, tp, tp, cases, timeout=300)
    assert not any(failures), failures


def cp_faces(rank, tp, cp):
    """The shifted face on a (cp, tp) mesh against the whole."""
    mesh = dist.init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
    cp_group, tp_group = mesh.get_group("cp"), mesh.get_group("tp")
    length, case = 4 * cp * tp, (2, 4 * cp * tp, 11, 5)
    hidden, weight, targets = problem(case, torch.float64, 3)
    start, end = dense.cut(11, tp, tp_group.rank(), "chunk")
    mine = shard_sequence(hidden.transpose(0, 1), cp_group.rank(), cp, 0)
    mine = mine.chunk(tp, 0)[tp_group.rank()].clone().requires_grad_()
    value = from_parallel_hidden_states_to_logprobs(
        mine, None, weight[start:end], False, targets, start, end, tp_group, cp_group=cp_group
    )
    following = torch.cat([targets[:, 1:], torch.full_like(targets[:, :1], -1)], 1)
    upstream = torch.randn(2, length - 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    padded = torch.nn.functional.pad(upstream, (0, 1))
    expected, grad, _ = reference_grads(hidden, weight, following, 1.0, None, {"logprobs": padded})
    value.backward(upstream / cp)  # every cp rank owns a share of the loss
    grad = shard_sequence(grad.transpose(0, 1), cp_group.rank(), cp, 0).chunk(tp, 0)[tp_group.rank()]
    return dense.error(value, expected["logprobs"][:, :-1]), dense.error(mine.grad, grad)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_shifted_face_gathers_over_context_parallel(tp):
    for errors in run_world(cp_faces, tp * 2, tp, 2):
        assert max(errors) < 1e-12


def test_positions_without_a_target_cost_nothing_whatever_they_hold():
    hidden, weight, targets = problem(CASES[0], torch.float32, 0)
    targets[0, 2] = len(weight)
    hidden[targets < 0] = float("nan")
    hidden[targets >= len(weight)] = float("inf")
    for index in (None, ((targets >= 0) & (targets < len(weight))).flatten().nonzero().squeeze(1)):
        own_hidden, own_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        values = logprobs_from_hidden_states(own_hidden, own_weight, targets, entropy=True, index=index)
        (values.logprobs.sum() + values.entropy.sum()).backward()
        assert values.logprobs.isfinite().all() and values.entropy.isfinite().all()
        assert own_hidden.grad.isfinite().all() and own_weight.grad.isfinite().all()
        assert (own_hidden.grad[targets < 0] == 0).all() and own_weight.grad.abs().sum() > 0


def test_no_target_at_all_gives_zeros():
    hidden, weight, targets = problem(CASES[0], torch.float32, 0)
    hidden.requires_grad_(), weight.requires_grad_()
    values = logprobs_from_hidden_states(hidden, weight, torch.full_like(targets, -100), entropy=True, log_p2=True)
    (values.logprobs.sum() + values.entropy.sum()).backward()
    assert values.logprobs.abs().sum() == values.log_p2.abs().sum() == 0
    assert (hidden.grad == 0).all() and (weight.grad == 0).all()


def values_without_targets(rank):
    hidden, weight, targets = problem(CASES[0], torch.float32, 0)
    start, end = dense.cut(len(weight), 2, rank, "chunk")
    shard = VocabShard(start, dist.group.WORLD)
    hidden.requires_grad_()
    index = torch.zeros(0, dtype=torch.int64)
    values = logprobs_from_hidden_states(
        hidden, weight[start:end], torch.full_like(targets, -100), shard=shard, entropy=True, log_p2=True, index=index
    )
    total = weighted_logprob_sum(
        hidden.flatten(0, 1), weight[start:end], index, torch.zeros(0), index, shard=shard, rows_per_tile=2
    )
    (values.logprobs.sum() + values.entropy.sum() + total).backward()
    return values.logprobs.abs().sum().item(), values.log_p2.abs().sum().item(), hidden.grad.abs().sum().item()


def test_no_target_at_all_gives_zeros_over_ranks():
    assert run_world(values_without_targets, 2) == [(0, 0, 0)] * 2


def test_two_backwards_and_two_uses_sum_up():
    hidden, weight, targets = problem(CASES[0], torch.float64, 0)
    hidden.requires_grad_()
    values = logprobs_from_hidden_states(hidden, weight, targets, entropy=True)
    again = logprobs_from_hidden_states(hidden, weight, targets)
    loss = (values.logprobs * again.logprobs + values.entropy).sum()
    loss.backward(retain_graph=True)
    first = hidden.grad.clone()
    loss.backward()
    ones = torch.ones(targets.shape)
    expected = reference(hidden.detach(), weight, targets, 1.0, None)["logprobs"]
    _, grad, _ = reference_grads(hidden, weight, targets, 1.0, None, {"logprobs": 2 * expected, "entropy": ones})
    assert dense.error(first, grad) < 1e-12
    assert dense.error(hidden.grad, 2 * grad) < 1e-12


def test_no_grad_keeps_no_graph():
    hidden, weight, targets = problem(CASES[0], torch.float32, 0)
    weight.requires_grad_()
    with torch.no_grad():
        assert not logprobs_from_hidden_states(hidden, weight, targets).logprobs.requires_grad


def test_the_sum_of_logprobs_is_the_weighted_sum():
    hidden, weight, targets = problem(CASES[0], torch.float64, 0)
    index = ((targets >= 0) & (targets < len(weight))).flatten().nonzero().squeeze(1)
    total = weighted_logprob_sum(
        hidden.flatten(0, 1), weight, targets.flatten()[index], torch.ones(len(index)), index, softcap=2.0
    )
    logprobs = logprobs_from_hidden_states(hidden, weight, targets, softcap=2.0).logprobs
    assert abs(total - logprobs.sum()) < 1e-12 * abs(total)


def test_impossible_temperatures_are_refused():
    hidden, weight, targets = problem(CASES[0], torch.float32, 0)
    with pytest.raises(ValueError, match="temperature"):
        logprobs_from_hidden_states(hidden, weight, targets, temperature=0.0)


def count_collectives(rank, tp):
    hidden, weight, targets = problem((2, 6, 4 * tp, 5), torch.float32, 0)
    shard = VocabShard(rank * 4, dist.group.WORLD)
    weight = weight[rank * 4 : (rank + 1) * 4].clone().requires_grad_()
    with CommDebugMode() as forward:
        values = logprobs_from_hidden_states(hidden, weight, targets, shard=shard, tile=(2, 3), entropy=True)
    with CommDebugMode() as backward:
        (values.logprobs + values.entropy).sum().backward()
    index = (targets >= 0).flatten().nonzero().squeeze(1)[:5]
    with CommDebugMode() as weighted:
        chosen = targets.flatten()[index]
        total = weighted_logprob_sum(
            hidden.flatten(0, 1), weight, chosen, torch.ones(5), index, shard=shard, rows_per_tile=2
        )
        total.backward()
    return forward.get_total_counts(), backward.get_total_counts(), weighted.get_total_counts()


def test_collectives_are_one_forward_and_none_backward_whatever_the_tiles():
    for counts in run_world(count_collectives, 2, 2):
        assert counts == (1, 0, 3)  # the weighted sum: one per tile of tokens, forward and backward together
