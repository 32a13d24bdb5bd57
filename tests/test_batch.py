"""The batch contract: padding, trimming, what a caller may leave out, and which document is which."""

import pytest
import torch

from dtrain.base.batch import (
    IGNORE_INDEX,
    collate,
    complete_batch,
    document_ids,
    document_lengths,
    num_documents,
    num_trained_tokens,
    trim,
)


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
    assert batch["labels"].tolist() == [[11, 12, 13, IGNORE_INDEX, IGNORE_INDEX], [11, 12, 13, 14, 15]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert batch["seq_ids"].tolist() == [[0, 0, 0, -1, -1], [0, 0, 0, 0, 0]]
    assert num_trained_tokens(batch) == 8 and document_lengths(batch).tolist() == [3, 5]


def test_what_a_callers_batch_lacks_is_made():
    ids = torch.arange(10, 22).view(2, 6)
    full = complete_batch({"input_ids": ids, "input_lengths": torch.tensor([4, 6])})
    assert full["seq_ids"].tolist() == [[0, 0, 0, 0, -1, -1], [0] * 6]
    assert full["labels"].tolist() == [[11, 12, 13, *[IGNORE_INDEX] * 3], [17, 18, 19, 20, 21, IGNORE_INDEX]]
    assert full["position_ids"][:, :4].tolist() == [[0, 1, 2, 3]] * 2
    masked = complete_batch({"input_ids": ids, "attention_mask": (full["seq_ids"] == 0).long()})
    assert masked.keys() == full.keys() and all(torch.equal(masked[name], full[name]) for name in full)
    packed = complete_batch({"input_ids": ids[:1], "seq_ids": torch.tensor([[0, 0, 0, 1, 1, -1]])})
    assert packed["position_ids"][0, :5].tolist() == [0, 1, 2, 0, 1]
    assert packed["labels"].tolist() == [[11, 12, IGNORE_INDEX, 14, IGNORE_INDEX, IGNORE_INDEX]]
    assert complete_batch(full).keys() == full.keys()
    with pytest.raises(ValueError, match="padding must be on the right"):
        complete_batch({"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]] * 2)})


def test_masks_enter_the_labels_where_the_token_is_predicted():
    ids = torch.arange(10, 22).view(2, 6)
    tokens = torch.tensor([[1, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1]])
    full = complete_batch({"input_ids": ids, "token_mask": tokens, "reward": torch.ones(2)})
    assert full["labels"].tolist() == [
        [IGNORE_INDEX, 12, 13, *[IGNORE_INDEX] * 3],
        [*[IGNORE_INDEX] * 4, 21, IGNORE_INDEX],
    ]
    assert full.keys() == {"input_ids", "seq_ids", "position_ids", "labels", "reward"}
    rows = complete_batch({"input_ids": ids, "token_mask": tokens, "sample_mask": torch.tensor([1.0, 0.0])})
    assert rows["labels"][1].tolist() == [IGNORE_INDEX] * 6 and rows["labels"][0].tolist() == full["labels"][0].tolist()


def test_documents_are_counted_through_the_batch():
    batch = collate([{**row(4), "seq_ids": torch.tensor([0, 0, 1, 1])}, row(2), {**row(3), "seq_ids": torch.arange(3)}])
    assert document_ids(batch).tolist() == [[0, 0, 1, 1], [2, 2, -1, -1], [3, 4, 5, -1]]
    assert num_documents(batch) == 6 and num_documents(collate([])) == 0 and document_ids(collate([])).shape == (0, 1)


def test_trim_keeps_one_column():
    assert trim({"seq_ids": torch.full((2, 4), -1)})["seq_ids"].shape == (2, 1)
