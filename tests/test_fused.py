"""Functions that a GPU computes in one kernel: compiled they give the numbers of their written form.

Inductor's C++ stands in for its Triton, of which each is one kernel: it splits a step with its scales into more.
"""

import shutil
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._inductor import metrics as generated

from dtrain.adapters import nf4
from dtrain.base import compiled, top_p
from dtrain.base.compiled import CompiledFunction
from dtrain.base.fused import Fused
from dtrain.commands.plan.plan import resolve_plan
from dtrain.commands.plan.planned_device import MetaKernels, PlannedDevice
from dtrain.commands.plan.step import plan_step
from dtrain.commands.plan.tracer import Tracer
from dtrain.losses.head import filtered, kl, logprobs, softmax, sources, topk, weighted_sum
from dtrain.memory import gradient_accumulation, low_bit_adam
from dtrain.optim import muon
from tests.pretend.worlds import run_pretend
from tests.tiny import tiny_recipe, write_model

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ for a CPU")


@pytest.fixture
def compile_here(monkeypatch):
    """compile_here(*fused, backend) compiles these on a CPU; begun without what others have compiled."""
    torch._dynamo.reset()
    chosen = []

    def choose(*functions, backend="inductor"):
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
        for one in functions:
            monkeypatch.setattr(one, "_compiled", CompiledFunction(one.function, "it", -1))
        chosen.extend(functions)
        monkeypatch.setattr(Fused, "will_compile", lambda self, tensor: self in chosen)

    with torch._inductor.config.patch(compile_threads=1):  # a pool would import torch in a process of its own
        yield choose


def stepped(shape, state, dtype, device="cpu", decoupled=True):
    """Return what an optimizer holds after three steps: the weight and its state."""
    torch.manual_seed(0)
    weight = nn.Parameter((torch.randn(shape) * 0.1).to(dtype).to(device))
    options = {"names": {weight: "w"}, "seed": 0, "state": state, "lr": 1e-3, "decoupled": decoupled}
    optimizer = low_bit_adam.LowBitAdam([{"params": [weight], "weight_decay": 0.1}], **options)
    for step in range(3):
        torch.manual_seed(step)
        weight.grad = (torch.randn(shape) * 0.01).to(dtype).to(device)
        optimizer.step()
    return [weight.detach().cpu(), *(value.cpu() for value in optimizer.state[weight].values())]


def assert_equal(found, expected):
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


CASES = [((64, 512), "int8"), ((40, 300), "bfloat16")]  # whole blocks; a row that is none


@needs_compiler
@pytest.mark.slow
def test_a_compiled_step_in_few_bits_has_the_same_bits(compile_here):
    shape, state = CASES[0]
    expected = stepped(shape, state, torch.bfloat16)
    before = generated.generated_kernel_count
    compile_here(low_bit_adam._step_rows)
    assert_equal(stepped(shape, state, torch.bfloat16), expected)
    stepped((2 * shape[0], shape[1]), state, torch.bfloat16)  # other rows are no other kernel
    assert 0 < generated.generated_kernel_count - before <= 11


@needs_compiler
@pytest.mark.slow
def test_weights_in_4_bits_are_read_by_one_kernel(compile_here):
    dtype = torch.bfloat16
    held = [nf4.quantize(torch.randn(rows, 128)) for rows in (3, 5)]
    expected = [nf4.dequantize(*parts, dtype) for parts in held]
    before = generated.generated_kernel_count
    compile_here(nf4._write_blocks)
    assert_equal([nf4.dequantize(*parts, dtype) for parts in held], expected)
    assert generated.generated_kernel_count - before == 1


HEAD = softmax.tile_statistics, softmax.gradient_of_exps, softmax.gradient_of_logits


def head_problem():
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (21, 50))
    return hidden, weight, torch.randint(0, 50, (21,)), torch.arange(21)


def smoothed_loss(**options):
    """Return a loss, its accuracy and gradients, float64, by tiles."""
    hidden, weight, targets, index = head_problem()
    sums = weighted_sum.token_loss_sums(
        hidden, weight, targets, index, weighted_sum.nll, rows_per_tile=8, label_smoothing=0.1, **options
    )
    return [sums.loss.detach(), sums.correct, *torch.autograd.grad(sums.loss, (hidden, weight))]


def losses(**options):
    """Return `smoothed_loss`; then log-probabilities, entropies and their gradients: float64, by tiles."""
    found = smoothed_loss(**options)
    hidden, weight, targets, index = head_problem()
    scores = logprobs.logprobs_from_hidden_states(hidden, weight, targets, entropy=True, tile=(8, 50), **options)
    total = scores.logprobs.sum() + (scores.entropy * index).sum()
    return [*found, scores.logprobs.detach(), scores.entropy.detach(), *torch.autograd.grad(total, (hidden, weight))]


@pytest.mark.parametrize("functions", [HEAD, HEAD[:1], HEAD[1:]], ids=["all", "statistics", "gradient"])
def test_a_compiled_head_is_exact_in_float64_whatever_of_it_is_compiled(compile_here, functions):
    expected = losses(softcap=3.0)
    compile_here(*functions, backend="aot_eager")
    for mine, theirs in zip(losses(softcap=3.0), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def jensen_shannon():
    """Return the Jensen-Shannon divergence from a teacher of other width and its gradients: float64, by tiles."""
    torch.manual_seed(0)
    hidden, weight, *teacher = (torch.randn(n, d, dtype=torch.float64) for d in (8, 12) for n in (21, 50))
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    models = kl.HeadInput(*inputs), kl.HeadInput(*teacher)
    found = kl.jsd_sum_from_hidden_states(*models, torch.arange(21), beta=0.3, rows_per_tile=8)
    return [*(value.detach() for value in found), *torch.autograd.grad(found.total, inputs)]


def divergences():
    """Return divergences from a teacher of other width and their gradients: the KLs, the Jensen-Shannon divergence, and
    on its likeliest tokens; float64, by tiles."""
    torch.manual_seed(0)
    hidden, weight, *teacher = (torch.randn(n, d, dtype=torch.float64) for d in (8, 12) for n in (21, 50))
    inputs, index, options = (hidden.requires_grad_(), weight.requires_grad_()), torch.arange(21), {"rows_per_tile": 8}
    models = kl.HeadInput(*inputs, 3.0), kl.HeadInput(*teacher, 3.0)
    logits, ids = topk.topk_logits_from_hidden_states(models[1], 7, index)
    outputs = []
    for share in (1.0, 0.3, 0.4):  # from the third on a compiler may take it for a variable
        mixed = {"forward_share": share, "temperature": 1.5, **options}
        outputs.append(kl.kl_sum_from_hidden_states(*models, index, **mixed))
        outputs.append(topk.topk_kl_sum_from_hidden_states(models[0], logits, ids, index, **mixed))
    outputs.append(kl.jsd_sum_from_hidden_states(*models, index, beta=0.3, **options))
    gradients = [gradient for of_loss in outputs for gradient in torch.autograd.grad(of_loss.total, inputs)]
    return [*(value.detach() for of_loss in outputs for value in of_loss), *gradients]


def filtered_values():
    """Return log-probabilities under filters with their gradients, and the mask of a search for the likeliest."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (21, 50))
    targets, index, results = torch.randint(0, 50, (21,)), torch.arange(21), []
    for top_k, share in ((9, 1.0), (None, 0.9)):
        rule = logprobs.TrainingSamplingParams(top_k, share, 0.7)
        values = filtered.filtered_logprobs_from_hidden_states(hidden, weight, targets, rule, index=index)
        total = torch.where(values.isinf(), 0, values).sin().sum()
        results += [values.detach(), *torch.autograd.grad(total, (hidden, weight))]
    return [*results, top_p.top_p_mask(hidden.detach() @ weight.detach().t(), 0.7)]


PARTS = {
    "pairs": (divergences, (*HEAD, kl._divergences, kl._gradient)),
    "statistics": (divergences, (HEAD[0], kl._divergences)),
    "gradients": (divergences, (*HEAD[1:], kl._gradient)),
    "filtered": (filtered_values, (*HEAD, top_p._find_next_bits, top_p._mask_down_to)),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.slow
def test_other_heads_are_exact_in_float64_whatever_of_them_is_compiled(compile_here, part):
    values, functions = PARTS[part]
    expected = values()
    compile_here(*functions, backend="aot_eager")
    for mine, theirs in zip(values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    assert not any(function._compiled.runs_uncompiled for function in functions)


GRADIENTS = {
    "labels": (
        smoothed_loss,
        softmax.gradient_of_exps,
        6,
    ),  # the formula, the targets' columns, rounding; for a tile's size and any
    "jsd": (jensen_shannon, kl._gradient, 1),
}


@needs_compiler
@pytest.mark.parametrize("head", GRADIENTS)
@pytest.mark.slow
def test_the_heads_gradient_is_few_kernels(compile_here, head):
    values, gradient, most = GRADIENTS[head]
    expected, before = values(), generated.generated_kernel_count
    compile_here(gradient)
    for mine, theirs in zip(values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    assert 0 < generated.generated_kernel_count - before <= most


def counted(loss, vocab=100_000, tokens=4096):
    """Return the kernels of a tile, and the bytes a logit that are no product's, of a loss of hidden states and a
    head's weight: [tokens, D] and [vocab, D] of a student and of a teacher, on a planned GPU."""
    one_rank = SimpleNamespace(size=lambda: 1)
    tracer = Tracer(SimpleNamespace(tp=one_rank, ep=None, fsdp=SimpleNamespace(ndim=1)), on_host=False)
    student, teacher = (
        [torch.empty(n, 8, dtype=torch.bfloat16, device="meta", requires_grad=grad) for n in (tokens, vocab)]
        for grad in (True, False)
    )
    index = torch.arange(tokens, device="meta")
    with PlannedDevice(torch.device("cuda", 0), tracer.few, tracer.as_one_kernel), tracer:
        loss(kl.HeadInput(*student), kl.HeadInput(*teacher), index).backward()
    tiles = -(-tokens // sources.head_tile_rows(vocab, "cuda"))
    return tracer.counts[None, "kernels"] / tiles, tracer.counts[None, "moved"] / tokens / vocab


def on_topk(student, teacher, index):
    logits, ids = (torch.empty(len(index), 64, dtype=kind, device="meta") for kind in (torch.float32, torch.int64))
    return topk.topk_kl_sum_from_hidden_states(student, logits, ids, index, forward_share=0.3).total


def under(top_k, share):
    def loss(student, teacher, index):
        rule = logprobs.TrainingSamplingParams(top_k, share, 0.7)
        return filtered.filtered_logprobs_from_hidden_states(*student[:2], index, rule, index=index).sum()

    return loss


MOVED = {  # kernels of a tile, and bytes a logit
    "labels": (lambda s, t, i: weighted_sum.token_loss_sums(*s[:2], i, i, weighted_sum.nll).loss, 42, 11),
    "kl": (lambda s, t, i: kl.kl_sum_from_hidden_states(s, t, i).total, 26, 36),
    "mixed": (lambda s, t, i: kl.kl_sum_from_hidden_states(s, t, i, forward_share=0.3, temperature=2).total, 28, 43),
    "jsd": (lambda s, t, i: kl.kl_sum_from_hidden_states(s, t, i, jsd_beta=0.5).total, 26, 36),
    "top k": (on_topk, 105, 19),
    "filtered by top p": (under(None, 0.9), 160, 370),
}


@pytest.mark.parametrize("head", MOVED)
def test_a_plan_counts_few_kernels_and_bytes_of_a_head(head):
    loss, kernels, moved = MOVED[head]
    kernels_counted, moved_counted = counted(loss)
    assert kernels_counted <= kernels and moved_counted <= moved, (kernels_counted, moved_counted)


def rounded(matrix, gradients):
    """Return bfloat16 weights and momenta after steps of Muon, and sums of gradients, [64, 512] each."""
    weight = nn.Parameter(matrix.clone())
    optimizer = muon.Muon([{"params": [weight], "weight_decay": 0.1}], names={weight: "w"}, lr=0.02, seed=3)
    summed = nn.Parameter(matrix.clone())
    adding = gradient_accumulation.GradientAccumulator([("w", summed)], 5)
    for number, gradient in enumerate(gradients):
        weight.grad = gradient.clone()
        optimizer.step()
        adding.begin(0, number, number == len(gradients) - 1)
        (summed.float() * gradient.float()).sum().backward()
    adding.finish()
    return [weight.detach(), optimizer.state[weight]["momentum_buffer"], summed.grad]


@needs_compiler
@pytest.mark.slow
def test_compiled_steps_of_muon_and_sums_of_gradients_are_one_kernel_and_have_the_same_bits(compile_here):
    torch.manual_seed(0)
    matrix, *gradients = (torch.randn(64, 512).bfloat16() for _ in range(4))
    expected, before = rounded(matrix, gradients), generated.generated_kernel_count
    compile_here(muon._update_momentum, muon._step_rows, gradient_accumulation._add)
    assert_equal(rounded(matrix, gradients), expected)
    assert generated.generated_kernel_count - before == 3


def test_what_cannot_be_compiled_runs_as_written_and_is_said_once(compile_here):
    def broken(graph, inputs):
        raise ValueError("no such kernel")

    expected = stepped(*CASES[1], torch.bfloat16)
    compile_here(low_bit_adam._step_rows, backend=broken)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert_equal(stepped(*CASES[1], torch.bfloat16), expected)
    assert len([one for one in told if "no such kernel" in str(one.message)]) == 1


def on_card(rank):
    """Return what a card holds after steps that are compiled, by torch's own operations, and whether they were."""
    torch.compile = partial(torch.compile, backend="aot_eager")
    compiled.has_triton = lambda: True
    held = stepped(*CASES[1], torch.bfloat16, "cuda")
    return [tensor.tolist() for tensor in held], low_bit_adam._step_rows.will_compile(torch.zeros(1).cuda())


def test_a_card_compiles_its_steps_and_keeps_the_bits():
    ((found, compiles),) = run_pretend(on_card)
    assert compiles
    assert found == [tensor.tolist() for tensor in stepped(*CASES[1], torch.bfloat16)]


@pytest.mark.slow
def test_a_plan_counts_a_step_in_few_bits_as_no_more_than_torchs_own(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    path = write_model(tmp_path / "model", "qwen3", tied=False, **sizes)
    usual = f"model.path={path}", "train.dtype=bfloat16", "train.global_batch=2", "train.micro_batch=1"
    plain, few = (
        plan_step(resolve_plan(tiny_recipe(tmp_path, *usual, *keys), 1, "cuda"))
        for keys in ((), ("optimizer.state=int8", "train.masters=bfloat16"))
    )
    assert few.num_kernels <= plain.num_kernels and few.bytes_moved <= plain.bytes_moved  # gradients are not cast


def test_a_plan_is_handed_what_is_one_kernel_on_a_card():
    taken = []

    def fuse(function, *arguments):
        taken.append(function)
        return function(*arguments)

    codes, scales = (torch.empty(8, n, dtype=kind, device="meta") for n, kind in ((32, torch.uint8), (1, torch.int32)))
    for device, expected in (("cpu", []), ("cuda", [nf4._write_blocks.function])):
        with PlannedDevice(torch.device(device, 0), fuse=fuse), MetaKernels():
            assert nf4.dequantize(codes, scales, torch.bfloat16).shape == (8, 64)
        assert taken == expected
