"""Where code is that a recipe names: rewards of dtrain's own by name, all else by import path. Nothing is run."""

import ast
import importlib
import importlib.util
import re
import symtable
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import decode_source
from pathlib import Path
from types import MappingProxyType

from dtrain.base.errors import UserError
from dtrain.base.import_paths import search_path
from dtrain.base.ranges import nearest

_NAMES = (
    *("math_exact", "text_exact", "numeric", "regex", "format_tags", "json_valid"),
    *("length_penalty", "cosine_length", "repetition_penalty"),
)
BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        **{name: f"dtrain.rl.rewards.{name}:{name}" for name in _NAMES},
        "python_tests": "dtrain.rl.rewards.python_tests:PythonTests",
        "judge": "dtrain.rl.remote.judge:Judge",
    }
)
"""Name -> import path."""
NO_REWARD = (
    "which is no reward: name a Python function that takes completions, and columns of the data by their names, and "
    "gives a list of numbers"
)
"""The end of a refusal."""


def find(name: str, kind: str = "reward") -> tuple[str, str]:
    """(module, function) of a reward's name or import path, `module.function` or `module:function`; of another kind of
    function, as the messages call it, by import path alone.

    Modules are looked for where Python looks, then in the working directory. Nothing is imported: a module's source is
    read for the function's name. Raises UserError for an unknown name (with the near miss), a module that is not there,
    a file that is not Python, a module without that name, and a reward of Python's own C modules.
    """
    return find_file(name, kind)[:2]


def find_file(name: str, kind: str = "reward") -> tuple[str, str, str]:
    """As `find`, and the file that the module will come from."""
    known = BUILT_IN if kind == "reward" else {}
    path = known.get(name, name)
    module, _, function = path.rpartition(":" if ":" in path else ".")
    if not module or not function:
        near = nearest(name, known)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(known) or 'none by name'}"
        raise UserError(f"{kind} {name}: no {kind} has this name; {hint} (an import path reads module.function)")
    if not all(map(str.isidentifier, module.split("."))) or function == "py":
        plain = (
            re.sub(r"\.py$", "", module if function != "py" else path.rpartition(".")[0]).strip("./").replace("/", ".")
        )
        named = function if function != "py" else "function"
        raise UserError(f"{kind} {name} is no import path: write module.function, without .py, such as {plain}.{named}")
    spec = _spec(f"{kind} {name}", module)
    names = _names(f"{kind} {name}", spec)
    if names is not None and function not in names:
        near = nearest(function, names)
        hint = f"; did you mean {near}?" if near else ""
        raise UserError(f"{kind} {name}: {spec.origin} defines no {function}{hint}")
    if kind == "reward" and _is_of_c(spec, function):
        raise UserError(f"reward {name} is of a C module of Python itself, {NO_REWARD}")
    return module, function, spec.origin or "Python itself"


def find_verifiers(name: str) -> str:
    """The file of an environment of the library `verifiers`, which its name's last part is a package of. Nothing is
    imported. Raises UserError where the library or the package is not installed."""
    module = name.rpartition("/")[2].replace("-", "_")
    if not module.isidentifier():
        raise UserError(f"{name} is no name of an environment: write NAME or OWNER/NAME")
    for one, how in (("verifiers", "'dtrain[verifiers]'"), (module, f"its package, or: prime env install {name}")):
        spec = PathFinder.find_spec(one, search_path()) or _of_a_finder_of_its_own(one)
        if spec is None:
            raise UserError(f"there is no package {one}: pip install {how}")
    assert spec is not None, "the loop has found it"
    names = _names(name, spec)
    if names is not None and "load_environment" not in names:
        raise UserError(f"{spec.origin} defines no load_environment, which an environment of verifiers has")
    return spec.origin or module


def definition(file: Path, function: str, decorated: bool = False) -> ast.AST | None:
    """What a module's source gives that name at its top, imports of the name from beside it followed: a function or
    class, undecorated unless `decorated`, or the value that is assigned."""
    if file.suffix != ".py":
        return None
    found: ast.AST | None = None
    for one in ast.parse(decode_source(file.read_bytes())).body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and one.name == function:
            found = None if one.decorator_list and not decorated else one
        elif isinstance(one, ast.Assign) and any(isinstance(t, ast.Name) and t.id == function for t in one.targets):
            found = one.value
        elif isinstance(one, ast.ImportFrom) and one.module and not one.level:
            for alias in one.names:
                other = file.parent / f"{one.module}.py"
                if (alias.asname or alias.name) == function:
                    is_there = other.is_file() and other != file
                    found = definition(other, alias.name, decorated) if is_there else None
    return found


def _spec(whose: str, module: str) -> ModuleSpec:
    """Of a module, without the import of those that it lies in."""
    parent = module.rpartition(".")[0]
    if parent:
        spec = PathFinder.find_spec(module, list(_spec(whose, parent).submodule_search_locations or []))
    elif (spec := PathFinder.find_spec(module, search_path())) is None:
        is_built_in = module in sys.builtin_module_names
        spec = ModuleSpec(module, None) if is_built_in else _of_a_finder_of_its_own(module)
    if spec is None:
        raise UserError(
            f"{whose}: there is no module {module}, neither in {Path.cwd()} nor among the installed packages"
        )
    return spec


def _of_a_finder_of_its_own(name: str) -> ModuleSpec | None:
    """Of a package whose installer put a finder in place."""
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # a module that was loaded by other means, __main__ say
        return None


def _names(whose: str, spec: ModuleSpec) -> set[str] | None:
    """What the module defines at its top level, blocks of `if` and `try` included; None where that cannot be known."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        source = decode_source(Path(spec.origin).read_bytes())
        tree, table = ast.parse(source), symtable.symtable(source, spec.origin, "exec")
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{whose}: {spec.origin} is no Python: {error}") from None
    names = {one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported()}
    has_star = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree))
    return None if has_star or "__getattr__" in names else names


def _is_of_c(spec: ModuleSpec, function: str) -> bool:
    """Whether it is of a module of Python's own that is written in C, or of one that takes all names of such a module,
    as os does."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return spec.name.partition(".")[0] in sys.stdlib_module_names and spec.submodule_search_locations is None
    body = ast.walk(ast.parse(decode_source(Path(spec.origin).read_bytes())))
    stars = [one.module for one in body if isinstance(one, ast.ImportFrom) and one.names[0].name == "*"]
    within = [name for name in stars if name and name in sys.builtin_module_names]
    return any(hasattr(importlib.import_module(name), function) for name in within)
