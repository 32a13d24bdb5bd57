"""Data files: finding the files of a path, the format of each by its first row, and reading their rows in chunks.

Kinds of files: JSON Lines (one object a line), a JSON array of objects, CSV with a header, and parquet (needs
pyarrow). All but parquet may be gzipped (`.gz`). No file is read completely at once: a chunk has at most 256 rows and
about 1 MiB. For example, chat.jsonl with 600 short rows gives

    Chunk("chat.jsonl", [(1, b'{"messages": ...}'), ..., (256, ...)], size=81920)
    Chunk("chat.jsonl", [(257, ...), ..., (512, ...)], size=80110)
    Chunk("chat.jsonl", [(513, ...), ..., (600, ...)], size=27502)

JSON Lines are parsed later (`parse_row`), in the processes that tokenise.

Nulls of parquet. A struct column has the same keys in all rows, so each tool call has the arguments of every other
call, and each tool the parameters of every other tool, as nulls. For example, the arguments {"city": "Oslo"} and
{"a": 2} are read as {"city": "Oslo", "a": None} and {"city": None, "a": 2}. Keys with nulls are therefore removed from
calls and tools, also if the null was an argument of the call itself. Nulls in other columns, which rewards may read,
and nulls in lists are kept.

This module does not import torch.
"""

import csv
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dtrain.base import json_files
from dtrain.base.errors import UserError
from dtrain.base.hub import is_model_id
from dtrain.base.ranges import closest_name
from dtrain.data.formats import formats
from dtrain.data.formats.formats import FILE_KINDS, file_suffix
from dtrain.data.sources.columns import describe_missing_columns, suggest_mapping
from dtrain.data.sources.hub import DatasetPart
from dtrain.data.sources.reading import RowReading
from dtrain.recipe.shipped import how_to_make

if TYPE_CHECKING:
    from dtrain.data.sources.urls import RemoteFile


CHUNK_ROWS = 256
CHUNK_BYTES = 1 << 20
MAX_ROW_BYTES = 1 << 24  # a row of a million tokens, as text or as ids with labels, is smaller

CALL_COLUMNS = ("tool_calls", "function_call")
TABLE_SUFFIXES = (".tsv", ".tab", ".xlsx", ".xls", ".ods")

NOT_SPACE = re.compile(r"\S|\Z")
Stream = io.BufferedReader | gzip.GzipFile
T = TypeVar("T")


class SizedRow(NamedTuple):
    """A row of a file.

    Attributes:
        line: Line of the file at which it begins.
        row: The row; bytes for JSON Lines.
        size: Its bytes or characters in the file.
    """

    line: int
    row: Any
    size: int


@dataclass(frozen=True)
class Chunk:
    """Neighbouring rows of one file.

    Attributes:
        file: Path of the file.
        rows: Line and value of each row. A value may be the bytes of a line, which `parse_row` reads.
        size: Bytes of the file that the chunk covers. The sizes of all chunks add up to the size of the file.
    """

    file: str
    rows: list[tuple[int, Any]]
    size: int


def is_url(path: str) -> bool:
    """Return True if a path is a URL, such as s3://bucket/rows.jsonl."""
    return "://" in path


def is_dataset_id(path: str) -> bool:
    """Return True if a path looks like the id of a dataset on the hub. A file of that name is used first.

    Example:
        >>> is_dataset_id("trl-lib/Capybara"), is_dataset_id("data/chat.jsonl")
        (True, False)
    """
    for suffix in FILE_KINDS:
        if path.lower().endswith((suffix, f"{suffix}.gz")):
            return False
    return is_model_id(path)


def files_to_copy(path: str, key: str, cache_dir: Path) -> "list[RemoteFile]":
    """Return the files of a URL that are not in the cache yet; [] if `path` is no URL. Raises UserError."""
    if not is_url(path):
        return []
    from dtrain.data.sources import urls  # it loads fsspec

    return urls.files_to_copy(path, key, cache_dir)


def source_entries(split: Any, key: str) -> list[tuple[Any, str]]:
    """Return the sources of data.train or data.val, each with its key in the recipe."""
    if split.sources:
        return [(source, f"{key}.sources[{number}]") for number, source in enumerate(split.sources)]
    return [(split, key)]


def source_paths(source: Any) -> list[str]:
    """Return the paths of a source of the recipe."""
    return [source.path] if isinstance(source.path, str) else source.path or []


def uncached_datasets(source: Any, key: str) -> list[tuple[str, DatasetPart]]:
    """Return the hub datasets of a source that are not in the cache yet.

    Args:
        source: The recipe's source.
        key: Its key in the recipe, for messages.

    Returns:
        The id of each dataset, and the split, subset and revision that the source uses.
    """
    names = [path for path in source_paths(source) if is_dataset_id(path)]
    if not names:
        return []
    from dtrain.data.sources import hub  # local files need nothing of it

    part = DatasetPart.of(source)
    uncached = []
    for name in names:
        with suppress(UserError):  # a split that does not exist is reported where the files are looked up
            if hub.cached_files(name, part, key) is None:
                uncached.append((name, part))
    return uncached


def find_files(
    paths: str | Sequence[str], key: str = "data.train.path", source: Any = None, cache_dir: str | Path | None = None
) -> list[Path]:
    """Find the files of paths.

    Args:
        paths: A path, glob, URL or id of a dataset on the hub, or a list of these.
        key: Key of `paths` in the recipe, for messages.
        source: The recipe's source, with split, subset and revision of a dataset on the hub. Only the hub's local cache
            is searched.
        cache_dir: Directory to which files behind URLs are copied.

    Returns:
        The files, in the order of `paths`. Those of a glob are sorted.

    Raises:
        UserError: If a path has no file, or a file is of a kind that dtrain does not read.
    """
    files = []
    for path in [paths] if isinstance(paths, str) else paths:
        files += _files_of_path(str(path), key, source, cache_dir)
    for file in files:
        file_kind(file, key)
    if not files:
        raise UserError(f"{key} names no file. Give a path, a glob or a list of them")
    return files


def _files_of_path(path: str, key: str, source: Any, cache_dir: str | Path | None) -> list[Path]:
    """Find the files of one path: a URL, a file, a glob, or the id of a dataset, in this order. Raises UserError."""
    if is_url(path):
        from dtrain.data.sources import urls  # it loads fsspec

        if cache_dir is None:
            raise UserError(f"{key}: {path} is a URL, and there is no directory to copy it to. Copy it yourself")
        return urls.local_copies(path, key, Path(cache_dir).expanduser())
    expanded = Path(path).expanduser()
    if expanded.is_file():
        return [expanded]
    if expanded.is_dir():
        raise UserError(f"{key}: {path} is a directory. Name its files, for example {key}='{path.rstrip('/')}/*.jsonl'")
    if glob.has_magic(path):
        names = sorted(Path(name) for name in glob.glob(str(expanded), recursive=True) if Path(name).is_file())
        if not names:
            raise UserError(f"{key}: no file matches {path}")
        return names
    if is_dataset_id(path):
        from dtrain.data.sources import hub

        part = DatasetPart.of(source)
        files = hub.cached_files(path, part, key.removesuffix(".path"))
        if files is None:
            raise UserError(hub.describe_uncached(path, part, key))
        return files
    hint = _list_hint(path) or how_to_make(path) or _near_file_hint(expanded)
    raise UserError(f"{key}: there is no file {path}{hint}")


def _list_hint(path: str) -> str:
    """Return the hint for several files that are written as one path."""
    parts = re.split(r"[,;\s]+", path)
    if len(parts) > 1 and Path(parts[0]).is_file():
        return f": several are written [{','.join(parts)}]"
    return ""


def _near_file_hint(file: Path) -> str:
    """Return the hint for a path without a file: the target of a link, or a similar name in the directory."""
    if file.is_symlink():
        return f": it is a link to {os.readlink(file)}, which is no file"
    names = []
    if file.parent.is_dir():
        names = [entry.name for entry in islice(file.parent.iterdir(), 1000)]
    near = closest_name(file.name, names)
    return f"; did you mean {file.parent / near}?" if near else ""


def file_kind(file: Path, key: str = "data.train.path") -> str:
    """Return json, csv or parquet, by the file's suffix. Raises UserError for other files."""
    suffix = file_suffix(file)
    if suffix in FILE_KINDS:
        return FILE_KINDS[suffix]
    if suffix in TABLE_SUFFIXES:
        fix = "save the table as .csv, with commas"
    else:
        fix = 'plain text goes into a .jsonl, a line for each: {"text": "..."}'
    raise UserError(
        f"{key}: {file} is not one of the files that dtrain reads: {', '.join(FILE_KINDS)}, all but the last also as "
        f".gz; {fix}"
    )


def read_chunks(file: Path) -> Iterator[Chunk]:
    """Yield the rows of a file in chunks of at most CHUNK_ROWS rows and about CHUNK_BYTES. Blank lines are skipped.

    Raises:
        UserError: If the file is damaged, or a row is too large.
    """
    kind = file_kind(file)
    if kind == "parquet":
        for chunk, may_have_long_row in read_parquet(file):
            if may_have_long_row:
                for line, row in chunk.rows:
                    _refuse_long(file, line, _text_size(row))
            yield chunk
        return
    stream: Stream
    with gzip.open(file) if file.suffix.lower() == ".gz" else open(file, "rb") as stream:
        try:
            if kind == "csv":
                rows = _read_csv(file, stream)
            elif _first_character(stream) == b"[":
                rows = _JsonArrayReader(file, stream).rows()
            else:
                rows = _read_json_lines(file, stream)
            yield from _bounded_chunks(file, rows)
        except UnicodeDecodeError as problem:
            raise UserError(f"{file}: the file is not UTF-8 text ({problem}). Convert it to UTF-8") from problem
        except (gzip.BadGzipFile, EOFError, zlib.error) as problem:
            raise UserError(f"{file}: the file is not a whole gzip file ({problem})") from problem


def parse_row(file: str, line: int, row: Any) -> dict[str, Any]:
    """Parse a row of a chunk.

    Args:
        file: Path of the data file, for messages.
        line: Line of the row, for messages.
        row: Bytes of a line, or a value that is parsed already.

    Raises:
        UserError: If the row is no JSON object, with file, line and column of the mistake.

    Example:
        >>> parse_row("chat.jsonl", 1, b'{"text": "Hi"}')
        {'text': 'Hi'}
    """
    if isinstance(row, bytes):
        try:
            text = row.decode("utf-8-sig" if line == 1 else "utf-8").rstrip("\r\n")  # else column 1
            row = json_files.loads(text)
        except json.JSONDecodeError as problem:
            raise UserError(
                f"{file}:{line}: this line is not JSON: {problem.msg} (column {problem.colno}); "
                f"each line of the file must be one whole JSON object{_json_mistake_hint(text, Path(file).name)}"
            ) from problem
        except UnicodeDecodeError as problem:
            raise UserError(f"{file}:{line}: {_encoding_hint(row, problem)}") from problem
        except ValueError as problem:  # a number of thousands of digits, lists in lists in lists, a name twice
            raise UserError(f"{file}:{line}: this line cannot be read: {problem}") from problem
    if not isinstance(row, dict):
        raise UserError(
            f"{file}:{line}: a row must be a JSON object with named fields, not {json_files.json_type(row)}"
        )
    return row


def read_rows(
    chunk: Chunk, reading: RowReading, read: Callable[[Mapping[str, Any]], T]
) -> Iterator[tuple[int, Mapping[str, Any], T]]:
    """Read the rows of a chunk.

    Args:
        chunk: The rows.
        reading: How they are read.
        read: Called with each row, after it was renamed and converted.

    Yields:
        Line, row and result of `read`, for each row.

    Raises:
        UserError: If a row is wrong. Errors of `read` get file and line in front.
    """
    convert = reading.reader()
    for line, raw in chunk.rows:
        parsed = parse_row(chunk.file, line, raw)
        try:
            row = convert(parsed)
        except UserError as problem:
            missing = describe_missing_columns(parsed, reading.columns)
            raise UserError(f"{chunk.file}:{line}: {problem}{missing}") from problem
        try:
            value = read(row)
        except UserError as problem:
            raise UserError(f"{chunk.file}:{line}: {problem}{reading.describe_row(parsed)}") from problem
        yield line, row, value


def _json_mistake_hint(text: str, name: str) -> str:
    """Return a hint for a line that is no JSON, by frequent mistakes; "" if none of them fits."""
    if text.strip() in ("{", "["):
        return f". If an object goes on over several lines, `jq -c . {name} > rows.jsonl` puts each on one"
    first_quote = text.lstrip("{ ")[:1]
    if first_quote and first_quote in "\u2018\u201c\u00ab":
        return f'. Its quotes are typographic, {first_quote}, but JSON uses "'
    if text.startswith("{'"):
        return ". It looks like Python's own notation: write it with json.dumps"
    return ""


def _encoding_hint(row: bytes, problem: UnicodeDecodeError) -> str:
    if row.startswith(b"\x1f\x8b"):
        return "the file is gzipped. Give it a name that ends in .gz"
    if row.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "the file is UTF-16 text; `iconv -f UTF-16 -t UTF-8` converts it"
    return f"this line is not UTF-8 text ({problem}). Convert it to UTF-8"


def first_row(file: Path) -> tuple[int, dict[str, Any]] | None:
    """Return the line and value of the file's first row; None if it has none."""
    for chunk in read_chunks(file):
        for line, row in chunk.rows:
            return line, parse_row(chunk.file, line, row)
    return None


def detect_formats(
    files: Sequence[Path], name: str, kind: str, reading: RowReading, key: str | None
) -> tuple[str, ...]:
    """Return the format of each file.

    Args:
        files: The files.
        name: The format of all of them. With "auto", the first row of a file decides; the encoder compares the others.
        kind: The kind of their rows: examples, pairs or prompts.
        reading: How their rows are read.
        key: The recipe's key of `columns`, for messages. None if the caller has no such setting.

    Raises:
        UserError: If a format is unknown or not of this kind, or if there is no row.
    """
    if name == "preference" and kind in ("examples", "prompts"):
        raise UserError(f"{files[0]}: {formats.PREFERENCES_REFUSED}")
    if name != "auto" and name not in formats.FORMATS_BY_KIND[kind]:
        raise UserError(f"{files[0]}: {formats.refuse_single(name, kind)}")
    if name != "auto" and not reading.columns:
        return (name,) * len(files)
    found = [_format_of_first_row(file, name, kind, reading, key) for file in files]
    detected_formats = [detected for detected in found if detected is not None]
    if not detected_formats:
        raise UserError(f"the dataset is empty: there is no row in {', '.join(map(str, files[:3]))}")
    # A file without rows needs a format, too; any one serves.
    return tuple(detected or detected_formats[0] for detected in found)


def _format_of_first_row(file: Path, name: str, kind: str, reading: RowReading, key: str | None) -> str | None:
    """Return the format of a file's first row; None if it has none. Raises UserError, also for a missing column."""
    first = first_row(file)
    if first is None:
        return None
    line, parsed = first
    convert = reading.reader(key, strict=True)
    try:
        row = convert(parsed)
        detected = formats.detect_format(row, kind) if name == "auto" else name
        if detected is None:
            if reading.function is not None:
                hint = f" (of the row that {reading.function} returned)"
            elif reading.columns:
                hint = ""
            else:
                hint = suggest_mapping(row, kind, key)
            raise UserError(formats.describe_unknown_format(row, kind) + hint)
    except UserError as problem:
        raise UserError(f"{file}:{line}: {problem}") from problem
    return detected


def _first_character(stream: Stream) -> bytes:
    """Return the first byte that is neither space nor byte order mark, and seek to the start of the stream."""
    character = b""
    while not character:
        block = stream.read(4096)
        if not block:
            break
        character = block.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    stream.seek(0)
    return character


def _bounded_chunks(file: Path, rows: Iterator[SizedRow]) -> Iterator[Chunk]:
    """Gather rows into chunks."""
    gathered: list[tuple[int, Any]] = []
    size = 0
    for line, row, row_size in rows:
        gathered.append((line, row))
        size += row_size
        if len(gathered) >= CHUNK_ROWS or size >= CHUNK_BYTES:
            yield Chunk(str(file), gathered, size)
            gathered, size = [], 0
    if gathered:
        yield Chunk(str(file), gathered, size)


def _refuse_long(file: Path, line: int, size: int) -> None:
    """Raise UserError if the size of a row, or of the part that has been read, is above MAX_ROW_BYTES."""
    if size > MAX_ROW_BYTES:
        raise UserError(
            f"{file}:{line}: this row is larger than {MAX_ROW_BYTES >> 20} MiB, more than one row may be. Is there a "
            "line break after each row? Split a longer document into several rows"
        )


def _text_size(value: Any) -> int:
    """Estimate the number of characters of a table's value as text. Images count as 0."""
    if isinstance(value, dict):
        return sum(len(str(name)) + _text_size(item) for name, item in value.items())
    if isinstance(value, list):
        return sum(map(_text_size, value))
    return 0 if isinstance(value, bytes) else len(str(value))


def _read_json_lines(file: Path, stream: Stream) -> Iterator[SizedRow]:
    line = 0
    while True:
        text = stream.readline(MAX_ROW_BYTES + 1)
        if not text:
            return
        line += 1
        _refuse_long(file, line, len(text))
        if text.strip():
            yield SizedRow(line, text, len(text))


class _JsonArrayReader:
    """Reader of the objects of one JSON array, decoded one after the other.

    Only a piece of the file is in memory: `_buffer` from `_position` on. If an object does not end in it, more is read.
    """

    def __init__(self, file: Path, stream: Stream):
        self._file = file
        self._text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        self._buffer = self._text.read(CHUNK_BYTES)
        self._position = 0  # of the next character in the buffer
        self._line = 1  # of this character

    def rows(self) -> Iterator[SizedRow]:
        """Yield the rows. Raises UserError with the line of the mistake."""
        self._skip_spaces()
        self._position += 1  # the opening bracket
        is_closed = self._skip_spaces() == "]"
        if is_closed:
            self._position += 1
        while not is_closed:
            self._skip_spaces()
            row, end = self._decode_row()
            yield SizedRow(self._line, row, end - self._position)
            self._move_to(end)
            separator = self._skip_spaces()
            if separator not in ",]":
                raise UserError(
                    f"{self._file}:{self._line}: a comma or a ] must follow a row of a JSON array, not {separator!r}"
                )
            self._position += 1
            is_closed = separator == "]"
        self._check_end()

    def _read_more(self) -> bool:
        """Read more into the buffer. Returns False at the end of the file."""
        # At least as much as is in the buffer, so that a long row is not decoded again for every MiB.
        block = self._text.read(max(CHUNK_BYTES, len(self._buffer) - self._position))
        self._buffer = self._buffer[self._position :] + block
        self._position = 0
        return bool(block)

    def _move_to(self, position: int) -> None:
        self._line += self._buffer.count("\n", self._position, position)
        self._position = position

    def _skip_spaces(self) -> str:
        """Move to the next character that is no space, and return it."""
        while True:
            match = NOT_SPACE.search(self._buffer, self._position)
            self._move_to(match.start() if match else len(self._buffer))
            if self._position < len(self._buffer):
                return self._buffer[self._position]
            if not self._read_more():
                raise UserError(
                    f"{self._file}:{self._line}: the JSON array never ends: a ] is missing. Is the file complete?"
                )

    def _decode_row(self) -> tuple[Any, int]:
        """Return the value that begins at the position, and its end in the buffer."""
        while True:
            try:
                row, end = json_files.DECODER.raw_decode(self._buffer, self._position)
                json_files.check_json_size(row)
                _refuse_long(self._file, self._line, end - self._position)
                return row, end
            except json.JSONDecodeError as problem:
                _refuse_long(self._file, self._line, len(self._buffer) - self._position)
                line = self._line + self._buffer.count("\n", self._position, problem.pos)
                character = self._buffer[problem.pos : problem.pos + 1]
                # The row may only be cut off at the end of the buffer.
                if not self._read_more():
                    hint = " (a comma before the ] is one too many)" if character == "]" else ""
                    raise UserError(f"{self._file}:{line}: this is not JSON: {problem.msg}{hint}") from problem
            except (ValueError, RecursionError) as problem:
                raise UserError(f"{self._file}:{self._line}: this row cannot be read: {problem}") from problem

    def _check_end(self) -> None:
        """Raise UserError if something follows the array."""
        rest = self._buffer[self._position :].strip()
        while not rest and self._read_more():
            rest = self._buffer[self._position :].strip()
        if rest:
            raise UserError(
                f"{self._file}:{self._line}: the JSON array ends here, but {rest[:20]!r} follows. A file contains one "
                "array, or JSON Lines: one object a line"
            )


def _read_csv(file: Path, stream: Stream) -> Iterator[SizedRow]:
    csv.field_size_limit(MAX_ROW_BYTES)  # the csv module's own limit of 128 KiB is less than one long document
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    reader = csv.DictReader(text, strict=True)
    last_line = 1  # of the row before
    try:
        # A spreadsheet's empty columns have empty names, which nothing reads.
        refuse_duplicate_names(f"{file}:1", [name for name in reader.fieldnames or () if name])
        for row in reader:
            # A cell may have line breaks, so a row may have several lines. `line_num` is the last of them.
            line = last_line + 1 if reader.line_num > last_line else last_line
            last_line = reader.line_num
            if None in row:
                raise UserError(f"{file}:{line}: this row has more cells than the header has names")
            cells = {name: cell for name, cell in row.items() if cell is not None}
            yield SizedRow(line, cells, sum(map(len, cells.values())) + len(cells))
    except csv.Error as problem:
        raise UserError(f"{file}:{reader.line_num}: this is not CSV: {problem}") from problem


def read_parquet(file: Path) -> Iterator[tuple[Chunk, bool]]:
    """Read a parquet file.

    Yields:
        (chunk, may_have_long_row): a chunk of at most CHUNK_ROWS rows and about MAX_ROW_BYTES, and whether the chunk is
        larger than MAX_ROW_BYTES, so that one of its rows may be too long.

    Raises:
        UserError: If pyarrow is not installed, or the file is damaged.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as problem:
        raise UserError(f"{file}: parquet files need pyarrow: pip install 'dtrain[datasets]'") from problem
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            fields = list(table.schema_arrow)
            _refuse_duplicate_fields(file, fields)
            tool_columns = {field.name for field in fields if _is_list_of_tools(field)}
            call_columns = {field.name for field in fields if _contains_calls(field)}
            num_rows = max(1, table.metadata.num_rows)
            num_bytes = file.stat().st_size
            # Images make rows large, so a batch may have few rows.
            batch_size = max(1, min(CHUNK_ROWS, MAX_ROW_BYTES * num_rows // max(1, num_bytes)))
            line = 1
            for batch in table.iter_batches(batch_size=batch_size):
                rows = batch.to_pylist()
                for row in rows:
                    for name in tool_columns | call_columns:
                        row[name] = _without_filled_nulls(row[name], is_inside=name in tool_columns)
                chunk = Chunk(str(file), list(enumerate(rows, start=line)), num_bytes * len(rows) // num_rows)
                yield chunk, batch.nbytes > MAX_ROW_BYTES
                line += len(rows)
    except pyarrow.ArrowException as problem:
        raise UserError(f"{file}: the file is not readable as parquet: {problem}") from problem


def _inner_fields(field: Any) -> list[Any]:
    """Return the fields inside a field's type: the keys of a struct, or the element of a list."""
    return [field.type.field(index) for index in range(field.type.num_fields)]


def _contains_calls(field: Any) -> bool:
    """Return True if a field is the tool calls of a message, or has them anywhere inside."""
    return field.name in CALL_COLUMNS or any(_contains_calls(inner) for inner in _inner_fields(field))


def _is_list_of_tools(field: Any) -> bool:
    """Return True if a column lists tools: objects with a function, or with a name and parameters."""
    is_list = hasattr(field.type, "value_type")  # pyarrow's lists have no common base class
    if not is_list:
        return False
    names: set[str] = set()
    for element in _inner_fields(field):
        names.update(key.name for key in _inner_fields(element))
    return "function" in names or {"name", "parameters"} <= names


def _without_filled_nulls(value: Any, is_inside: bool) -> Any:
    """Return a value without the nulls that parquet added to the structs of tool calls.

    Args:
        value: A value of a row.
        is_inside: Whether the value is inside a tool call. Otherwise only the calls inside of it are changed.
    """
    if isinstance(value, list):
        return [_without_filled_nulls(item, is_inside) for item in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for name, item in value.items():
        if item is None and is_inside:
            continue
        result[name] = _without_filled_nulls(item, is_inside or name in CALL_COLUMNS)
    return result


def _refuse_duplicate_fields(file: Path, fields: Sequence[Any], parent: str = "") -> None:
    """Raise UserError if a name is used twice among the columns of a parquet file, or in a struct of one."""
    refuse_duplicate_names(str(file), [f"{parent}{field.name}" for field in fields])
    for field in fields:
        _refuse_duplicate_fields(file, _inner_fields(field), f"{parent}{field.name}.")


def refuse_duplicate_names(location: str, names: Sequence[str]) -> None:
    """Raise UserError if a name is used twice among the columns of a table. `location` names the table."""
    duplicates = [repr(name[:80]) for name, count in Counter(names).items() if count > 1]
    if duplicates:
        raise UserError(f"{location}: several columns have the same name: {', '.join(duplicates)}. Keep one of each")
