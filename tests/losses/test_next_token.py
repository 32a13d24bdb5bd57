"""Next-token log-probabilities in every layout (groups, DTensor, plain, packed; tp and cp) against dense float64."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dtrain.losses import (
    TrainingSamplingParams,
    allgather_cp_sharded_tensor,
    cp_shift_next,
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
    gather_logits_at_global_indices,
    get_distillation_topk_logprobs_from_logits,
    get_logprobs_from_vocab_parallel_logits,
    get_next_token_logprobs_from_logits,
    group_all_reduce_sum,
    group_all_reduce_sum_with_grad,
)
from dtrain.parallel.context.batch import shard_sequence
from tests.losses import dense
from tests.losses.test_sampling import expected_logprobs
from tests.world import run_world

BATCH, VOCAB = 3, 13
SAMPLING = TrainingSamplingParams(top_k=5, top_p=0.9)


def mesh_of(tp, cp):
    mesh = dist.init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
    return mesh, mesh.get_group("tp"), mesh.get_group("cp")


def problem(length, vocab=VOCAB):
    ids = dense.random_targets((BATCH, length), vocab, 2)
    return dense.random_logits((BATCH, length, vocab), torch.float64, 2), ids


def shifted(full, ids, sampling=None):
    """Dense [B, S − 1]."""
    if sampling is not None:
        return expected_logprobs(full[:, :-1], ids[:, 1:], sampling.top_k, sampling.top_p)
    return dense.logprob_at(full[:, :-1], ids[:, 1:, None]).squeeze(-1)


def dense_grad(full, ids, upstream, sampling=None):
    full = full.clone().requires_grad_()
    expected = shifted(full, ids, sampling)
    torch.where(expected.detach() > -float("inf"), expected, 0).backward(upstream)
    return expected.detach(), full.grad


def by_groups(rank, tp, cp):
    _, tp_group, cp_group = mesh_of(tp, cp)
    full, ids = problem(8 * cp)
    short = ids[:, :-3]  # padded inside
    start, end = dense.cut(VOCAB, tp, tp_group.rank(), "chunk")
    errors = []
    for targets in (ids, short):
        upstream = torch.randn(BATCH, targets.shape[1] - 1, generator=torch.Generator().manual_seed(1)).double()
        for chunk in (None, 3, 100):
            for sampling in (None, SAMPLING):
                expected, grad = dense_grad(full[:, : targets.shape[1]], targets, upstream, sampling)
                grad = torch.nn.functional.pad(grad, (0, 0, 0, full.shape[1] - targets.shape[1]))
                grad = shard_sequence(grad, cp_group.rank(), cp)[..., start:end]
                local = shard_sequence(full, cp_group.rank(), cp)[..., start:end].clone()
                one, two = local.clone().requires_grad_(), local.clone().requires_grad_()
                value = from_parallel_logits_to_logprobs(
                    one, targets, start, end, tp_group, False, cp_group, chunk, sampling
                )
                again = get_next_token_logprobs_from_logits(
                    targets, two, None, tp_group.rank(), tp_group, cp_group, sampling, chunk
                )
                value.backward(upstream / cp)  # summed over cp: every rank owns a share of the loss
                again.backward((upstream / cp).t().contiguous().t())
                errors += [dense.error(value, expected), dense.error(again, expected)]
                errors += [dense.error(one.grad, grad), dense.error(two.grad, grad)]
    return max(errors)


def by_dtensor(rank, tp, cp):
    mesh, _, cp_group = mesh_of(tp, cp)
    if cp == 1:
        mesh = mesh["tp"]
    full, ids = problem(8 * cp)
    length = 8 * cp
    order = torch.randperm(length, generator=torch.Generator().manual_seed(5))  # any order of the sequence
    upstream = torch.randn(BATCH, length - 1, generator=torch.Generator().manual_seed(1)).double()
    errors = []
    for vocabulary in (Shard(2), Shard(-1), Replicate()):
        for sampling, chunk in ((None, None), (None, 3), (SAMPLING, None), (SAMPLING, 2)):
            expected, grad = dense_grad(full, ids, upstream, sampling)
            if cp == 1:
                logits = distribute_tensor(full, mesh, [vocabulary]).requires_grad_()
                tokens, seq_index, grad_placed = ids, None, distribute_tensor(grad, mesh, [vocabulary])
            else:
                places = [Shard(1), vocabulary]
                logits = distribute_tensor(full[:, order], mesh, places).requires_grad_()
                tokens = distribute_tensor(ids[:, order], mesh["cp"], [Shard(1)])
                seq_index, grad_placed = order, distribute_tensor(grad[:, order], mesh, places)
            value = get_next_token_logprobs_from_logits(
                tokens, logits, seq_index, sampling_params=sampling, chunk_size=chunk
            )
            value.backward(upstream)  # not summed over cp: one loss, the same on every rank
            errors += [dense.error(value, expected), dense.error(logits.grad.to_local(), grad_placed.to_local())]
            with torch.no_grad():
                assert not get_logprobs_from_vocab_parallel_logits(logits, tokens, seq_index).requires_grad
    return max(errors)


def packed(rank, tp, cp):
    _, tp_group, cp_group = mesh_of(tp, cp)
    group = cp_group if cp > 1 else None
    start, end = dense.cut(VOCAB, tp, tp_group.rank(), "chunk")
    errors = []
    for lengths in ([2, 0, 5, 1, 3], [1]):
        lengths = [2 * cp * n for n in lengths]
        total = sum(lengths)
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        full = dense.random_logits((1, total, VOCAB), torch.float64, 4)
        ids = torch.randint(0, VOCAB, (1, total), generator=torch.Generator().manual_seed(2))
        longest = max(lengths) + 2
        upstream = torch.randn(len(lengths), longest - 1, generator=torch.Generator().manual_seed(1)).double()
        reference = full.clone().requires_grad_()
        expected = torch.zeros(len(lengths), longest - 1, dtype=torch.float64)
        rolled = torch.zeros_like(ids)
        held = []
        for number, length in enumerate(lengths):
            span = slice(int(ends[number]), int(ends[number]) + length)
            if length:
                row = shifted(reference[:, span], ids[:, span])
                expected = torch.cat(
                    [expected[:number], torch.nn.functional.pad(row, (0, longest - length)), expected[number + 1 :]]
                )
                rolled[:, span] = ids[:, span].roll(-1, 1)
                held.append(shard_sequence(torch.arange(span.start, span.stop), cp_group.rank(), cp, 0))
        expected.backward(upstream)
        held = torch.cat(held)
        for pre_rolled in (False, True):
            for chunk, sampling in ((None, None), (3, None), (None, TrainingSamplingParams(top_k=1000))):
                local = full[:, held, start:end].clone().requires_grad_()
                value = from_parallel_logits_to_logprobs_packed_sequences(
                    local,
                    rolled[:, held] if pre_rolled else ids,
                    ends,
                    longest,
                    start,
                    end,
                    tp_group,
                    False,
                    group,
                    chunk,
                    sampling,
                    pre_rolled,
                )
                value.backward(upstream / cp)
                errors += [dense.error(value, expected)]
                errors += [dense.error(local.grad, reference.grad[:, held, start:end])]
    return max(errors)


def distillation(rank, tp, cp):
    mesh, tp_group, cp_group = mesh_of(tp, cp)
    length, kept = 4 * cp, 3
    full, _ = problem(length)
    teacher = dense.random_logits((BATCH, length, VOCAB), torch.float64, 9)
    values, ids = teacher.topk(kept, -1)
    start, end = dense.cut(VOCAB, tp, tp_group.rank(), "chunk")
    errors = []
    for zero_outside in (False, True):
        for entropy in (False, True):

            def reference(full, zero_outside=zero_outside):
                at_ids = full.gather(-1, ids) if not zero_outside else full.log_softmax(-1).gather(-1, ids)
                student = at_ids if zero_outside else at_ids.log_softmax(-1)
                return student[:, :-1], dense.neg_entropy(full)[:, :-1]

            weights = [
                torch.randn(part.shape, generator=torch.Generator().manual_seed(1)).double() for part in reference(full)
            ]
            whole = full.clone().requires_grad_()
            student, neg_entropy = reference(whole)
            ((student * weights[0]).sum() + (neg_entropy * weights[1] * entropy).sum()).backward()
            local = shard_sequence(full, cp_group.rank(), cp)[..., start:end].clone()
            layouts = {"groups": (local.clone().requires_grad_(), tp_group.rank(), tp_group, cp_group)}
            placed = DTensor.from_local(
                local.clone(), mesh, [Shard(1), Shard(2)], run_check=False, shape=full.shape, stride=full.stride()
            )
            layouts["dtensor"] = (placed.requires_grad_(), None, None, None)
            if tp == 1:
                layouts["plain"] = (local.clone().requires_grad_(), None, None, cp_group if cp > 1 else None)
            for logits, *groups in layouts.values():
                got = get_distillation_topk_logprobs_from_logits(logits, values, ids, zero_outside, entropy, *groups)
                errors += [dense.error(got[0], student), dense.error(got[1], values[:, :-1].log_softmax(-1))]
                loss = (got[0] * weights[0]).sum()
                if entropy:
                    errors.append(dense.error(got[2], neg_entropy))
                    loss = loss + (got[2] * weights[1]).sum()
                else:
                    assert got[2] is None
                (loss / cp).backward()
                grad = logits.grad.to_local() if isinstance(logits, DTensor) else logits.grad
                expected = shard_sequence(whole.grad, cp_group.rank(), cp)[..., start:end]
                errors.append(dense.error(grad, expected))
    return max(errors)


def every_layout(rank, tp, cp):
    return {layout.__name__: layout(rank, tp, cp) for layout in (by_groups, by_dtensor, packed, distillation)}


@pytest.mark.parametrize("tp, cp", [(1, 1), (3, 1), (2, 2), (1, 4)])
def test_every_layout_equals_dense_float64(tp, cp):
    for errors in run_world(every_layout, tp * cp, tp, cp, timeout=300):
        assert max(errors.values()) < 1e-12, errors


def cp_helpers(rank, cp):
    group = dist.group.WORLD
    full = torch.randn(2, 4 * cp, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine = shard_sequence(full, rank, cp).requires_grad_()
    whole = allgather_cp_sharded_tensor(mine, group)
    whole.sum().backward()  # an expanded gradient; every rank has this loss, so the sum over cp is cp
    assert torch.equal(whole, full) and (mine.grad == cp).all()
    window = full.chunk(cp, 1)[rank].clone().requires_grad_()
    following = cp_shift_next(window, group, fill=7.0)
    expected = torch.cat([full[:, 1:], torch.full_like(full[:, :1], 7.0)], 1)
    assert torch.equal(following, expected.chunk(cp, 1)[rank])
    following.sum().backward()
    first = 0.0 if rank == 0 else 1.0  # the token before is on another rank, whose gradient comes over
    assert (window.grad[:, 1:] == 1).all() and (window.grad[:, 0] == first).all()
    number = torch.tensor([float(rank + 1)], requires_grad=True)
    total = group_all_reduce_sum_with_grad(number, group)
    total.backward()
    expected = cp * (cp + 1) / 2
    assert total.item() == expected and number.grad.item() == 1.0 and number.item() == rank + 1
    assert group_all_reduce_sum(number, group).item() == expected
    assert not group_all_reduce_sum(number, group).requires_grad
    ids = torch.randint(0, 3, (2, 4 * cp - 1, 2), generator=torch.Generator().manual_seed(1))
    at_ids = gather_logits_at_global_indices(mine.detach(), ids, cp_group=group, vocab_start_index=0, vocab_end_index=3)
    assert torch.equal(at_ids, full[:, :-1].gather(-1, ids))
    return True


@pytest.mark.parametrize("cp", [1, 4])
def test_context_parallel_helpers(cp):
    assert all(run_world(cp_helpers, cp, cp))


def test_without_a_group_helpers_do_nothing():
    x = torch.randn(2, 5)
    assert group_all_reduce_sum_with_grad(x, None) is x
    assert torch.equal(cp_shift_next(x, None, fill=0.0)[:, :-1], x[:, 1:])
    assert allgather_cp_sharded_tensor(x, None) is x


def refusals(rank):
    mesh, tp_group, cp_group = mesh_of(2, 2)
    full, ids = problem(8)
    said = []
    partial = DTensor.from_local(full, mesh["tp"], [Partial()], run_check=False)
    rows = distribute_tensor(full, mesh["tp"], [Shard(1)])
    sharded = distribute_tensor(full, mesh, [Shard(1), Shard(2)])
    tokens = distribute_tensor(ids, mesh["cp"], [Shard(1)])
    local = full[:, :4, :6]
    for attempt in (
        lambda: get_next_token_logprobs_from_logits(ids, partial),
        lambda: get_next_token_logprobs_from_logits(ids, rows),
        lambda: get_next_token_logprobs_from_logits(ids, sharded),
        lambda: get_next_token_logprobs_from_logits(tokens, sharded),
        lambda: get_next_token_logprobs_from_logits(ids, local, vocab_parallel_group=tp_group),
        lambda: from_parallel_logits_to_logprobs(full[:, :3], ids[:, :6], 0, VOCAB, None, cp_group=cp_group),
        lambda: from_parallel_logits_to_logprobs(full[:, :2], ids[:, :6], 0, VOCAB, None),
    ):
        with pytest.raises(ValueError) as raised:
            attempt()
        said.append(str(raised.value))
    return said


def test_layouts_that_do_not_fit_are_refused_by_name():
    words = ["Partial", "Shard(dim=1)", "DTensor", "seq_index", "vocab_parallel_rank", "cp=2", "6 positions"]
    for said in run_world(refusals, 4):
        for message, word in zip(said, words, strict=True):
            assert word in message, message


def test_packed_sequences_that_do_not_fit_are_refused():
    logits, ids = torch.zeros(1, 6, 4), torch.zeros(1, 6, dtype=torch.int64)

    def run(ends, longest):
        return from_parallel_logits_to_logprobs_packed_sequences(logits, ids, torch.tensor(ends), longest, 0, 4, None)

    assert run([0, 2, 6], 4).shape == (2, 3)
    with pytest.raises(RuntimeError, match="unpacked_seqlen"):
        run([0, 2, 6], 3)
    with pytest.raises(RuntimeError, match="cu_seqlens"):
        run([0, 2, 8], 8)


def wrong_cut(rank):
    group = dist.group.WORLD
    columns = [2, 5][rank]  # torch.chunk would not cut so
    get_next_token_logprobs_from_logits(
        torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, columns), None, rank, group
    )


def test_a_cut_that_only_bounds_could_tell_is_refused():
    """Rank 0 refuses; rank 1, which is left in its collective, ends with it."""
    with pytest.raises(AssertionError, match="pass their bounds"):
        run_world(wrong_cut, 2)
