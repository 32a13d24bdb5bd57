"""Reading of untrusted JSON: bounded size and depth, no duplicate names, and errors that say what is wrong.

Every JSON file of a model, a checkpoint or a data set is read through this module. Imports no torch.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError

MAX_DEPTH = 100  # levels of nesting, since later code may walk a value by recursion
MAX_ENTRIES = 100_000_000  # of all lists and objects of a value together
# Maximum sizes of files: a configuration, a vocabulary or an index of weights, and a file that dtrain writes itself.
SMALL_FILE_BYTES, LARGE_FILE_BYTES, OWN_FILE_BYTES = 1 << 24, 1 << 27, 1 << 33
_BLOCK = 1 << 20  # bytes that are read at once
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
_KINDS[type(None)] = "null"


def digest(*parts: Any) -> str:
    """Return the SHA-256 of values in JSON, as hex digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def json_type(value: Any) -> str:
    """Return the name of a value's JSON type.

    Example:
        >>> json_type([1]), json_type(None)
        ('a list', 'null')
    """
    return _KINDS.get(type(value), type(value).__name__)


def loads(text: str | bytes, *, allow_nan: bool = True) -> Any:
    """Parse a JSON text.

    Args:
        text: The text. Bytes are UTF-8.
        allow_nan: Accept NaN and Infinity, which Python writes.

    Raises:
        ValueError: If the text is not JSON, too deep or too large. Its subclasses json.JSONDecodeError and
            UnicodeDecodeError are raised as well.
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
    """Check that a value is not nested too deep and does not have too many entries.

    An object that is contained several times, as with YAML's aliases, is counted each time.

    Raises:
        ValueError: If the value has more than MAX_DEPTH levels, or more than `max_entries` entries.
    """
    # Level by level instead of by recursion, so that a deep value does not exhaust the stack.
    level = [value] if isinstance(value, dict | list) else []
    depth = num_entries = 0
    while level:
        depth += 1
        num_entries += sum(len(container) for container in level)
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        if num_entries > max_entries:
            raise ValueError(f"it has more than {max_entries:,} entries")
        next_level = []
        for container in level:
            entries = container.values() if isinstance(container, dict) else container
            next_level += [entry for entry in entries if isinstance(entry, dict | list)]
        level = next_level


def read_text(path: Path, max_bytes: int = SMALL_FILE_BYTES) -> str:
    """Read an untrusted text file.

    Raises:
        UserError: If the file cannot be read, is no regular file, has more than `max_bytes` bytes, or is not UTF-8.
    """
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is a directory or a device. Give a regular file")
        with path.open("rb") as stream:
            text = bytearray()
            # In blocks, because read(n) allocates n bytes first. One byte more than allowed shows that it is too large.
            while block := stream.read(min(_BLOCK, max_bytes + 1 - len(text))):
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
    r"""Split a text into lines, which end with `\n` or `\r\n`.

    `str.splitlines` also splits at characters that belong to a line's content, such as U+2028, which JSON writes as it
    is, and the form feed.
    """
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def read_json(path: Path, *, max_bytes: int = SMALL_FILE_BYTES, allow_nan: bool = False) -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        path: The file.
        max_bytes: Maximum size of the file.
        allow_nan: Accept NaN and Infinity, which Python writes.

    Raises:
        UserError: If the file cannot be read, or is not a JSON object. The message names the file.
    """
    text = read_text(path, max_bytes)
    try:
        value = loads(text, allow_nan=allow_nan)
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); is the file whole?") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object but {json_type(value)}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build the dict of a JSON object. Raises ValueError for a duplicate name (Python would keep its last value)."""
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name[:80]!r} is twice in one object; keep one of them")
            seen.add(name)
    return members


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


DECODER = json.JSONDecoder(object_pairs_hook=_object)
"""Decoder for callers that read one value after another from a text.

They must call `check_json_size` on each value, and handle RecursionError.
"""
_STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_number)


def is_non_negative_int(value: Any) -> bool:
    """Check whether a value is an int of at least 0. A bool is no int."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def as_list(value: Any, key: str) -> list[Any]:
    """Return a value as a list. A string is parsed as JSON, since CSV and some parquet files contain lists as strings.

    Args:
        value: The value.
        key: Name of the value, for messages.

    Raises:
        UserError: If the value is no list.
    """
    if isinstance(value, str):
        try:
            value = loads(value)
        except ValueError as problem:
            raise UserError(f"{key} is a string that is not JSON ({problem}); it must be a list") from problem
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise UserError(f"{key} must be a list, not {json_type(value)}")
    return list(value)
