"""JSON that others may have written: of bounded size and depth, each name once, and errors that say what is wrong.

The only reader of such text: every file of a model, a checkpoint or a data set goes through it. Imports no torch.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError

MAX_DEPTH = 100  # levels; what walks a value later may recurse
MAX_ENTRIES = 100_000_000  # entries of all lists and objects together
SMALL_FILE_BYTES, LARGE_FILE_BYTES, OWN_FILE_BYTES = (
    1 << 24,
    1 << 27,
    1 << 33,
)  # bytes: of a configuration, a vocabulary, a file of dtrain's own
_BLOCK = 1 << 20  # bytes read at once
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
_KINDS[type(None)] = "null"


def digest(*parts: Any) -> str:
    """Return the SHA-256 of values that JSON can write, in hex."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def json_type(value: Any) -> str:
    """Return the name of the value's JSON type."""
    return _KINDS.get(type(value), type(value).__name__)


def loads(text: str | bytes, *, allow_nan: bool = True) -> Any:
    """Return the value of a JSON text, UTF-8 where it is bytes. allow_nan: read NaN and Infinity, which Python writes.

    Raises ValueError that says what is wrong, json.JSONDecodeError and UnicodeDecodeError among them.
    """
    text = text.decode("utf-8") if isinstance(text, bytes) else text
    if text.startswith("\ufeff"):
        raise ValueError("it begins with a byte order mark; save it as UTF-8 without one")
    try:
        value = (DECODER if allow_nan else _STRICT).decode(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    check_json_size(value)
    return value


def check_json_size(value: Any, max_entries: int = MAX_ENTRIES) -> None:
    """Raise ValueError for a value nested deeper than MAX_DEPTH, or with more than `max_entries` entries, shared ones
    counted each time."""
    level, depth, parts = [value] if isinstance(value, dict | list) else [], 0, 0
    while level:
        depth, parts = depth + 1, parts + sum(map(len, level))
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        if parts > max_entries:
            raise ValueError(f"it has more than {max_entries:,} entries")
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]


def read_text(path: Path, max_bytes: int = SMALL_FILE_BYTES) -> str:
    """Return the text of a file that a stranger may have written. Raises UserError: no regular file, more than
    `max_bytes` bytes, not UTF-8."""
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is a directory or a device; a file belongs there")
        with path.open("rb") as stream:
            text = bytearray()
            while block := stream.read(min(_BLOCK, max_bytes + 1 - len(text))):  # read(n) allocates n bytes first
                text += block
        if len(text) > max_bytes:
            raise UserError(
                f"{path} is larger than {max_bytes >> 20} MiB, more than such a file has; is it the right one?"
            )
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); convert it to UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


def split_lines(text: str) -> list[str]:
    r"""Return the lines of a text, which `\n` or `\r\n` ends.

    `str.splitlines` also splits at characters that belong to a line's content, such as U+2028, which JSON writes as it
    is, and the form feed.
    """
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def read_json(path: Path, *, max_bytes: int = SMALL_FILE_BYTES, allow_nan: bool = False) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises UserError naming the file."""
    text = read_text(path, max_bytes)
    try:
        value = loads(text, allow_nan=allow_nan)
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); is the file whole?") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object but {json_type(value)}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name[:80]!r} stands twice in one object; keep one of them")
            seen.add(name)
    return members


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


DECODER = json.JSONDecoder(object_pairs_hook=_object)
"""For a reader that takes value after value from a text. It calls `check_json_size` and catches RecursionError."""
_STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_number)


def is_non_negative_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def as_list(value: Any, key: str) -> list[Any]:
    """Return `value` as a list; a string is read as JSON, as CSV and some parquet files hold lists. Raises UserError
    that names `key`."""
    if isinstance(value, str):
        try:
            value = loads(value)
        except ValueError as problem:
            raise UserError(f"{key} is a string that is not JSON ({problem}); it must be a list") from problem
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise UserError(f"{key} must be a list, not {json_type(value)}")
    return list(value)
