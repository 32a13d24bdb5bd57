"""Divergences between two models straight from their hidden states, against dense float64 logits on one rank."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from dtrain.losses.head.kl import forward_kl, kl_sum_from_hidden_states, reverse_kl
from dtrain.losses.head.topk import topk_kl_sum_from_hidden_states, topk_logits_from_hidden_states
from dtrain.losses.head.vocabulary import HeadInput, VocabShard
from tests.cases import run_cases
from tests.losses.dense import cut, error, hidden_tolerance
from tests.world import run_world

TOKENS, VOCAB = 23, 37
INDEX = torch.tensor([4, 0, 7, 8, 9, 11, 12, 15, 16, 17, 20, 22, 3])


def models(dtype=torch.float64, softcap=None):
    """A student and a teacher of other width, the whole vocabulary, in float64 from what `dtype` holds."""
    generator = torch.Generator().manual_seed(1)
    inputs = []
    for width in (8, 12):
        hidden = torch.randn(TOKENS, width, generator=generator, dtype=torch.float64).to(dtype)
        weight = torch.randn(VOCAB, width, generator=generator, dtype=torch.float64).to(dtype)
        inputs.append(HeadInput(hidden, weight, softcap))
    return inputs


def dense_logits(model, temperature):
    logits = model.hidden.double()[INDEX] @ model.weight.double().T
    if model.softcap is not None:
        logits = model.softcap * torch.tanh(logits / model.softcap)
    return logits / temperature


def dense_kl(student, teacher, share, temperature):
    logq, logp = (dense_logits(model, temperature).log_softmax(-1) for model in (student, teacher))
    forward, reverse = forward_kl(logq, logp).sum(), reverse_kl(logq, logp).sum()
    return share * forward + (1 - share) * reverse, forward, reverse


def dense_topk(student, teacher, share, temperature, kept, zero_outside):
    logits, ids = dense_logits(teacher, 1.0).sort(dim=-1, descending=True, stable=True)
    logp = (logits[:, :kept] / temperature).log_softmax(-1)
    every = dense_logits(student, temperature)
    whole = every.log_softmax(-1)
    inside = whole.gather(1, ids[:, :kept])
    if not zero_outside:
        logq = every.gather(1, ids[:, :kept]).log_softmax(-1)
        return share * forward_kl(logq, logp).sum() + (1 - share) * reverse_kl(logq, logp).sum(), inside.exp().sum()
    filled = torch.full_like(every, -100.0).scatter(1, ids[:, :kept], logp)
    reverse = (whole.exp() * (whole - filled)).sum()
    return share * forward_kl(inside, logp).sum() + (1 - share) * reverse, inside.exp().sum()


def with_gradients(student, loss, scale=0.5):
    """The values of `loss(student)`, and the gradients of scale · the first by hidden states and weight."""
    student = student._replace(hidden=student.hidden.clone().requires_grad_(), weight=student.weight.clone())
    student.weight.requires_grad_()
    values = loss(student)
    (values[0] * scale).backward()
    return [value.detach() for value in values], student.hidden.grad, student.weight.grad


def one_rank(rank, tp, kind, dtype, softcap, loss, dense, rows):
    """The largest errors, in units of the tolerance, of a rank's values and gradients."""
    student, teacher = models(dtype, softcap)
    start, end = cut(VOCAB, tp, rank, kind)
    shard = VocabShard(start, dist.group.WORLD) if tp > 1 else None
    local = [model._replace(weight=model.weight[start:end]) for model in (student, teacher)]
    values, hidden, weight = with_gradients(local[0], lambda one: loss(one, local[1], shard, rows))
    exact = student._replace(hidden=student.hidden.double(), weight=student.weight.double())
    right, right_hidden, right_weight = with_gradients(exact, lambda one: dense(one, teacher))
    hidden = hidden.double()
    if tp > 1:
        dist.all_reduce(hidden)
    value = max(error(mine, other) for mine, other in zip(values, right, strict=True))
    gradient = max(error(hidden, right_hidden), error(weight, right_weight[start:end]) if end > start else 0.0)
    untouched = torch.ones(TOKENS, dtype=torch.bool).index_fill(0, INDEX, False)
    assert not hidden[untouched].any()
    return value / hidden_tolerance(dtype, gradient=False), gradient / hidden_tolerance(dtype, gradient=True)


def full(share, temperature):
    def loss(student, teacher, shard, rows):
        return kl_sum_from_hidden_states(
            student, teacher, INDEX, forward_share=share, temperature=temperature, shard=shard, rows_per_tile=rows
        )

    return loss, lambda student, teacher: dense_kl(student, teacher, share, temperature)


def topk(share, temperature, kept, zero_outside):
    def loss(student, teacher, shard, rows):
        logits, ids = topk_logits_from_hidden_states(teacher, kept, INDEX, shard=shard, rows_per_tile=rows)
        options = {"forward_share": share, "temperature": temperature, "zero_outside": zero_outside}
        return topk_kl_sum_from_hidden_states(student, logits, ids, INDEX, shard=shard, rows_per_tile=rows, **options)

    return loss, lambda student, teacher: dense_topk(student, teacher, share, temperature, kept, zero_outside)


LOSSES = {
    "forward": full(1.0, 1.0),
    "reverse": full(0.0, 2.0),
    "mixed": full(0.3, 0.5),
    "top 5, forward, zero outside": topk(1.0, 2.0, 5, True),
    "top 5, reverse, zero outside": topk(0.0, 1.0, 5, True),
    "top 5, mixed, zero outside": topk(0.3, 0.5, 5, True),
    "top 5, forward": topk(1.0, 1.0, 5, False),
    "top 5, mixed": topk(0.6, 2.0, 5, False),
    "top 1": topk(1.0, 1.0, 1, True),
}


def run(name, dtype=torch.float64, softcap=None, rows=None):
    value, gradient = one_rank(0, 1, "chunk", dtype, softcap, *LOSSES[name], rows)
    assert value <= 1 and gradient <= 1, (value, gradient)


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_those_of_dense_logits(name):
    run(name)
    run(name, rows=4)
    run(name, softcap=3.0, rows=64)


LOWER = (torch.float32, torch.bfloat16, torch.float16)
IN_LOWER = ("mixed", "top 5, mixed, zero outside")


@pytest.mark.parametrize(("tp", "kind"), [(2, "chunk"), (3, "uneven"), (4, "uneven")])
def test_a_cut_vocabulary_changes_nothing(tp, kind):
    softcap = 3.0 if tp == 2 else None
    cases = {name: (tp, kind, torch.float64, softcap, *loss, 5) for name, loss in LOSSES.items()}
    if tp == 2:
        cases |= {f"{n}, {dtype}": (2, kind, dtype, None, *LOSSES[n], None) for n in IN_LOWER for dtype in LOWER}
    errors = run_cases(one_rank, tp, cases)
    assert not {name: ranks for name, ranks in errors.items() if not max(map(max, ranks)) <= 1}


@pytest.mark.parametrize("dtype", LOWER)
@pytest.mark.parametrize("name", IN_LOWER)
def test_lower_precisions_stay_within_one_rounding(name, dtype):
    run(name, dtype=dtype)


def test_the_gradient_of_the_forward_kl_is_finite_whatever_the_gap():
    hidden = torch.tensor([[1.0]], requires_grad=True)
    student = HeadInput(hidden, torch.tensor([[1.5e38], [-1.5e38], [0.0]]))
    teacher = HeadInput(torch.tensor([[1.0]]), torch.tensor([[-1.5e38], [1.5e38], [0.0]]))
    kl_sum_from_hidden_states(student, teacher, torch.tensor([0])).total.backward()
    assert hidden.grad.isfinite().all()


def collectives(rank):
    student, teacher = models()
    start, end = cut(VOCAB, 2, rank, "chunk")
    student, teacher = (model._replace(weight=model.weight[start:end]) for model in (student, teacher))
    student.hidden.requires_grad_()
    shard, counts = VocabShard(start, dist.group.WORLD), []
    for name in ("mixed", "top 5, mixed, zero outside"):
        loss, _ = LOSSES[name]
        with CommDebugMode() as forward:
            total = loss(student, teacher, shard, 5).total
        with CommDebugMode() as backward:
            total.backward()
        counts += [forward.get_total_counts(), backward.get_total_counts()]
    return counts


def test_two_collectives_a_tile_and_none_backward():
    tiles = -(-len(INDEX) // 5)
    # The divergence: statistics of both models, and the divergences of the rows. The top k: the teacher's candidates
    # and the student's statistics of each tile, and the shards' sizes once.
    assert run_world(collectives, 2) == [[2 * tiles, 0, 2 * tiles + 1, 0]] * 2


def test_all_tokens_as_the_top_k_are_the_whole_vocabulary():
    student, teacher = models()
    logits, ids = topk_logits_from_hidden_states(teacher, VOCAB + 5, INDEX)
    assert ids.shape == (len(INDEX), VOCAB)
    for share in (1.0, 0.4):
        right = kl_sum_from_hidden_states(student, teacher, INDEX, forward_share=share, temperature=1.5).total
        for zero_outside in (True, False):
            options = {"forward_share": share, "temperature": 1.5, "zero_outside": zero_outside}
            mine = topk_kl_sum_from_hidden_states(student, logits, ids, INDEX, **options).total
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["mixed", "top 5, mixed, zero outside"])
def test_no_token_gives_zero_and_zero_gradients(name):
    student, teacher = models()
    student.hidden.requires_grad_()
    none = torch.empty(0, dtype=torch.int64)
    if name == "mixed":
        total = kl_sum_from_hidden_states(student, teacher, none, forward_share=0.3).total
    else:
        logits, ids = topk_logits_from_hidden_states(teacher, 5, none)
        total = topk_kl_sum_from_hidden_states(student, logits, ids, none, forward_share=0.3).total
    total.backward()
    assert total == 0 and not student.hidden.grad.any()


def test_a_student_that_is_its_teacher_is_at_the_minimum():
    _, teacher = models()
    values, hidden, weight = with_gradients(
        teacher, lambda student: kl_sum_from_hidden_states(student, teacher, INDEX, forward_share=0.5)
    )
    assert all(value.abs() < 1e-12 for value in values)
    assert hidden.abs().max() < 1e-12 and weight.abs().max() < 1e-12


def test_memory_is_that_of_tiles_not_of_logits():
    """No tensor of [tokens, V] is made: what torch allocates stays far below one."""
    tokens, vocab, width = 4096, 1024, 4
    generator = torch.Generator().manual_seed(0)
    student, teacher = (
        HeadInput(torch.randn(tokens, width, generator=generator), torch.randn(vocab, width, generator=generator))
        for _ in range(2)
    )
    student.hidden.requires_grad_()
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        kl_sum_from_hidden_states(student, teacher, torch.arange(tokens), rows_per_tile=64).total.backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < tokens * vocab * 4 / 8


def test_wrong_arguments_are_named():
    student, teacher = models()
    with pytest.raises(ValueError, match="forward_share=2"):
        kl_sum_from_hidden_states(student, teacher, INDEX, forward_share=2)
    with pytest.raises(ValueError, match="temperature=0"):
        kl_sum_from_hidden_states(student, teacher, INDEX, temperature=0)
    with pytest.raises(ValueError, match="37 tokens here, the teacher's 30"):
        kl_sum_from_hidden_states(student, teacher._replace(weight=teacher.weight[:30]), INDEX)
    top_k = topk_logits_from_hidden_states(teacher, 3, INDEX)
    for beta in (0, 1.5):
        message = f"jsd_beta={beta}: the teacher's share"
        with pytest.raises(ValueError, match=message):
            kl_sum_from_hidden_states(student, teacher, INDEX, jsd_beta=beta)
        with pytest.raises(ValueError, match=message):
            topk_kl_sum_from_hidden_states(student, *top_k, INDEX, jsd_beta=beta)
        # Also on a rank without tokens, so that all ranks of a mesh fail alike.
        empty = [values[:0] for values in top_k]
        with pytest.raises(ValueError, match=message):
            topk_kl_sum_from_hidden_states(student, *empty, INDEX[:0], jsd_beta=beta)
    with pytest.raises(ValueError, match="k=0"):
        topk_logits_from_hidden_states(teacher, 0, INDEX)
    student.hidden.requires_grad_()
    total = kl_sum_from_hidden_states(student, teacher, INDEX).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        total.backward()
