"""The check that a reward can work with the columns of the data: by its source, or by its own process where that does
not tell."""

import ast
import inspect
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.base.errors import UserError
from dtrain.base.nested_columns import column_names, get_column, has_column
from dtrain.rl.rewards.catalog import (
    BUILT_IN,
    NEEDS_SOFTWARE,
    NOT_A_REWARD,
    READS_ANSWERS,
    find_definition,
    find_function_and_file,
)
from dtrain.rl.worker import Outcome, Worker, WorkerLost, attempt

if TYPE_CHECKING:
    from dtrain.recipe.rollouts import Reward

OWN = ("prompts", "completions", "completion_ids")
"""Arguments of a reward beside the columns of the data."""
_ONE_VALUE = ("float", "int", "bool", "len", "str")
_MOST_LISTED = 30  # names of columns in a message
_USUAL_ANSWERS = ("ground_truth", "aliases", "answers", "answer", "value", "text", "target", "label")
"""Keys that usually hold the answer in an object, for a hint."""


@dataclass(frozen=True)
class Signature:
    """Names that a callable takes. needs, may: by name, without and with a default; by_place: those that it needs and
    takes by position alone; takes_all: whether it takes any name."""

    needs: Collection[str]
    may: Collection[str] = ()
    by_place: Collection[str] = ()
    takes_all: bool = False


@dataclass(frozen=True)
class RewardKeys:
    """How messages name the settings of rewards: GRPO's keys by default, a set of `eval`, or options of a command.

    Attributes:
        rewards: The list of rewards.
        timeout: The time limit of a reward.
        columns: The mapping of the files' columns. None if the caller has no such setting.
        column_setting: How a reward reads another column, with {name} of the reward and {column} to replace. None
            stands for a recipe's entry of `rewards`.

    Example:
        >>> RewardKeys().set_column("numeric", "gold")
        'grpo.rewards=[{fn: numeric, kwargs: {column: gold}}]'
    """

    rewards: str = "grpo.rewards"
    timeout: str = "grpo.reward_timeout"
    columns: str | None = "data.train.columns"
    column_setting: str | None = None

    def set_column(self, name: str, column: str) -> str:
        """Return the setting with which the reward `name` reads `column`."""
        setting = self.column_setting
        if setting is None:
            setting = self.rewards + "=[{{fn: {name}, kwargs: {{column: {column}}}}}]"
        return setting.format(name=name, column=column)


GRPO_KEYS = RewardKeys()


def missing_column_problems(
    rewards: Iterable["Reward"], rows: Iterable[Mapping[str, Any]], keys: RewardKeys = GRPO_KEYS
) -> list[str]:
    """Return why rewards have no values, one line each, without repetition.

    Args:
        rewards: Checked rewards, each with a name or import path.
        rows: For each split, a row with every column of its data.
        keys: The keys that the messages name.

    Raises:
        UserError: As `missing_column_problem`.
    """
    rows = list(rows)
    problems = []
    for reward in rewards:
        for row in rows:
            problem = missing_column_problem(str(reward.fn), reward.options, row, keys)
            if problem is not None:
                problems.append(problem)
    return list(dict.fromkeys(problems))


def missing_column_problem(
    name: str, options: Mapping[str, Any], columns: Mapping[str, Any], keys: RewardKeys = GRPO_KEYS
) -> str | None:
    """Return why a reward has no values with data of these columns; None if it may have some.

    A function of dtrain's own that takes a `column` reads that one. One that needs programs or packages must start on
    this machine. Another function must have what its signature takes without a default, and take something of what a
    reward is called with. A class must have __call__ and options for all that it is made with. This is read in the
    source. If the source is not enough, for example for a decorated function, the module is imported in a process of
    its own, as a run does.

    Args:
        name: The reward's name or import path.
        options: Its options.
        columns: A row with every column of the data.
        keys: The keys that the message names.

    Raises:
        UserError: As `find`.
    """
    module, function, file = find_function_and_file(name)
    own = next((known for known, path in BUILT_IN.items() if path == f"{module}:{function}"), None)
    if own is not None:
        column = {**import_module("dtrain.rl.rewards.catalog").REWARDS[own], **options}.get("column")
        if column is not None:
            if not has_column(columns, column):
                return missing_column_message(own, column, columns, keys)
            refusal = None
            if own in READS_ANSWERS:
                refusal = answer_type_problem(own, column, get_column(columns, column), keys)
            if refusal is not None:
                return refusal
        try:
            if own in NEEDS_SOFTWARE:
                getattr(import_module(module), function)(**options)
        except UserError as problem:
            return str(problem)
        return None
    node = find_definition(Path(file), function)
    if isinstance(node, ast.Constant | ast.List | ast.Dict | ast.Tuple | ast.Set):
        return f"reward {name} is a value that cannot be called, {NOT_A_REWARD}"
    made_with: Signature | None = None
    if isinstance(node, ast.ClassDef):
        makes, call = (_method(node, called) for called in ("__init__", "__call__"))
        if call is None and not (node.bases or node.keywords):
            return f"reward {name} is a class without __call__, {NOT_A_REWARD}"
        made_with, node = _signature(makes) or Signature([]), call
    called = _signature(node)
    if called is None:
        service, key, say = "dtrain.rl.rewards.columns:SignatureReader", keys.timeout, partial(print, file=sys.stderr)
        try:
            with Worker(service, module, function, what=f"reward {name}", timeout=60.0, key=key, say=say) as process:
                ((makes, calls),) = process.call("signatures")
            made_with, called = makes and Signature(**makes), Signature(**calls)
        except (UserError, WorkerLost) as problem:
            return str(problem)
    lacking = [key for key in made_with.needs if key not in options] if made_with else []
    if lacking:
        return f"reward {name} is made with {', '.join(lacking)}: set its kwargs in {keys.rewards}"
    if called.by_place:
        return f"reward {name} takes {', '.join(called.by_place)} by place, {NOT_A_REWARD}"
    available = {*columns, *OWN, *(() if made_with else options)}
    missing = [key for key in called.needs if key not in available]
    if missing:
        return missing_argument_message(name.rsplit(".", 1)[-1], missing, columns, keys)
    if not called.takes_all and not {*called.needs, *called.may} & {*columns, *OWN}:
        return f"reward {name} takes neither completions nor a column, {NOT_A_REWARD}"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _gives_no_list(node):
        return f"reward {name} gives one value, or none, for all completions: return a list, a number for each"
    return None


def missing_column_message(name: str, column: str, columns: Mapping[str, Any], keys: RewardKeys = GRPO_KEYS) -> str:
    """Return the refusal of a reward of dtrain's own that reads a column which the data does not have."""
    return (
        f"reward {name}: the data has no column {column!r} (it has {_listed(columns)}); name the right one: "
        f"{keys.set_column(name, '..')}"
    )


def answer_type_problem(name: str, column: str, value: Any, keys: RewardKeys = GRPO_KEYS) -> str | None:
    """Return why `value` of a column is no answer to compare with; None if it is one.

    An answer is a text, a number, a truth value or null, or a list of these. An object is none, because only the user
    knows which of its values is meant.
    """
    if isinstance(value, Mapping):
        names = [str(key) for key in value]
        usual = [name for name in (*_USUAL_ANSWERS, *names[:1]) if name in names]
        nested = f"{column}.{usual[0]}" if usual else ".."
        return (
            f"reward {name}: column {column!r} holds an object ({', '.join(names[:_MOST_LISTED]) or 'empty'}), and an "
            "answer is a text, a number, or a list of accepted ones; name the value in it that is the answer: "
            f"{keys.set_column(name, nested)}"
        )
    items = value if isinstance(value, list | tuple) else ()
    if any(isinstance(item, Mapping | list | tuple) for item in items):
        return (
            f"reward {name}: column {column!r} holds a list of lists or objects; a list of accepted answers holds "
            "texts or numbers"
        )
    return None


def values_of(name: str, column: str, columns: Mapping[str, Sequence[Any]]) -> Sequence[Any]:
    """Return the values of the column that a reward of dtrain's own reads, one for each completion.

    A value in an object, such as `reward_model.ground_truth`, is None in rows whose object does not have it.

    Raises:
        UserError: If the data has no such column.
    """
    if column in columns:
        return columns[column]
    top, _, nested = column.partition(".")
    if not nested or top not in columns:
        raise UserError(missing_column_message(name, column, columns))
    objects = [value if isinstance(value, Mapping) else {} for value in columns[top]]
    return [get_column(value, nested) if has_column(value, nested) else None for value in objects]


def missing_argument_message(
    name: str, missing: Collection[str], columns: Mapping[str, Any], keys: RewardKeys = GRPO_KEYS
) -> str:
    """Return the refusal of a reward whose signature takes columns that are `missing` from the data."""
    nested = [f"{key}: {known}" for key in missing for known in column_names(columns) if known.endswith(f".{key}")]
    hint = ""
    if keys.columns is not None and len(nested) == len(missing):
        hint = f"; map it with {keys.columns}={{{', '.join(nested)}}}"
    return f"reward {name} takes {', '.join(missing)}, which is no column of the data (it has {_listed(columns)}){hint}"


def _listed(columns: Mapping[str, Any]) -> str:
    names = [name for name in column_names(columns) if name not in OWN]
    more = ", .." if len(names) > _MOST_LISTED else ""
    return (", ".join(names[:_MOST_LISTED]) or "none") + more


class SignatureReader:
    """Service that reads the signatures of one reward before a run: of what it is made and called with. It neither
    makes nor calls it."""

    def load(self, module: str, function: str) -> list[Outcome]:
        return [attempt(self._load, module, function)]

    def signatures(self) -> list[tuple[dict[str, Any] | None, dict[str, Any]]]:
        return [self._signatures]

    def _load(self, module: str, function: str) -> None:
        path = f"{module}.{function}"
        self._signatures: tuple[dict[str, Any] | None, dict[str, Any]]
        reward = getattr(import_module(module), function)
        if not isinstance(reward, type):
            self._signatures = None, asdict(read_signature(path, reward))
        elif any("__call__" in vars(base) for base in reward.__mro__):
            made_with, called_with = read_signature(path, reward), read_signature(path, reward.__call__, skip=1)
            self._signatures = asdict(made_with), asdict(called_with)
        else:
            raise UserError(f"reward {path} is a class without __call__, {NOT_A_REWARD}")


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
    takes, none = deepcopy(node.args), ast.Constant(None)
    for argument in ast.walk(takes):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    takes.defaults = [none] * min(len(takes.defaults), len(takes.posonlyargs) + len(takes.args))
    takes.kw_defaults = [default and none for default in takes.kw_defaults]
    alike = ast.fix_missing_locations(ast.Expression(ast.Lambda(takes, none)))  # nothing of the source is run
    return read_signature("", eval(compile(alike, "", "eval")))


def read_signature(path: str, function: Any, skip: int = 0) -> Signature:
    """Return the signature of a callable. skip: how many parameters to leave out at the beginning. Raises UserError for
    what has no signature."""
    try:
        parameters = [*inspect.signature(function).parameters.values()][skip:]
    except (TypeError, ValueError) as error:
        raise UserError(f"reward {path} cannot be called by names ({error}), {NOT_A_REWARD}") from None
    bare = [p for p in parameters if p.default is p.empty]
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return Signature(
        needs=[p.name for p in bare if p.kind in by_name],
        may=[p.name for p in parameters if p.default is not p.empty and p.kind in by_name],
        by_place=[p.name for p in bare if p.kind is p.POSITIONAL_ONLY],
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
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
