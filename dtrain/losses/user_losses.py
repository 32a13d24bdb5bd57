"""Losses of users, which a recipe names by an import path or by a name that an installed package registers.

A path leads to a function with the signature of dtrain's own losses, or to a row of the table of such losses:

    sft.loss    function(logprobs [tokens], **options) -> [tokens]; row `TokenLoss` (token_options.py)
    dpo.loss    function(pairs, *, beta, **options) -> [pairs]; row `PreferenceLoss` (preference/options.py)
    grpo.loss   function(tokens, **options) -> [n, S]; row `PolicyLoss` (policy/options.py)

The options of a function are its keyword parameters with a default. A recipe sets them in `sft.kwargs`, `dpo.kwargs` or
`grpo.kwargs`. A row says more than a function can, for example that a preference loss needs no reference. For example,
with `sft.loss: my_losses:focal` and `sft.kwargs: {gamma: 3.0}`:

    def focal(logprobs, *, gamma=2.0):
        return -((1 - logprobs.exp()) ** gamma) * logprobs

Imports no torch, except with the code of the user.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar

from dtrain.base.errors import UserError
from dtrain.base.plugins import import_object, is_import_path, plugins

Row = TypeVar("Row")

_FIRST_ARGUMENT = {"sft.loss": "the log-probabilities", "dpo.loss": "the pairs", "grpo.loss": "the tokens"}
"""The first argument of a loss, by the key that names the loss."""


def is_user_loss(name: str, key: str) -> bool:
    """Check for an import path, or a name that an installed package registers for `key`.

    Example:
        >>> is_user_loss("my_losses:focal", "sft.loss"), is_user_loss("nll", "sft.loss")
        (True, False)
    """
    return is_import_path(name) or name in plugins(key)


@cache
def import_loss(name: str, key: str, row_type: type[Row], given: tuple[str, ...] = ()) -> Row:
    """Import a user's loss.

    Args:
        name: The import path, or the registered name.
        key: Key of the recipe, such as "sft.loss".
        row_type: Type of the table's rows.
        given: Keyword parameters that dtrain sets itself, such as "beta".

    Returns:
        The row at the path, or a row for the function at the path.

    Raises:
        UserError: If it cannot be imported, is neither a function nor a row, takes no argument, or has a parameter
            without a default.
    """
    target = import_object(name, key)
    if isinstance(target, row_type):
        return target
    if not callable(target) or isinstance(target, type):
        kind = f"a function, or a {row_type.__name__} with a function"
        raise UserError(f"{key}={name} is a {type(target).__name__}. It must be {kind}")
    make_row: Callable[..., Row] = row_type
    return make_row(function=target, options=_options_of(target, name, key, given))


def _options_of(function: Callable[..., Any], name: str, key: str, given: Iterable[str]) -> dict[str, Any]:
    """Return the options of a loss function and their defaults."""
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise UserError(f"{key}={name} takes no positional argument. Its first one gets {_FIRST_ARGUMENT[key]}")
    options = {}
    for parameter in parameters[1:]:
        if parameter.kind is parameter.VAR_KEYWORD or parameter.name in given:
            continue
        if parameter.default is parameter.empty:
            text = f"{key}={name}: its parameter {parameter.name} has no default, so dtrain cannot call it"
            raise UserError(f"{text}. Give it one, which {key.partition('.')[0]}.kwargs can change")
        options[parameter.name] = parameter.default
    return options
