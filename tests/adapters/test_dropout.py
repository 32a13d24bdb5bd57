"""Dropout of adapters: a function of tokens and places, so that no mesh and no micro-batch changes it."""

from types import SimpleNamespace

import pytest
import torch

from dtrain.adapters.config import AdapterConfig
from dtrain.adapters.lora import Adapter, AdapterSettings
from dtrain.models.common.micro_batch import AdapterContext

SHARE, WIDTH, LENGTH = 0.25, 512, 8


def batch_of(*documents):
    """Rows of one document each, of LENGTH tokens."""
    ids = torch.tensor(documents)
    return {
        "input_ids": ids,
        "position_ids": torch.arange(LENGTH).expand(ids.shape),
        "seq_ids": torch.zeros_like(ids),
    }


def part(rank, size):
    """The share of a tensor-parallel rank, as `TensorParallel` says it."""
    return SimpleNamespace(
        rank=rank, size=size, sequence_parallel=True, local_start=lambda length: rank * length // size
    )


def dropped(batch, *, seed=0, step=0, number=0, tp=None, cut=None):
    """Return ones [B, S, WIDTH], or a rank's part of them, after dropout."""
    settings = AdapterSettings(AdapterConfig(dropout=SHARE), seed)
    rows, length = batch["input_ids"].shape
    ones = torch.ones(rows, length // (cut.size if cut else 1), WIDTH // (tp.size if tp else 1))
    layer = SimpleNamespace(training=True, in_features=WIDTH, tp=tp, sequence_tp=cut)
    context = AdapterContext(dropout_tokens=settings.dropout_tokens(batch, step))
    return Adapter(1.0, False, number, settings)._apply_dropout(layer, ones, context)


FIRST, SECOND = list(range(LENGTH)), list(range(7, 7 + LENGTH))


def test_the_share_is_dropped_and_the_rest_scaled_up():
    left = dropped(batch_of(FIRST, SECOND))
    assert set(left.unique().tolist()) == {0.0, torch.tensor(1 / (1 - SHARE)).item()}
    assert (left == 0).double().mean().item() == pytest.approx(SHARE, abs=0.02)


def test_it_differs_by_step_seed_layer_place_and_document():
    left = dropped(batch_of(FIRST, SECOND))
    for other in ({"step": 1}, {"seed": 1}, {"number": 1}):
        assert not torch.equal(left, dropped(batch_of(FIRST, SECOND), **other)), other
    patterns = {tuple(token.tolist()) for token in left.flatten(0, 1)}
    assert len(patterns) == 2 * LENGTH
    assert torch.equal(left.flip(0), dropped(batch_of(SECOND, FIRST)))  # whatever row a document is in


def test_a_part_of_the_inputs_or_of_the_tokens_is_dropped_as_in_the_whole():
    batch = batch_of(FIRST, SECOND)
    whole = dropped(batch)
    assert torch.equal(torch.cat([dropped(batch, tp=part(rank, 2)) for rank in range(2)], 2), whole)
    assert torch.equal(torch.cat([dropped(batch, cut=part(rank, 2)) for rank in range(2)], 1), whole)
