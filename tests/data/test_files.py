"""Files to rows: every kind, in bounded pieces, with the line of each row and of each mistake."""

import csv
import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from dtrain.base.errors import UserError
from dtrain.data.formats.formats import normalise
from dtrain.data.sources import files
from dtrain.data.sources.reading import RowReading

ROWS = [{"text": f"row {number}\nüber", "n": number} for number in range(700)]


def read(file):
    return [
        (line, files.parse_row(chunk.file, line, row)) for chunk in files.read_chunks(file) for line, row in chunk.rows
    ]


def test_json_lines_in_chunks(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(json.dumps(row) for row in ROWS).encode() + b"\n\n")
    assert read(file) == list(enumerate(ROWS, start=1))
    sizes = [len(chunk.rows) for chunk in files.read_chunks(file)]
    assert max(sizes) <= files.CHUNK_ROWS and len(sizes) == 3


def test_only_line_feeds_end_a_line(tmp_path):
    """Characters at which Python's splitlines also splits, as JSON writes them without escapes."""
    rows = [{"text": f"one{character}two"} for character in "\u2028\u2029\x85"]
    file = tmp_path / "a.jsonl"
    file.write_bytes("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode())
    assert read(file) == list(enumerate(rows, start=1))


def test_blank_lines_count(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"n": 1}\n\n  \n{"n": 2}')
    assert read(file) == [(1, {"n": 1}), (4, {"n": 2})]


@pytest.mark.parametrize("indent", [None, 2])
def test_json_array_is_read_piece_by_piece(tmp_path, monkeypatch, indent):
    monkeypatch.setattr(files, "CHUNK_BYTES", 97)  # far less than the file, and not a divisor of anything
    file = tmp_path / "a.json"
    text = " \n" + json.dumps(ROWS, indent=indent, ensure_ascii=False)
    file.write_text(text, encoding="utf-8")
    found = read(file)
    assert [row for _, row in found] == ROWS
    lines = text.split("\n")
    assert all(lines[line - 1].lstrip(" [").startswith("{") for line, _ in found)


@pytest.mark.parametrize("text, message", [
    ('[{"a": 1}\n{"a": 2}]', "x.json:2: a comma or a ]"),
    ('[{"a": 1},\n{"a": 2', "x.json:2: this is not JSON"),
    ('[{"a": 1},\n', "x.json:2: the JSON array never ends"),
    ('[{"a": 1},\n 5]', "x.json:2: a row must be a JSON object"),
])  # fmt: skip
def test_bad_json_array(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match="x.json") as error:
        read(tmp_path / "x.json")
    assert message in str(error.value)


def test_bad_line_names_file_and_line(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1}\n{"a": 2,}\n')
    with pytest.raises(UserError, match=r"x\.jsonl:2: this line is not JSON: .*column 9"):
        read(file)
    file.write_text('{"a": 1}\n{"a": [2\n')
    with pytest.raises(UserError, match=r"x\.jsonl:2: this line is not JSON: .*column 9"):
        read(file)
    file.write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(UserError, match=r"x\.jsonl:2: this line is not UTF-8"):
        read(file)


def test_csv_with_long_cells_and_line_breaks(tmp_path):
    file = tmp_path / "a.csv"
    rows = [{"prompt": "a\nb", "completion": "x" * 200_000}, {"prompt": 'say "hi", ok', "completion": "y"}]
    with open(file, "w", newline="") as stream:
        writer = csv.DictWriter(stream, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(rows)
    assert read(file) == [(2, rows[0]), (4, rows[1])]
    file.write_text("a,b\n1,2\n1,2,3\n")
    with pytest.raises(UserError, match=r"a\.csv:3: this row has more cells"):
        read(file)


def test_parquet_rows_are_counted(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=300)
    assert read(tmp_path / "a.parquet") == list(enumerate(ROWS, start=1))
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match="b.parquet: the file is not readable as parquet"):
        read(tmp_path / "b.parquet")


@pytest.mark.parametrize("header, told", [
    ("text,text", "'text'"),
    ('a,"te\nxt",b,a,"te\nxt"', r"'a', 'te\nxt'"),
])  # fmt: skip
def test_doubled_columns_of_csv_are_refused(tmp_path, header, told):
    (tmp_path / "a.csv").write_text(f"{header}\n1,2\n")
    with pytest.raises(UserError) as error:
        read(tmp_path / "a.csv")
    assert str(error.value) == f"{tmp_path / 'a.csv'}:1: several columns have the same name: {told}. Keep one of each"
    with pytest.raises(UserError, match="several columns have the same name"):
        files.detect_formats(
            [tmp_path / "a.csv"], "auto", "examples", RowReading({"text": "text"}), "data.train.columns"
        )


def test_empty_columns_of_csv_are_no_mistake(tmp_path):
    (tmp_path / "a.csv").write_text("text,,\nyes,,\n")
    assert read(tmp_path / "a.csv") == [(2, {"text": "yes", "": ""})]


def struct(*names):
    return pyarrow.StructArray.from_arrays([pyarrow.array([name]) for name in names], names=names)


@pytest.mark.parametrize("columns, told", [
    ([("text", pyarrow.array(["a"]))] * 2, ": 'text'. Keep"),
    ([("text", struct("a")), ("text", struct("b"))], ": 'text'. Keep"),
    ([("a", struct("x", "y", "x"))], ": 'a.x'. Keep"),
    ([("m", pyarrow.ListArray.from_arrays([0, 1], struct("role", "content", "content")))], ".content'. Keep"),
    ([("n", pyarrow.array([[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))), ("n", struct("x"))], "'n'"),
])  # fmt: skip
def test_doubled_columns_of_parquet_are_refused(tmp_path, columns, told):
    table = pyarrow.Table.from_arrays([values for _, values in columns], names=[name for name, _ in columns])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: several columns have the same name") as error:
        read(tmp_path / "a.parquet")
    assert told in str(error.value)


def test_names_that_stand_in_two_structs_are_no_mistake(tmp_path):
    table = pyarrow.Table.from_arrays([struct("x"), struct("x"), pyarrow.array(["c"])], names=["a", "b", "x"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [(1, {"a": {"x": "x"}, "b": {"x": "x"}, "x": "c"})]


def calling(name, arguments, schema, case):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": schema}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    return {"messages": messages, "tools": [tool], "case": case}


def test_nulls_that_parquet_fills_in_are_no_arguments_of_tools(tmp_path):
    """A struct column gives each call the keys of all calls. In JSON a null is what somebody wrote."""
    text, number = {"type": "string"}, {"type": "number", "enum": [1, None]}
    rows = [
        calling("weather", {"city": "Bonn", "when": {"day": 1}}, {"city": text}, {"given": 1}),
        calling("add", {"x": 1, "y": [None, 2]}, {"x": number}, {"wanted": 3}),
        calling("stop", {}, {}, {}),
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = [row for _, row in read(tmp_path / "a.parquet")]
    assert [normalise(row, "messages") for row in found] == [normalise(row, "messages") for row in rows]
    assert found[0]["case"] == {"given": 1, "wanted": None}  # of a reward's, which may read either key
    row = calling("weather", {"city": "Bonn", "when": None}, {}, {})
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    assert read(tmp_path / "a.jsonl") == [(1, row)]


def test_gzip(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as stream:
        stream.write('{"n": 1}\n{"n": 2}\n')
    assert read(tmp_path / "a.jsonl.gz") == [(1, {"n": 1}), (2, {"n": 2})]
    (tmp_path / "a.jsonl.gz").write_bytes((tmp_path / "a.jsonl.gz").read_bytes()[:-9])
    with pytest.raises(UserError, match="not a whole gzip file"):
        read(tmp_path / "a.jsonl.gz")


def test_paths_globs_and_lists(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.csv"):
        (tmp_path / name).write_text("")
    assert files.find_files(str(tmp_path / "*.jsonl")) == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    both = [str(tmp_path / "c.csv"), str(tmp_path / "a.*")]
    assert files.find_files(both) == [tmp_path / "c.csv", tmp_path / "a.jsonl"]


@pytest.mark.parametrize("path, words", [
    ("HuggingFaceH4/ultrachat", ["Run `dtrain download --data HuggingFaceH4/ultrachat` to download it"]),
    ("data/none.jsonl", ["there is no file data/none.jsonl"]),
    ("none*.jsonl", ["no file matches none*.jsonl"]),
    ("{dir}", ["is a directory", "*.jsonl"]),
    ("{dir}/notes.txt", [".jsonl", ".parquet"]),
])  # fmt: skip
def test_paths_that_mean_no_data(tmp_path, path, words):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError) as error:
        files.find_files(path.replace("{dir}", str(tmp_path)), "data.val.path")
    assert all(word in str(error.value) for word in ["data.val.path", *words])


@pytest.mark.parametrize("rest", ['[{"n": 2}]', "oops", ', {"n": 2}]'])
def test_what_follows_a_json_array_is_not_passed_over(tmp_path, rest):
    (tmp_path / "a.json").write_text('[{"n": 1}]\n \n')
    assert read(tmp_path / "a.json") == [(1, {"n": 1})]
    (tmp_path / "a.json").write_text(f'[{{"n": 1}}]\n{" " * 5_000_000}\n{rest}')
    with pytest.raises(UserError, match=r"a\.json:1: the JSON array ends here, but .* follows"):
        read(tmp_path / "a.json")


@pytest.mark.parametrize("value", [
    "9" * 5000, "9" * 10**6, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000,
    "[" * 500 + "]" * 500, '1, "n": 2',
])  # fmt: skip
def test_json_that_python_cannot_read_names_its_line(tmp_path, value):
    for text, line in ((f'{{"n": 1}}\n{{"n": {value}}}', 2), (f'[{{"n": {value}}}]', 1)):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(UserError, match=rf"a\.json:{line}: this (line|row) cannot be read"):
            read(tmp_path / "a.json")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.csv", "a.parquet"])
def test_a_row_has_a_bounded_size(tmp_path, name):
    """A line of 60 MB took minutes to tokenise, and one without end all of the memory."""
    file, rows = tmp_path / name, [{"text": "short"}, {"text": "long " * 3_400_000}, {"text": "x"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if name.endswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_bytes({
            "a.jsonl": lines,
            "a.json": json.dumps(rows, indent=1).encode(),
            "a.jsonl.gz": gzip.compress(lines, 1),
            "a.csv": "".join(f"{row['text']}\n" for row in [{"text": "text"}, *rows]).encode(),
        }[name])  # fmt: skip
    with pytest.raises(UserError, match=rf"{name}:\d+: (this row is larger than 16 MiB|this is not CSV: field larger)"):
        read(file)
    rows[1]["text"] = rows[1]["text"][:16_000_000]
    file = tmp_path / "b.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row for _, row in read(file)] == rows


def test_the_line_of_a_row_that_is_too_large(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "short"}\n' * 3 + '{"text": "' + "x" * files.MAX_ROW_BYTES)
    with pytest.raises(UserError, match=r"a\.jsonl:4: this row is larger than 16 MiB"):
        read(tmp_path / "a.jsonl")


def test_a_gzip_file_damaged_in_the_middle(tmp_path):
    content = bytearray(gzip.compress(b"".join(b'{"n": %d}\n' % number for number in range(90_000))))
    content[20] ^= 0xFF
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(UserError, match="not a whole gzip file"):
        read(tmp_path / "a.jsonl.gz")
