"""Columns of a row by name. A dot in a name selects a value in an object: `reward_model.ground_truth`.

A column whose own name contains dots is found first, so that a flattened file keeps working:

    {"reward_model": {"ground_truth": "4"}}    reward_model.ground_truth is "4"
    {"reward_model.ground_truth": "4"}         reward_model.ground_truth is "4"
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def has_column(row: Mapping[str, Any], name: str) -> bool:
    """Check whether a row has a column, at its top level or in an object."""
    try:
        get_column(row, name)
    except KeyError:
        return False
    return True


def get_column(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, at the row's top level or in an object.

    Raises:
        KeyError: If the row has no such column.

    Example:
        >>> get_column({"reward_model": {"ground_truth": "4"}}, "reward_model.ground_truth")
        '4'
    """
    if name in row:
        return row[name]
    value: Any = row
    for key in name.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(name)
        value = value[key]
    return value


def column_names(row: Mapping[str, Any]) -> list[str]:
    """Return the names of all columns of `row`. The name of an object is followed by the names of the values in it.

    Example:
        >>> column_names({"level": 1, "reward_model": {"ground_truth": "4"}})
        ['level', 'reward_model', 'reward_model.ground_truth']
    """
    return list(_names(row, ""))


def _names(row: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in row.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{key}.")


def example_row(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a row that has every column of `rows`, with the column's first value that is not null.

    Objects are merged.

    Example:
        >>> example_row([{"level": None, "meta": {"a": 1}}, {"level": 2, "meta": {"b": 3}}])
        {'level': 2, 'meta': {'a': 1, 'b': 3}}
    """
    example: dict[str, Any] = {}
    for row in rows:
        for name, value in row.items():
            value_so_far = example.get(name)
            if isinstance(value_so_far, Mapping) and isinstance(value, Mapping):
                example[name] = example_row([value_so_far, value])
            elif value_so_far is None:
                example[name] = value
    return example
