"""Linear attention of packed rows, of prompts and step by step: the numbers of every document by itself."""

import pytest
import torch

from dtrain.attention.delta import LinearMask, causal_conv, gated_delta
from tests.attention.recurrence import Sizes, alone, heads, inputs, packed

SHARED, EQUAL = Sizes(), Sizes(key_heads=3, value_heads=3, key=4, value=6, width=3)


def computed(leaves, documents, sizes):
    x, weight, g, beta = leaves
    mask = LinearMask.of(documents, x.shape[1], sizes.width)
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


@pytest.mark.parametrize("sizes", [SHARED, EQUAL], ids=["shared", "equal"])
@pytest.mark.parametrize("case", ROWS)
def test_packed_rows_are_their_documents_alone(case, sizes):
    documents = ROWS[case]
    leaves = inputs(*documents.shape, sizes)
    up = torch.randn(*documents.shape, sizes.value_heads, sizes.value, dtype=torch.float64)
    out, grads = differentiated(lambda some: computed(some, documents, sizes), leaves, up)
    expected, expected_grads = differentiated(lambda some: alone(*some, documents, sizes)[0], leaves, up)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for one, other in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
