"""JSON from strangers within limits, and objects checked field by field against a table. No torch.

A table names every field that is known, how its value is read and what stands for null or absence. A field that it
does not name is refused, so that nothing unread reaches the engine.
"""

import difflib
import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

MOST_ITEMS = 1 << 20  # of one body, commas and brackets: a few bytes of text may become a hundred in memory
DEEPEST = 32  # lists and objects within one another
MOST_DIGITS = 64  # of a number, in a row
LAST_ID = 2**31 - 1
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)  # to the end where it is not closed
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MOST_DIGITS + 1))
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class ApiError(Exception):
    """An answer other than 200: `status`, and the message, the parameter and the type of OpenAI's error object; with
    405 the methods that would do."""

    def __init__(self, status: int, message: str, param: str | None = None, allow: str | None = None):
        self.status, self.message, self.param, self.allow = status, message, param, allow
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises ApiError."""
    check_json(raw, "the body")
    try:
        body = json.loads(raw.decode(), parse_float=_finite, parse_constant=_finite, object_pairs_hook=_unique)
    except ValueError as error:  # of the encoding too
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def check_json(raw: bytes, name: str) -> None:
    """Raises ApiError for JSON that is too much to parse. It need not be sound."""
    bare = _STRING.sub(b"", raw)
    if sum(map(bare.count, (b",", b"[", b"]", b"{", b"}"))) > MOST_ITEMS:
        raise ApiError(400, f"{name} has more than {MOST_ITEMS} values")
    steps = (1 if bracket in b"[{" else -1 for bracket in bare.translate(None, _NO_BRACKETS))
    if max(accumulate(steps), default=0) > DEEPEST:
        raise ApiError(400, f"{name} has lists or objects more than {DEEPEST} deep")
    if _LONG_NUMBER.search(bare):
        raise ApiError(400, f"{name} has a number of more than {MOST_DIGITS} digits")


def _finite(text: str) -> float:
    """Also of NaN and Infinity, which JSON does not have."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{shown(name)} stands twice in one object")
        found[name] = value
    return found


def shown(value: Any) -> str:
    """A value for a message, cut short."""
    return reprlib.repr(value)


@dataclass(frozen=True)
class Field:
    """read: a value that is not null, and its field's name -> what is used, or ApiError. default: without one."""

    read: Callable[[Any, str], Any]
    default: Any = None


Table = Mapping[str, Field]


def check(body: Any, table: Table, name: str = "") -> dict[str, Any]:
    """Every field of `table`, as it was read from the object `body`. Raises ApiError."""
    if not isinstance(body, dict):
        raise refusal(name or "the body", "an object", body)
    inside = f"{name}." if name else ""
    for one in body:
        if one not in table:
            near = difflib.get_close_matches(one[:64], table, 1, 0.0)
            hint = f"; the nearest known field is {inside}{near[0]}" if near else ""
            one = inside + one[:64]
            raise ApiError(400, f"{shown(one)[1:-1]} is no field that dtrain serve knows{hint}", one)
    return {
        one: field.default if body.get(one) is None else field.read(body[one], inside + one)
        for one, field in table.items()
    }


def refusal(name: str, wanted: str, value: Any) -> ApiError:
    return ApiError(400, f"{name} must be {wanted}, not {shown(value)}", name)


def flag(default: bool = False) -> Field:
    def read(value: Any, name: str) -> bool:
        if not isinstance(value, bool):
            raise refusal(name, "true or false", value)
        return value

    return Field(read, default)


def whole(least: int, most: int, default: int | None = None) -> Field:
    def read(value: Any, name: str) -> int:
        if type(value) is not int:  # a bool is an int
            raise refusal(name, "a whole number", value)
        if not least <= value <= most:
            raise ApiError(400, f"{name}={shown(value)} must be from {least} to {most}", name)
        return value

    return Field(read, default)


def number(least: float, most: float, default: float, *, above: bool = False) -> Field:
    """above: `least` itself is too little."""

    def read(value: Any, name: str) -> float:
        if type(value) not in (int, float):
            raise refusal(name, "a number", value)
        if value < least or (above and value == least) or value > most:
            bounds = f"{'above' if above else 'at least'} {least:g} and at most {most:g}"
            raise ApiError(400, f"{name}={shown(value)} must be {bounds}", name)
        return float(value)

    return Field(read, default)


def text(most: int = 256, pattern: str | None = None, default: str | None = None) -> Field:
    def read(value: Any, name: str) -> str:
        if not isinstance(value, str):
            raise refusal(name, "a text", value)
        if len(value) > most:
            raise ApiError(400, f"{name} has {len(value)} characters, and at most {most} are taken", name)
        if pattern is not None and not re.fullmatch(pattern, value):
            raise ApiError(400, f"{name}={shown(value)} has characters that do not belong there", name)
        return value

    return Field(read, default)


def texts(most: int, longest: int) -> Field:
    """A text or a list of them, none empty."""

    def read(value: Any, name: str) -> tuple[str, ...]:
        several = [value] if isinstance(value, str) else value
        if not isinstance(several, list) or not all(isinstance(one, str) and one for one in several):
            raise ApiError(400, f"{name} must be a text or a list of texts, none empty", name)
        if len(several) > most or max(map(len, several), default=0) > longest:
            raise ApiError(400, f"{name} may have {most} texts of {longest} characters at most", name)
        return tuple(several)

    return Field(read, ())


def ids(most: int) -> Field:
    def read(value: Any, name: str) -> list[int]:
        if value != [] and not is_ids(value) or len(value) > most:
            raise ApiError(400, f"{name} must be a list of token ids, {most} at most", name)
        return value

    return Field(read, [])


def is_ids(value: Any) -> bool:
    """Whether it is a list of whole numbers that may be token ids, not empty."""
    return isinstance(value, list) and bool(value) and all(type(one) is int and 0 <= one <= LAST_ID for one in value)


def items(read: Callable[[Any, str], Any], default: list | None = None) -> Field:
    """A list, each entry read by itself."""

    def read_all(value: Any, name: str) -> list[Any]:
        if not isinstance(value, list):
            raise refusal(name, "a list", value)
        return [read(one, f"{name}[{index}]") for index, one in enumerate(value)]

    return Field(read_all, default)


def record(table: Table) -> Field:
    def read(value: Any, name: str) -> dict[str, Any]:
        return check(value, table, name)

    return Field(read, check({}, table))


def free(value: Any, name: str) -> dict[str, Any]:
    """An object whose fields are somebody else's."""
    if not isinstance(value, dict):
        raise refusal(name, "an object", value)
    return value


def choice(values: Mapping[str, Any], default: Any = None) -> Field:
    def read(value: Any, name: str) -> Any:
        if not isinstance(value, str) or value not in values:
            raise ApiError(400, f"{name}={shown(value)} is unknown; choose {', '.join(values)}", name)
        return values[value]

    return Field(read, default)


def only(*values: Any) -> Field:
    """A field that would change the answer, and that the server does not have: with values that ask for nothing."""

    def read(value: Any, name: str) -> Any:
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values):
            raise ApiError(400, f"{name}={shown(value)}: dtrain serve does not have it; leave it out", name)
        return value

    return Field(read)


def ignored() -> Field:
    """A field that changes nothing in the answer."""
    return Field(lambda value, name: None)
