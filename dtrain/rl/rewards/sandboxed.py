"""The program inside the sandbox, which runs the model's code and then a test. Imports only the standard library.

`code_sandbox` passes the text of this file to a fresh interpreter. No other file of dtrain is in the sandbox.

A test reports values instead of comparing them (`python_tests`). Standard output has one line of JSON for each report,
[number of the condition, [values]], and the text "end" after the last statement of the test. For example,

    _dtrain_report(0, add(1, 2))        writes  [0, [3]]
    _dtrain_report(1, [(1, 2.5)])       writes  [1, [[{"type": "tuple", "items": [1, 2.5]}]]]

The model's code shares this process and can write such lines itself. It does not know which values are expected.
"""

import builtins
import importlib
import json
import os
import resource
import sys
import types
from collections.abc import Set
from contextlib import suppress
from numbers import Number
from typing import Any, TextIO

_FILE_BYTES = 4 << 20  # largest size of each file, including standard output
_MAX_FILES = 64
_MAX_THREADS = 64
_OBJECT: dict[str, Any] = {"type": "object", "items": []}  # any value that is no plain data


def encode(value: object) -> Any:
    """Return plain data in the form of JSON.

    Plain data are None, numbers, text, bytes, and lists, tuples, sets and dicts of plain data. An instance of a
    subclass becomes one of the base class, without its own `__eq__`.

    Raises:
        TypeError, ValueError, ArithmeticError, AttributeError: For anything else.
    """
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        # Python refuses to read very long numbers in decimal digits.
        return value if value.bit_length() <= 64 else _node("int", hex(value))
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return _node("tuple", *[encode(item) for item in value])
    if isinstance(value, Set):
        return _node("set", *[encode(item) for item in value])
    if isinstance(value, dict):
        return _node("dict", *[[encode(key), encode(item)] for key, item in value.items()])
    if isinstance(value, bytes | bytearray):
        return _node("bytes", value.hex())
    if isinstance(value, complex):
        return _node("complex", value.real, value.imag)
    if isinstance(value, Number):
        # Fraction and Decimal, whose modules take as long to import as the interpreter takes to start
        numerator, denominator = value.as_integer_ratio()  # type: ignore[attr-defined]
        return _node("Fraction", encode(numerator), encode(denominator))
    raise TypeError(f"{type(value)} is no plain data")


def _node(kind: str, *items: Any) -> dict[str, Any]:
    return {"type": kind, "items": list(items)}


def _encode_or_object(value: object) -> Any:
    try:
        return encode(value)
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return _OBJECT


class Reporter:
    """Writes the reports of a test."""

    def __init__(self, file: TextIO):
        self._file = file

    def report(self, condition: int, *values: object) -> None:
        """Report values that the test compares with literals."""
        self._write([condition, [_encode_or_object(value) for value in values]])

    def report_equality(self, condition: int, left: object, right: object) -> None:
        """Report two values that the test compares with each other.

        Two objects of the code are compared here, by their own `__eq__`. Plain data never are.
        """
        nodes = [_encode_or_object(left), _encode_or_object(right)]
        if nodes == [_OBJECT, _OBJECT]:
            nodes = [bool(left == right), True]
        self._write([condition, nodes])

    def end(self) -> None:
        """Report that the test ran to its end."""
        self._write("end")

    def _write(self, report: Any) -> None:
        self._file.write(json.dumps(report) + "\n")
        self._file.flush()  # a process that the code forks must not write it again


def main(job: dict[str, Any]) -> None:
    """Run a job of `CodeSandbox.run`."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # standard error is for a sandbox that does not start
    limits = {"AS": job["memory"], "CPU": job["seconds"], "FSIZE": _FILE_BYTES, "NOFILE": _MAX_FILES, "CORE": 0}
    if job["limits_threads"]:
        limits["NPROC"] = _MAX_THREADS
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))

    sys.argv[:] = ["solution"]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # defined by `site`, which -S leaves out
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if job["test"] is None:
        exec(compile(job["code"], "solution", "exec"), module.__dict__)
        return

    reporter = Reporter(os.fdopen(os.dup(1), "w"))
    os.dup2(nowhere, 1)  # what the code prints is not a report
    exec(compile(job["code"], "solution", "exec"), module.__dict__)
    sys.modules["solution"] = module
    for name in job["modules"]:
        if name not in module.__dict__:
            with suppress(ImportError):
                module.__dict__[name] = importlib.import_module(name)
    module.__dict__["_dtrain_report"] = reporter.report
    module.__dict__["_dtrain_report_equality"] = reporter.report_equality
    exec(compile(job["test"], "test", "exec"), module.__dict__)
    reporter.end()
    os._exit(0)  # without the exit handlers and threads of the code


if __name__ == "__main__":
    with open(int(sys.argv[1])) as job_file:
        received = json.load(job_file)
    main(received)
