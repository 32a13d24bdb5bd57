"""The batch contract: padding, cutting, trimming, and micro-batches of nothing but padding."""

import pytest
import torch

from dtrain.batch import IGNORE, collate, micro_batches, real_tokens, rows_in, trained_tokens, trim


def row(length, start=10):
    return {
        "input_ids": torch.arange(start, start + length),
        "labels": torch.arange(start + 1, start + length + 1),
        "position_ids": torch.arange(length),
        "seq_ids": torch.zeros(length, dtype=torch.int64),
    }


def test_collate_pads_each_stream_with_its_own_value():
    batch = collate([row(3), row(5)])
    assert batch["input_ids"].tolist() == [[10, 11, 12, 0, 0], [10, 11, 12, 13, 14]]
    assert batch["labels"].tolist() == [[11, 12, 13, IGNORE, IGNORE], [11, 12, 13, 14, 15]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert batch["seq_ids"].tolist() == [[0, 0, 0, -1, -1], [0, 0, 0, 0, 0]]
    assert trained_tokens(batch) == real_tokens(batch) == 8


def test_micro_batches_are_trimmed_and_ranks_without_rows_get_padding():
    batch = collate([row(2), row(3), row(7)])
    pieces = micro_batches(batch, size=2, count=3)
    assert [tuple(piece["input_ids"].shape) for piece in pieces] == [(2, 3), (1, 7), (1, 1)]
    assert trained_tokens(pieces[2]) == real_tokens(pieces[2]) == 0
    assert sum(map(trained_tokens, pieces)) == trained_tokens(batch)


def test_no_rows_at_all_is_a_batch():
    batch = collate([])
    assert rows_in(batch) == 0 and trained_tokens(batch) == 0
    (piece,) = micro_batches(batch, size=4, count=1)
    assert piece["labels"].tolist() == [[IGNORE]] and piece["seq_ids"].tolist() == [[-1]]


def test_rows_that_do_not_fit_are_an_error():
    with pytest.raises(ValueError, match="5 rows do not fit into 2 micro-batches of 2"):
        micro_batches(collate([row(2)] * 5), size=2, count=2)


def test_trim_keeps_one_column():
    assert trim({"seq_ids": torch.full((2, 4), -1)})["seq_ids"].shape == (2, 1)
