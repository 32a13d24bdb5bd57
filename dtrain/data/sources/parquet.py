"""Parquet files in chunks of rows, as `files` reads the other kinds. Torch is not imported.

A struct column has one set of keys for all rows: each call of a tool gets the arguments of every other call, each tool
the parameters of every other tool, as nulls. Those keys are left out again. A null that was written into an argument
cannot be told from them. Nulls of other columns, which rewards may read, and those in lists are kept.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError
from dtrain.data.sources.chunk import CHUNK_ROWS, ROW_BYTES, Chunk, refuse_doubled

_CALLS = ("tool_calls", "function_call")


def chunks(file: Path) -> Iterator[tuple[Chunk, bool]]:
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
                for row in rows if nested else ():
                    row |= {name: _without_filled(row[name], name in tools) for name in nested}
                chunk = Chunk(str(file), list(enumerate(rows, start=line)), size * len(rows) // total)
                yield chunk, batch.nbytes > ROW_BYTES
                line += len(rows)
    except pyarrow.ArrowException as problem:
        raise UserError(f"{file}: the file is not readable as parquet: {problem}") from problem


def _inner(field: Any) -> list[Any]:
    """Return the fields of a field's type: of a struct its keys, of a list its element."""
    return [field.type.field(index) for index in range(field.type.num_fields)]


def _holds_calls(field: Any) -> bool:
    """Return whether `field` is, or has anywhere within it, the calls of a message."""
    return field.name in _CALLS or any(map(_holds_calls, _inner(field)))


def _holds_tools(field: Any) -> bool:
    """Return whether the column `field` lists tools: objects with a function, or with a name and parameters."""
    is_list = hasattr(field.type, "value_type")
    names = {key.name for element in _inner(field) for key in _inner(element)} if is_list else set()
    return "function" in names or {"name", "parameters"} <= names


def _without_filled(value: Any, within: bool) -> Any:
    """Return `value` without the nulls of the structs in the calls that it holds; within: of all of its structs."""
    if isinstance(value, dict):
        return {
            name: _without_filled(item, within or name in _CALLS)
            for name, item in value.items()
            if item is not None or not within
        }
    return [_without_filled(item, within) for item in value] if isinstance(value, list) else value


def _refuse_doubled_fields(file: Path, fields: Sequence[Any], parent: str = "") -> None:
    """Raise UserError where a name stands twice among the columns of a parquet file, or in a struct of one."""
    refuse_doubled(str(file), [f"{parent}{field.name}" for field in fields])
    for field in fields:
        _refuse_doubled_fields(file, _inner(field), f"{parent}{field.name}.")
