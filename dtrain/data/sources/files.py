"""Data files: the files of a path, the format of each by its first row, and their rows in order, with their lines.

JSON Lines (one object a line), a JSON array of objects, CSV with a header, and parquet (needs pyarrow); the first
three may be gzipped (`.gz`). No file is read at once: rows of bounded size come in chunks. Torch is not imported.

In parquet files a struct column has one set of keys for all rows: each call of a tool gets the arguments of every other
call, each tool the parameters of every other tool, as nulls. Those keys are left out again. A null that was written
into an argument cannot be told from them. Nulls of other columns, which rewards may read, and those in lists are kept.
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
from typing import TYPE_CHECKING, Any, TypeVar

from dtrain.base import json_files
from dtrain.base.errors import UserError
from dtrain.base.hub import is_model_id
from dtrain.base.ranges import closest_name
from dtrain.data.formats import formats
from dtrain.data.formats.formats import FILE_KINDS, file_suffix
from dtrain.data.sources.columns import describe_missing_columns, rename_columns, suggest_mapping
from dtrain.data.sources.hub import DatasetPart
from dtrain.recipe.shipped import how_to_make

if TYPE_CHECKING:
    from dtrain.data.sources.urls import RemoteFile


CHUNK_ROWS = 256
CHUNK_BYTES = 1 << 20
ROW_BYTES = 1 << 24  # of one row: a million tokens, as text or as ids with labels, are less

_CALL_COLUMNS = ("tool_calls", "function_call")

_PLAIN_TEXT = 'plain text goes into a .jsonl, a line for each: {"text": "..."}'
NO_SPACE = re.compile(r"\S|\Z")
Stream = io.BufferedReader | gzip.GzipFile
T = TypeVar("T")


@dataclass(frozen=True)
class Chunk:
    """Neighbouring rows of one file: (line, row) pairs; a row is still bytes where `parse_row` has to read it.

    `size` is the number of bytes of the file that the chunk stands for: a progress bar adds them up to the file's size.
    """

    file: str
    rows: list[tuple[int, Any]]
    size: int


def is_url(path: str) -> bool:
    return "://" in path


def is_dataset_id(path: str) -> bool:
    """Return whether `path` reads as a dataset's id on the hub. A file of that name comes first."""
    return not any(path.lower().endswith((kind, f"{kind}.gz")) for kind in FILE_KINDS) and is_model_id(path)


def files_to_copy(path: str, key: str, cache_dir: Path) -> "list[RemoteFile]":
    """Return the files of a URL that are not in the cache yet; [] if `path` is no URL. Raises UserError."""
    if not is_url(path):
        return []
    from dtrain.data.sources import urls  # it loads fsspec

    return urls.files_to_copy(path, key, cache_dir)


def source_entries(split: Any, key: str) -> list[tuple[Any, str]]:
    """Return the sources of data.train or data.val, by its field names as attributes, and the key of each."""
    if split.sources:
        return [(source, f"{key}.sources[{number}]") for number, source in enumerate(split.sources)]
    return [(split, key)]


def source_paths(source: Any) -> list[str]:
    return [source.path] if isinstance(source.path, str) else source.path or []


def uncached_datasets(source: Any, key: str) -> list[tuple[str, DatasetPart]]:
    """Return id and wanted part of every dataset of the hub that a source names and that is not in the cache."""
    absent, pick, names = [], DatasetPart.of(source), [*filter(is_dataset_id, source_paths(source))]
    if not names:
        return []
    from dtrain.data.sources import hub  # files of this machine need none of it

    for name in names:
        with suppress(UserError):  # a split that is not there: told where the files are looked at
            if hub.cached_files(name, pick, key) is None:
                absent.append((name, pick))
    return absent


def find_files(
    paths: str | Sequence[str], key: str = "data.train.path", source: Any = None, cache_dir: str | Path | None = None
) -> list[Path]:
    """Return the files that `paths` (one or several paths, globs, ids of the hub or URLs) mean, in the order given, a
    glob's sorted.

    source: the attributes split, subset and revision of a dataset of the hub, which is looked for in its cache alone.
    cache_dir: where files behind URLs are copied to.
    Raises UserError, naming `key`, for a path without a file and for a kind of file that dtrain does not read.
    """
    listed = [paths] if isinstance(paths, str) else paths
    files = [file for path in listed for file in _files_of_path(str(path), key, source, cache_dir)]
    for file in files:
        file_kind(file, key)
    if not files:
        raise UserError(f"{key} names no file; give a path, a glob or a list of them")
    return files


def _files_of_path(path: str, key: str, source: Any, cache_dir: str | Path | None) -> list[Path]:
    if is_url(path):
        from dtrain.data.sources import urls  # it loads fsspec

        if cache_dir is None:
            raise UserError(f"{key}: {path} is a URL, and there is no place to copy it to; copy it yourself")
        return urls.local_copies(path, key, Path(cache_dir).expanduser())
    expanded = Path(path).expanduser()
    if expanded.is_file():
        return [expanded]
    if expanded.is_dir():
        raise UserError(f"{key}: {path} is a directory; name its files, for example {key}='{path.rstrip('/')}/*.jsonl'")
    if glob.has_magic(path):
        names = sorted(Path(name) for name in glob.glob(str(expanded), recursive=True) if Path(name).is_file())
        if not names:
            raise UserError(f"{key}: no file matches {path}")
        return names
    if is_dataset_id(path):
        from dtrain.data.sources import hub

        pick = DatasetPart.of(source)
        files = hub.cached_files(path, pick, key.removesuffix(".path"))
        if files is None:
            raise UserError(hub.describe_uncached(path, pick, key))
        return files
    parts = re.split(r"[,;\s]+", path)
    several = f": several are written [{','.join(parts)}]" if len(parts) > 1 and Path(parts[0]).is_file() else ""
    raise UserError(f"{key}: there is no file {path}{several or how_to_make(path) or _near_file_hint(expanded)}")


def _near_file_hint(file: Path) -> str:
    """Return the hint for a path that leads to no file: the target of a link, or the name that is meant."""
    if file.is_symlink():
        return f": it is a link to {os.readlink(file)}, which is no file"
    names = [entry.name for entry in islice(file.parent.iterdir(), 1000)] if file.parent.is_dir() else []
    near = closest_name(file.name, names)
    return f"; did you mean {file.parent / near}?" if near else ""


def file_kind(file: Path, key: str = "data.train.path") -> str:
    """Return json, csv or parquet, by the file's ending."""
    ending = file_suffix(file)
    kind = FILE_KINDS.get(ending)
    if kind is None:
        table = ending in (".tsv", ".tab", ".xlsx", ".xls", ".ods")
        raise UserError(
            f"{key}: {file} is none of the files that dtrain reads: {', '.join(FILE_KINDS)}, all but the last also as "
            ".gz; " + ("save the table as .csv, with commas" if table else _PLAIN_TEXT)
        )
    return kind


def read_chunks(file: Path) -> Iterator[Chunk]:
    """Yield the rows of `file` in chunks of at most CHUNK_ROWS rows and about CHUNK_BYTES; blank lines are skipped."""
    kind = file_kind(file)
    if kind == "parquet":
        for chunk, is_large in read_parquet(file):
            for line, row in chunk.rows if is_large else ():
                _refuse_long(file, line, _text_size(row))
            yield chunk
        return
    stream: Stream
    with gzip.open(file) if file.suffix.lower() == ".gz" else open(file, "rb") as stream:
        try:
            rows: Iterator[tuple[int, Any, int]]
            if kind == "csv":
                rows = _csv(file, stream)
            elif _first_character(stream) == b"[":
                rows = _json_array(file, stream)
            else:
                rows = _json_lines(file, stream)
            yield from _bounded_chunks(file, rows)
        except UnicodeDecodeError as problem:
            raise UserError(f"{file}: the file is not UTF-8 text ({problem}); convert it to UTF-8") from problem
        except (gzip.BadGzipFile, EOFError, zlib.error) as problem:
            raise UserError(f"{file}: the file is not a whole gzip file ({problem})") from problem


def parse_row(file: str, line: int, row: Any) -> dict[str, Any]:
    """Return a row of a chunk as a dict. Raises UserError with file, line and column of the mistake."""
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
    chunk: Chunk, columns: Mapping[str, str], read: Callable[[Mapping[str, Any]], T]
) -> Iterator[tuple[int, Mapping[str, Any], T]]:
    """Yield the line of each row, the row with our names of its `columns`, and what `read` makes of it. Raises
    UserError, of `read` too, with file and line in front."""
    for line, raw in chunk.rows:
        parsed = parse_row(chunk.file, line, raw)
        try:
            row = rename_columns(parsed, columns) if columns else parsed
            value = read(row)
        except UserError as problem:
            raise UserError(f"{chunk.file}:{line}: {problem}{describe_missing_columns(parsed, columns)}") from problem
        yield line, row, value


def _json_mistake_hint(text: str, name: str) -> str:
    if text.strip() in ("{", "["):
        return f". If an object goes on over several lines, `jq -c . {name} > rows.jsonl` puts each on one"
    if text.lstrip("{ ")[:1] in ("\u2018", "\u201c", "\u00ab"):
        return f'. Its quotes are of a page, {text.lstrip("{ ")[0]}: JSON has "'
    return ". It looks like Python's own notation: write it with json.dumps" if text.startswith("{'") else ""


def _encoding_hint(row: bytes, problem: UnicodeDecodeError) -> str:
    if row.startswith(b"\x1f\x8b"):
        return "the file is gzipped; give it a name that ends in .gz"
    if row.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "the file is UTF-16 text; `iconv -f UTF-16 -t UTF-8` converts it"
    return f"this line is not UTF-8 text ({problem}); convert it to UTF-8"


def first_row(file: Path) -> tuple[int, dict[str, Any]] | None:
    """Return the line and value of the file's first row; None where it has none."""
    rows = ((line, parse_row(chunk.file, line, row)) for chunk in read_chunks(file) for line, row in chunk.rows)
    return next(rows, None)


def detect_formats(
    files: Sequence[Path], name: str, kind: str, columns: Mapping[str, str], key: str | None
) -> tuple[str, ...]:
    """Return the format of each file.

    Args:
        files: The files.
        name: The format of all of them. With "auto", the first row of a file decides; the encoder compares the others.
        kind: The kind of their rows: examples, pairs or prompts.
        columns: The files' own names of columns.
        key: The recipe's key of `columns`, for messages. None if the caller has no such setting.

    Raises:
        UserError: If a format is unknown or not of this kind, or if there is no row.
    """
    if name == "preference" and kind in ("examples", "prompts"):
        raise UserError(f"{files[0]}: {formats.PREFERENCES_REFUSED}")
    if name != "auto" and name not in formats.FORMATS_BY_KIND[kind]:
        raise UserError(f"{files[0]}: {formats.refuse_single(name, kind)}")
    if name != "auto" and not columns:
        return (name,) * len(files)
    first = [_first_format(file, name, kind, columns, key) for file in files]
    known = next((detected for detected in first if detected is not None), None)
    if known is None:
        raise UserError(f"the dataset is empty: there is no row in {', '.join(map(str, files[:3]))}")
    return tuple(detected or known for detected in first)


def _first_format(file: Path, name: str, kind: str, columns: Mapping[str, str], key: str | None) -> str | None:
    """Return the format of the file's first row; None where it has none. UserError, also for a missing column."""
    first = first_row(file)
    if first is None:
        return None
    line, row = first
    try:
        row = rename_columns(row, columns, key, strict=True) if columns else row
        detected = formats.detect_format(row, kind) if name == "auto" else name
        if detected is None:
            raise UserError(
                formats.describe_unknown_format(row, kind) + ("" if columns else suggest_mapping(row, kind, key))
            )
    except UserError as problem:
        raise UserError(f"{file}:{line}: {problem}") from problem
    return detected


def _first_character(stream: Stream) -> bytes:
    """Return the first byte that is neither space nor byte order mark; the stream is back at its start."""
    character = b""
    while not character and (block := stream.read(4096)):
        character = block.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    stream.seek(0)
    return character


def _bounded_chunks(file: Path, rows: Iterator[tuple[int, Any, int]]) -> Iterator[Chunk]:
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
    """Raise UserError for a row, or what has been read of it, of more than ROW_BYTES."""
    if size > ROW_BYTES:
        raise UserError(
            f"{file}:{line}: this row is larger than {ROW_BYTES >> 20} MiB, more than one row may be: is there a line "
            "break after each row? Split a longer document into several rows"
        )


def _text_size(value: Any) -> int:
    """Return about how many characters a value of a table has as text, images not counted."""
    if isinstance(value, dict):
        return sum(len(str(name)) + _text_size(item) for name, item in value.items())
    if isinstance(value, list):
        return sum(map(_text_size, value))
    return 0 if isinstance(value, bytes) else len(str(value))


def _json_lines(file: Path, stream: Stream) -> Iterator[tuple[int, bytes, int]]:
    for line, text in enumerate(iter(lambda: stream.readline(ROW_BYTES + 1), b""), start=1):
        _refuse_long(file, line, len(text))
        if text.strip():
            yield line, text, len(text)


def _json_array(file: Path, stream: Stream) -> Iterator[tuple[int, Any, int]]:
    """Yield the objects of one JSON array, decoded one after the other from a sliding piece of the file."""
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    buffer, position, line = text.read(CHUNK_BYTES), 0, 1

    def more() -> bool:
        nonlocal buffer, position
        block = text.read(max(CHUNK_BYTES, len(buffer) - position))
        buffer, position = buffer[position:] + block, 0
        return bool(block)

    def next_character() -> str:
        nonlocal position, line
        while True:
            match = NO_SPACE.search(buffer, position)
            end = match.start() if match else len(buffer)
            line += buffer.count("\n", position, end)
            position = end
            if position < len(buffer):
                return buffer[position]
            if not more():
                raise UserError(f"{file}:{line}: the JSON array never ends: a ] is missing; is the file whole?")

    next_character()
    position += 1
    closed = next_character() == "]"
    position += closed
    while not closed:
        next_character()
        while True:
            try:
                row, end = json_files.DECODER.raw_decode(buffer, position)
                json_files.check_json_size(row)
                _refuse_long(file, line, end - position)
                break
            except json.JSONDecodeError as problem:
                _refuse_long(file, line, len(buffer) - position)
                at, character = line + buffer.count("\n", position, problem.pos), buffer[problem.pos : problem.pos + 1]
                if not more():
                    after = " (a comma before the ] is one too many)" if character == "]" else ""
                    raise UserError(f"{file}:{at}: this is not JSON: {problem.msg}{after}") from problem
            except (ValueError, RecursionError) as problem:
                raise UserError(f"{file}:{line}: this row cannot be read: {problem}") from problem
        yield line, row, end - position
        line += buffer.count("\n", position, end)
        position = end
        separator = next_character()
        if separator not in ",]":
            raise UserError(f"{file}:{line}: a comma or a ] must follow a row of a JSON array, not {separator!r}")
        position += 1
        closed = separator == "]"
    while not (rest := buffer[position:].strip()) and more():
        pass
    if rest:
        raise UserError(
            f"{file}:{line}: the JSON array ends here, but {rest[:20]!r} follows; a file holds one array, "
            "or JSON Lines: one object a line"
        )


def _csv(file: Path, stream: Stream) -> Iterator[tuple[int, dict[str, str], int]]:
    csv.field_size_limit(ROW_BYTES)  # the csv module's own 128 KiB is less than one long document
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    reader = csv.DictReader(text, strict=True)
    line = 1
    try:
        # A spreadsheet's empty columns have empty names, which nothing reads.
        refuse_duplicate_names(f"{file}:1", [name for name in reader.fieldnames or () if name])
        for row in reader:
            start, line = line + 1 if reader.line_num > line else line, reader.line_num
            if None in row:
                raise UserError(f"{file}:{start}: this row has more cells than the header has names")
            cells = {name: cell for name, cell in row.items() if cell is not None}
            yield start, cells, sum(map(len, cells.values())) + len(cells)
    except csv.Error as problem:
        raise UserError(f"{file}:{reader.line_num}: this is not CSV: {problem}") from problem


def read_parquet(file: Path) -> Iterator[tuple[Chunk, bool]]:
    """Yield the rows of `file` in chunks of at most CHUNK_ROWS rows and about ROW_BYTES, each with a flag: one of its
    rows may have more. Raises UserError."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as problem:
        raise UserError(f"{file}: parquet files need pyarrow: pip install 'dtrain[datasets]'") from problem
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            columns = list(table.schema_arrow)
            _refuse_doubled_fields(file, columns)
            tools = {column.name for column in columns if _holds_tools(column)}
            nested = {*tools, *(column.name for column in columns if _holds_calls(column))}
            line, total, size = 1, max(1, table.metadata.num_rows), file.stat().st_size
            rows_at_once = max(1, min(CHUNK_ROWS, ROW_BYTES * total // max(1, size)))  # images make rows large
            for batch in table.iter_batches(batch_size=rows_at_once):
                rows = batch.to_pylist()
                if nested:
                    for row in rows:
                        row |= {name: _without_filled(row[name], name in tools) for name in nested}
                chunk = Chunk(str(file), list(enumerate(rows, start=line)), size * len(rows) // total)
                yield chunk, batch.nbytes > ROW_BYTES
                line += len(rows)
    except pyarrow.ArrowException as problem:
        raise UserError(f"{file}: the file is not readable as parquet: {problem}") from problem


def _inner_fields(field: Any) -> list[Any]:
    """Return the fields of a field's type: of a struct its keys, of a list its element."""
    return [field.type.field(index) for index in range(field.type.num_fields)]


def _holds_calls(field: Any) -> bool:
    """Return whether `field` is, or has anywhere within it, the calls of a message."""
    return field.name in _CALL_COLUMNS or any(map(_holds_calls, _inner_fields(field)))


def _holds_tools(field: Any) -> bool:
    """Return whether the column `field` lists tools: objects with a function, or with a name and parameters."""
    if not hasattr(field.type, "value_type"):  # not a list
        return False
    names: set[str] = set()
    for element in _inner_fields(field):
        names.update(key.name for key in _inner_fields(element))
    return "function" in names or {"name", "parameters"} <= names


def _without_filled(value: Any, within: bool) -> Any:
    """Return `value` without the nulls of the structs in the calls that it holds; within: of all of its structs."""
    if isinstance(value, dict):
        return {
            name: _without_filled(item, within or name in _CALL_COLUMNS)
            for name, item in value.items()
            if item is not None or not within
        }
    return [_without_filled(item, within) for item in value] if isinstance(value, list) else value


def _refuse_doubled_fields(file: Path, fields: Sequence[Any], parent: str = "") -> None:
    """Raise UserError where a name stands twice among the columns of a parquet file, or in a struct of one."""
    refuse_duplicate_names(str(file), [f"{parent}{field.name}" for field in fields])
    for field in fields:
        _refuse_doubled_fields(file, _inner_fields(field), f"{parent}{field.name}.")


def refuse_duplicate_names(place: str, names: Sequence[str]) -> None:
    """Raise UserError where a name stands twice among the columns of a table."""
    doubled = [repr(name[:80]) for name, count in Counter(names).items() if count > 1]
    if doubled:
        raise UserError(f"{place}: several columns have the same name: {', '.join(doubled)}; keep one of each")
