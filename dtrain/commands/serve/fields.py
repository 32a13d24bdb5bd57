"""JSON from clients, checked field by field against a table. No torch.

A table names every field that is known. A field that it does not name is refused, so that nothing unread goes further.
"""

import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Union

from dtrain.base.ranges import hint

_WORDS = {bool: "true or false", int: "a whole number", float: "a number"}
_WORDS |= {str: "a text", list: "a list", dict: "an object"}
shown = reprlib.repr  # a value for a message, cut short


class ApiError(Exception):
    """An answer other than 200: `status`, and the message, the parameter and the type of OpenAI's error object."""

    def __init__(self, status: int, message: str, param: str | None = None):
        self.status, self.message, self.param = status, message, param
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


def read_object(raw: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object of a body. Raises ApiError."""
    try:
        body = json.loads(raw.decode(), parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:  # of the encoding too
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def _finite(text: str) -> float:
    """Return the number in `text`; raises ValueError for NaN and Infinity, which JSON does not have."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


@dataclass(frozen=True)
class Field:
    """A row of a table. kind: the value's type, None for any. default: for null and absence. least, most: of
    a number, or of a text's or a list's length. of: a list's entries, or an object's table. among: the only values that
    are served. use: converts the value, or raises ApiError."""

    kind: type | None = None
    default: Any = None
    least: float = 0
    most: float = math.inf
    of: Union["Field", "Table", None] = None
    among: tuple | None = None
    use: Callable[[Any, str], Any] | None = None

    def read(self, value: Any, name: str) -> Any:
        """Return the value that `value` of the field `name` stands for. Raises ApiError."""
        if self.kind is not None and type(value) is not self.kind and (self.kind, type(value)) != (float, int):
            raise ApiError(400, f"{name} must be {_WORDS[self.kind]}, not {shown(value)}", name)
        size = value if self.kind in (int, float) else len(value) if self.kind in (str, list) else self.least
        if not self.least <= size <= self.most:
            bounds = f"at least {self.least}" if self.most == math.inf else f"from {self.least} to {self.most}"
            what = f"{name}={shown(value)}" if size is value else f"the length of {name}, {size},"
            raise ApiError(400, f"{what} must be {bounds}", name)
        is_flag = isinstance(value, bool)  # 1 is no True
        if self.among is not None and value not in [item for item in self.among if isinstance(item, bool) == is_flag]:
            rest = f"it may be {', '.join(map(str, self.among))}" if self.among else "leave it out"
            raise ApiError(400, f"{name}={shown(value)}: dtrain serve does not have it; {rest}", name)
        if isinstance(self.of, Field):
            return [self.of.read(item, f"{name}[{index}]") for index, item in enumerate(value)]
        if self.of is not None:
            return {key: item for key, item in check(value, self.of, name).items() if item is not None}
        return value if self.use is None else self.use(value, name)


Table = Mapping[str, Field]


def check(body: Mapping[str, Any], table: Table, name: str = "") -> dict[str, Any]:
    """Return every field of `table`, read from `body`, which stands at `name`. Raises ApiError."""
    inside = f"{name}." if name else ""
    for key in body:
        if key not in table:
            full, meant = f"{inside}{key[:64]}", hint(key, table, inside, otherwise="")
            raise ApiError(400, f"{full} is no field that dtrain serve knows{meant}", full)
    return {
        key: field.default if body.get(key) is None else field.read(body[key], inside + key)
        for key, field in table.items()
    }


def is_ids(value: Any) -> bool:
    """Return whether `value` is a list of numbers that may be token ids, not empty."""
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)


FLAG = Field(bool, False)
TEXT = Field(str, most=4096)
COUNT = Field(int, most=2**31 - 1)
IGNORED = Field()  # changes nothing in the answer
