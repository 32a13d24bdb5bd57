"""Flat batches: lengths, padding masks, chunks, and the cut over cp, against a loop over sequences."""

import sys
import types

import pytest
import torch

from dtrain.parallel.context import _shard_thd_chunk_for_te, make_cp_batch_for_te
from tests.parallel.test_context import Dimension, held

EMPTY = -1000


def packed(rows, padding_id=0):
    """rows: per row its sequences as (tokens, padded length). Ids count from 1; every row must have the same width."""
    most = max(len(row) for row in rows)
    batch = {name: [] for name in ("input_ids", "labels", "seq_lens", "seq_lens_padded")}
    token = 1
    for row in rows:
        ids, labels = [], []
        for own, whole in row:
            ids += [*range(token, token + own), *[padding_id] * (whole - own)]
            labels += [*range(token + 1, token + 1 + own), *[-100] * (whole - own)]
            token += own
        batch["input_ids"].append(ids)
        batch["labels"].append(labels)
        unused = [EMPTY] * (most - len(row))
        batch["seq_lens"].append([own for own, _ in row] + unused)
        batch["seq_lens_padded"].append([whole for _, whole in row] + unused)
    return {name: torch.tensor(values) for name, values in batch.items()}


ROWS = [[(3, 8), (16, 16)], [(24, 24)], [(8, 8), (7, 8), (0, 8)], [(20, 24)]]


def expected_stream(batch, rows, name, size, rank):
    """Head and tail of every sequence, one after the other, from the definition."""
    stream, sequences = [], []
    for row, lengths in zip(batch[name][rows].tolist(), batch["seq_lens_padded"][rows].tolist(), strict=True):
        start = 0
        for length in lengths:
            if length != EMPTY:
                sequences.append(row[start : start + length])
                start += length
    for sequence in sequences:
        stream += [sequence[t] for t in held(len(sequence), size, rank)] if size > 1 else sequence
    return stream


@pytest.mark.parametrize(("size", "rank"), [(s, r) for s in (1, 2, 4) for r in range(s)])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_streams_lengths_and_masks(size, rank, chunks):
    batch = packed(ROWS)
    batch["position_ids"] = torch.arange(1000, 1000 + 4 * 24).view(4, 24)
    before = {name: tensor.clone() for name, tensor in batch.items()}
    flat = make_cp_batch_for_te(Dimension(size, rank), batch, num_chunks=chunks)
    assert set(batch) == set(before) and all(torch.equal(batch[name], before[name]) for name in batch)
    assert set(flat) == {
        *("input_ids", "labels", "position_ids", "padding_mask"),
        *("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "qkv_format"),
    }
    per_chunk = 4 // chunks
    longest = 0
    for index in range(chunks):
        rows = slice(index * per_chunk, (index + 1) * per_chunk)
        for name in ("input_ids", "labels", "position_ids"):
            stream = flat[name] if chunks == 1 else flat[name][index]
            assert stream.tolist() == expected_stream(batch, rows, name, size, rank), name
        mask = flat["padding_mask"] if chunks == 1 else flat["padding_mask"][index]
        ids = flat["input_ids"] if chunks == 1 else flat["input_ids"][index]
        assert mask.dtype == torch.bool and torch.equal(mask, ids == 0)
        lengths = [n for row in batch["seq_lens_padded"][rows].tolist() for n in row if n != EMPTY]
        ends = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
        longest = max(longest, len(ends))
        found = flat["cu_seqlens"] if chunks == 1 else flat["cu_seqlens"][index]
        assert found.dtype == torch.int32 and found.tolist()[: len(ends)] == ends
        assert set(found.tolist()[len(ends) :]) <= {EMPTY}
        longest_sequence = flat["max_seqlen"] if chunks == 1 else flat["max_seqlen"][index]
        assert longest_sequence == max(lengths) and flat["max_seqlen"].dtype == torch.int32
    assert flat["cu_seqlens"].shape[-1] == longest
    assert torch.equal(flat["cu_seqlens"], flat["cu_seqlens_padded"])


def test_ranks_share_out_all_tokens_of_lengths_that_three_divides():
    batch = packed([[(5, 6), (12, 12)], [(18, 18)]])
    parts = [make_cp_batch_for_te(Dimension(3, rank), batch)["labels"] for rank in range(3)]
    assert sorted(torch.cat(parts).tolist()) == sorted(batch["labels"].flatten().tolist())


def test_a_padding_id_that_is_a_word_too_is_no_padding():
    batch = packed([[(4, 8)]], padding_id=7)
    batch["input_ids"][0, 1] = 7
    flat = make_cp_batch_for_te(None, batch, padding_token_id=7)
    assert flat["padding_mask"].tolist() == [False] * 4 + [True] * 4


def test_positions_are_made_per_sequence_and_one_row_of_them_stands_for_all():
    batch = packed([[(3, 4), (4, 4)], [(8, 8)]])
    flat = make_cp_batch_for_te(None, batch)
    assert flat["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, *range(8)]
    batch["position_ids"] = torch.arange(8)[None]
    assert make_cp_batch_for_te(None, batch)["position_ids"].tolist() == [*range(8), *range(8)]


def test_another_sentinel():
    batch = packed(ROWS)
    for name in ("seq_lens", "seq_lens_padded"):
        batch[name][batch[name] == EMPTY] = -1
    flat = make_cp_batch_for_te(None, batch, num_chunks=4, seq_lens_padding_value=-1)
    assert flat["cu_seqlens"].tolist() == [[0, 8, 24, -1], [0, 24, -1, -1], [0, 8, 16, 24], [0, 24, -1, -1]]


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        ({}, {"qkv_format": "bshd"}, ValueError, "only 'thd' format is supported"),
        ({"seq_lens": None}, {}, KeyError, "seq_lens"),
        ({"seq_lens_padded": None}, {}, KeyError, "seq_lens_padded"),
        ({}, {"num_chunks": 3}, ValueError, "num_chunks=3 does not divide the 4 rows"),
        ({}, {"num_chunks": 0}, ValueError, "num_chunks=0"),
        ({}, {"cp_mesh": Dimension(3)}, ValueError, r"padded lengths \[8, 16, 8, 8, 8\] are not multiples of 2·cp = 6"),
        ({"seq_lens_padded": torch.full((4, 3), 4)}, {}, ValueError, r"sum to \[12, 12, 12, 12\] in the rows"),
        ({"seq_lens": torch.full((4, 3), 1)}, {}, ValueError, "must have the same sequences"),
        ({"seq_lens": torch.full((4, 2), 1)}, {}, ValueError, "must have the same sequences"),
    ],
)
def test_what_would_drop_rows_or_tokens_is_refused(change, options, error, message):
    batch = {name: tensor for name, tensor in {**packed(ROWS), **change}.items() if tensor is not None}
    with pytest.raises(error, match=message):
        make_cp_batch_for_te(options.pop("cp_mesh", Dimension(2)), batch, **options)


def test_a_sequence_longer_than_with_its_padding_is_refused():
    batch = packed([[(4, 4), (4, 4)]])
    batch["seq_lens"][0, 0] = 5
    with pytest.raises(ValueError, match="none longer than its padded length"):
        make_cp_batch_for_te(None, batch)


def test_one_flat_chunk_with_only_the_ends_given():
    batch = {
        "input_ids": torch.tensor([1, 2, 3, 0, 5, 6, 7, 8]),
        "labels": torch.arange(8),
        "position_ids": torch.arange(8),
        "cu_seqlens": torch.tensor([0, 4, 8, EMPTY]),
    }
    whole = _shard_thd_chunk_for_te(batch, None, "thd", EMPTY, 0)
    assert whole["padding_mask"].tolist() == [False] * 3 + [True] + [False] * 4
    part = _shard_thd_chunk_for_te(batch, Dimension(2, 0), "thd", EMPTY, 0)
    assert part["input_ids"].tolist() == [1, 0, 5, 8] and part["cu_seqlens"].tolist() == [0, 4, 8, EMPTY]
    assert part["max_seqlen"] == 4 and batch["input_ids"].numel() == 8
    with pytest.raises(ValueError, match="the sequences have 8 of 9 tokens"):
        _shard_thd_chunk_for_te(
            {"input_ids": torch.arange(9), "cu_seqlens": batch["cu_seqlens"]}, Dimension(2), "thd", EMPTY, 0
        )
    with pytest.raises(ValueError, match="cu_seqlens is missing"):
        _shard_thd_chunk_for_te({"input_ids": torch.arange(8)}, Dimension(2), "thd", EMPTY, 0)


def test_transformer_engine_is_left_alone_on_a_cpu(monkeypatch):
    """Its function takes CUDA tensors; that one of the name is installed must not change what a CPU gets."""
    engine = types.ModuleType("transformer_engine_torch")
    engine.thd_get_partitioned_indices = lambda ends, total, size, rank: torch.arange(total)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", engine)
    batch = packed([[(8, 8)]])
    assert make_cp_batch_for_te(Dimension(2), batch)["input_ids"].tolist() == [1, 2, 7, 8]


@pytest.mark.parametrize(("size", "rank"), [(s, r) for s in (1, 2, 4) for r in range(s)])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_embeddings_and_other_streams_are_cut_as_ids_are_and_the_rest_passes(size, rank, chunks):
    batch = packed(ROWS)
    ids = make_cp_batch_for_te(Dimension(size, rank), batch, num_chunks=chunks)
    words = torch.randn(200, 5, dtype=torch.float64, requires_grad=True)
    passing = {
        "pixel_values": torch.randn(7, 3),
        "images": ["a", "b", "c", "d"],
        "name": "batch",
        "kinds": torch.arange(4),
        "missing": None,
    }
    streams = {"input_ids": words[batch["input_ids"]], "token_type_ids": batch["input_ids"] % 3}
    streams |= {"weights": batch["labels"][..., None].double(), "attention_mask": torch.ones(4, 24)}
    flat = make_cp_batch_for_te(Dimension(size, rank), batch | streams | passing, num_chunks=chunks)
    assert flat.keys() == ids.keys() | passing.keys() | {"token_type_ids", "weights"}
    assert all(flat[name] is value for name, value in passing.items())
    assert torch.equal(flat["input_ids"], words[ids["input_ids"]])
    assert torch.equal(flat["token_type_ids"], ids["input_ids"] % 3)
    assert torch.equal(flat["weights"], ids["labels"][..., None].double())
    for name in ids.keys() - {"input_ids", "qkv_format"}:
        assert torch.equal(flat[name], ids[name]), name
    flat["input_ids"].sum().backward()
    assert words.grad.sum() == flat["input_ids"].numel()


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_positions_with_coordinates_and_the_places_that_a_rank_holds(size, rank):
    batch = packed(ROWS)
    flat, places = make_cp_batch_for_te(Dimension(size, rank), batch, return_local_indices=True)
    assert torch.equal(batch["input_ids"].flatten()[places], flat["input_ids"]) and "local_indices" not in flat
    coordinates = torch.arange(3 * 4 * 24).view(3, 4, 24)
    for given in (coordinates, coordinates[:, :1]):
        found = make_cp_batch_for_te(Dimension(size, rank), batch | {"position_ids": given})["position_ids"]
        assert found.shape == (3, 1, len(places))
        assert torch.equal(found[:, 0], given.expand(3, 4, 24).flatten(1)[:, places])
    found, none = make_cp_batch_for_te(
        Dimension(size, rank), batch | {"position_ids": coordinates}, num_chunks=2, return_local_indices=True
    )
    assert found["position_ids"].shape == (2, 3, 1, 48 // size) and none is None
    bare = batch | {"position_ids": None}
    assert torch.equal(make_cp_batch_for_te(Dimension(size, rank), bare)["position_ids"], flat["position_ids"])


def test_a_batch_without_rows_and_embeddings_that_do_not_tell_padding():
    empty = make_cp_batch_for_te(Dimension(2), {name: one[:0] for name, one in packed(ROWS).items()})
    assert empty["input_ids"].shape == (0,) and empty["cu_seqlens"].tolist() == [0] and empty["max_seqlen"] == 0
    ends = torch.tensor([0, 4, 8])
    with pytest.raises(ValueError, match="cannot be derived from embeddings"):
        _shard_thd_chunk_for_te({"input_ids": torch.zeros(8, 3), "cu_seqlens": ends}, Dimension(2), "thd", EMPTY, 0)
