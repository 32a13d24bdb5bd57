"""The search for the largest logits of wide rows, against a stable sort: values, and the lower column of equal ones."""

import pytest
import torch

from dtrain.losses.head.topk import local_topk


def rows(kind, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(shape, generator=generator) * 3
    if kind == "equal ones":
        return logits.round()
    if kind == "bfloat16":
        return logits.bfloat16()
    if kind == "few finite":
        return logits.masked_fill(torch.rand(shape, generator=generator) < 0.998, -float("inf"))
    if kind == "nothing finite":
        return torch.full(shape, -float("inf"))
    if kind == "every other column":
        return torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)[..., ::2]
    return logits


KINDS = ["plain", "equal ones", "bfloat16", "few finite", "nothing finite", "every other column"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 2048), (2, 5, 4099), (1, 70, 1000), (8191,), (33, 300), (2, 7)])
@pytest.mark.parametrize("k", [1, 2, 6])
def test_it_is_a_stable_sort(kind, shape, k):
    logits = rows(kind, shape, seed=k)
    values, columns = logits.sort(dim=-1, descending=True, stable=True)
    found, places = local_topk(logits, k)
    assert torch.equal(found, values[..., :k])
    assert torch.equal(places, columns[..., :k])
