"""The rewards that come with dtrain: their options with the defaults, read from the functions, and the ranges. No
torch.

Any other name has to be an import path, `module.function` or `module:function`, found in the working directory too.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

from dtrain.base.name_patterns import pattern_error
from dtrain.base.ranges import NUMBER, Range, is_finite
from dtrain.rl.rewards.find import BUILT_IN

REQUIRED = inspect.Parameter.empty
"""The default of an option that has none."""
OF_JUDGE = ("url", "model", "rubric")
"""Options of judge that stand beside `fn`."""


REWARDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        name: {p.name: p.default for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
        for name, path in BUILT_IN.items()
        for signature in [inspect.signature(resolve_name(path))]
    }
)
"""Name -> its options and their defaults."""

FORMER_NAMES: Mapping[str, str] = MappingProxyType({"isolated": "allow_full_access"})
"""Options that had another name or meaning -> which one replaced them."""


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

RANGES: Mapping[str, Range] = MappingProxyType(
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


def is_path(name: str) -> bool:
    """Return whether `name` can be an import path: dotted, or with a colon before the function."""
    return bool(re.fullmatch(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*[.:][^\W\d]\w*", name))
