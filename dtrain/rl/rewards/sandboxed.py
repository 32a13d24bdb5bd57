"""A process of `code_sandbox`: a program, the code of a completion, or the test that calls the code.

The process of the test alone decides: it ends with `PASSED` where the test runs to its end. It never runs code of the
completion, and the process of the completion never sees the test. It runs without dtrain beside it.
"""

import ast
import builtins
import importlib
import os
import resource
import sys
import types
from contextlib import suppress
from typing import Any

from dtrain.rl.rewards.remote_calls import FAILED, CodeSide, TestSide

PASSED = 0
_FILE_BYTES = 1 << 20  # of a file, what a program prints included


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
    solution.__dict__["__getattr__"] = lambda name: _attribute(side, name)
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


def _attribute(side: TestSide, name: str) -> Any:
    try:
        return side.request("global", name)
    except KeyError:
        raise AttributeError(f"the completion defines no {name}") from None
