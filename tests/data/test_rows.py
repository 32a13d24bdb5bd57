"""The endless sequence of rows: each sample once an epoch, labels shifted once, any position a place to go on from."""

import json
from collections import Counter
from itertools import islice

import pytest
import torch

from dtrain.base.errors import UserError
from dtrain.data.formats.encoder import Encoder
from dtrain.data.rows import rows as rows_module
from dtrain.data.rows.cache import Source, open_cache
from dtrain.data.rows.rows import Batches, Cursor, Rows
from dtrain.data.text.tokenizer import Tokenizer
from tests.data.makers import byte_level, save, write_jsonl


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """60 samples of 2 to 16 tokens; sample i is made of the token i, trained in its first token and its second half."""
    root = tmp_path_factory.mktemp("rows")
    lengths = [2 + number * 7 % 15 for number in range(60)]
    data = [
        {"input_ids": [number] * size, "labels": [number] + [-100] * (size // 2 - 1) + [number] * (size - size // 2)}
        for number, size in enumerate(lengths)
    ]
    coder = Encoder(Tokenizer.from_directory(save(root, byte_level())), None, max_length=16)
    source = Source((write_jsonl(root / "a.jsonl", data),), ("tokenized",))
    return open_cache([source], coder, cache_dir=root / "cache")


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(rows_module, "WINDOW", 16)


def make(samples, **options):
    return Rows(samples, max_length=16, **{"seed": 3, **options})


def listed(row):
    return {name: tensor.tolist() for name, tensor in row.items()}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_once_an_epoch(samples, packing, shuffle):
    rows = make(samples, packing=packing, shuffle=shuffle, epochs=3)
    placements = list(rows.sample_groups())
    assert len(placements) == rows.total_rows()
    for epoch in range(3):
        count = rows.rows_in_epoch(epoch)
        mine, placements = placements[:count], placements[count:]
        assert Counter(index for placement in mine for index in placement.samples) == Counter(range(60))
        assert [placement.next_cursor for placement in mine[:-1]] == [Cursor(epoch, row) for row in range(1, count)]
        assert mine[-1].next_cursor == Cursor(epoch + 1, 0) and mine[-1].epochs == epoch + 1
        progress = [placement.epochs for placement in mine]
        assert progress == sorted(progress) and epoch < progress[0]
        if not shuffle and not packing:
            assert [placement.samples for placement in mine] == [[index] for index in range(60)]
        sizes = [sum(len(samples[index][0][0]) for index in placement.samples) for placement in mine]
        assert max(sizes) <= 16 and sum(sizes) == rows.tokens_in_epoch(epoch) == samples.meta["tokens"]
    orders = [tuple(tuple(p.samples) for p in islice(make(samples, seed=seed).sample_groups(), 60)) for seed in (1, 2)]
    assert orders[0] != orders[1]


def test_a_row_by_hand(samples):
    row = listed(*make(samples).build([1, 3]))  # 9 and 8 tokens
    assert row["input_ids"] == [1] * 9 + [3] * 8
    assert row["position_ids"] == [*range(9), *range(8)]
    assert row["seq_ids"] == [0] * 9 + [1] * 8
    assert row["labels"] == [-100] * 3 + [1] * 5 + [-100] + [-100] * 3 + [3] * 4 + [-100]


def test_rows_hold_the_samples(samples):
    """Brute force: each token of each sample, its label the next one where that one is trained."""
    for row in make(samples, epochs=2).iterate():
        assert all(tensor.dtype == torch.int64 and tensor.shape == row["input_ids"].shape for tensor in row.values())
        row, at = listed(row), 0
        for document in range(max(row["seq_ids"]) + 1):
            ids, trained = (tensor.tolist() for tensor in samples[row["input_ids"][at]][0])
            for place in range(len(ids)):
                label = ids[place + 1] if place + 1 < len(ids) and trained[place + 1] else -100
                found = tuple(row[name][at + place] for name in ("input_ids", "labels", "position_ids", "seq_ids"))
                assert found == (ids[place], label, place, document)
            at += len(ids)
        assert at == len(row["input_ids"])


@pytest.mark.slow
@pytest.mark.trap(
    "a resume in the second epoch goes on in the order of the first",
    "huggingface/accelerate #2016",
    "rows twice, others never",
    "from any position the rows are those of the whole run",
)
@pytest.mark.parametrize("packing", [True, False])
def test_resume_at_every_position(samples, packing):
    rows = make(samples, packing=packing, epochs=3)
    whole = list(rows.sample_groups())
    cursor = Cursor()
    for position, placement in enumerate(whole):
        saved = Cursor(*json.loads(json.dumps(cursor)))
        fresh = make(samples, packing=packing, epochs=3)
        assert list(islice(fresh.sample_groups(saved), 5)) == whole[position : position + 5]
        cursor = placement.next_cursor
    assert list(rows.sample_groups(cursor)) == []


@pytest.mark.parametrize("packing", [True, False])
def test_a_begun_epoch_is_the_beginning_of_a_whole_one(samples, packing):
    whole = make(samples, packing=packing, epochs=3)
    part = make(samples, packing=packing, epochs=2.5)
    first, last = whole.rows_in_epoch(0) + whole.rows_in_epoch(1), whole.rows_in_epoch(2)
    expected = list(whole.sample_groups())[: first + -(-last // 2)]
    assert list(part.sample_groups()) == expected and part.total_rows() == len(expected)
    assert list(part.sample_groups(expected[-3].next_cursor)) == expected[-2:]
    assert list(part.sample_groups(expected[-1].next_cursor)) == []
    assert make(samples, packing=False, epochs=0.1).total_rows() == 6  # of 60: no rounding up of 6.0000000001


def test_cursor_beyond_the_data(samples):
    with pytest.raises(UserError, match="row 500 of epoch 1, but that epoch has only"):
        next(make(samples).iterate(Cursor(1, 500)))


def test_without_end(samples):
    assert make(samples).total_rows() is None
    assert list(islice(make(samples).sample_groups(), 400))[-1].next_cursor.epoch > 3


def collect(batches):
    found = []
    for batch in batches:
        assert batch.samples == [sample for row in batch.rows for sample in samples_in(row)]
        found.append(([listed(row) for row in batch.rows], batch.size, batch.cursor, batch.epoch))
    return found


def samples_in(row):
    """Sample i is made of the token i."""
    return [int(row["input_ids"][row["seq_ids"] == document][0]) for document in range(int(row["seq_ids"][-1]) + 1)]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4])
def test_ranks_share_the_same_batches(samples, dp_size):
    """Whatever the number of ranks, batch n holds the same rows; the last one is short, and a rank may have none."""
    rows = make(samples, epochs=2)
    alone = collect(Batches(rows, global_batch=12))
    ranks = [collect(Batches(rows, global_batch=12, dp_rank=rank, dp_size=dp_size)) for rank in range(dp_size)]
    assert sum(size for _, size, _, _ in alone) == rows.total_rows()
    for number, (all_rows, size, cursor, epoch) in enumerate(alone):
        assert size == len(all_rows) and (size == 12 or number == len(alone) - 1)
        for rank in range(dp_size):
            assert ranks[rank][number] == (all_rows[rank::dp_size], size, cursor, epoch)


@pytest.mark.processes
def test_ranks_by_length_share_the_same_batches_alike_in_tokens(samples):
    rows = make(samples, packing=False, epochs=1)
    alone = list(Batches(rows, global_batch=8))
    ranks = [list(Batches(rows, global_batch=8, dp_rank=r, dp_size=4, balance_lengths=True)) for r in range(4)]
    for whole, *parts in zip(alone, *ranks, strict=True):
        assert sorted(one for part in parts for one in part.samples) == sorted(whole.samples)
        assert all((part.cursor, part.epoch, part.size) == (whole.cursor, whole.epoch, whole.size) for part in parts)
        assert max(len(part.rows) for part in parts) == -(-whole.size // 4)
        for part in parts:
            places = [whole.samples.index(one) for one in part.samples]
            assert places == sorted(places)
            assert [listed(row) for row in part.rows] == [listed(whole.rows[place]) for place in places]
    spread = [[sum(len(row["input_ids"]) for row in part.rows) for part in parts] for parts in zip(*ranks, strict=True)]
    lengths = [[len(row["input_ids"]) for row in whole.rows] for whole in alone]
    assert all(max(of) - min(of) <= max(longest) for of, longest in zip(spread, lengths, strict=True))
    ahead = Batches(rows, global_batch=8, dp_rank=1, dp_size=4, num_workers=1, balance_lengths=True)
    assert [batch.samples for batch in ahead] == [batch.samples for batch in ranks[1]]


@pytest.mark.trap(
    "the shuffle of epoch 0 again after each resume",
    "huggingface/accelerate PR#4232",
    "the head of one order is seen again and again",
    "the order is a function of seed and epoch",
)
def test_batches_span_epochs_and_resume_anywhere(samples):
    rows = make(samples, epochs=3)
    whole = collect(Batches(rows, global_batch=5))
    assert any(batch[2].epoch > 0 and 0 < batch[2].row < 5 for batch in whole)
    for number, (_, _, cursor, _) in enumerate(whole):
        rest = collect(Batches(rows, global_batch=5, dp_rank=1, dp_size=2, cursor=cursor))
        assert [(size, cursor) for _, size, cursor, _ in rest] == [(b[1], b[2]) for b in whole[number + 1 :]]
        assert [batch[0] for batch in rest] == [batch[0][1::2] for batch in whole[number + 1 :]]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(samples, workers):
    rows = make(samples, epochs=2)
    alone = collect(Batches(rows, global_batch=7, dp_rank=2, dp_size=4, cursor=Cursor(0, 3)))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    together = Batches(rows, global_batch=7, dp_rank=2, dp_size=4, cursor=Cursor(0, 3), num_workers=workers)
    assert collect(together) == alone
    assert torch.equal(torch.get_rng_state(), state)  # else training would draw other numbers


def test_weights_without_a_row(samples):
    weightless = type(samples)(samples.directory, [0.0], {})
    with pytest.raises(UserError, match="weights"):
        make(weightless)
