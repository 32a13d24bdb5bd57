"""The rewards that come with dtrain, for a recipe's `grpo.rewards`: names, options, ranges. No torch.

The functions are in `dtrain.rollout.rewards`, a file each; a test holds their keywords and this table equal. Any other
name has to be an import path, `module.function` or `module:function`, found in the working directory too.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dtrain.config.numbers import is_finite, is_number

REQUIRED = object()
"""The default of an option that has none."""

REWARDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "math_exact": {"column": "answer"},
        "numeric": {"column": "answer", "absolute": 0.0, "relative": 1e-6},
        "regex": {"pattern": REQUIRED, "full": False, "ignore_case": False},
        "format_tags": {"tags": ("think", "answer"), "strict": True, "prefix": ""},
        "length_penalty": {"target_tokens": REQUIRED, "max_tokens": REQUIRED},
        "json_valid": {"required_keys": ()},
    }
)
"""Name -> its options and their defaults."""


def _is_pattern(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(re.compile(value))
    except re.error:
        return False


_TEXT = (lambda v: isinstance(v, str), "a string")
_WORDS = (lambda v: _is_list(v) and all(isinstance(one, str) for one in v), "a list of strings")
_SWITCH = (lambda v: isinstance(v, bool), "true or false")
_NOT_NEGATIVE = (lambda v: is_finite(v) and v >= 0, "a finite number, at least 0")
_TOKENS = (lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0, "a whole number, at least 0")

# What an option may be, and that in words.
RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "column": (lambda v: isinstance(v, str) and v != "", "the name of a column"),
        "absolute": _NOT_NEGATIVE,
        "relative": _NOT_NEGATIVE,
        "pattern": (_is_pattern, "a regular expression of Python's re"),
        "full": _SWITCH,
        "ignore_case": _SWITCH,
        "tags": (lambda v: _WORDS[0](v) and len(v) > 0 and all(v), "a list of at least one tag's name"),
        "strict": _SWITCH,
        "prefix": _TEXT,
        "target_tokens": _TOKENS,
        "max_tokens": _TOKENS,
        "required_keys": _WORDS,
    }
)


def problems(rewards: Sequence[Any]) -> list[str]:
    """What is wrong with `grpo.rewards`, a line each; each reward has fn, weight and kwargs. Import paths are not
    looked up here: `dtrain.rollout.rewards.find` does."""
    found = []
    for index, reward in enumerate(rewards):
        key, name = f"grpo.rewards[{index}]", reward.fn
        if not is_number(reward.weight):
            found.append(f"{key}.weight={reward.weight} must be a finite number")
        if not name:
            found.append(f"{key}.fn is missing: name a reward ({', '.join(REWARDS)}), or give an import path")
        elif name in REWARDS:
            found += _of_options(f"{key}.kwargs", name, reward.kwargs)
        elif not is_path(name):
            near = difflib.get_close_matches(name, REWARDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(REWARDS)}, and import paths"
            found.append(f"{key}.fn={name} is no reward; {hint}")
    return found


def is_path(name: str) -> bool:
    """Whether `name` can be an import path: dotted, or with a colon before the function."""
    return bool(re.fullmatch(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*[.:][^\W\d]\w*", name))


def _of_options(key: str, name: str, options: Mapping[str, Any]) -> list[str]:
    known = REWARDS[name]
    found = [
        f"{key}.{option} is required by {name}"
        for option, default in known.items()
        if default is REQUIRED and option not in options
    ]
    for option, value in options.items():
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"; did you mean {key}.{near[0]}?" if near else f"; it reads {', '.join(known)}"
            found.append(f"{key}.{option} is not read by {name}{hint}")
        elif not RANGES[option][0](value):
            found.append(f"{key}.{option}={value} must be {RANGES[option][1]}")
    target, most = options.get("target_tokens"), options.get("max_tokens")
    if not found and name == "length_penalty" and target >= most:
        found.append(f"{key}.target_tokens={target} must be below {key}.max_tokens={most}")
    return found


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
