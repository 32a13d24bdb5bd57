"""Functions of logits over a cut vocabulary against dense float64, values and gradients, on every kind of cut."""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from dtrain.losses import (
    ChunkedDistributedEntropy,
    ChunkedDistributedGatherLogprob,
    ChunkedDistributedLogprob,
    DistributedCrossEntropy,
    DistributedLogprob,
    _compute_distributed_log_softmax,
    _compute_distributed_softmax,
    distributed_vocab_topk,
    gather_logits_at_global_indices,
    vocab_parallel_argmax,
    vocab_parallel_gather_columns,
    vocab_parallel_log_softmax,
)
from tests.losses import dense
from tests.world import run_world

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CASES = [
    # batch, length, vocabulary, chunk, cut, holes
    (2, 5, 12, 2, "chunk", False),
    (3, 1, 13, 4, "chunk", True),
    (1, 9, 5, 4, "chunk", False),
    (2, 7, 21, 100, "random", True),
    (2, 6, 33, 1, "random", False),
    (1, 1, 4, 1, "chunk", True),
]


def upstream_like(value, seed, kind):
    """An incoming gradient [B, S, ..]: plain, expanded from one number, or with strides out of order."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "expanded":
        return torch.full((1,), 1.7, dtype=value.dtype).expand(value.shape)
    plain = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)
    return plain if kind == "plain" else plain.transpose(0, 1).contiguous().transpose(0, 1)


class Check:
    """Compares, and remembers what was wrong with which case."""

    def __init__(self, rank, tp, case, dtype, seed):
        self.batch, self.length, self.vocab, self.chunk, kind, holes = case
        self.rank, self.tp, self.dtype, self.case = rank, tp, dtype, case
        self.start, self.end = dense.cut(self.vocab, tp, rank, kind)
        self.kind, self.seed, self.failures = kind, seed, []
        self.group = dense.everyone()
        self.full = dense.random_logits((self.batch, self.length, self.vocab), dtype, seed, holes)
        self.upstreams = ("plain", "expanded", "strided")

    def shard(self, contiguous=True):
        part = self.full[..., self.start : self.end]
        part = part.clone() if contiguous else part.transpose(0, 1).contiguous().transpose(0, 1)
        return part.detach().requires_grad_()

    def say(self, name, size, tolerance):
        if not size <= tolerance:
            self.failures.append(f"{name} {self.case} {self.dtype} tp={self.tp} rank={self.rank}: {size:.2e}")

    def values(self, name, value, expected):
        if value.dtype != torch.promote_types(self.dtype, torch.float32):
            self.failures.append(f"{name}: {value.dtype}")
        self.say(name, dense.error(value, expected), dense.logits_tolerance(self.dtype, gradient=False))

    def gradient(self, name, grad, expected, whole):
        """The largest error over the largest magnitude of the whole gradient."""
        scale = whole.abs().max().item() or 1.0
        size = (grad.double() - expected).abs().max().item() / scale if grad.numel() else 0.0
        self.say(f"grad of {name}", size, dense.logits_tolerance(self.dtype, gradient=True))
        if grad.dtype != self.dtype or grad.shape != expected.shape:
            self.failures.append(f"grad of {name}: {grad.dtype} {tuple(grad.shape)}")

    def function(self, name, distributed, reference):
        """distributed(shard) against reference(whole logits), value and gradient, under odd strides and upstreams."""
        for round_, kind in enumerate(self.upstreams):
            logits = self.shard(contiguous=round_ != 1)
            before = logits.detach().clone()
            value = distributed(logits)
            upstream = upstream_like(value, self.seed, kind)
            untouched = upstream.clone()
            expected, whole = dense.grad_of(reference, self.full, upstream=upstream)
            self.values(name, value, expected)
            value.backward(upstream)
            self.gradient(name, logits.grad, whole[..., self.start : self.end], whole)
            if not torch.equal(logits.detach(), before) or not torch.equal(upstream, untouched):
                self.failures.append(f"{name} modified its input")
        # Twice in one graph, and the sum of both gradients.
        logits = self.shard()
        (distributed(logits) * upstream + distributed(logits) * upstream).sum().backward()
        self.gradient(f"{name} twice", logits.grad, 2 * whole[..., self.start : self.end], 2 * whole)


def check_logprobs(rank, tp, case, dtype, seed):
    check = Check(rank, tp, case, dtype, seed)
    bounds = (check.start, check.end)
    targets = dense.random_targets((check.batch, check.length), check.vocab, seed)
    ids = dense.random_targets((check.batch, check.length, 4), check.vocab, seed + 5)
    for name, group_last in (("DistributedLogprob", False), ("ChunkedDistributedLogprob", True)):

        def logprob(logits, inference_only=False, chunked=group_last):
            if chunked:
                return ChunkedDistributedLogprob.apply(
                    logits, targets, *bounds, check.chunk, check.group, inference_only
                )
            return DistributedLogprob.apply(logits, targets, *bounds, check.group, inference_only)

        check.function(name, logprob, lambda full: dense.logprob_at(full, targets[..., None]).squeeze(-1))
        value = logprob(check.shard(), inference_only=True)
        if value.requires_grad:
            check.failures.append(f"{name}: inference_only keeps a graph")
    check.function(
        "ChunkedDistributedGatherLogprob",
        lambda logits: ChunkedDistributedGatherLogprob.apply(logits, ids, *bounds, check.chunk, check.group, False),
        lambda full: dense.logprob_at(full, ids),
    )
    return check.failures


def check_distributions(rank, tp, case, dtype, seed):
    check = Check(rank, tp, case, dtype, seed)
    check.function(
        "ChunkedDistributedEntropy",
        lambda logits: ChunkedDistributedEntropy.apply(logits, check.chunk, check.group),
        dense.neg_entropy,
    )
    teacher = dense.random_logits(check.full.shape, dtype, seed + 9)
    if case[-1]:  # the teacher is zero wherever the student is, so that the cross entropy stays finite
        teacher = teacher.masked_fill(check.full == -float("inf"), -float("inf"))
    part = teacher[..., check.start : check.end].contiguous()

    def cross_entropy(full):
        p, logq = teacher.double().softmax(-1), full.log_softmax(-1)
        return -(p * logq.masked_fill(p == 0, 0)).sum(-1)

    check.function(
        "DistributedCrossEntropy",
        lambda logits: DistributedCrossEntropy.apply(logits, part, check.group),
        cross_entropy,
    )
    whole = check.full.double().log_softmax(-1)
    mine = whole[..., check.start : check.end]
    check.values("_compute_distributed_log_softmax", _compute_distributed_log_softmax(check.shard(), check.group), mine)
    check.values("_compute_distributed_softmax", _compute_distributed_softmax(check.shard(), check.group), mine.exp())
    # The upstream of a cut result is cut too: a function of each rank's own columns.
    weights = torch.randn(check.full.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights = weights.masked_fill(whole == -float("inf"), 0)
    logits = check.shard()
    value = vocab_parallel_log_softmax(logits, 1.3, tp_group=check.group)
    expected, grad = dense.grad_of(lambda full: (full / 1.3).log_softmax(-1), check.full, upstream=weights)
    check.values("vocab_parallel_log_softmax", value, expected[..., check.start : check.end])
    value.backward(weights[..., check.start : check.end].to(value.dtype))
    check.gradient("vocab_parallel_log_softmax", logits.grad, grad[..., check.start : check.end], grad)
    return check.failures


def check_topk(rank, tp, case, dtype, seed):
    check = Check(rank, tp, case, dtype, seed)
    bounds = dict(vocab_start_index=check.start, vocab_end_index=check.end)
    coarse = check.full.round()  # full of equal logits
    for full in (check.full, coarse):
        part = full[..., check.start : check.end]
        expected, expected_ids = full.double().sort(dim=-1, descending=True, stable=True)
        for k in {1, 3, check.vocab - 1, check.vocab, check.vocab + 3} - {0}:
            values, ids = distributed_vocab_topk(part, k, check.group, chunk_size=check.chunk, **bounds)
            kept = min(k, check.vocab)
            check.values(f"topk {k}", values, expected[..., :kept])
            if not torch.equal(ids, expected_ids[..., :kept]):
                check.failures.append(f"topk {k} ids {case} {dtype} tp={tp}: {ids} for {expected_ids[..., :kept]}")
        if check.kind == "chunk" and not torch.equal(
            vocab_parallel_argmax(part, tp_group=check.group), full.argmax(-1)
        ):
            check.failures.append(f"argmax {case} {dtype}")
    ids = dense.random_targets((check.batch, check.length, 3), check.vocab, seed)
    valid = (ids >= 0) & (ids < check.vocab)
    check.function(
        "gather_logits_at_global_indices",
        lambda logits: gather_logits_at_global_indices(logits, ids, check.group, chunk_size=check.chunk, **bounds),
        lambda full: torch.where(valid, full.gather(-1, torch.where(valid, ids, 0)), 0),
    )
    if check.kind == "chunk":
        columns = torch.tensor([check.vocab - 1, 0])
        check.function(
            "vocab_parallel_gather_columns",
            lambda logits: vocab_parallel_gather_columns(logits, columns, tp_group=check.group),
            lambda full: full[..., columns],
        )
    return check.failures


def failures_of_cases(rank, checks, tp, cases):
    torch.manual_seed(rank)
    return [line for check in checks for case, dtype, seed in cases for line in check(rank, tp, case, dtype, seed)]


def chosen(tp):
    """Every case in float64 and in another dtype, which differs between the sizes."""
    return [
        (case, dtype, seed)
        for seed, case in enumerate(CASES)
        for dtype in (DTYPES[0], DTYPES[1 + (seed + SIZES.index(tp)) % 3])
    ]


SIZES = (1, 3, 4)  # as many as dtypes beside float64
CHECKS = (check_logprobs, check_distributions, check_topk)


@pytest.mark.parametrize("tp", SIZES)
def test_functions_of_logits_equal_dense_float64(tp):
    failures = run_world(failures_of_cases, tp, CHECKS, tp, chosen(tp), timeout=300)
    assert not any(failures), failures


def test_bounds_that_do_not_fit_are_refused():
    logits = torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="8 columns"):
        DistributedLogprob.apply(logits, torch.zeros(1, 2, dtype=torch.int64), 0, 7, None)


def test_a_masked_position_gives_zero_whatever_it_holds():
    logits = torch.randn(1, 3, 8)
    logits[0, 1] = float("nan")
    logits[0, 2] = -float("inf")
    logits.requires_grad_()
    targets = torch.tensor([[3, -100, -100]])
    value = DistributedLogprob.apply(logits, targets, 0, 8, None)
    value.sum().backward()
    assert value[0, 1:].tolist() == [0.0, 0.0]
    assert (logits.grad[0, 1:] == 0).all() and logits.grad[0, 0].abs().sum() > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("is_student", [True, False])
def test_a_cross_entropy_of_what_is_no_number_is_none(value, is_student):
    logits = [torch.randn(1, 2, 7), torch.randn(1, 2, 7)]
    logits[0 if is_student else 1][0, 0, 2] = value
    found = DistributedCrossEntropy.apply(*logits, None)
    assert found[0, 0].isnan() and found[0, 1].isfinite()


def test_large_offsets_keep_their_digits():
    logits = (torch.randn(2, 5, 40) + 20000).requires_grad_()
    targets = torch.randint(0, 40, (2, 5))
    value = DistributedLogprob.apply(logits, targets, 0, 40, None)
    value.sum().backward()
    expected, grad = dense.grad_of(
        lambda full: dense.logprob_at(full, targets[..., None]).squeeze(-1), logits, upstream=torch.ones(2, 5)
    )
    assert dense.error(value, expected) < 5e-6
    assert dense.error(logits.grad, grad) < 5e-6


def count_collectives(rank, tp):
    logits, targets = torch.randn(2, 6, 8, requires_grad=True), torch.zeros(2, 6, dtype=torch.int64)
    start, group = rank * 8, dense.everyone()
    ids = targets[..., None].expand(2, 6, 3)
    counts = {}
    for name, function in {
        "logprob": lambda: DistributedLogprob.apply(logits, targets, start, start + 8, group),
        "chunked": lambda: ChunkedDistributedLogprob.apply(logits, targets, start, start + 8, 1, group),
        "gather": lambda: ChunkedDistributedGatherLogprob.apply(logits, ids, start, start + 8, 1, group),
        "entropy": lambda: ChunkedDistributedEntropy.apply(logits, 1, group),
        "cross entropy": lambda: DistributedCrossEntropy.apply(logits, logits.detach(), group),
        "log softmax": lambda: vocab_parallel_log_softmax(logits, 1.0, tp_group=group),
    }.items():
        with CommDebugMode() as forward:
            value = function()
        with CommDebugMode() as backward:
            value.sum().backward()
        counts[name] = (forward.get_total_counts(), backward.get_total_counts())
    return counts


def test_collectives_do_not_grow_with_the_chunks():
    expected = {name: (1, 0) for name in ("logprob", "chunked", "entropy", "cross entropy")}
    expected |= {"gather": (2, 0), "log softmax": (1, 1)}
    for counts in run_world(count_collectives, 2, 2):
        assert counts == expected
