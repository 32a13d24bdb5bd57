"""Functions that a GPU computes in one kernel: compiled they give the numbers of their written form.

Inductor's C++ stands in for its Triton, of which each is one kernel: it splits a step with its scales into more.
"""

import shutil
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch._inductor import metrics as generated

from dtrain.base import compiled
from dtrain.base.compiled import Compiled
from dtrain.base.fused import Fused
from dtrain.commands.plan.meta_kernels import MetaKernels
from dtrain.commands.plan.plan import resolve_plan
from dtrain.commands.plan.planned_device import PlannedDevice
from dtrain.commands.plan.step import plan_step
from dtrain.losses.head import logprobs, weighted_sum
from dtrain.models.common import nf4
from dtrain.optim import adam
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
            monkeypatch.setattr(one, "_compiled", Compiled(one.function, "it", -1))
        chosen.extend(functions)
        monkeypatch.setattr(Fused, "compiles", lambda self, tensor: self in chosen)

    with torch._inductor.config.patch(compile_threads=1):  # a pool would import torch in a process of its own
        yield choose


def stepped(shape, state, dtype, device="cpu", decoupled=True):
    """Return what an optimizer holds after three steps: the weight and its state."""
    torch.manual_seed(0)
    weight = nn.Parameter((torch.randn(shape) * 0.1).to(dtype).to(device))
    options = {"names": {weight: "w"}, "seed": 0, "state": state, "lr": 1e-3, "decoupled": decoupled}
    optimizer = adam.LowBitAdam([{"params": [weight], "weight_decay": 0.1}], **options)
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
    compile_here(adam._step)
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
    compile_here(nf4._fill)
    assert_equal([nf4.dequantize(*parts, dtype) for parts in held], expected)
    assert generated.generated_kernel_count - before == 1


HEAD = weighted_sum._softmax, weighted_sum._gradient, logprobs._stats_of_tile, logprobs._gradient_of_tile


def losses(**options):
    """Return a loss, its accuracy and gradients; then log-probabilities, entropies and theirs: float64, by tiles."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (21, 50))
    targets, index = torch.randint(0, 50, (21,)), torch.arange(21)
    sums = weighted_sum.token_loss_sums(
        hidden, weight, targets, index, weighted_sum.nll, rows_per_tile=8, label_smoothing=0.1, **options
    )
    found = [sums.loss.detach(), sums.correct, *torch.autograd.grad(sums.loss, (hidden, weight))]
    scores = logprobs.logprobs_from_hidden_states(hidden, weight, targets, entropy=True, tile=(8, 50), **options)
    total = scores.logprobs.sum() + (scores.entropy * index).sum()
    return [*found, scores.logprobs.detach(), scores.entropy.detach(), *torch.autograd.grad(total, (hidden, weight))]


@pytest.mark.parametrize("functions", [HEAD, HEAD[:1], HEAD[1:2]], ids=["all", "softmax", "gradient"])
def test_a_compiled_head_is_exact_in_float64_whatever_of_it_is_compiled(compile_here, functions):
    expected = losses(softcap=3.0)
    compile_here(*functions, backend="aot_eager")
    for mine, theirs in zip(losses(softcap=3.0), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


@needs_compiler
@pytest.mark.slow
def test_the_heads_gradient_is_one_kernel(compile_here):
    expected, before = losses(), generated.generated_kernel_count
    compile_here(weighted_sum._gradient)
    for mine, theirs in zip(losses(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    assert generated.generated_kernel_count - before == 1


def test_what_cannot_be_compiled_runs_as_written_and_is_said_once(compile_here):
    def broken(graph, inputs):
        raise ValueError("no such kernel")

    expected = stepped(*CASES[1], torch.bfloat16)
    compile_here(adam._step, backend=broken)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert_equal(stepped(*CASES[1], torch.bfloat16), expected)
    assert len([one for one in told if "no such kernel" in str(one.message)]) == 1


def on_card(rank):
    """Return what a card holds after steps that are compiled, by torch's own operations, and whether they were."""
    torch.compile = partial(torch.compile, backend="aot_eager")
    compiled.has_triton = lambda: True
    held = stepped(*CASES[1], torch.bfloat16, "cuda")
    return [tensor.tolist() for tensor in held], adam._step.compiles(torch.zeros(1).cuda())


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
    assert few.kernels <= plain.kernels and few.moved <= plain.moved  # gradients are not cast


def test_a_plan_is_handed_what_is_one_kernel_on_a_card():
    taken = []

    def fuse(function, *arguments):
        taken.append(function)
        return function(*arguments)

    codes, scales = (torch.empty(8, n, dtype=kind, device="meta") for n, kind in ((32, torch.uint8), (1, torch.int32)))
    for device, expected in (("cpu", []), ("cuda", [nf4._fill.function])):
        with PlannedDevice(torch.device(device, 0), fuse=fuse), MetaKernels():
            assert nf4.dequantize(codes, scales, torch.bfloat16).shape == (8, 64)
        assert taken == expected
