"""A file's own names of columns: which of ours a recipe may map to them, and rows with ours. Torch is not imported."""

from collections.abc import Mapping
from typing import Any

from dtrain.data.formats import KINDS
from dtrain.errors import UserError
from dtrain.ranges import nearest

# What a format reads beside the keys by which it is known.
ALSO: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "examples": {
        "tokenized": ("labels",),
        "messages": ("tools",),
        "sharegpt": ("system", "tools"),
        "alpaca": ("input", "system", "history", "tools"),
        "prompt_completion": ("tools",),
    },
    "pairs": {
        "preference": ("prompt", "system", "tools", "question", "conversations", "instruction", "input", "history")
    },
}


def names_of(kind: str, name: str = "auto") -> list[str]:
    """Our columns of a format, of `auto` those of every format, that a method on `kind` trains on."""
    formats = [one for one in KINDS[kind] if name in ("auto", one) and (kind, one) != ("examples", "preference")]
    return list(dict.fromkeys(key for one in formats for key in (*KINDS[kind][one], *ALSO.get(kind, {}).get(one, ()))))


def unknown(columns: Mapping[str, str], kind: str, name: str, key: str) -> list[str]:
    """What is wrong in `columns`, the value of `key`, a line each. Of prompts, rewards may read any column."""
    problems = [f"{key}.{ours} is empty: name a column of the file" for ours, theirs in columns.items() if not theirs]
    known = names_of(kind, name)
    reader = "a format" if name == "auto" else f"format {name}"
    for ours in columns if kind != "prompts" else ():
        if ours not in known:
            near = nearest(ours, known)
            meant = f"; did you mean {near}?" if near else "."
            problems.append(
                f"{key}.{ours}: no column of this name is read{meant} Columns that {reader} reads: {', '.join(known)}"
            )
    return problems


def renamed(
    row: Mapping[str, Any], columns: Mapping[str, str], key: str = "data.train.columns", *, strict: bool = False
) -> dict[str, Any]:
    """`row` with our names: each of `columns` holds what the file's column holds, which loses its own name.

    strict: UserError, naming `key`, for a column that the row does not have; else such a one is absent.
    """
    absent = [f"{ours}: {theirs}" for ours, theirs in columns.items() if theirs not in row]
    if absent and strict:
        raise UserError(
            f"{key} names {', '.join(absent)}, and the file has no such column; it has {', '.join(map(str, row))}"
        )
    taken = {*columns, *columns.values()}
    rest = {name: value for name, value in row.items() if name not in taken}
    return rest | {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}


def lacking(row: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    """What to add to a refusal of `row`, as the file has it: which of `columns` it lacks."""
    absent = [f"{ours} is the file's {theirs}" for ours, theirs in columns.items() if theirs not in row]
    return f" (by `columns`, {', '.join(absent)}, and this row has {', '.join(map(str, row))})" if absent else ""
