"""Values that two processes exchange as JSON. Decoding builds plain Python values and runs no code of the sender.

It runs inside the processes of `code_sandbox`, without dtrain beside it: it imports the standard library alone.
"""

import builtins
import importlib
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable
from typing import Any

_SCALARS = frozenset({type(None), bool, int, float, str})
_BASES: dict[type, Callable[[Any], Any]] = {  # how a value of a derived class becomes one of the base, as C has it
    **{base: base.__pos__ for base in (int, float, complex)},
    str: lambda value: str.__getitem__(value, slice(None)),
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
    frozenset: frozenset.copy,
}
_EMPTY: dict[str, Callable[[Any], Any]] = {  # mutable containers, from their default_factory or maxlen
    "list": lambda _: [],
    "dict": lambda _: {},
    "set": lambda _: set(),
    "bytearray": lambda _: bytearray(),
    "collections.OrderedDict": lambda _: OrderedDict(),
    "collections.Counter": lambda _: Counter(),
    "collections.defaultdict": lambda default_factory: defaultdict(default_factory),
    "collections.deque": lambda maxlen: deque(maxlen=maxlen),
}
_PARTS: dict[str, Callable[[Any], Iterable[Any]]] = {  # what immutable values are made of
    **dict.fromkeys(("tuple", "frozenset", "dict_keys", "dict_values", "dict_items"), list),
    "bytes": lambda value: [value.hex()],
    "complex": lambda value: [value.real, value.imag],
    **dict.fromkeys(("range", "slice"), lambda value: [value.start, value.stop, value.step]),
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "datetime.date": lambda value: value.timetuple()[:3],
    "datetime.datetime": lambda value: [*value.timetuple()[:6], value.microsecond],
    "datetime.time": lambda value: [value.hour, value.minute, value.second, value.microsecond],
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "uuid.UUID": lambda value: [str(value)],
}
_MAKE: dict[str, Callable[..., Any]] = {  # how they are made again; the others by their own type
    "tuple": lambda *items: items,
    "frozenset": lambda *items: frozenset(items),
    "dict_keys": lambda *keys: dict.fromkeys(keys).keys(),
    "dict_values": lambda *values: dict(enumerate(values)).values(),
    "dict_items": lambda *pairs: dict(pairs).items(),
    "bytes": bytes.fromhex,
}
ERRORS = {
    name: kind for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
}
"""Name -> built-in exception."""
_TYPES = {*ERRORS, *_EMPTY, *(name for name in _PARTS if hasattr(builtins, name) or "." in name)}
_TYPES |= {"object", "bool", "int", "float", "str"}


class Shared:
    """Mutable containers of one exchange, numbered in the order in which both sides meet them."""

    def __init__(self) -> None:
        self.containers: list[Any] = []
        self._places: dict[int, int] = {}

    def add(self, container: Any) -> None:
        self._places[id(container)] = len(self.containers)
        self.containers.append(container)

    def place(self, container: Any) -> int | None:
        return self._places.get(id(container))


class Codec:
    """Encodes values as what JSON holds, and decodes them. Values that are not plain are a derived class's business.

    Plain are None, numbers, texts, bytes, the built-in containers and those of `collections`, named tuples, ranges,
    slices, built-in exceptions, Decimal, Fraction, UUID, dates without a zone, and the types of all these. An immutable
    value of a derived class is sent as a value of its base; a mutable one is not plain. A container that occurs twice
    stays one, and may hold itself.
    """

    def encode_other(self, value: Any, shared: Shared) -> Any:
        raise TypeError(f"{type(value)} is not plain")

    def decode_other(self, node: dict[str, Any], shared: Shared) -> Any:
        raise TypeError(f"{node['kind']} is not plain")

    def encode(self, value: Any, shared: Shared) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        name = _name_of(kind)
        if name in _EMPTY:
            place = shared.place(value)
            if place is not None:
                return {"kind": "shared", "place": place}
            extra = self.encode(getattr(value, "default_factory", getattr(value, "maxlen", None)), shared)
            shared.add(value)
            items = self.encode_contents(value, shared)
            return items if kind is list else {"kind": name, "extra": extra, "items": items}
        if name in _PARTS and getattr(value, "tzinfo", None) is None:
            return {"kind": name, "items": self._encode_all(_PARTS[name](value), shared)}
        if ERRORS.get(name) is kind:
            return {"kind": "error", "name": name, "items": self._encode_all(value.args, shared)}
        if isinstance(value, type) and _name_of(value) in _TYPES:
            return {"kind": "type", "name": _name_of(value)}
        if isinstance(value, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
            items = self._encode_all(value, shared)
            return {"kind": "namedtuple", "name": kind.__name__, "fields": [*kind._fields], "items": items}
        for base, as_base in _BASES.items():
            if isinstance(value, base):
                return self.encode(as_base(value), shared)
        return self.encode_other(value, shared)

    def decode(self, node: Any, shared: Shared) -> Any:
        """Return the value that `encode` gave `node` for. Raises an exception of any type for any other node."""
        if isinstance(node, list):
            node = {"kind": "list", "extra": None, "items": node}
        if not isinstance(node, dict):
            return node
        kind = node["kind"]
        if kind == "shared":
            return shared.containers[node["place"]]
        if kind in _EMPTY:
            container = _EMPTY[kind](self.decode(node["extra"], shared))
            shared.add(container)
            refill(container, self.decode_contents(container, node["items"], shared))
            return container
        if kind == "type":
            return _type_named(node["name"])
        if kind not in _PARTS and kind not in ("error", "namedtuple"):
            return self.decode_other(node, shared)
        items = self._decode_all(node["items"], shared)
        if kind == "error":
            return ERRORS[node["name"]](*items)
        if kind == "namedtuple":
            return namedtuple(node["name"], node["fields"])(*items)
        return (_MAKE[kind] if kind in _MAKE else _type_named(kind))(*items)

    def encode_contents(self, container: Any, shared: Shared) -> list[Any]:
        """Return the encoded entries of a mutable container; of a mapping, pairs."""
        if isinstance(container, dict):
            return [[self.encode(key, shared), self.encode(value, shared)] for key, value in dict.items(container)]
        return self._encode_all(container, shared)

    def decode_contents(self, container: Any, items: list[Any], shared: Shared) -> list[Any]:
        """Return the decoded entries, for `refill` to put into `container`."""
        if isinstance(container, dict):
            return [(self.decode(key, shared), self.decode(value, shared)) for key, value in items]
        return self._decode_all(items, shared)

    def _encode_all(self, values: Iterable[Any], shared: Shared) -> list[Any]:
        items = [*values]
        return items if _SCALARS.issuperset(map(type, items)) else [self.encode(item, shared) for item in items]

    def _decode_all(self, items: list[Any], shared: Shared) -> list[Any]:
        return items if _SCALARS.issuperset(map(type, items)) else [self.decode(item, shared) for item in items]


def refill(container: Any, items: list[Any]) -> None:
    """Give a mutable container other contents."""
    if isinstance(container, list | bytearray):
        container[:] = items
        return
    container.clear()
    if isinstance(container, dict):
        for key, value in items:
            container[key] = value
    elif isinstance(container, deque):
        container.extend(items)
    else:
        container.update(items)


def to_line(message: Any) -> bytes:
    """Return a message as a line of JSON, with integers of any length."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(message).encode() + b"\n"
    finally:
        sys.set_int_max_str_digits(limit)


def from_line(line: bytes) -> Any:
    """Return the message of such a line. Raises ValueError for another, an unfinished one among them."""
    if not line.endswith(b"\n"):
        raise ValueError("the line has no end")
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.loads(line)
    finally:
        sys.set_int_max_str_digits(limit)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _type_named(name: str) -> Any:
    if name not in _TYPES:
        raise ValueError(f"{name} is not plain")
    module, _, type_name = name.rpartition(".")
    return getattr(importlib.import_module(module or "builtins"), type_name)
