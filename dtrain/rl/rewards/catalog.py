"""The rewards that come with dtrain and their options, and the search for user code by its import path.

A reward is named by a key of `BUILT_IN`, by a name that an installed package registers (`base/plugins.py`), or by an
import path, `module.function` or `module:function`. Modules are also found in the working directory. Nothing is
imported for the search, which reads the source of a module for the name. Torch is not imported.
"""

import ast
import importlib
import importlib.util
import inspect
import symtable
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import decode_source
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

from dtrain.base.errors import UserError
from dtrain.base.name_patterns import pattern_error
from dtrain.base.plugins import REWARDS_KEY, misspelt_key_hint, plugins
from dtrain.base.processes import import_search_path
from dtrain.base.ranges import NUMBER, Range, closest_name, is_finite

READS_ANSWERS = ("math_exact", "text_exact", "numeric", "cosine_length", "math_verify")
"""Rewards that compare a completion with the data's answer."""
NEEDS_SOFTWARE = ("python_tests", "math_verify")
"""Rewards that need programs or packages. Their constructors check for these."""
_MODULES = {
    **dict.fromkeys(("math_exact", "text_exact", "numeric", "cosine_length"), "right_answers"),
    **dict.fromkeys(("regex", "format_tags", "json_valid", "length_penalty", "repetition_penalty"), "form"),
}
BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        **{name: f"dtrain.rl.rewards.{module}:{name}" for name, module in _MODULES.items()},
        "math_verify": "dtrain.rl.rewards.symbolic_answers:MathVerify",
        "python_tests": "dtrain.rl.rewards.python_tests:PythonTests",
        "judge": "dtrain.rl.remote.judge:Judge",
    }
)
"""Name -> import path."""
NOT_A_REWARD = (
    "so it cannot be a reward. A reward is a Python function that accepts completions, or columns of the data by name, "
    "and returns a list of numbers"
)
"""The end of messages about something that is not a reward."""


def reward_paths() -> dict[str, str]:
    """Return the import paths of all rewards with names: those of dtrain, and those of installed packages."""
    return {**plugins(REWARDS_KEY), **BUILT_IN}


def find(name: str, kind: str = "reward") -> tuple[str, str]:
    """Find the function of a reward's name or import path.

    Args:
        name: A name of BUILT_IN or of a plugin, or an import path.
        kind: Kind of function for messages, such as "tool". Names are accepted only for "reward".

    Returns:
        (module, function).

    Raises:
        UserError: If the name is unknown, the module does not exist or is not Python, or it does not define the
            function. Rewards from Python's own C modules are refused, too.

    Example:
        >>> find("math_exact")
        ('dtrain.rl.rewards.right_answers', 'math_exact')
        >>> find("dtrain.rl.samples:Sample", kind="environment")
        ('dtrain.rl.samples', 'Sample')
    """
    return find_function_and_file(name, kind)[:2]


def find_function_and_file(name: str, kind: str = "reward") -> tuple[str, str, str]:
    """Return (module, function) as `find`, and the file of the module."""
    known = reward_paths() if kind == "reward" else {}
    path = known.get(name, name)
    module, _, function = path.rpartition(":" if ":" in path else ".")
    if not module or not function:
        near = closest_name(name, known)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(known) or 'none by name'}"
        misspelt_key = misspelt_key_hint(name, REWARDS_KEY) if kind == "reward" else ""
        text = f"{kind} {name}: no {kind} has this name{misspelt_key}; {hint}"
        raise UserError(f"{text} (an import path has the form module.function)")
    if not all(map(str.isidentifier, module.split("."))) or function == "py":
        if function == "py":  # the path of a file, without a function
            module, function = path.rpartition(".")[0], "function"
        corrected = f"{module.removesuffix('.py').strip('./').replace('/', '.')}.{function}"
        raise UserError(f"{kind} {name} is not an import path. Write module.function, without .py, such as {corrected}")
    spec = _module_spec(f"{kind} {name}", module)
    names = _top_level_names(f"{kind} {name}", spec)
    if names is not None and function not in names:
        near = closest_name(function, names)
        hint = f"; did you mean {near}?" if near else ""
        raise UserError(f"{kind} {name}: {spec.origin} defines no {function}{hint}")
    if kind == "reward" and _is_from_c_module(spec, function):
        raise UserError(f"reward {name} comes from a C module of Python, {NOT_A_REWARD}")
    return module, function, spec.origin or "Python itself"


def find_verifiers(name: str) -> str:
    """Return the file of an environment of the library `verifiers`. Nothing is imported.

    Args:
        name: Name of the environment, NAME or OWNER/NAME. NAME is also its package.

    Raises:
        UserError: If the library or the package is not installed.
    """
    module = name.rpartition("/")[2].replace("-", "_")
    if not module.isidentifier():
        raise UserError(f"{name} is not the name of an environment. Write NAME or OWNER/NAME")
    for package, how in (("verifiers", "'dtrain[verifiers]'"), (module, f"its package, or: prime env install {name}")):
        spec = PathFinder.find_spec(package, import_search_path()) or _spec_by_import_system(package)
        if spec is None:
            raise UserError(f"there is no package {package}: pip install {how}")
    assert spec is not None, "the loop raises otherwise"
    names = _top_level_names(name, spec)
    if names is not None and not names & {"load_environment", "__all__"}:
        raise UserError(f"{spec.origin} defines neither load_environment nor __all__, as an environment of verifiers "
                        "does")  # fmt: skip
    return spec.origin or module


def find_definition(file: Path, function: str, decorated: bool = False) -> ast.AST | None:
    """Return the definition of a name at the top level of a module's source.

    An import of the name from a file in the same directory is followed.

    Args:
        file: The module's file.
        function: The name.
        decorated: Whether to return functions and classes with decorators. A decorator may change the signature.

    Returns:
        The definition of a function or class, or the value that is assigned to the name. None if there is none.
    """
    if file.suffix != ".py":
        return None
    result: ast.AST | None = None
    for node in ast.parse(decode_source(file.read_bytes())).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == function:
            result = None if node.decorator_list and not decorated else node
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if function in names:
                result = node.value
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == function:
                    other = file.parent / f"{node.module}.py"
                    result = None
                    if other.is_file() and other != file:
                        result = find_definition(other, alias.name, decorated)
    return result


def _module_spec(whose: str, module: str) -> ModuleSpec:
    """Return the spec of a module without importing its parent packages.

    Args:
        whose: Beginning of the error message, such as "reward my.short".
        module: The module.

    Raises:
        UserError: If there is no such module.
    """
    parent = module.rpartition(".")[0]
    spec: ModuleSpec | None
    if parent:
        locations = _module_spec(whose, parent).submodule_search_locations or []
        try:
            spec = PathFinder.find_spec(module, list(locations))
        except KeyError:  # a folder without __init__.py within another one, which Python finds only by importing both
            spec = ModuleSpec(module, None, is_package=True)
            spec.submodule_search_locations = [f"{location}/{module.rpartition('.')[2]}" for location in locations]
    else:
        spec = PathFinder.find_spec(module, import_search_path())
        if spec is None and module in sys.builtin_module_names:
            spec = ModuleSpec(module, None)
        elif spec is None:
            spec = _spec_by_import_system(module)
    if spec is None:
        raise UserError(
            f"{whose}: there is no module {module}, neither in {Path.cwd()} nor among the installed packages"
        )
    return spec


def _spec_by_import_system(name: str) -> ModuleSpec | None:
    """Return the spec of a package with its own import finder, as editable installs may have. None if there is none."""
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # a module that was not imported, such as __main__
        return None


def _top_level_names(whose: str, spec: ModuleSpec) -> set[str] | None:
    """Return the names that a module defines at its top level, also in `if` and `try`. None if they are not known.

    They are not known for modules that are not Python source, and with `import *` or `__getattr__`.
    """
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        source = decode_source(Path(spec.origin).read_bytes())
        tree, table = ast.parse(source), symtable.symtable(source, spec.origin, "exec")
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{whose}: {spec.origin} is not valid Python: {error}") from None
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    has_star = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree))
    return None if has_star or "__getattr__" in names else names


def _is_from_c_module(spec: ModuleSpec, function: str) -> bool:
    """Return whether a name comes from a C module of Python, directly or by `import *`, as in the module os.

    Such functions have no readable signature.
    """
    if spec.origin is None or not spec.origin.endswith(".py"):
        return spec.name.partition(".")[0] in sys.stdlib_module_names and spec.submodule_search_locations is None
    nodes = ast.walk(ast.parse(decode_source(Path(spec.origin).read_bytes())))
    stars = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    c_modules = [name for name in stars if name and name in sys.builtin_module_names]
    return any(hasattr(importlib.import_module(name), function) for name in c_modules)


# REWARDS reads the options from the modules of the rewards. These modules import the functions above, so everything
# below must stay at the end of this file.
REQUIRED = inspect.Parameter.empty
"""The default of an option that has none."""
JUDGE_OPTIONS = ("url", "model", "rubric")
"""Options of `judge` that are keys of the entry itself, next to `fn`, instead of its `kwargs`."""


def _read_options(path: str) -> dict[str, Any]:
    """Return the options of a reward, which are its keyword-only parameters, with their defaults."""
    options = {}
    for parameter in inspect.signature(resolve_name(path)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            options[parameter.name] = parameter.default
    return options


REWARDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {name: _read_options(path) for name, path in BUILT_IN.items()}
)
"""Name -> its options and their defaults."""

FORMER_NAMES: Mapping[str, str] = MappingProxyType({"isolated": "allow_full_access"})
"""Former options -> the option that replaced them."""

_TEXT: Range = (lambda v: isinstance(v, str), "a string")
_NON_EMPTY: Range = (lambda v: v is None or (isinstance(v, str) and v.strip() != ""), "a text that is not empty")
_WORDS: Range = (
    lambda v: isinstance(v, Sequence) and not isinstance(v, str) and all(isinstance(item, str) for item in v),
    "a list of strings",
)
_SWITCH: Range = (lambda v: isinstance(v, bool), "true or false")
_NOT_NEGATIVE: Range = (lambda v: is_finite(v) and v >= 0, "a finite number, at least 0")
_TOKENS: Range = (lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0, "a whole number, at least 0")
_COUNT: Range = (lambda v: _TOKENS[0](v) and v >= 1, "a whole number, at least 1")

OPTION_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "column": (lambda v: isinstance(v, str) and v != "", "the name of a column"),
        "absolute": _NOT_NEGATIVE,
        "relative": _NOT_NEGATIVE,
        "pattern": (lambda v: isinstance(v, str) and pattern_error(v) is None, "a regular expression of Python's re"),
        "full": _SWITCH,
        "ignore_case": _SWITCH,
        "tags": (lambda v: _WORDS[0](v) and len(v) > 0 and all(v), "a list of at least one tag's name"),
        "strict": _SWITCH,
        "prefix": _TEXT,
        "target_tokens": _TOKENS,
        "max_tokens": _COUNT,
        "ngram_size": _COUNT,
        "max_penalty": (lambda v: is_finite(v) and v <= 0, "a finite number, at most 0"),
        **dict.fromkeys(("min_value_wrong", "max_value_wrong", "min_value_correct", "max_value_correct"), NUMBER),
        "required_keys": _WORDS,
        "whole": _SWITCH,
        "memory": (lambda v: type(v) is int and 64 <= v <= 1 << 20, "a whole number of MiB, from 64"),
        "allow_full_access": _SWITCH,
        "url": (
            lambda v: isinstance(v, str) and v.startswith(("http://", "https://")),
            "an address that begins with http:// or https://",
        ),
        "model": _NON_EMPTY,
        "rubric": _NON_EMPTY,
        "concurrency": (lambda v: type(v) is int and 1 <= v <= 1024, "a whole number from 1 to 1024"),
        "timeout": (lambda v: is_finite(v) and v > 0, "a finite number of seconds, more than 0"),
        "api_key_file": _NON_EMPTY,
        "cache": _NON_EMPTY,
    }
)
"""Name of an option -> its range."""
