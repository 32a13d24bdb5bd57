"""Linear attention of packed rows, of prompts and step by step: the numbers of every document by itself."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.attention.linear import chunks as delta_chunks, layer as delta
from dtrain.attention.linear.flash import FlashDelta
from dtrain.attention.linear.layer import LinearMask, causal_conv, conv_step, delta_step, gated_delta, last_window
from dtrain.memory.activation_checkpointing import STORED
from tests.attention.fla import chunk_gated_delta_rule
from tests.attention.recurrence import Sizes, alone, heads, inputs, packed

SHARED, EQUAL = Sizes(), Sizes(key_heads=3, value_heads=3, key=4, value=6, width=3)


def computed(leaves, documents, sizes, flash=None):
    x, weight, g, beta = leaves
    mask = LinearMask.of(documents, x.shape[1], sizes.width, flash=flash)
    return gated_delta(*heads(causal_conv(x, weight, mask), sizes), g, beta, mask)[0]


def differentiated(function, leaves, up):
    leaves = [one.clone().requires_grad_() for one in leaves]
    out = function(leaves)
    (out * up).sum().backward()
    return out.detach(), [one.grad for one in leaves]


ROWS = {
    "one token": packed((1,)),
    "below a chunk": packed((3, 1, 2, 30)),
    "a chunk": packed((64,)),
    "above a chunk": packed((1, 62, 2, 3, 1)),
    "chunks": packed((64, 64, 128)),
    "across chunks": packed((100, 1, 1, 90, 5), padding=40),
    "padding alone": torch.cat([packed((70,)), packed((), padding=70)]),
    "padding on the left": packed((40, 50)).flip(1).sub(1),
}


@pytest.mark.trap(
    "the state of linear attention goes on into the next sample",
    "NVIDIA-NeMo/Automodel PR#2147",
    "samples see each other",
    "each document alone, convolution and state",
)
@pytest.mark.parametrize("flash", [None, FlashDelta(chunk_gated_delta_rule)], ids=["chunks", "fla"])
@pytest.mark.parametrize("sizes", [SHARED, EQUAL], ids=["shared", "equal"])
@pytest.mark.parametrize("case", ROWS)
def test_packed_rows_are_their_documents_alone(case, sizes, flash):
    """A document must not go on from the state of the one before (Automodel #2131, ms-swift #9618), nor from the last
    inputs of its convolution."""
    documents = ROWS[case]
    leaves = inputs(*documents.shape, sizes)
    up = torch.randn(*documents.shape, sizes.value_heads, sizes.value, dtype=torch.float64)
    out, grads = differentiated(lambda some: computed(some, documents, sizes, flash), leaves, up)
    expected, expected_grads = differentiated(lambda some: alone(*some, documents, sizes)[0], leaves, up)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for one, other in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("flash", [None, FlashDelta(chunk_gated_delta_rule)], ids=["chunks", "fla"])
def test_heads_and_tokens_some_at_a_time_give_the_same(monkeypatch, flash):
    documents = ROWS["across chunks"]
    leaves = inputs(*documents.shape, SHARED)
    up = torch.randn(*documents.shape, SHARED.value_heads, SHARED.value, dtype=torch.float64)
    together = differentiated(lambda some: computed(some, documents, SHARED, flash), leaves, up)
    monkeypatch.setattr(delta_chunks, "CACHE_ELEMENTS", 1)
    monkeypatch.setattr(delta, "CACHE_ELEMENTS", 1)  # 64 tokens, the fewest
    apart = differentiated(lambda some: computed(some, documents, SHARED, flash), leaves, up)
    for one, other in zip([together[0], *together[1]], [apart[0], *apart[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("length", [1, 40, 64, 130])
def test_a_document_is_as_transformers_computes_it(length):
    """float32, 2e-5 of the largest: values, and the gradients of all inputs."""
    theirs = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    sizes = Sizes(key_heads=2, value_heads=4, key=32, value=16)
    leaves = inputs(1, length, sizes, torch.float32)

    def oracle(some):
        x, weight, g, beta = some
        padded = theirs.causal_conv1d_fn(x.transpose(1, 2), weight, None, activation="silu").transpose(1, 2)
        rule = theirs.torch_chunk_gated_delta_rule
        return rule(*heads(padded, sizes), g, beta, use_qk_l2norm_in_kernel=True)[0]

    up = torch.randn(1, length, sizes.value_heads, sizes.value)
    # The row holds another document before it and padding behind it: theirs sees neither.
    others, after = inputs(1, 37, sizes, torch.float32, seed=1), inputs(1, 9, sizes, torch.float32, seed=2)
    documents = packed((37, length), padding=9)

    def ours(some):
        row = [
            one if one.dim() == 2 else torch.cat([first, one, last], 1)
            for one, first, last in zip(some, others, after, strict=True)
        ]
        return computed(row, documents, sizes)[:, 37 : 37 + length]

    out, grads = differentiated(ours, leaves, up)
    expected, expected_grads = differentiated(oracle, leaves, up)
    for one, other in zip([out, *grads], [expected, *expected_grads], strict=True):
        assert (one - other).abs().max() <= 2e-5 * other.abs().max().clamp(min=1e-6)


def test_padding_touches_nothing():
    documents = packed((30, 50), padding=16)
    leaves, padding = inputs(*documents.shape, SHARED), documents < 0
    other = [one.clone() for one in leaves]
    for one in (other[0], other[2], other[3]):
        one[padding] = -1e6
    up = torch.randn(*documents.shape, SHARED.value_heads, SHARED.value, dtype=torch.float64)  # on padding too
    out, grads = differentiated(lambda some: computed(some, documents, SHARED), leaves, up)
    out_too, grads_too = differentiated(lambda some: computed(some, documents, SHARED), other, up)
    assert torch.equal(out, out_too) and bool((out[padding] == 0).all())
    for one, too in zip(grads, grads_too, strict=True):
        assert torch.equal(one, too)
        assert one.dim() == 2 or bool((one[padding] == 0).all())


def test_decays_beyond_all_numbers_stay_finite():
    documents = packed((90, 3, 70))
    leaves = inputs(*documents.shape, SHARED, torch.float32)
    leaves[2] = leaves[2] * 1e30
    up = torch.randn(*documents.shape, SHARED.value_heads, SHARED.value)
    out, grads = differentiated(lambda some: computed(some, documents, SHARED), leaves, up)
    assert all(bool(one.isfinite().all()) for one in (out, *grads))


def test_decays_of_one_document_cost_another_no_precision():
    documents = packed((20, 30))
    leaves = inputs(*documents.shape, SHARED)
    leaves[2][documents == 0] *= 1e8
    expected, _ = alone(*leaves, documents, SHARED)
    torch.testing.assert_close(computed(leaves, documents, SHARED), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", [(9, 1), (9, 2), (9, 5), (1,), (3,), (12,)])
def test_the_last_window_is_of_the_last_document(lengths):
    documents = packed(lengths, padding=2)
    x = torch.randn(*documents.shape, 3)
    own = x[:, :-2][:, -min(3, lengths[-1]) :]
    window = last_window(x, LinearMask.of(documents, x.shape[1]))
    assert torch.equal(window, torch.cat([torch.zeros(1, 3 - own.shape[1], 3), own], 1))


def test_half_precision_is_summed_in_float32():
    documents = packed((90, 3, 70))
    leaves = inputs(*documents.shape, SHARED, torch.bfloat16)
    leaves[2] = leaves[2].float()
    out = computed(leaves, documents, SHARED)
    expected = computed([one.float() for one in leaves], documents, SHARED)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("sizes", [SHARED, EQUAL], ids=["shared", "equal"])
def test_tokens_after_prompts_are_those_of_the_whole_rows(sizes):
    """Prompts of several lengths in one batch, then the rows of each group, one token or three at a time."""
    lengths, each, more = [1, 2, 70, 33], 2, 7
    count, owners = max(lengths), torch.arange(len(lengths)).repeat_interleave(each)
    x, weight, g, beta = inputs(len(owners), count + more, sizes)
    first = torch.arange(len(lengths)) * each
    for row, owner in enumerate(owners):  # a group has one prompt
        for one in (x, g, beta):
            one[row, : lengths[owner]] = one[first[owner], : lengths[owner]]
    prompts, mask = (
        [one[first, :count] for one in (x, g, beta)],
        LinearMask.of_lengths(torch.tensor(lengths), count, sizes.width),
    )
    out, state = gated_delta(*heads(causal_conv(prompts[0], weight, mask), sizes), *prompts[1:], mask)
    window, state = last_window(prompts[0], mask)[owners], state[owners]
    at = torch.tensor(lengths)[owners][:, None]
    rows, found = torch.arange(len(owners))[:, None], []
    for steps in (1, 1, 3, 1, 1):
        places = at + torch.arange(steps)
        mixed, window = conv_step(x[rows, places], weight, window)
        new, state = delta_step(*heads(mixed, sizes), g[rows, places], beta[rows, places], state)
        found.append(new)
        at = at + steps
    for row, owner in enumerate(owners):
        length = lengths[owner] + more
        whole = [one[row, None, :length] for one in (x, g, beta)]
        expected, states = alone(whole[0], weight, *whole[1:], torch.zeros(1, length, dtype=torch.int64), sizes)
        torch.testing.assert_close(out[owner, : lengths[owner]], expected[0, :-more], rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.cat(found, 1)[row], expected[0, -more:], rtol=0, atol=1e-12)
        torch.testing.assert_close(state[row], states[0], rtol=0, atol=1e-12)


class _Results(TorchDispatchMode):
    """The operations of a forward whose results selective activation checkpointing would keep."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in STORED:
            self.kept.append(func)
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_keeps_nothing_of_a_forward():
    documents = ROWS["across chunks"]
    with _Results() as results:
        computed(inputs(*documents.shape, SHARED), documents, SHARED)
    assert not results.kept


def test_a_row_goes_on_from_a_state():
    """The row's second part, where a first document goes on and another begins; derivatives reach the state."""
    sizes, cut, documents = SHARED, 70, packed((90, 40))
    leaves = inputs(*documents.shape, sizes)
    up = torch.randn(*documents.shape, sizes.value_heads, sizes.value, dtype=torch.float64)

    def in_two(some):
        x, weight, g, beta = some
        mixed, state, outputs = causal_conv(x, weight, LinearMask.of(documents, x.shape[1])), None, []
        for part in (slice(0, cut), slice(cut, None)):
            mask = LinearMask.of(documents[:, part], x[:, part].shape[1])
            parts = *heads(mixed[:, part], sizes), g[:, part], beta[:, part]
            out, state = delta_chunks.chunked(*parts, mask.segments, mask.real, state)
            outputs.append(out)
        return torch.cat(outputs, 1)

    out, grads = differentiated(in_two, leaves, up)
    expected, expected_grads = differentiated(lambda some: alone(*some, documents, sizes)[0], leaves, up)
    for mine, exact in zip([out, *grads], [expected, *expected_grads], strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)
