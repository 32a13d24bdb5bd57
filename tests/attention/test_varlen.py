"""The variable-length kernel over torch's operation written out from its documentation, and the proof that it must give
before it is chosen."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend

from dtrain.attention import kernels
from dtrain.attention.blocks import Partial
from dtrain.attention.packing import Packing
from dtrain.attention.segments import Flash, Segments
from dtrain.attention.varlen import VarlenKernel, check_varlen
from dtrain.attention.visibility import MaskStreams, Visibility
from tests.attention.flash import WrittenFlash
from tests.attention.test_kernels import VISIBILITIES, brute_force, written_out

PACKED = [name for name in VISIBILITIES if name.startswith("packed")]
HEADS = {"heads": 4, "key_heads": 2, "head_dim": 16, "value_dim": 16, "device": torch.device("cpu")}
EXCHANGES = [None, "allgather", "ring"]


def check(kernel, given, visibility, rows, extra=0, sinks=False):
    """The kernel, prepared from `given`, computes what `visibility` says; `extra` tokens behind see nothing."""
    draw, length = torch.Generator().manual_seed(0), visibility.queries
    q, k, v = (
        torch.randn(rows, length + extra, n, size, generator=draw, dtype=torch.float64).requires_grad_()
        for n, size in ((6, 8), (2, 8), (2, 5))
    )
    asked = [q, k, v, *([torch.linspace(-2, 4, 6, dtype=q.dtype, requires_grad=True)] if sinks else [])]
    out = kernel(q, k, v, kernel.prepare(given, q.dtype, q.device), 0.3, *asked[3:])
    assert bool((out[:, length:] == 0).all())
    seen = brute_force(visibility, rows)
    expected = written_out(*(one[:, :length] for one in (q, k, v)), seen, 0.3, *asked[3:])
    torch.testing.assert_close(out[:, :length], expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
    found = torch.autograd.grad(out[:, :length], asked, weight)
    for one, other in zip(found, torch.autograd.grad(expected, asked, weight), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_are_what_the_mask_says(name):
    """The host knows the packing, with sequence parallel's padding behind it, or reads it from the device."""
    visibility, flash = VISIBILITIES[name], WrittenFlash()
    positions, documents = visibility.key_positions, visibility.key_documents
    packing, kernel = Packing.of(positions, documents), VarlenKernel(flash)
    assert kernel.keys(MaskStreams(positions, documents), packing) is None
    check(kernel, Visibility(153, 153, visibility.window, rows=3, packing=packing), visibility, 3, extra=3)
    check(kernel, visibility, visibility, 3)
    check(kernel, visibility, visibility, 3, sinks=True)
    assert flash.calls == 3


@pytest.mark.trap(
    "a sliding window one key too wide",
    "huggingface/transformers #39408",
    "another attention than the model was trained with",
    "the window of the mask, which is that of sdpa",
)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["plain-65-7", "plain-150-64"])
def test_rows_under_a_window(name, rows):
    flash = WrittenFlash()
    check(VarlenKernel(flash), replace(VISIBILITIES[name], rows=rows), VISIBILITIES[name], rows)
    assert flash.calls == 1


def broken(stream, how):
    stream = stream.clone()
    how(stream)
    return stream


@pytest.mark.parametrize("name", ["plain-65-None", "plain-65-200", "positions", "pieces"])
def test_what_is_sdpas(name):
    """Plain causal rows; positions that do not count, and documents in two pieces, by a mask."""
    visibility = VISIBILITIES.get(name) or VISIBILITIES["packed-9"]
    positions, documents = visibility.key_positions, visibility.key_documents
    if name == "positions":
        positions = broken(positions, lambda one: one[1].mul_(2))
    if name == "pieces":
        documents = broken(documents, lambda one: one[0, 60:].fill_(int(one[0, 0])))
    if positions is not None:
        assert Packing.of(positions, documents) is None
        visibility = Visibility(150, 150, 9, positions, positions, documents, documents)
    flash = WrittenFlash()
    check(VarlenKernel(flash), visibility, visibility, 3)
    assert flash.calls == 0


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("window", [None, 5, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_kernel_that_computes_what_sdpa_does_proves_itself(window, dtype, exchange):
    state = torch.get_rng_state()
    for sinks in (False, True):
        assert check_varlen(WrittenFlash(), window=window, dtype=dtype, exchange=exchange, sinks=sinks, **HEADS) is None
    values = HEADS | {"value_dim": 10}
    assert check_varlen(WrittenFlash(), window=window, dtype=dtype, exchange=exchange, **values) is None
    shared = {"window": window, "dtype": dtype, "exchange": exchange, "shares_beginnings": True}
    for sinks in (False, True):
        assert check_varlen(WrittenFlash(), sinks=sinks, **shared, **HEADS) is None
    assert torch.equal(state, torch.get_rng_state())


class Wider(WrittenFlash):
    def seen(self, distance, window, longest_key):
        return super().seen(distance, (window[0] + 1 if window[0] >= 0 else -1, window[1]), longest_key)


class BlindToDocuments(WrittenFlash):
    def _segments(self, q, k, v, segments):
        queries, keys = (torch.tensor([0, len(one)], dtype=torch.int32) for one in (q, k))
        return super()._segments(q, k, v, Segments((), (), queries, keys, len(q), len(k), segments.window))


class FromTheStart(WrittenFlash):
    """Causal from the first query and key on, as flash attention before 2.1."""

    def seen(self, distance, window, longest_key):
        shifted = distance - int(distance[0, 0]) if window[1] == 0 else distance
        return super().seen(shifted, window, longest_key)


class WithoutGradientOfValues(WrittenFlash):
    def __call__(self, q, k, v, segments, scale, sinks=None):
        return super().__call__(q, k, v.detach(), segments, scale, sinks) + 0 * v.sum()

    def differentiate(self, *args):
        q_grad, k_grad, v_grad = super().differentiate(*args)
        return q_grad, k_grad, 0 * v_grad


class OwnSumInBackward(WrittenFlash):
    """Ignores the log-sum-exp that it is given."""

    def differentiate(self, grad, q, k, v, merged, segments, scale):
        _, own_lse = self._computed(q, k, v, segments, scale)
        return super().differentiate(grad, q, k, v, merged._replace(lse=own_lse), segments, scale)


class Refuses(WrittenFlash):
    def _computed(self, *args):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore")


class OfOneSize(WrittenFlash):
    """Wrong where heads of values are smaller than those of keys."""

    def __call__(self, q, k, v, segments, scale, sinks=None):
        out = super().__call__(q, k, v, segments, scale, sinks)
        return out if v.shape[-1] == k.shape[-1] else out * 1.25


def test_heads_of_two_sizes_are_looked_at_in_both():
    asked = {"window": 5, "dtype": torch.bfloat16}
    assert check_varlen(OfOneSize(), **asked, **HEADS) is None
    assert "gives other numbers" in check_varlen(OfOneSize(), **asked, **(HEADS | {"value_dim": 10}))


@pytest.mark.parametrize(
    ("flash", "exchange"),
    [
        (Wider, None),
        (BlindToDocuments, None),
        (WithoutGradientOfValues, None),
        (FromTheStart, "allgather"),
        (OwnSumInBackward, "ring"),
        (Wider, "ring"),
    ],
)
def test_a_kernel_that_computes_something_else_is_found_out(flash, exchange):
    found = check_varlen(flash(), window=5, dtype=torch.bfloat16, exchange=exchange, **HEADS)
    assert "gives other numbers than sdpa here" in found
    if flash in (FromTheStart, OwnSumInBackward):  # right where it is asked for nothing more
        assert found.startswith(f"varlen for {exchange} gives")
        assert check_varlen(flash(), window=5, dtype=torch.bfloat16, **HEADS) is None
    if flash is OwnSumInBackward:
        assert "gives other numbers" in check_varlen(flash(), window=5, dtype=torch.bfloat16, sinks=True, **HEADS)
        found = check_varlen(flash(), window=None, dtype=torch.bfloat16, shares_beginnings=True, **HEADS)
        assert found.startswith("varlen for shared beginnings gives other numbers")


def test_plain_rows_are_looked_at_too_where_another_has_taken_the_place_of_sdpas_own(monkeypatch):
    own, asked = kernels.scaled_dot_product_attention, {"window": None, "dtype": torch.bfloat16, "is_later": True}

    def wrong(q, *arguments, **options):
        is_replaced = torch.backends.cuda.flash_sdp_enabled() and q.dtype == torch.bfloat16
        return own(q, *arguments, **options) * (1.25 if is_replaced else 1.0)

    assert check_varlen(WrittenFlash(), **asked, **HEADS) is None
    monkeypatch.setattr(kernels, "scaled_dot_product_attention", wrong)
    assert check_varlen(WrittenFlash(), **asked, **HEADS).startswith("sdpa of plain rows gives other numbers")


def test_what_a_device_does_not_have_is_said():
    found = check_varlen(Refuses(), window=None, dtype=torch.bfloat16, **HEADS)
    assert found == "varlen does not run here: FlashAttention only supports Ampere GPUs or newer."
    assert "varlen does not run here" in check_varlen(Flash(), window=None, dtype=torch.bfloat16, **HEADS)


@pytest.mark.parametrize("value_size", [16, 8, 24])
def test_torchs_own_operations_take_these_arguments(value_size):
    """On tensors without numbers, forward and backward, alone and with the log-sum-exp: names, shapes and dtypes."""
    with torch.device("meta"):
        q, k = (torch.empty(64, n, 16, dtype=torch.bfloat16).requires_grad_() for n in (4, 2))
        v = torch.empty(64, 2, value_size, dtype=torch.bfloat16).requires_grad_()
        ends = torch.empty(6, dtype=torch.int32)
    segments, flash = Segments((), (), ends, ends, 128, 128, (6, 0)), Flash()
    out = flash(q, k, v, segments, 0.25)
    assert out.shape == (64, 4, value_size) and out.dtype == q.dtype
    assert [one.shape for one in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]
    with torch.no_grad():
        out, lse = flash.forward(q, k, v, segments, 0.25)
        assert out.shape == (64, 4, value_size) and lse.shape == (4, 64) and lse.dtype == torch.float32
        grads = flash.backward(out, q, k, v, Partial(out, lse), segments, 0.25)
    assert [one.shape for one in grads] == [q.shape, k.shape, v.shape]


def test_torchs_private_backward_is_flash_attentions_as_the_forward_is():
    schema = torch.ops.torch_attn._varlen_attn_backward.default._schema
    backends = [argument.default_value for argument in schema.arguments if argument.name == "backend"]
    assert backends in ([], [SDPBackend.FLASH_ATTENTION.value])  # from torch 2.15 on it has one
