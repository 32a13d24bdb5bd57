"""The processes of `code_sandbox`, a program, the code of a completion or the test that calls the code, and the calls
between the last two, in both directions. They run without dtrain beside them.

The process of the test alone decides: it ends with `PASSED` where the test runs to its end. It never runs code of the
completion, and the process of the completion never sees the test. So its side trusts nothing: it builds plain values
(`plain_values`) and stand-ins for the code's objects, lets the code call only functions that the test handed over, and
ends, failed, at any other message.
"""

import ast
import builtins
import copy
import functools
import importlib
import io
import operator
import os
import resource
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO

from dtrain.rl.rewards.plain_values import ERRORS, Codec, Shared, from_line, refill, to_line

PASSED, FAILED = 0, 1  # exit status of a test
_FILE_BYTES = 1 << 20  # of a file, what a program prints included
_CONTAINERS = (list, dict, set, bytearray)
# Special methods that an object has where its class has them. They show the code nothing but the object itself, keys
# and arguments: what is compared or computed with it stays with the test.
_SPECIAL = tuple(
    f"__{name}__"
    for name in "len iter next reversed bool int float complex index abs neg pos invert round trunc floor ceil bytes "
    "getitem setitem delitem enter".split()
)
_ARITHMETIC = "add sub mul matmul truediv floordiv mod pow lshift rshift and or xor".split()
_BETWEEN_OBJECTS = (
    *(f"__{prefix}{name}__" for name in _ARITHMETIC for prefix in ("", "i")),
    *("__lt__", "__le__", "__gt__", "__ge__"),
)


class Side(Codec):
    """An end of the two pipes. Either side may call while it answers a call."""

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO):
        self._incoming, self._outgoing = incoming, outgoing

    def request(self, operation: str, *operands: Any) -> Any:
        """Return the other side's answer, or raise the exception that it raises there. Mutable containers among
        `operands` change as they changed there."""
        is_raised, value = self.exchange(operation, operands)
        if is_raised:
            raise value
        return value

    def exchange(self, operation: str, operands: tuple[Any, ...]) -> tuple[bool, Any]:
        """Return (whether the other side raised the value, the value)."""
        shared = Shared()
        self.send({"operation": operation, "operands": [self.encode(operand, shared) for operand in operands]})
        num_sent = len(shared.containers)
        while "operation" in (message := self.receive()):
            self.answer(message)
        value = self.decode(message["value"], shared)
        sent = shared.containers[:num_sent]
        contents = [self.decode_contents(*pair, shared) for pair in zip(sent, message["contents"], strict=True)]
        for container, items in zip(sent, contents, strict=True):
            refill(container, items)
        self.show(message["printed"])
        return message["raised"], value

    def answer(self, message: dict[str, Any]) -> None:
        shared = Shared()
        operands = [self.decode(operand, shared) for operand in message["operands"]]
        received = [*shared.containers]
        try:
            value, is_raised = self.perform(message["operation"], *operands), False
        except BaseException as error:  # SystemExit too is the caller's to see
            value, is_raised = error, True
        self.send(
            {
                "value": self.encode(value, shared),
                "contents": [self.encode_contents(container, shared) for container in received],
                "raised": is_raised,
                "printed": self.printed(),
            }
        )

    def perform(self, operation: str, *operands: Any) -> Any:
        raise NotImplementedError

    def printed(self) -> str:
        return ""

    def show(self, printed: str) -> None:
        pass

    def send(self, message: Any) -> None:
        self._outgoing.write(to_line(message))
        self._outgoing.flush()

    def receive(self) -> Any:
        return from_line(self._incoming.readline())


class CodeSide(Side):
    """The side of the code: all of its objects may be called and looked at, by handles. module: where it runs."""

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO, code: str, module: types.ModuleType):
        super().__init__(incoming, outgoing)
        self._code, self._module = code, module
        self._objects: list[Any] = []
        self._handles: dict[int, int] = {}
        self._of_the_test: dict[int, tuple[Any, int]] = {}  # id -> an object that the test's side sent, its handle
        self._described: set[int] = set()
        self._stdout = io.BytesIO()
        sys.stdout = io.TextIOWrapper(self._stdout, encoding="utf-8", errors="replace", write_through=True)

    def serve(self) -> None:
        """Answer until the test's process has ended, which raises."""
        while True:
            self.answer(self.receive())

    def perform(self, operation: str, *operands: Any) -> Any:
        operations: dict[str, Callable[..., Any]] = {
            "run": lambda: exec(compile(self._code, "solution", "exec"), self._module.__dict__),
            "global": lambda name: vars(self._module)[name],
            "call": lambda function, arguments, keywords: function(*arguments, **keywords),
            "special": lambda name, owner, *arguments: getattr(type(owner), name)(owner, *arguments),
            "operator": lambda name, *values: getattr(operator, name)(*values),
            "copy": lambda name, value: getattr(copy, name)(value),
            "contents": _contents_of,
            **{"getattr": getattr, "setattr": setattr, "delattr": delattr},
        }
        return operations[operation](*operands)

    def printed(self) -> str:
        text = self._stdout.getvalue().decode(errors="replace")
        self._stdout.seek(0)
        self._stdout.truncate()
        return text

    def encode(self, value: Any, shared: Shared) -> Any:
        if id(value) in self._of_the_test:
            return {"kind": "yours", "handle": self._of_the_test[id(value)][1]}
        return super().encode(value, shared)

    def encode_other(self, value: Any, shared: Shared) -> dict[str, Any]:
        if isinstance(value, type):
            return self.encode_type(value, shared)
        handle = self._handle_of(value)
        return {"kind": "object", "handle": handle, "type": self.encode_type(type(value), shared)}

    def _handle_of(self, value: Any) -> int:
        handle = self._handles.setdefault(id(value), len(self._objects))
        if handle == len(self._objects):
            self._objects.append(value)
        return handle

    def encode_type(self, kind: type, shared: Shared) -> dict[str, Any]:
        """Return the node of a class, with its description where it is sent for the first time."""
        handle = self._handle_of(kind)
        node: dict[str, Any] = {"kind": "class", "handle": handle}
        if handle not in self._described:
            self._described.add(handle)
            attributes: dict[str, Any] = {}
            for base in reversed(kind.__mro__):
                attributes |= vars(base)
            node |= {
                "name": kind.__name__,
                "error": next((base.__name__ for base in kind.__mro__ if ERRORS.get(base.__name__) is base), None),
                "bases": [self.encode_type(base, shared) for base in kind.__bases__ if base.__module__ != "builtins"],
                "special": [name for name in (*_SPECIAL, "__call__") if attributes.get(name) is not None],
                "has_contents": issubclass(kind, _CONTAINERS),
            }
        return node

    def decode_other(self, node: dict[str, Any], shared: Shared) -> Any:
        if node["kind"] == "yours":
            return self._objects[node["handle"]]
        handle: int = node["handle"]
        value: Any
        if node["kind"] == "named":
            value = importlib.import_module(node["module"])
            for part in filter(None, node["name"].split(".")):
                value = getattr(value, part)
        else:
            value = self._callback()
            if node["kind"] == "iterator":
                self._of_the_test[id(value)] = value, handle
                value = _items_of(value)
        self._of_the_test[id(value)] = value, handle
        return value

    def _callback(self) -> Callable[..., Any]:
        """Return a function of the test, for the code to call."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            return self.request("call", call, arguments, keywords)

        return call


def _contents_of(value: Any) -> Any:
    base: Any = next(base for base in _CONTAINERS if isinstance(value, base))
    return base(dict.items(value) if base is dict else base.__iter__(value))


def _items_of(take: Callable[[], Any]) -> Iterator[Any]:
    while True:
        try:
            item = take()
        except StopIteration:
            return
        yield item


class TestSide(Side):
    """The side of the test. What it cannot send, and any message that it cannot read, ends the process as failed."""

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO):
        super().__init__(incoming, outgoing)
        self._sent: list[Any] = []
        self._handles: dict[int, int] = {}
        self._callbacks: set[int] = set()
        self._classes: dict[int, RemoteClass] = {}
        self._objects: dict[int, RemoteObject] = {}

    def exchange(self, operation: str, operands: tuple[Any, ...]) -> tuple[bool, Any]:
        try:
            return super().exchange(operation, operands)
        except BaseException:  # no `try` of the test may take it for an exception of the code
            os._exit(FAILED)

    def perform(self, operation: str, *operands: Any) -> Any:
        function, arguments, keywords = operands
        if operation != "call" or self._handles.get(id(function)) not in self._callbacks:
            os._exit(FAILED)
        return function(*arguments, **keywords)

    def show(self, printed: str) -> None:
        if printed:
            sys.stdout.write(printed)

    def encode_other(self, value: Any, shared: Shared) -> dict[str, Any]:
        if isinstance(value, RemoteClass):
            return {"kind": "yours", "handle": value.__dict__["_dtrain_class"]}
        if isinstance(value, RemoteObject):
            return {"kind": "yours", "handle": value._dtrain_handle}
        if isinstance(value, BaseException):
            name = next(base.__name__ for base in type(value).__mro__ if ERRORS.get(base.__name__) is base)
            return {"kind": "error", "name": name, "items": [self.encode(item, shared) for item in value.args]}
        node: dict[str, Any] = {}
        if named := _name_in_library(value):
            node = {"kind": "named", "module": named[0], "name": named[1]}
        elif isinstance(value, _FUNCTIONS):
            node = {"kind": "callback"}
        elif isinstance(value, Iterator):
            value, node = value.__next__, {"kind": "iterator"}
        if not node:
            raise TypeError("an object of the test cannot be sent")
        handle = self._handles.setdefault(id(value), len(self._sent))
        if handle == len(self._sent):
            self._sent.append(value)
        if node["kind"] != "named":
            self._callbacks.add(handle)
        return node | {"handle": handle}

    def decode_other(self, node: dict[str, Any], shared: Shared) -> Any:
        handle = node["handle"]
        if node["kind"] == "yours":
            return self._sent[handle]
        if node["kind"] == "class":
            return self._classes[handle] if handle in self._classes else self._make_class(handle, node, shared)
        if node["kind"] != "object":
            raise ValueError("no such kind")
        kind = _remote_class(self.decode_other(node["type"], shared))
        if handle not in self._objects:
            value = self._objects[handle] = kind.__new__(kind)
            object.__setattr__(value, "_dtrain_handle", handle)
            if isinstance(value, BaseException):
                object.__setattr__(value, "args", tuple(self.request("getattr", value, "args")))
        return self._objects[handle]

    def _make_class(self, handle: int, node: dict[str, Any], shared: Shared) -> "RemoteClass":
        bases = [_remote_class(self.decode_other(base, shared)) for base in node["bases"]] or [RemoteObject]
        error = ERRORS.get(node["error"])
        if error is not None and not any(issubclass(base, error) for base in bases):
            bases.append(error)
        methods = {name: _asks("special", name) for name in _SPECIAL if name in node["special"]}
        if "__call__" in node["special"]:
            methods["__call__"] = _call
        if "__enter__" in node["special"]:
            methods["__exit__"] = _exit
        own = {"_dtrain_side": self, "_dtrain_class": handle, "_dtrain_has_contents": node["has_contents"]}
        made = self._classes[handle] = RemoteClass(
            node["name"], tuple(bases), {"__module__": "solution", **own, **methods}
        )
        return made


def _asks(*operation: str) -> Callable[..., Any]:
    """Return a method that asks the code's side for this operation of the object and the method's operands."""
    return lambda self, *operands: self._dtrain_side.request(*operation, self, *operands)


def _call(self: Any, *arguments: Any, **keywords: Any) -> Any:
    return self._dtrain_side.request("call", self, arguments, keywords)


class RemoteClass(type):
    """The class of stand-ins for objects of one class of the code; itself the stand-in for that class."""

    _dtrain_side: TestSide

    __call__ = _call
    __getattr__ = _asks("getattr")
    __setattr__ = _asks("setattr")
    __getitem__ = _asks("operator", "getitem")
    __iter__ = _asks("special", "__iter__")
    __len__ = _asks("special", "__len__")

    def __bool__(cls) -> bool:
        return True


class RemoteObject:
    """The stand-in for an object of the code, which answers for it, but is never shown a plain value by an operator.

    It equals no plain value, whatever its own `__eq__` says, unless it is of a class derived from a mutable container:
    then its contents are compared here. With a plain value it cannot be ordered or computed. Two objects of the code
    are compared and computed with by the code.
    """

    _dtrain_side: TestSide
    _dtrain_handle: int
    _dtrain_has_contents = False

    __dict__ = property(lambda self: self._dtrain_side.request("getattr", self, "__dict__"))

    __getattr__ = _asks("getattr")
    __setattr__ = _asks("setattr")
    __delattr__ = _asks("delattr")

    def __eq__(self, other: Any) -> Any:
        if _is_remote(other):
            return self._dtrain_side.request("operator", "eq", self, other)
        if self._dtrain_has_contents:
            return self._dtrain_side.request("contents", self) == other
        return NotImplemented

    def __contains__(self, item: Any) -> Any:
        if _is_remote(item):
            return self._dtrain_side.request("operator", "contains", self, item)
        return any(item is each or item == each for each in self)  # type: ignore[attr-defined]

    __hash__ = _asks("special", "__hash__")
    __str__ = _asks("special", "__str__")
    __repr__ = _asks("special", "__repr__")
    __format__ = _asks("special", "__format__")
    __copy__ = _asks("copy", "copy")

    def __deepcopy__(self, _: Any) -> Any:
        return self._dtrain_side.request("copy", "deepcopy", self)


_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType, functools.partial


def _remote_class(value: Any) -> Any:
    if not isinstance(value, RemoteClass):
        raise ValueError("it is no class of the code")
    return value


def _is_remote(value: Any) -> bool:
    return isinstance(value, RemoteObject | RemoteClass)


def _exit(self: RemoteObject, kind: Any, error: Any, _: Any) -> Any:
    return self._dtrain_side.request("special", "__exit__", self, kind, error, None)


def _between(name: str) -> Callable[[RemoteObject, Any], Any]:
    def method(self: RemoteObject, other: Any) -> Any:
        return self._dtrain_side.request("operator", name, self, other) if _is_remote(other) else NotImplemented

    return method


for _name in _BETWEEN_OBJECTS:
    setattr(RemoteObject, _name, _between(_name))


def _name_in_library(value: Any) -> tuple[str, str] | None:
    """Return (module, name) by which the standard library knows an object, a function, class or module; None where it
    does not."""
    if isinstance(value, types.ModuleType):
        module, name = value.__name__, ""
    else:
        module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    if module.partition(".")[0] not in sys.stdlib_module_names or module not in sys.modules:
        return None
    try:
        is_there = functools.reduce(getattr, filter(None, name.split(".")), sys.modules[module]) is value
    except AttributeError:
        return None
    return (module, name) if is_there else None


def main(job: dict[str, Any]) -> None:
    """Run a job. role: program, code or test. code, test: texts. incoming, outgoing: the descriptors of the pipes
    between code and test. memory: bytes of addresses; seconds: of processor. has_walls: in a sandbox."""
    seconds = max(1, round(job["seconds"]))
    limits = {"AS": job["memory"], "CPU": seconds, "FSIZE": _FILE_BYTES, "NOFILE": 64, "CORE": 0}
    if job["has_walls"] and tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14):
        limits["NPROC"] = 64  # threads; older kernels count those of the user outside too
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    sys.argv[:] = ["solution"]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as `site` has them
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if job["role"] == "program":
        exec(compile(job["code"], "solution", "exec"), module.__dict__)
        return
    incoming, outgoing = os.fdopen(job["incoming"], "rb"), os.fdopen(job["outgoing"], "wb")
    if job["role"] == "code":
        CodeSide(incoming, outgoing, job["code"], module).serve()
    try:
        _run_test(job["test"], TestSide(incoming, outgoing), module)
    except BaseException:  # SystemExit too: only its end passes a test
        os._exit(FAILED)
    os._exit(PASSED)


def _run_test(test: str, side: TestSide, module: types.ModuleType) -> None:
    """Run a test whose unknown names are the code's."""
    tree = ast.parse(test)
    side.request("run")
    solution = sys.modules["solution"] = types.ModuleType("solution")

    def attribute(name: str) -> Any:
        try:
            return side.request("global", name)
        except KeyError:
            raise AttributeError(f"the completion defines no {name}") from None

    solution.__dict__["__getattr__"] = attribute
    module.__dict__["__builtins__"] = _Names(side)
    for name in _ambiguous_names(tree):
        with suppress(KeyError):  # it is the built-in one
            module.__dict__[name] = side.request("global", name)
    exec(compile(tree, "test", "exec"), module.__dict__)


class _Names(dict[str, Any]):
    """Names that a test does not define: Python's own, then modules of the standard library, then the code's."""

    def __init__(self, side: TestSide):
        super().__init__(vars(builtins))
        self._side = side

    def __missing__(self, name: str) -> Any:
        if name in sys.stdlib_module_names:
            return importlib.import_module(name)
        return self._side.request("global", name)


def _ambiguous_names(tree: ast.Module) -> set[str]:
    """Return names of Python's own that must mean the code's, since the test uses no other name of the code: `sum`,
    where a completion is asked to write a function `sum`."""
    nodes = [*ast.walk(tree)]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    defined = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined |= {node.name for node in nodes if isinstance(node, definitions)}
    defined |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    defined |= {str(node.name) for node in nodes if isinstance(node, ast.ExceptHandler)}
    free = {node.id for node in names} - defined
    uses_solution = any(isinstance(node, ast.ImportFrom) and node.module == "solution" for node in nodes)
    is_clear = uses_solution or "solution" in defined
    own = {name for name in free if hasattr(builtins, name) or name in sys.stdlib_module_names}
    return set() if is_clear or free - own else own
