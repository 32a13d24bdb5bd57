"""Patterns of parameters, in `train.train_only` and `train.freeze`: `*` stands for any part. No torch."""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from dtrain.config.schema import Train


def matched(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Whether a parameter that has these names is meant: by any pattern, under any name."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def unmatched(section: Train, names: Collection[str]) -> list[str]:
    """Patterns of the section that mean none of a model's parameters, one line each."""
    return [
        f"train.{key}: {pattern} matches no parameter of the model; they have names such as {next(iter(names))}, and * "
        "stands for any part"
        for key, patterns in (("train_only", section.train_only), ("freeze", section.freeze))
        for pattern in patterns
        if not matched(names, [pattern])
    ]
