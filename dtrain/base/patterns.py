"""Patterns of parameter names, in which `*` stands for any part. Imports no torch."""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase


def matched(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Return whether any of a parameter's `names` matches any of `patterns`."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def unmatched(patterns_by_key: Mapping[str, Iterable[str]], names: Collection[str]) -> list[str]:
    """Return a line for each pattern that matches none of the parameter `names`, with the recipe's key it stands in."""
    return [
        f"{key}: {pattern} matches no parameter of the model; they have names such as {next(iter(names))}, and * "
        "stands for any part"
        for key, patterns in patterns_by_key.items()
        for pattern in patterns
        if not matched(names, [pattern])
    ]
