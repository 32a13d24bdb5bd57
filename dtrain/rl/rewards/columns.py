"""The check, before a run, that a reward can work with the columns of the data.

A reward is `fn(prompts, completions, completion_ids, **columns)` and may accept fewer arguments. Its signature is read
from the source of its module, without importing it. If the source is not enough, for example because of a decorator,
the module is imported in a process of its own.
"""

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

REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments of a reward other than the columns of the data."""
_RETURN_ONE_VALUE = ("float", "int", "bool", "len", "str")
"""Functions whose result cannot be a list of rewards."""
_MAX_LISTED = 30  # names of columns in a message
_USUAL_ANSWERS = ("ground_truth", "aliases", "answers", "answer", "value", "text", "target", "label")
"""Keys that usually hold the answer in an object, for a hint."""


@dataclass(frozen=True)
class Signature:
    """The parameters of a callable.

    Attributes:
        required: Parameters without a default that can be passed by name.
        optional: Parameters with a default that can be passed by name.
        positional_only: Parameters without a default that are positional-only.
        has_kwargs: Whether it has **kwargs.
    """

    required: Collection[str]
    optional: Collection[str] = ()
    positional_only: Collection[str] = ()
    has_kwargs: bool = False


@dataclass(frozen=True)
class RewardKeys:
    """Names of the settings of rewards, for messages. The defaults are the recipe keys of GRPO.

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
    """Return the problems of a list of rewards with the columns of the data, without repetition.

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
    """Return why a reward cannot work with data of these columns. None if it may.

    A reward of dtrain with an option `column` needs that column. If it needs programs or packages, it must start on
    this machine. Any other function needs the parameters of its signature that have no default, and must accept
    something that a reward is called with. A class needs `__call__`, and options for the parameters of its constructor.

    Args:
        name: The reward's name or import path.
        options: Its options.
        columns: A row with every column of the data.
        keys: Names of the settings, for the message.

    Raises:
        UserError: If there is no such reward.
    """
    module, function, file = find_function_and_file(name)
    for built_in, path in BUILT_IN.items():
        if path == f"{module}:{function}":
            return _built_in_problem(built_in, options, columns, keys)
    node = find_definition(Path(file), function)
    if isinstance(node, ast.Constant | ast.List | ast.Dict | ast.Tuple | ast.Set):
        return f"reward {name} is a value that cannot be called, {NOT_A_REWARD}"
    constructor: Signature | None = None  # None for a function
    if isinstance(node, ast.ClassDef):
        init, call = _method(node, "__init__"), _method(node, "__call__")
        inherits = bool(node.bases or node.keywords)
        if call is None and not inherits:
            return f"reward {name} is a class without __call__, {NOT_A_REWARD}"
        constructor = _signature(init) or Signature([])
        node = call
    signature = _signature(node)
    if signature is None:  # the source is not enough
        try:
            constructor, signature = _import_signatures(name, module, function, keys)
        except (UserError, WorkerLost) as error:
            return str(error)
    problem = _call_problem(name, constructor, signature, options, columns, keys)
    if problem is not None:
        return problem
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _returns_no_list(node):
        return f"reward {name} returns one value, or nothing, for all completions. Return a list with a number for each"
    return None


def _built_in_problem(
    name: str, options: Mapping[str, Any], columns: Mapping[str, Any], keys: RewardKeys
) -> str | None:
    """Return why a reward of dtrain cannot work with data of these columns. None if it may."""
    # `catalog` reads the options from the modules of the rewards, which import this module.
    catalog = import_module("dtrain.rl.rewards.catalog")
    column = {**catalog.REWARDS[name], **options}.get("column")
    if column is not None:
        if not has_column(columns, column):
            return missing_column_message(name, column, columns, keys)
        if name in READS_ANSWERS:
            problem = answer_type_problem(name, column, get_column(columns, column), keys)
            if problem is not None:
                return problem
    if name in NEEDS_SOFTWARE:
        module, _, function = BUILT_IN[name].partition(":")
        try:
            getattr(import_module(module), function)(**options)
        except UserError as error:
            return str(error)
    return None


def _import_signatures(name: str, module: str, function: str, keys: RewardKeys) -> tuple[Signature | None, Signature]:
    """Import a reward in a process of its own.

    Returns:
        The signatures of the constructor, None for a function, and of the call.

    Raises:
        UserError: If the module cannot be imported.
        WorkerLost: If the process ends or hangs.
    """
    with Worker(
        "dtrain.rl.rewards.columns:SignatureReader",
        module,
        function,
        what=f"reward {name}",
        timeout=60.0,
        key=keys.timeout,
        print_line=partial(print, file=sys.stderr),
    ) as process:
        ((constructor, call),) = process.call("signatures")
    return (None if constructor is None else Signature(**constructor)), Signature(**call)


def _call_problem(
    name: str,
    constructor: Signature | None,
    signature: Signature,
    options: Mapping[str, Any],
    columns: Mapping[str, Any],
    keys: RewardKeys,
) -> str | None:
    """Return why a reward cannot be called with the data's columns. None if it can.

    Args:
        name: The reward.
        constructor: Signature of the constructor, which gets the options. None for a function, which gets them itself.
        signature: Signature of the call.
        options: The reward's options.
        columns: A row with every column of the data.
        keys: Names of the settings, for the message.
    """
    available = {*columns, *REWARD_ARGUMENTS}
    if constructor is None:
        available.update(options)
    else:
        missing_options = [key for key in constructor.required if key not in options]
        if missing_options:
            return (
                f"reward {name} needs the options {', '.join(missing_options)}. Set them in its kwargs ({keys.rewards})"
            )
    if signature.positional_only:
        return (
            f"reward {name} has the positional-only parameters {', '.join(signature.positional_only)}, {NOT_A_REWARD}"
        )
    missing = [key for key in signature.required if key not in available]
    if missing:
        return missing_argument_message(name.rsplit(".", 1)[-1], missing, columns, keys)
    accepted = {*signature.required, *signature.optional}
    if not signature.has_kwargs and not accepted & {*columns, *REWARD_ARGUMENTS}:
        return f"reward {name} accepts neither completions nor a column, {NOT_A_REWARD}"
    return None


def missing_column_message(name: str, column: str, columns: Mapping[str, Any], keys: RewardKeys = GRPO_KEYS) -> str:
    """Return the message for a reward of dtrain that reads a column which the data does not have."""
    return (
        f"reward {name}: the data has no column {column!r} (it has {_listed(columns)}); name the right one: "
        f"{keys.set_column(name, '..')}"
    )


def answer_type_problem(name: str, column: str, value: Any, keys: RewardKeys = GRPO_KEYS) -> str | None:
    """Return why a value of a column cannot be an answer. None if it can.

    An answer is a text, a number, a truth value or null, or a list of these. An object is refused, because only the
    user knows which of its values is meant.

    Example:
        >>> answer_type_problem("numeric", "gold", [1, 2]) is None
        True
        >>> answer_type_problem("numeric", "gold", {"value": 1})[:58]
        "reward numeric: column 'gold' holds an object (value), and"
    """
    if isinstance(value, Mapping):
        names = [str(key) for key in value]
        usual = [name for name in (*_USUAL_ANSWERS, *names[:1]) if name in names]
        nested = f"{column}.{usual[0]}" if usual else ".."
        return (
            f"reward {name}: column {column!r} holds an object ({', '.join(names[:_MAX_LISTED]) or 'empty'}), and an "
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
    """Return the values of the column that a reward of dtrain reads, one for each completion.

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
    """Return the message for a reward whose signature needs columns that are `missing` from the data."""
    nested = [f"{key}: {known}" for key in missing for known in column_names(columns) if known.endswith(f".{key}")]
    hint = ""
    if keys.columns is not None and len(nested) == len(missing):
        hint = f"; map it with {keys.columns}={{{', '.join(nested)}}}"
    text = f"reward {name} takes {', '.join(missing)}, which is no column of the data (it has {_listed(columns)}){hint}"
    return f"{text}. dtrain itself gives {', '.join(REWARD_ARGUMENTS)}"


def _listed(columns: Mapping[str, Any]) -> str:
    names = [name for name in column_names(columns) if name not in REWARD_ARGUMENTS]
    more = ", .." if len(names) > _MAX_LISTED else ""
    return (", ".join(names[:_MAX_LISTED]) or "none") + more


class SignatureReader:
    """The service that imports one reward and reads its signatures. It does not call the reward."""

    def load(self, module: str, function: str) -> list[Outcome]:
        """Import the reward."""
        return [attempt(self._load, module, function)]

    def signatures(self) -> list[tuple[dict[str, Any] | None, dict[str, Any]]]:
        """Return the fields of the signatures of the constructor, None for a function, and of the call."""
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
    """Return the last definition of a method in a class, without its argument `self`. None if it has none.

    A method with a decorator, and anything else of this name, is returned unchanged. `_signature` does not read those.
    """
    function_types = ast.FunctionDef | ast.AsyncFunctionDef
    methods = [item for item in node.body if isinstance(item, function_types) and item.name == name]
    if not methods or methods[-1].decorator_list or not methods[-1].args.args:
        for item in node.body:
            if getattr(item, "name", None) == name:
                return item
        return None
    method = methods[-1]
    del method.args.args[0]
    return method


def _signature(node: ast.AST | None) -> Signature | None:
    """Return the signature of a function's definition. None if it cannot be read from the source.

    Python itself reads the parameters: they are compiled as those of a lambda, with None for all defaults and without
    annotations, so nothing of the source is run.
    """
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or getattr(node, "decorator_list", []):
        return None
    parameters, none = deepcopy(node.args), ast.Constant(None)
    for argument in ast.walk(parameters):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    num_positional = len(parameters.posonlyargs) + len(parameters.args)
    # `self` was removed, so there may be one default more than parameters.
    parameters.defaults = [none] * min(len(parameters.defaults), num_positional)
    parameters.kw_defaults = [None if default is None else none for default in parameters.kw_defaults]
    same_signature = ast.fix_missing_locations(ast.Expression(ast.Lambda(parameters, none)))
    return read_signature("", eval(compile(same_signature, "", "eval")))


def read_signature(path: str, function: Any, skip: int = 0) -> Signature:
    """Return the signature of a callable.

    Args:
        path: Name of the reward, for the message.
        function: The callable.
        skip: Number of parameters to leave out at the beginning, such as `self`.

    Raises:
        UserError: If Python does not know the signature, as for some functions in C.

    Example:
        >>> read_signature("short", lambda completions, answer, scale=1.0: None)
        Signature(required=['completions', 'answer'], optional=['scale'], positional_only=[], has_kwargs=False)
    """
    try:
        parameters = [*inspect.signature(function).parameters.values()][skip:]
    except (TypeError, ValueError) as error:
        raise UserError(f"reward {path} cannot be called by names ({error}), {NOT_A_REWARD}") from None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required: list[str] = []
    optional: list[str] = []
    positional_only: list[str] = []
    has_kwargs = False
    for parameter in parameters:
        has_default = parameter.default is not parameter.empty
        if parameter.kind is parameter.VAR_KEYWORD:
            has_kwargs = True
        elif parameter.kind in by_name:
            names = optional if has_default else required
            names.append(parameter.name)
        elif parameter.kind is parameter.POSITIONAL_ONLY and not has_default:
            positional_only.append(parameter.name)
    return Signature(required, optional, positional_only, has_kwargs)


def _returns_no_list(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function surely returns one value, or nothing, instead of a list.

    Functions that raise or yield are not judged.
    """
    pending: list[ast.AST] = [*node.body]
    returned: list[ast.expr | None] = []
    while pending:
        child = pending.pop()
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue  # its returns are not those of the function
        if isinstance(child, ast.Raise | ast.Yield | ast.YieldFrom):
            return False
        if isinstance(child, ast.Return):
            returned.append(child.value)
        pending += ast.iter_child_nodes(child)
    return all(_is_one_value(value) for value in returned)


def _is_one_value(value: ast.expr | None) -> bool:
    """Return whether a returned expression is a constant, nothing, or a call such as float(..)."""
    if value is None or isinstance(value, ast.Constant):
        return True
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id in _RETURN_ONE_VALUE
    return False
