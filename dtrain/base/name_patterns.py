"""Patterns for parameter and module names: Python regular expressions, and globs with `*`."""

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

from dtrain.base.errors import Problem


def pattern_error(pattern: str) -> str | None:
    """Return Python's error message for an invalid regular expression, or None if the expression is valid."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:
        return str(error)
    except RecursionError:
        return "it is nested too deeply"
    return None


def suffix_pattern(pattern: str) -> str:
    """Return the regular expression for names that end in `pattern`, at the start of the name or after a dot."""
    return rf"(.*\.)?({pattern})"


def matches_suffix(pattern: str, name: str) -> bool:
    """Check whether a pattern matches a dotted name, or its end after a dot.

    For example, `q_proj` matches `model.layers.0.self_attn.q_proj`. PEFT reads `rank_pattern` in this way.
    """
    return re.fullmatch(suffix_pattern(pattern), name) is not None


def matches_any(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Check whether any of a parameter's names matches any of the glob patterns."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def unmatched_patterns(patterns_by_key: Mapping[str, Iterable[str]], names: Collection[str]) -> list[Problem]:
    """Return a problem for each pattern that matches none of the model's parameters.

    Args:
        patterns_by_key: Keys of the recipe, and the patterns in their values.
        names: Names of all parameters of the model.
    """
    problems = []
    for key, patterns in patterns_by_key.items():
        for pattern in patterns:
            if not matches_any(names, [pattern]):
                text = f"{key}: {pattern} matches no parameter of the model"
                first_name = next(iter(names))
                fix = f"Names are such as {first_name}, and * stands for any part"
                problems.append(Problem(key, text, fix))
    return problems
