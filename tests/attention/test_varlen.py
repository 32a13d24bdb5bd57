"""The variable-length kernel over torch's operation written out from its documentation, and the proof that it must give
before it is chosen."""

import pytest
import torch

from dtrain.attention.varlen import DocumentEnds, VarlenKernel, prove
from tests.attention.test_kernels import VISIBILITIES, brute_force, written_out

PACKED = [name for name in VISIBILITIES if name.startswith("packed")]
HEADS = {"heads": 4, "key_heads": 2, "head_dim": 16, "device": torch.device("cpu")}


def documented(q, k, v, ends, key_ends, longest, longest_key, *, scale, window_size, enable_gqa, off=0):
    """varlen_attn(q [T, H, hd], k and v [T, kv, hd], ...) as its documentation has it: each document by itself, seen
    as far to the left as the window says (-1: all), nothing to the right."""
    assert enable_gqa and window_size[1] == 0 and longest == longest_key == int(ends.diff().max())
    assert ends.dtype == torch.int32 and torch.equal(ends, key_ends) and ends[0] == 0 and ends[-1] == len(q)
    left = window_size[0] if window_size[0] >= 0 else longest
    out = []
    for begin, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        seen = (distance >= 0) & (distance <= left + off)
        out.append(written_out(q[None, begin:end], k[None, begin:end], v[None, begin:end], seen[None], scale)[0])
    return torch.cat(out)


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_are_what_the_mask_says(name):
    visibility = VISIBILITIES[name]
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 150, n, 8, generator=draw, dtype=torch.float64).requires_grad_() for n in (6, 2, 2))
    kernel = VarlenKernel(documented)
    prepared = kernel.prepare(visibility, q.dtype, q.device)
    out, expected = kernel(q, k, v, prepared, 0.3), written_out(q, k, v, brute_force(visibility, 3), 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn(out.shape, generator=draw, dtype=torch.float64)
    for one, other in zip(*(torch.autograd.grad(x, (q, k, v), weight) for x in (out, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["plain-65-None", "plain-65-7"])
def test_rows_of_one_document_are_sdpas(name):
    def never(*args, **kwargs):
        raise AssertionError

    visibility = VISIBILITIES[name]
    kernel = VarlenKernel(never)
    q, k, v = (torch.randn(2, 65, n, 8, dtype=torch.float64) for n in (6, 2, 2))
    out = kernel(q, k, v, kernel.prepare(visibility, q.dtype, q.device), 0.3)
    torch.testing.assert_close(out, written_out(q, k, v, brute_force(visibility, 2), 0.3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_kernel_that_computes_what_sdpa_does_proves_itself(window, dtype):
    state = torch.get_rng_state()
    assert prove(VarlenKernel(documented), window=window, dtype=dtype, **HEADS) is None
    assert torch.equal(state, torch.get_rng_state())


def wider(*args, **kwargs):
    return documented(*args, **kwargs, off=1)


def blind_to_documents(q, k, v, ends, *args, **kwargs):
    whole = torch.tensor([0, len(q)], dtype=torch.int32)
    return documented(q, k, v, whole, whole, len(q), len(q), **kwargs)


def without_gradient_of_values(q, k, v, *args, **kwargs):
    return documented(q, k, v.detach(), *args, **kwargs) + 0 * v.sum()


def refuses(*args, **kwargs):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore")


@pytest.mark.parametrize("attend", [wider, blind_to_documents, without_gradient_of_values])
def test_a_kernel_that_computes_something_else_is_found_out(attend):
    found = prove(VarlenKernel(attend), window=5, dtype=torch.bfloat16, **HEADS)
    assert found.startswith("varlen gives other numbers than sdpa here")


def test_what_a_device_does_not_have_is_said():
    found = prove(VarlenKernel(refuses), window=None, dtype=torch.bfloat16, **HEADS)
    assert found == "varlen does not run here: FlashAttention only supports Ampere GPUs or newer."
    assert "varlen does not run here" in prove(VarlenKernel(), window=None, dtype=torch.bfloat16, **HEADS)


def test_torchs_own_operation_takes_these_arguments():
    """On tensors without numbers, forward and backward: names, shapes and dtypes."""
    with torch.device("meta"):
        q, k, v = (torch.empty(2, 64, n, 16, dtype=torch.bfloat16).requires_grad_() for n in (4, 2, 2))
        ends = torch.empty(6, dtype=torch.int32)
    out = VarlenKernel()(q, k, v, DocumentEnds(ends, 40, (6, 0)), 0.25)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert [one.shape for one in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]
