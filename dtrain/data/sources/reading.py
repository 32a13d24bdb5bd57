"""Conversion of a source's rows: renaming of columns, then a user's function.

`data.train.format` and the other keys `format` take one of dtrain's formats, or the import path of a function

    def read(row: dict) -> dict

that returns a row of one of dtrain's formats, which is then recognised as with `auto`. An installed package can
register a name for it, as the entry point "data.format.NAME".

This module does not import torch.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dtrain.base.errors import UserError
from dtrain.base.json_files import digest, json_type
from dtrain.base.plugins import import_object, is_import_path, plugins, registered_path
from dtrain.data.formats.formats import FORMATS_BY_KIND
from dtrain.data.sources.columns import describe_missing_columns, rename_columns

PLUGIN_KEY = "data.format"
Reader = Callable[[dict[str, Any]], dict[str, Any]]
# What a function raises because of a row, or because of a mistake in it.
_FUNCTION_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError, OSError, RecursionError),
    *(RuntimeError, TypeError, ValueError),
)


@dataclass(frozen=True)
class RowReading:
    """Conversion of a source's rows to a format of dtrain.

    Attributes:
        columns: dtrain's names of columns, each with the name that the files use.
        function: Import path of a function that converts each row, after its columns were renamed. None: rows are of
            one of dtrain's formats.
        key: The recipe's key of `function`, for messages.

    Example:
        >>> RowReading({"text": "body"}).reader()({"body": "Hi", "id": 7})
        {'id': 7, 'text': 'Hi'}
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    function: str | None = None
    key: str = "data.train.format"

    def reader(self, columns_key: str | None = None, *, strict: bool = False) -> Reader:
        """Return a function from a row as the file writes it to a row of one of dtrain's formats. Imports `function`.

        Args:
            columns_key: The recipe's key of `columns`, for messages.
            strict: Whether a column that the row does not have is an error.

        Raises:
            UserError: If `function` cannot be imported. Calls raise it for a row that cannot be converted.
        """
        convert = None if self.function is None else self._import_function(self.function)

        def read(row: dict[str, Any]) -> dict[str, Any]:
            if self.columns:
                row = rename_columns(row, self.columns, columns_key, strict=strict)
            if convert is None:
                return row
            try:
                converted = convert(dict(row))
            except _FUNCTION_ERRORS as error:
                raise UserError(f"{self.function} failed for this row: {type(error).__name__}: {error}") from error
            if not isinstance(converted, dict):
                raise UserError(
                    f"{self.function} returned {json_type(converted)} for this row. It must return a dict, a row of "
                    "one of dtrain's formats"
                )
            return converted

        return read

    def describe_row(self, row: Mapping[str, Any]) -> str:
        """Return the end of an error about a row: columns that it lacks, and the function that has returned it.

        Args:
            row: The row as the file writes it.
        """
        text = describe_missing_columns(row, self.columns)
        return text if self.function is None else f"{text} (the row that {self.function} returned)"

    def _import_function(self, function: str) -> Callable[[dict[str, Any]], Any]:
        imported: Callable[[dict[str, Any]], Any] = import_object(registered_path(function, PLUGIN_KEY), self.key)
        return imported

    def cache_key(self) -> list[Any]:
        """Return everything that decides how rows are read, for the cache's key. Imports `function`.

        The source of the function's module is part of it, so that a changed function reads the rows again.
        """
        parts: list[Any] = [dict(self.columns)] if self.columns else []
        if self.function is not None:
            path = registered_path(self.function, PLUGIN_KEY)
            parts.append([path, _source_digest(self._import_function(path))])
        return parts


class ReadFormat(NamedTuple):
    """A key `format` of a recipe.

    Attributes:
        name: One of dtrain's formats, or "auto".
        reading: Conversion of the rows to this format.
    """

    name: str
    reading: RowReading


def read_format(format: str, columns: Mapping[str, str], key: str) -> ReadFormat:
    """Interpret the keys `format` and `columns` of a source.

    Args:
        format: The value of `format`.
        columns: The value of `columns`.
        key: The key `format` of the source, for messages.

    Example:
        >>> read_format("text", {}, "eval.format").name, read_format("my_formats:forum", {}, "eval.format").name
        ('text', 'auto')
    """
    if is_function(format):
        return ReadFormat("auto", RowReading(columns, format, key))
    return ReadFormat(format, RowReading(columns))


def is_function(format: str) -> bool:
    """Check for the import path or the registered name of a function, in place of one of dtrain's formats."""
    return format not in known_formats() and (is_import_path(format) or format in plugins(PLUGIN_KEY))


def known_formats() -> list[str]:
    """Return the names of dtrain's own formats, and "auto"."""
    names = ["auto"]
    for formats in FORMATS_BY_KIND.values():
        names += [name for name in formats if name not in names]
    return names


def _source_digest(function: Any) -> str:
    """Return the digest of the source of the module that defines a function. "" if it has no source in Python."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # an instance with __call__: its class is defined in Python, too
        file = inspect.getsourcefile(type(function))
    return "" if file is None else digest(Path(file).read_text(encoding="utf-8"))
