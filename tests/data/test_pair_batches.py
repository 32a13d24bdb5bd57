"""Batches of pairs: packing, the shares of ranks, the cache, the preview."""

import io
import json
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from dtrain.base.batch import collate, document_ids
from dtrain.base.errors import UserError
from dtrain.commands.preview import preview
from dtrain.data.formats.encoder import Encoder
from dtrain.data.formats.pairs import SAME_TOKENS, PairEncoder
from dtrain.data.rows import cache, rows as rows_module
from dtrain.data.rows.cache import Source, open_cache
from dtrain.data.rows.rows import Batches, Cursor, Rows
from dtrain.data.sources.sources import open_rows
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.training import load_recipe
from tests.data import templates
from tests.data.makers import byte_level, save, write_jsonl
from tests.data.test_pairs import ASK, END, PLAIN, QWEN_ASK, QWEN_SYSTEM, encoder, say, tokenized


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """60 pairs, both documents 2 to 16 tokens; the ids of sample i are i."""
    root = tmp_path_factory.mktemp("pairs")
    data = [tokenized(*([number] * size for size in sizes_of(number))) for number in range(60)]
    source = Source((write_jsonl(root / "a.jsonl", data),), ("tokenized",))
    return open_cache([source], encoder(root / "model", max_length=16), cache_dir=root / "cache")


def sizes_of(number):
    """Tokens of prompt, chosen and rejected; the completions never equally long."""
    prompt = 1 + number * 5 % 7
    chosen = 1 + number * 7 % 9
    return prompt, chosen, 1 + (chosen + number % 7) % 9


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(rows_module, "WINDOW", 16)


def make(samples, **options):
    return Rows(samples, max_length=16, **{"seed": 3, **options})


def listed(row):
    return {name: tensor.tolist() for name, tensor in row.items()}


def document(number, side, at=0):
    """One document of sample `number`, by hand."""
    prompt, *completions = sizes_of(number)
    size = prompt + completions[side]
    return {
        "input_ids": [number] * size,
        "labels": [-100] * (prompt - 1) + [number] * completions[side] + [-100],
        "position_ids": list(range(size)),
        "seq_ids": [at] * size,
    }


def test_samples_are_pairs(samples):
    assert len(samples) == 60 and samples.documents_per_sample == 2 and samples.meta["rows"] == 60
    lengths = [[sizes_of(number)[0] + size for size in sizes_of(number)[1:]] for number in range(60)]
    assert samples.lengths(torch.arange(60)).tolist() == [sum(pair) for pair in lengths]
    assert samples.full_lengths(3, 6).tolist() == [size for pair in lengths[3:6] for size in pair]
    for number in range(60):
        assert [len(ids) for ids, _ in samples[number]] == lengths[number]
        assert [int(trained.sum()) for _, trained in samples[number]] == list(sizes_of(number)[1:])
        assert samples.origin(number)[1] == number + 1


def test_unpacked_a_pair_is_two_neighbouring_rows(samples):
    rows = make(samples, packing=False, epochs=1)
    assert rows.rows_in_epoch(0) == 60
    for placement in rows.sample_groups():
        (number,) = placement.samples
        assert [listed(row) for row in rows.build([number])] == [document(number, side) for side in (0, 1)]
    assert len(list(rows.iterate())) == 120


def test_packed_a_row_holds_whole_pairs(samples):
    rows, seen = make(samples, epochs=1), Counter()
    assert rows.capacity == 32
    for placement in rows.sample_groups():
        (row,) = rows.build(placement.samples)
        sides = [(number, side) for number in placement.samples for side in (0, 1)]
        expected = [document(number, side, at) for at, (number, side) in enumerate(sides)]
        assert listed(row) == {name: sum((one[name] for one in expected), []) for name in row}
        assert len(row["input_ids"]) <= 32
        seen.update(placement.samples)
    assert seen == Counter(range(60)) and rows.rows_in_epoch(0) < 50


def collect(batches):
    return [([listed(row) for row in b.rows], b.samples, b.size, b.cursor, b.epoch) for b in batches]


@pytest.mark.parametrize("packing", [True, False])
def test_ranks_share_the_same_batches(samples, packing):
    rows = make(samples, packing=packing, epochs=2)
    alone = collect(Batches(rows, global_batch=5))
    assert sum(batch[2] for batch in alone) == rows.total_rows()
    for dp_size in (2, 3):
        ranks = [collect(Batches(rows, global_batch=5, dp_rank=rank, dp_size=dp_size)) for rank in range(dp_size)]
        for number, (all_rows, all_samples, size, cursor, epoch) in enumerate(alone):
            placements = all_rows if packing else [all_rows[at : at + 2] for at in range(0, len(all_rows), 2)]
            assert size == len(placements)
            for rank in range(dp_size):
                mine = placements[rank::dp_size]
                mine = mine if packing else [row for pair in mine for row in pair]
                found = [
                    row["input_ids"][row["seq_ids"].index(at)] for row in mine for at in range(row["seq_ids"][-1] + 1)
                ]
                assert found[::2] == found[1::2]
                assert ranks[rank][number] == (mine, found[::2], size, cursor, epoch)
            assert sorted(sum((ranks[rank][number][1] for rank in range(dp_size)), [])) == sorted(all_samples)


@pytest.mark.processes
@pytest.mark.parametrize("packing", [True, False])
def test_workers_change_nothing_and_any_cursor_resumes(samples, packing):
    rows = make(samples, packing=packing, epochs=2)
    alone = collect(Batches(rows, global_batch=7, dp_rank=1, dp_size=2, cursor=Cursor(0, 3)))
    assert collect(Batches(rows, global_batch=7, dp_rank=1, dp_size=2, cursor=Cursor(0, 3), num_workers=2)) == alone
    after = alone[2][3]
    assert collect(Batches(rows, global_batch=7, dp_rank=1, dp_size=2, cursor=after)) == alone[3:]


def test_the_cache_is_used_again_and_is_no_other_kinds(tmp_path, monkeypatch):
    built, build = [], cache._write_samples
    monkeypatch.setattr(cache, "_write_samples", lambda *arguments: (built.append(1), build(*arguments))[1])
    coder = encoder(tmp_path / "model", max_length=16)
    rows = [{**tokenized([1], [2] * (1 + number % 3), [3]), "input_ids": [1, 2]} for number in range(9)]
    source = Source((write_jsonl(tmp_path / "a.jsonl", rows),), ("tokenized",))
    first, again = (open_cache([source], coder, cache_dir=tmp_path / "cache") for _ in range(2))
    assert len(built) == 1 and first.fingerprint == again.fingerprint
    assert [ids.tolist() for ids, _ in again[2]] == [[1, 2, 2, 2], [1, 3]]
    single = open_cache([source], Encoder(coder.tokenizer, None, max_length=16), cache_dir=tmp_path / "cache")
    assert len(built) == 2 and len(single[0]) == 1 and single.fingerprint != first.fingerprint
    longer = PairEncoder(coder.tokenizer, None, max_length=17)
    assert open_cache([source], longer, cache_dir=tmp_path / "cache").fingerprint == first.fingerprint
    assert len(built) == 3


def test_the_same_tokens_in_pairs_are_other_data(tmp_path):
    coder = encoder(tmp_path / "model", max_length=16)
    pair = Source((write_jsonl(tmp_path / "a.jsonl", [tokenized([1], [2], [3])]),), ("tokenized",))
    rows = [{"input_ids": [1, token], "labels": [-100, token]} for token in (2, 3)]
    single = Source((write_jsonl(tmp_path / "b.jsonl", rows),), ("tokenized",))
    pairs = open_cache([pair], coder, cache_dir=tmp_path / "cache")
    singles = open_cache([single], Encoder(coder.tokenizer, None, max_length=16), cache_dir=tmp_path / "cache")
    assert pairs.meta["fingerprint"] == singles.meta["fingerprint"] and pairs.fingerprint != singles.fingerprint


@pytest.mark.processes
def test_processes_give_what_one_gives(tmp_path, monkeypatch):
    coder = encoder(tmp_path / "model", templates.QWEN25, max_length=40)
    rows = [
        {"prompt": f"{number} " * (number % 9), "chosen": [say("x")], "rejected": [say("y z")]} for number in range(600)
    ]
    source = Source((write_jsonl(tmp_path / "a.jsonl", rows),), ("preference",))
    alone = open_cache([source], coder, cache_dir=None)
    monkeypatch.setattr(cache, "MIN_PARALLEL_BYTES", 0)
    together = open_cache([source], coder, cache_dir=tmp_path / "cache", num_workers=2)
    assert alone.fingerprint == together.fingerprint and len(together) == 600
    assert 0 < alone.meta["truncated"] < 600
    lengths = [[len(ids) for ids, _ in alone[number]] for number in range(600)]
    full = alone.full_lengths(0, 600).view(600, 2).tolist()
    assert alone.meta["truncated"] == sum(before != after for before, after in zip(full, lengths, strict=True))
    assert alone.meta["tokens_cut"] == sum(map(sum, full)) - alone.meta["tokens"]


def section(file, **more):
    plain = dict(max_length=64, packing=True, loss_on="assistant", shuffle=True, too_long="truncate", num_workers=0)
    unset = dict(val=None, cache_dir=None, chat_template=None, template_kwargs={}, prompts_as=None)
    plain["special_tokens"] = "structure"
    split = SimpleNamespace(path=str(file), format=more.pop("format", "auto"), sources=None)
    return SimpleNamespace(**{**plain, **unset, "train": split, **more})


def opened(model, data, kind="pairs"):
    said = []
    tokenizer = Tokenizer.from_directory(model)
    rows = open_rows(data, kind=kind, tokenizer=tokenizer, print_line=said.append, progress=False)
    return rows, "\n".join(said)


def test_says_what_it_found_and_left_out(tmp_path):
    model = save(tmp_path / "model", byte_level(), templates.QWEN25)
    same = {**PLAIN, "rejected": PLAIN["chosen"]}
    long = {**PLAIN, "chosen": [say("x" * 99)]}
    file = write_jsonl(tmp_path / "a.jsonl", [PLAIN, same, PLAIN, long])
    rows, said = opened(model, section(file))
    assert f"{file}: format preference (detected)" in said and "tokenizer_config.json (chat_template)" in said
    assert "train data: 3 pairs of 4 rows" in said and "1 pairs truncated to data.max_length=64" in said
    assert f"1 rows left out that teach no preference: {file}:2 ({SAME_TOKENS})" in said
    assert rows.capacity == 128
    _, said = opened(model, section(file, too_long="drop"))
    assert "train data: 2 pairs" in said and "1 rows dropped, longer than data.max_length=64" in said
    with pytest.raises(UserError, match="not one of 1 rows teaches a preference .*must differ"):
        opened(model, section(write_jsonl(tmp_path / "b.jsonl", [same])))
    tokens = write_jsonl(tmp_path / "c.jsonl", [tokenized([1], [2], [3])])
    assert "format tokenized (detected)\ntokenized rows are used as they are" in opened(model, section(tokens))[1]


@pytest.mark.parametrize("row, name, kind, words", [
    ({"messages": [ASK]}, "auto", "pairs", ["a.jsonl:1", "format messages", "method=sft"]),
    ({"messages": [ASK]}, "messages", "pairs", ["format messages", "method=sft", "prompt, chosen and rejected"]),
    ({"input_ids": [1]}, "tokenized", "pairs", ["a.jsonl:1", "no prompt_ids", "method=sft"]),
    ({"question": "x"}, "auto", "pairs", ["a.jsonl:1", "question", "preference: chosen, rejected"]),
    (PLAIN, "auto", "examples", ["a.jsonl", "preferences", "set method=dpo"]),
    (PLAIN, "preference", "examples", ["preferences", "set method=dpo"]),
    (tokenized([1], [2], [3]), "auto", "examples", ["a.jsonl:1", "preferences", "set method=dpo"]),
    (tokenized([1], [2], [3]), "tokenized", "examples", ["a.jsonl:1", "no input_ids", "set method=dpo"]),
])  # fmt: skip
def test_each_method_names_the_other(tmp_path, row, name, kind, words):
    model = save(tmp_path / "model", byte_level(), templates.QWEN25)
    with pytest.raises(UserError) as error:
        opened(model, section(write_jsonl(tmp_path / "a.jsonl", [row]), format=name), kind)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("packing", [True, False])
def test_preview(tmp_path, packing):
    model = save(tmp_path / "model", byte_level(), templates.QWEN25)
    file = write_jsonl(tmp_path / "a.jsonl", [PLAIN] * 4)
    data = {"train": {"path": str(file)}, "max_length": 128, "packing": packing}
    tree = {"method": "dpo", "data": data, "model": {"path": str(model)}, "run": {"dir": str(tmp_path / "runs")}}
    recipe = load_recipe(tree)
    out = io.StringIO()
    preview(recipe, samples=1, out=out)
    ask = QWEN_SYSTEM + QWEN_ASK
    shown = out.getvalue()
    text = f"- chosen:\n{ask}[[Me, 東京!{END}]]\n- rejected:\n{ask}[[You{END}]]\n"
    assert text in shown
    (tokens,) = {json.loads(meta.read_text())["tokens"] for meta in (tmp_path / "runs").glob(".cache/*/meta.json")}
    assert f"mean {tokens / 8:.1f} (max_length 128)" in shown
    if packing:
        rows, _ = opened(model, recipe.data)
        count = rows.rows_in_epoch(0)
        full = 100 * tokens / (256 * count)
        assert f"packed rows of 256 tokens are {full:.1f}% full, {4 / count:.1f} pairs each" in shown
        assert f"an epoch: {count} rows" in shown and "--- row 1" in shown
    else:
        assert shown.count("- chosen:") == 1 and "an epoch: 4 pairs" in shown and "--- pair 1" in shown


def test_a_batch_of_pairs_is_what_the_method_reads(samples):
    """In a collated batch the even documents are the chosen ones, packed or not."""
    for packing in (True, False):
        batch = next(iter(Batches(make(samples, packing=packing), global_batch=4)))
        ids = collate(batch.rows)
        documents = document_ids(ids)
        for at, sample in enumerate(islice(batch.samples, 6)):
            for side in (0, 1):
                inside = documents == 2 * at + side
                assert ids["input_ids"][inside].tolist() == document(sample, side)["input_ids"]
                assert ids["labels"][inside].tolist() == document(sample, side)["labels"]
