"""The check that a reward can work with the columns of the data: by its source, or by its own process where that does
not tell."""

import ast
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from dtrain.base.errors import UserError
from dtrain.rl.rewards.find import BUILT_IN, NO_REWARD, definition, find_file
from dtrain.rl.worker import Lost, Worker

OWN = ("prompts", "completions", "completion_ids")
"""Arguments of a reward beside the columns of the data."""
_ONE_VALUE = ("float", "int", "bool", "len", "str")


@dataclass(frozen=True)
class Signature:
    """Names that a callable takes. needs, may: by name, without and with a default; by_place: those that it needs and
    takes by position alone; takes_all: whether it takes any name."""

    needs: Collection[str]
    may: Collection[str] = ()
    by_place: Collection[str] = ()
    takes_all: bool = False


def lacking_columns(name: str, options: Mapping[str, Any], columns: Collection[str]) -> str | None:
    """Return why a reward has no values with data of these `columns`; None where it may have some.

    A function of dtrain's own that takes a `column` reads that one, and python_tests must start on this machine;
    another must have what its signature takes without a default, and take something of what a reward is called with. A
    class must have __call__ and options for all that it is made with. That is read in the source. Where the source does
    not tell, of a decorated function say, the module is imported in a process of its own, as a run does. Raises
    UserError as `find` does."""
    module, function, file = find_file(name)
    own = next((known for known, path in BUILT_IN.items() if path == f"{module}:{function}"), None)
    if own is not None:
        column = {**import_module("dtrain.rl.rewards.options").REWARDS[own], **options}.get("column")
        if column is not None and column not in columns:
            return no_column(own, column, columns)
        try:
            if own == "python_tests":  # whose walls may not stand here
                getattr(import_module(module), function)(**options)
        except UserError as problem:
            return str(problem)
        return None
    node = definition(Path(file), function)
    if isinstance(node, ast.Constant | ast.List | ast.Dict | ast.Tuple | ast.Set):
        return f"reward {name} is a value that cannot be called, {NO_REWARD}"
    made_with: Signature | None = None
    if isinstance(node, ast.ClassDef):
        makes, call = (_method(node, called) for called in ("__init__", "__call__"))
        if call is None and not (node.bases or node.keywords):
            return f"reward {name} is a class without __call__, {NO_REWARD}"
        made_with, node = _signature(makes) or Signature([]), call
    called = _signature(node)
    if called is None:
        try:
            with _Look(name, module, function) as process:
                made_with, called = process.signatures()
        except (UserError, Lost) as problem:
            return str(problem)
    lacking = [key for key in made_with.needs if key not in options] if made_with else []
    if lacking:
        return f"reward {name} is made with {', '.join(lacking)}: set its kwargs in grpo.rewards"
    if called.by_place:
        return f"reward {name} takes {', '.join(called.by_place)} by place, {NO_REWARD}"
    available = {*columns, *OWN, *(() if made_with else options)}
    missing = [key for key in called.needs if key not in available]
    if missing:
        return takes_more(name.rsplit(".", 1)[-1], missing, columns)
    if not called.takes_all and not {*called.needs, *called.may} & {*columns, *OWN}:
        return f"reward {name} takes neither completions nor a column, {NO_REWARD}"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _gives_no_list(node):
        return f"reward {name} gives one value, or none, for all completions: return a list, a number for each"
    return None


def no_column(name: str, column: str, columns: Collection[str]) -> str:
    """Return the refusal of a reward of dtrain's own that reads a column which the data does not have."""
    return (
        f"reward {name}: the data has no column {column!r} (it has {_listed(columns)}); name the right one: "
        f"grpo.rewards=[{{fn: {name}, kwargs: {{column: ..}}}}]"
    )


def values_of(name: str, column: str, columns: Mapping[str, Sequence[Any]]) -> Sequence[Any]:
    """Return the values of the column that a reward of dtrain's own reads. Raises UserError where there is none."""
    if column not in columns:
        raise UserError(no_column(name, column, columns))
    return columns[column]


def takes_more(name: str, missing: Collection[str], columns: Collection[str]) -> str:
    """Return the refusal of a reward whose signature takes columns that are `missing` from the data."""
    return f"reward {name} takes {', '.join(missing)}, which is no column of the data (it has {_listed(columns)})"


def _listed(columns: Collection[str]) -> str:
    return ", ".join(key for key in columns if key not in OWN) or "none"


class _Look(Worker):
    """A process that has imported a reward, and has neither made nor called it."""

    def __init__(self, name: str, module: str, function: str):
        service, key, say = "dtrain.rl.rewards.calls:Look", "grpo.reward_timeout", partial(print, file=sys.stderr)
        super().__init__(service, module, function, what=f"reward {name}", timeout=60.0, key=key, say=say)

    def signatures(self) -> tuple[Signature | None, Signature]:
        """Return the signatures of the reward's constructor, None for a function, and of its call. Raises Lost."""
        (answer,) = self._ask("signatures")
        makes, calls = answer
        return makes and Signature(**makes), Signature(**calls)


def _method(node: ast.ClassDef, name: str) -> ast.AST | None:
    """Return the definition of a class's method, without the argument self; None where the class has none."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    methods = [item for item in node.body if isinstance(item, kinds) and item.name == name]
    if not methods or methods[-1].decorator_list or not methods[-1].args.args:
        return next((item for item in node.body if getattr(item, "name", None) == name), None)
    del methods[-1].args.args[0]
    return methods[-1]


def _signature(node: ast.AST | None) -> Signature | None:
    """Return the signature of a function's definition; None where the source does not tell."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or getattr(node, "decorator_list", []):
        return None
    takes = node.args
    by_place = [argument.arg for argument in takes.posonlyargs]
    names = [*by_place, *(argument.arg for argument in takes.args)]
    bare = names[: len(names) - len(takes.defaults)]
    defaults = zip(takes.kwonlyargs, takes.kw_defaults, strict=True)
    of_keywords = [(argument.arg, default is None) for argument, default in defaults]
    return Signature(
        needs=[*(key for key in bare if key not in by_place), *(key for key, is_bare in of_keywords if is_bare)],
        may=[
            *(key for key in names[len(bare) :] if key not in by_place),
            *(k for k, is_bare in of_keywords if not is_bare),
        ],
        by_place=[key for key in bare if key in by_place],
        takes_all=takes.kwarg is not None,
    )


def _gives_no_list(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether each of a function's returns is surely one value, or it has none and does not only raise."""
    pending: list[ast.AST] = [*node.body]
    returns: list[ast.expr | None] = []
    while pending:
        child = pending.pop()
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(child, ast.Raise | ast.Yield | ast.YieldFrom):
            return False
        if isinstance(child, ast.Return):
            returns.append(child.value)
        pending += ast.iter_child_nodes(child)
    return all(
        value is None
        or isinstance(value, ast.Constant)
        or (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in _ONE_VALUE)
        for value in returns
    )
