"""Columns under the file's own names, against the same rows under ours; and files of several formats in one list."""

import csv
import gzip
import json
from dataclasses import replace

import pytest

from dtrain import recipe as config
from dtrain.base.errors import UserError
from dtrain.commands.cli import main
from dtrain.data.sources.sources import open_rows
from dtrain.data.text.tokenizer import Tokenizer
from dtrain.recipe import schema
from dtrain.training import load_recipe
from dtrain.training.registry import build_method
from dtrain.training.resume import compare
from tests.data import templates
from tests.data.makers import byte_level, save, write_jsonl
from tests.problem_lines import preflight
from tests.tiny import check, tiny_grpo, tiny_recipe

ASK, REPLY = {"role": "user", "content": "two and two"}, {"role": "assistant", "content": "four"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
ROWS = {
    "examples": {
        "messages": {"messages": [ASK, REPLY]},
        "sharegpt": {
            "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}],
            "system": "s",
        },
        "alpaca": {"instruction": "add", "input": "1 1", "output": "2", "system": "be brief"},
        "prompt_completion": {"prompt": "two and", "completion": " two"},
        "text": {"text": "the quick brown fox"},
        "tokenized": {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    },
    "pairs": {
        "preference": {"prompt": [ASK], "chosen": [REPLY], "rejected": [{**REPLY, "content": "no"}], "system": "s"},
        "tokenized": {"prompt_ids": [5, 6], "chosen_ids": [7], "rejected_ids": [8]},
    },
    "prompts": {
        "question": {"question": "two?", "answer": "4", "level": 3},
        "messages": {"messages": [ASK, REPLY], "wanted": "4"},
        "alpaca": {"instruction": "add", "output": "2"},
    },
}
CASES = [(kind, name) for kind, formats in ROWS.items() for name in formats]


@pytest.fixture
def model(tmp_path):
    return save(tmp_path / "model", byte_level(), templates.QWEN25)


def opened(model, section, kind="examples", **options):
    said = []
    rows = open_rows(
        section, kind=kind, tokenizer=Tokenizer.from_directory(model), print_line=said.append, progress=False, **options
    )
    return rows, "\n".join(said)


def section(path=None, **more):
    return schema.Data(train=schema.DataSource(path=path, **more), max_length=64, packing=False, shuffle=False)


def contents(rows):
    samples = rows.samples
    found = [[(ids.tolist(), mask.tolist()) for ids, mask in samples[index]] for index in range(len(samples))]
    return found, [samples.row(index)["columns"] for index in range(len(samples))] if samples.noun == "prompts" else []


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.parametrize("detected", [True, False])
def test_the_file_s_names_give_what_ours_give(tmp_path, model, kind, name, detected):
    row = ROWS[kind][name]
    columns = {key: f"their {key}" for key in row}
    ours = write_jsonl(tmp_path / "ours.jsonl", [row, row])
    theirs = write_jsonl(tmp_path / "theirs.jsonl", [{f"their {key}": value for key, value in row.items()}] * 2)
    format = "auto" if detected else name
    expected, _ = opened(model, section(str(ours), format=format), kind)
    found, _ = opened(model, section(str(theirs), format=format, columns=columns), kind)
    assert contents(found) == contents(expected)
    assert found.samples.identity == expected.samples.identity


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_column_may_be_a_value_in_an_object(tmp_path, model, kind, name):
    row = ROWS[kind][name]
    ours = write_jsonl(tmp_path / "ours.jsonl", [row, row])
    theirs = write_jsonl(tmp_path / "theirs.jsonl", [{"id": 7, "data": {"in": row}}] * 2)
    columns = {key: f"data.in.{key}" for key in row}
    expected, _ = opened(model, section(str(ours)), kind)
    found, _ = opened(model, section(str(theirs), columns=columns), kind)
    assert contents(found)[0] == contents(expected)[0]
    for kept, wanted in zip(contents(found)[1], contents(expected)[1], strict=True):
        assert {key: value for key, value in kept.items() if key not in ("id", "data")} == wanted


def test_a_column_whose_own_name_has_a_dot_comes_first(tmp_path, model):
    file = write_jsonl(tmp_path / "a.jsonl", [{"a.b": "one", "a": {"b": "two"}}])
    plain = write_jsonl(tmp_path / "b.jsonl", [{"text": "one"}])
    found, _ = opened(model, section(str(file), columns={"text": "a.b"}))
    assert contents(found) == contents(opened(model, section(str(plain)))[0])


def test_names_may_be_exchanged_and_what_is_not_named_stays(tmp_path, model):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": " two", "completion": "one and", "text": "not this"}])
    columns = {"prompt": "completion", "completion": "prompt"}
    found, _ = opened(model, section(str(file), format="prompt_completion", columns=columns))
    straight = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "one and", "completion": " two"}])
    assert contents(found) == contents(opened(model, section(str(straight)))[0])


@pytest.mark.parametrize("ending", [".csv", ".json", ".jsonl.gz", ".parquet"])
def test_every_kind_of_file(tmp_path, model, ending):
    rows = [{"q": "add", "a": "2"}, {"q": "take", "a": "1"}]
    file = tmp_path / f"a{ending}"
    if ending == ".csv":
        with file.open("w") as stream:
            writer = csv.DictWriter(stream, ["q", "a"])
            writer.writeheader()
            writer.writerows(rows)
    elif ending == ".json":
        file.write_text(json.dumps(rows))
    elif ending == ".jsonl.gz":
        file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    found, said = opened(model, section(str(file), columns={"instruction": "q", "output": "a"}))
    plain = write_jsonl(tmp_path / "p.jsonl", [{"instruction": row["q"], "output": row["a"]} for row in rows])
    assert contents(found) == contents(opened(model, section(str(plain)))[0]) and "format alpaca (detected)" in said


def test_a_cache_is_of_its_columns(tmp_path, model):
    file = write_jsonl(tmp_path / "a.jsonl", [{"one": "two and", "other": "the lazy dog"}])
    found = [
        contents(opened(model, section(str(file), columns={"text": name}), cache_dir=tmp_path / "cache")[0])
        for name in ("one", "other", "one")
    ]
    assert found[0] == found[2] != found[1]


def test_an_unknown_format_is_answered_with_how_to_map(tmp_path, model):
    file = write_jsonl(tmp_path / "a.jsonl", [{"id": 1, "dialog": [ASK, REPLY]}])
    with pytest.raises(UserError, match="or map them: 'data.train.columns={messages: dialog}', for one"):
        opened(model, section(str(file)))


def test_sources_and_validation_have_columns_of_their_own(tmp_path, model):
    one = write_jsonl(tmp_path / "a.jsonl", [{"t": "one"}])
    two = write_jsonl(tmp_path / "b.jsonl", [{"body": "two"}])
    entries = [
        schema.WeightedSource(path=str(one), columns={"text": "t"}),
        schema.WeightedSource(path=str(two), columns={"text": "body"}, weight=2.0),
    ]
    data = replace(section(sources=entries), val=schema.DataSource(path=str(two), columns={"text": "body"}))
    assert opened(model, data)[0].rows_in_epoch(0) == 3
    assert opened(model, data, split="val")[0].rows_in_epoch(0) == 1


def test_several_formats_in_one_list_of_files(tmp_path, model):
    """Each file as if it were alone; an empty one takes no part."""
    names = [("a", "messages"), ("b", "text"), ("c", "alpaca"), ("d", "text")]
    files = [write_jsonl(tmp_path / f"{file}.jsonl", [ROWS["examples"][name]]) for file, name in names]
    empty = write_jsonl(tmp_path / "empty.jsonl", [])
    rows, said = opened(model, section([str(file) for file in [empty, *files]]))
    alone = [contents(opened(model, section(str(file)))[0])[0] for file in files]
    assert contents(rows)[0] == sum(alone, [])
    assert "empty.jsonl and 1 more files: format messages" in said
    assert f"{tmp_path}/b.jsonl and 1 more files: format text" in said
    for _ in range(2):
        by_cache, _ = opened(model, section([str(file) for file in files]), cache_dir=tmp_path / "cache")
        assert contents(by_cache) == contents(rows)


def test_a_later_row_of_another_format_is_refused(tmp_path, model):
    file = write_jsonl(tmp_path / "a.jsonl", [{"t": "a"}, {"messages": [ASK, REPLY]}])
    with pytest.raises(UserError) as error:
        opened(model, section(str(file), columns={"text": "t"}))
    said = str(error.value)
    assert f"{file}:2: " in said and "no text" in said and "text is the file's t, and this row has messages" in said


@pytest.mark.parametrize(
    ("rows", "columns", "words"),
    [
        ([{"convs": []}], {"messages": "conversation"}, ["a.jsonl:1: data.train.columns names messages: conversation"]),
        ([{"convs": [], "id": 1}], {"messages": "conversation"}, ["no such column; it has convs, id"]),
        ([{"m": [ASK, REPLY]}], {"messages": "m", "tools": "functions"}, ["tools: functions", "it has m"]),
        ([{"m": {"chat": [ASK]}}], {"messages": "m.chats"}, ["names messages: m.chats", "it has m, m.chat"]),
        ([{"m": 5, "n": 1}], {"system": "m"}, ["a.jsonl:1: no known format has the keys n, system"]),
    ],
)
def test_a_column_that_the_file_lacks(tmp_path, model, rows, columns, words):
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError) as error:
        opened(model, section(str(file), columns=columns))
    assert all(word in str(error.value) for word in words), str(error.value)
    recipe = tiny_recipe(tmp_path, f"data.train.path={file}")
    recipe.data.train.columns = columns
    [problem] = preflight(recipe, 1)
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize(
    ("settings", "answer"),
    [
        (["data.train.columns={mesages: a}"], "mesages: no column of this name is read. Did you mean messages?"),
        (["data.train.columns={answers: a}"], "Columns that a format reads: input_ids, labels, messages, tools, syst"),
        (["data.train.columns={text: a}", "data.train.format=alpaca"], "Columns that format alpaca reads: instruction, "
         "output, input, system, history, tools"),
        (["data.train.columns={chosen: a}"], "data.train.columns.chosen: no column"),
        (["data.val={path: x, columns: {messages: ''}}"], "data.val.columns.messages is empty. Name a column of the"),
        (["data.train.sources=[{path: x, columns: {bad: a}}]"], "data.train.sources[0].columns.bad: no column"),
        (["data.train.path=null", "data.train.sources=[{path: x}]", "data.train.columns={text: a}"],
         "data.train.columns is for data.train.path, and the recipe has data.train.sources"),
    ],
)  # fmt: skip
def test_names_that_no_format_takes(tmp_path, settings, answer):
    found = "\n".join(check(tiny_recipe(tmp_path, *settings), 1))
    assert answer in found


def test_rewards_may_read_any_column(tmp_path):
    recipe = tiny_recipe(tmp_path, "method=grpo", "data.train.columns={question: q, answer: a, level: l}")
    assert not [problem for problem in check(recipe, 1) if "columns" in problem]


@pytest.mark.parametrize("key", ["data.train", "eval"])
def test_rewards_read_values_in_objects(tmp_path, capsys, key):
    """The objects of the rows differ: the first row of GRPO's data does not have every column."""
    named = {"style": "rule", "ground_truth": "4"}
    rows = [{"prompt_ids": [3, 4], "wanted": 5, "reward_model": model} for model in ({"style": "rule"}, named)]
    write_jsonl(tmp_path / "prompts.jsonl", rows if key == "data.train" else rows[::-1])
    recipe = tiny_grpo(tmp_path)
    rewards = "[{fn: math_exact, kwargs: {column: reward_model.ground_truth}}]"
    owner = "grpo" if key == "data.train" else key
    (tmp_path / "r.yaml").write_text(config.to_yaml(recipe))
    words = [f"{key}.path={tmp_path}/prompts.jsonl", f"{owner}.rewards={rewards}", "launch.device=cpu"]
    assert main(["validate", str(tmp_path / "r.yaml"), *words]) == 0, capsys.readouterr().err
    words[1] = words[1].replace("ground_truth", "truth")
    assert main(["validate", str(tmp_path / "r.yaml"), *words]) == 1
    assert "no column 'reward_model.truth'" in capsys.readouterr().err


def test_text_for_a_column_s_name_is_wanted():
    with pytest.raises(UserError, match=r"data.train.columns=\[.a.\] must be a mapping"):
        load_recipe({}, ["data.train.columns=[a]"])


def test_a_blank_that_is_missing_is_named():
    with pytest.raises(UserError, match="YAML reads messages:dialog as one word: write a blank after the colon"):
        load_recipe({}, ["data.train.columns={messages:dialog}"])


class Begun:
    def __init__(self, recipe: str, identities: dict):
        self.checkpoint = (None, {"recipe": recipe, "identities": identities, "method": {}})


def differences(recipe, start, identities, rows):
    own_rows = {"train": rows} if rows else {}
    return compare(recipe, start, identities, own_rows, build_method(recipe), allow_changes=[], tensor_difference=None)


def test_recipes_that_were_saved_without_the_key(tmp_path):
    """Also within an optional section and a list, where the schema's defaults do not reach by themselves."""
    settings = ["data.train.path=null", "data.train.sources=[{path: a.jsonl, weight: 2}]", "data.val.path=v.jsonl"]
    recipe = tiny_recipe(tmp_path, *settings)
    lines = [line for line in config.to_yaml(recipe).splitlines() if "columns" not in line]
    old = "\n".join(lines)
    assert "columns" in config.to_yaml(recipe) and config.diff_recipes(old, recipe) == []
    other = replace(recipe, data=replace(recipe.data, val=schema.DataSource(path="v.jsonl", columns={"text": "t"})))
    assert config.diff_recipes(old, other) == [("data.val.columns", {}, None), ("data.val.columns.text", None, "t")]


def test_resume_knows_the_rows_by_content(tmp_path):
    """Other names for the same content are said; for other content they are refused."""
    before, after = tiny_recipe(tmp_path), tiny_recipe(tmp_path, "data.train.columns={input_ids: tokens}")
    start = Begun(config.to_yaml(before), {"data.fingerprint": "same"})
    lines = differences(after, start, {"data.fingerprint": "same"}, None)
    assert any("data.train.columns.input_ids: null -> tokens" in line for line in lines)
    with pytest.raises(UserError, match="data.train.columns.input_ids"):
        differences(after, start, {"data.fingerprint": "other"}, None)


def test_packing_by_itself_is_no_other_packing(tmp_path):
    """auto in place of what it comes to is told, and not refused; in place of the other it is refused."""
    write_jsonl(tmp_path / "data.jsonl", [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 40)
    for length, packs, other in ((8, "true", "false"), (32, "false", "true")):
        given = [f"data.train.path={tmp_path / 'data.jsonl'}", f"data.max_length={length}"]
        recipe = {one: tiny_recipe(tmp_path, *given, f"data.packing={one}") for one in ("auto", "true", "false")}
        rows = {
            one: open_rows(asked.data, tokenizer=Tokenizer.from_directory(asked.model.directory), cache_dir=tmp_path)
            for one, asked in recipe.items()
        }
        for old, new in ((packs, "auto"), ("auto", packs)):
            start = Begun(config.to_yaml(recipe[old]), {"data.fingerprint": "same"})
            lines = differences(recipe[new], start, {"data.fingerprint": "same"}, rows[new])
            assert [line.partition(":")[0] for line in lines] == ["data.packing"]
        for old, new in ((other, "auto"), ("auto", other)):
            start = Begun(config.to_yaml(recipe[old]), {"data.fingerprint": "same"})
            with pytest.raises(UserError, match=r"data\.packing"):
                differences(recipe[new], start, {"data.fingerprint": "same"}, rows[new])
