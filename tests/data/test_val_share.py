"""`data.val` as a share of the training rows: what is validated on is never trained on, in whatever order it comes."""

import hashlib
import json
from collections import Counter

import pytest

from dtrain import recipe as config
from dtrain.base.errors import RecipeError, UserError
from dtrain.data.rows import cache
from dtrain.data.sources.sources import open_rows
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.recipe import schema
from dtrain.training import load_recipe
from dtrain.training.preflight import notes
from tests.data import templates
from tests.data.makers import byte_level, save, write_jsonl
from tests.running import run
from tests.tiny import check, tiny_recipe, write_rows

COUNT, SHARE = 400, 0.2


@pytest.fixture
def model(tmp_path):
    return save(tmp_path / "model", byte_level(), templates.QWEN25)


def opened(model, split, *paths, kind="examples", seed=3, val: object = SHARE, sources=None, **options):
    said = []
    path = None if sources else [str(path) for path in paths]
    data = schema.Data(train=schema.DataSource(path, sources=sources), max_length=64, val=val, num_workers=2)
    rows = open_rows(
        data, split=split, kind=kind, tokenizer=Tokenizer.from_directory(model), seed=seed, print_line=said.append,
        progress=False, **options,
    )  # fmt: skip
    return rows.samples, "\n".join(said)


def held(samples):
    """Return the number of times that each sample is there, by its documents' ids."""
    return Counter(str([ids.tolist() for ids, _ in samples[index]]) for index in range(len(samples)))


def texts(count=COUNT):
    return [{"text": f"row {number}", "id": number} for number in range(count)]


def test_both_sides_are_the_whole_and_share_nothing(tmp_path, model):
    file = write_jsonl(tmp_path / "a.jsonl", texts())
    (train, said), (val, _), (whole, _) = (
        opened(model, "train", file),
        opened(model, "val", file),
        opened(model, "train", file, val=None),
    )
    assert held(train) + held(val) == held(whole) and not held(train) & held(val)
    assert abs(len(val) - SHARE * COUNT) < 4 * (COUNT * SHARE * (1 - SHARE)) ** 0.5
    assert f"train data: {len(train)} samples of {len(train)} rows" in said
    assert f"(data.val is taken from these: {len(val)} rows are of the other part)" in said


def test_the_rule_is_a_hash_of_content_and_seed(tmp_path, model):
    """Written anew: 64 bits of BLAKE2b over [seed, content] as JSON, below the share."""
    file = write_jsonl(tmp_path / "a.jsonl", texts())

    def drawn(row):
        bits = hashlib.blake2b(json.dumps([3, row["text"]]).encode(), digest_size=8).digest()
        return int.from_bytes(bits, "big") / 2.0**64

    expected = write_jsonl(tmp_path / "b.jsonl", [row for row in texts() if drawn(row) < SHARE])
    assert held(opened(model, "val", file)[0]) == held(opened(model, "train", expected, val=None)[0])
    assert held(opened(model, "val", file, seed=4)[0]) != held(opened(model, "val", file)[0])


@pytest.mark.processes
def test_neither_order_nor_files_nor_workers_nor_more_rows_matter(tmp_path, model, monkeypatch):
    file = write_jsonl(tmp_path / "a.jsonl", texts())
    halves = [write_jsonl(tmp_path / f"{name}.jsonl", rows) for name, rows in
              (("c", texts()[:150][::-1]), ("b", texts()[150:]))]  # fmt: skip
    more = write_jsonl(tmp_path / "more.jsonl", [{"text": f"another {number}"} for number in range(50)])
    val = held(opened(model, "val", file)[0])
    assert held(opened(model, "val", *halves)[0]) == val
    grown = held(opened(model, "val", file, more)[0])
    assert val <= grown and not held(opened(model, "train", file)[0]) & grown
    monkeypatch.setattr(cache, "MIN_PARALLEL_BYTES", 0)
    monkeypatch.setattr("dtrain.data.sources.files.CHUNK_ROWS", 32)
    assert held(opened(model, "val", file)[0]) == val


def test_equal_rows_are_on_one_side_however_they_are_written(tmp_path, model):
    """Another id, another place, another format, a mark of what is trained: the same content."""
    rows = [
        [
            {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "yes"}]},
            {"conversations": [{"from": "human", "value": f"{number}?"}, {"from": "gpt", "value": "yes"}], "id": 1},
            {"instruction": f"{number}?", "output": "yes", "source": "x"},
        ]
        for number in range(60)
    ]
    marked = [{"messages": [row[0]["messages"][0], {**row[0]["messages"][1], "train": True}]} for row in rows]
    files = [write_jsonl(tmp_path / f"{at}.jsonl", [row[at] for row in rows]) for at in range(3)]
    files.append(write_jsonl(tmp_path / "marked.jsonl", marked))
    train, val = (held(opened(model, split, *files)[0]) for split in ("train", "val"))
    assert set(train.values()) == set(val.values()) == {4} and len(train) + len(val) == 60


def test_sources_count_as_often_in_training_only(tmp_path, model):
    one, two = write_jsonl(tmp_path / "a.jsonl", texts()), write_jsonl(tmp_path / "b.jsonl", [{"text": "never"}] * 9)
    sources = [schema.WeightedSource(str(one), weight=2.0), schema.WeightedSource(str(two), weight=0.0)]
    val, _ = opened(model, "val", sources=sources)
    assert held(val) == held(opened(model, "val", one)[0])


PAIR = {"chosen": [{"role": "assistant", "content": "a"}], "rejected": [{"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("pairs", [{"prompt": f"{number}?", **PAIR} for number in range(100)]),
        ("pairs", [{"prompt_ids": [number], "chosen_ids": [5], "rejected_ids": [6]} for number in range(100)]),
        ("prompts", [{"question": f"{number}?", "answer": "4", "level": number} for number in range(100)]),
        ("examples", [{"prompt": f"{number}?", "completion": "yes"} for number in range(100)]),
        ("examples", [{"input_ids": [number, 5, 6], "labels": [-100, 5, 6]} for number in range(100)]),
    ],
)
def test_every_kind_of_sample(tmp_path, model, kind, rows):
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    train, val = (held(opened(model, split, file, kind=kind)[0]) for split in ("train", "val"))
    assert not train & val and train.total() + val.total() == 100 and 5 < val.total() < 40


def test_prompts_that_differ_in_a_column_alone_are_on_one_side(tmp_path, model):
    rows = [{"question": f"{number // 2}?", "answer": f"{number}"} for number in range(100)]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    assert set(held(opened(model, "val", file, kind="prompts")[0]).values()) == {2}


@pytest.mark.parametrize(("split", "val", "fix"), [("val", 1e-9, "higher"), ("train", 1 - 1e-9, "lower")])
def test_a_side_without_a_row_is_refused(tmp_path, model, split, val, fix):
    file = write_jsonl(tmp_path / "a.jsonl", texts(20))
    with pytest.raises(UserError) as error:
        opened(model, split, file, val=val)
    assert f"{split} data: data.val={val} leaves it without a row: all of the 20 rows in" in str(error.value)
    assert f"Set data.val {fix}" in str(error.value)


@pytest.mark.parametrize("kind", ["examples", "prompts"])
def test_a_number_of_rows_takes_those_of_the_smallest_hashes(tmp_path, model, kind):
    """Written anew: the 40 rows whose 64 bits of BLAKE2b are smallest, equal rows together, from all files."""
    if kind == "examples":
        rows, content = texts(), lambda row: row["text"]
    else:
        rows = [{"prompt": f"{number}?"} for number in range(COUNT)]
        content = lambda row: [row["prompt"], None]  # noqa: E731

    def drawn(row):
        return hashlib.blake2b(json.dumps([3, content(row)]).encode(), digest_size=8).digest()

    ordered = sorted(rows, key=drawn)
    files = [write_jsonl(tmp_path / f"{at}.jsonl", rows[at::2]) for at in range(2)]
    expected = write_jsonl(tmp_path / "b.jsonl", ordered[:40])
    options = {"kind": kind, "cache_dir": tmp_path / "cache"}
    val, said = opened(model, "val", *files, val=40, **options)
    train, _ = opened(model, "train", *files, val=40, **options)
    assert len(val) == 40 and held(val) == held(opened(model, "train", expected, val=None, **options)[0])
    assert held(train) + held(val) == held(opened(model, "train", *files, val=None, **options)[0])
    assert f"{COUNT - 40} rows are of the other part" in said
    twice = write_jsonl(tmp_path / "twice.jsonl", rows * 2)
    assert len(opened(model, "val", twice, val=39, **options)[0]) == 40
    with pytest.raises(UserError, match=f"train data: data.val={COUNT} leaves it without a row"):
        opened(model, "train", *files, val=COUNT, **options)


def test_a_number_of_rows_counts_only_sources_that_train(tmp_path, model):
    one, two = write_jsonl(tmp_path / "a.jsonl", texts()), write_jsonl(tmp_path / "b.jsonl", [{"text": "never"}] * 9)
    sources = [schema.WeightedSource(str(two), weight=0.0), schema.WeightedSource(str(one), weight=2.0)]
    val, train = (opened(model, split, sources=sources, val=30)[0] for split in ("val", "train"))
    assert held(val) == held(opened(model, "val", one, val=30)[0]) and len(train) == COUNT - 30


@pytest.mark.parametrize("share", ["0", "1.0", "1.5", "-0.1", ".nan", ".inf", "true"])
def test_a_share_lies_between_0_and_1(tmp_path, share):
    try:
        found = check(tiny_recipe(tmp_path, f"data.val={share}"), 1)
    except RecipeError as error:
        found = [str(error)]
    assert len(found) == 1 and "data.val" in found[0]


@pytest.mark.parametrize(("value", "fix"), [("val.jsonl", "write data.val.path=val.jsonl"), ("[a.jsonl]", "")])
def test_a_file_is_no_share(value, fix):
    with pytest.raises(RecipeError, match=f"data.val is a .*mapping with the keys path.*{fix}"):
        load_recipe({}, [f"data.val={value}"])


def test_the_recipe_keeps_it(tmp_path):
    recipe = tiny_recipe(tmp_path, "data.val=0.25", "train.validate_every=2")
    assert recipe.data.val == 0.25 and check(recipe, 1) == [] and notes(recipe) == []
    [note] = notes(load_recipe(recipe, ["train.validate_every=null"]))
    assert "data.val=0.25 keeps rows out of training" in note
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml(recipe))
    assert load_recipe(again) == recipe
    assert load_recipe(again, ["data.val={path: v.jsonl}"]).data.val == schema.DataSource("v.jsonl")
    assert load_recipe(again, ["data.val=null"]).data.val is None


def measured(recipe):
    lines = (recipe.run.directory / "metrics.jsonl").read_text().splitlines()
    return [(row.get("loss"), row.get("val_loss")) for row in map(json.loads, lines)]


def validated_at(recipe):
    lines = map(json.loads, (recipe.run.directory / "metrics.jsonl").read_text().splitlines())
    return [row["step"] for row in lines if "val_loss" in row]


def test_a_run_with_validation_data_validates_five_times_by_default(tmp_path):
    """Also with a number of rows and a part of a pass, and at each save that keep_best compares."""
    write_rows(tmp_path / "rows.jsonl", count=47)
    shape = ["train.steps=null", "train.epochs=2.5", "data.val=5", "data.packing=false", "train.global_batch=4"]
    recipe = run(tiny_recipe(tmp_path, *shape, name="default"))
    assert validated_at(recipe) == [6, 12, 18, 24, 27]  # (42 + 42 + 21) / 4 = 26.25 steps
    best = ["checkpoint.keep_best=val_loss", "checkpoint.every=10", "train.steps=20", "train.epochs=null"]
    assert validated_at(run(tiny_recipe(tmp_path, *shape, *best, name="best"))) == [10, 20]
    never = ["train.validate_every=null", "train.steps=2", "train.epochs=null"]
    assert validated_at(run(tiny_recipe(tmp_path, *shape, *never, name="never"))) == []


def test_a_run_on_parts_is_one_on_files_of_them(tmp_path):
    """The same losses, trained and validated, as from two files with these rows. A resume with another share is
    refused."""
    write_rows(tmp_path / "rows.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]

    def drawn(row):
        bits = hashlib.blake2b(json.dumps([0, row["input_ids"]]).encode(), digest_size=8).digest()
        return int.from_bytes(bits, "big") / 2.0**64

    parts = [[row for row in rows if drawn(row) >= 0.3], [row for row in rows if drawn(row) < 0.3]]
    train, val = (write_jsonl(tmp_path / f"part{at}.jsonl", part) for at, part in enumerate(parts))
    shape = ["train.validate_every=2", "train.steps=4", "checkpoint.every=2"]
    files = run(tiny_recipe(tmp_path, *shape, f"data.train.path={train}", f"data.val.path={val}", name="files"))
    shared = run(tiny_recipe(tmp_path, *shape, "data.val=0.3"))
    assert measured(shared) == measured(files) and any(val for _, val in measured(shared))
    shape[1] = "train.steps=6"
    with pytest.raises(UserError, match="data.val: 0.3 -> 0.4"):
        run(tiny_recipe(tmp_path, *shape, "data.val=0.4"))
    assert len(measured(run(tiny_recipe(tmp_path, *shape, "data.val=0.3")))) == 9
