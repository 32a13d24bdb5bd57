"""A file's own names of columns: our names for them, hints where no format is known, renamed rows. Imports no torch."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dtrain.base.errors import Problem, UserError
from dtrain.base.json_files import loads
from dtrain.base.nested_columns import column_names, get_column, has_column
from dtrain.base.ranges import closest_name
from dtrain.data.formats.formats import FORMATS_BY_KIND, LABELS, detect_format

# What a format reads beside the keys by which it is known.
_ALSO: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "examples": {
        "tokenized": ("labels",),
        "messages": ("tools", "system"),
        "sharegpt": ("system", "tools"),
        "alpaca": ("input", "system", "history", "tools"),
        "prompt_completion": ("tools", "system"),
    },
    "pairs": {
        "preference": ("prompt", "system", "tools", "question", "conversations", "instruction", "input", "history")
    },
}
_OF_LABELLED = {name: (*keys, *LABELS) for name, keys in _ALSO["examples"].items()}
OPTIONAL_KEYS = {**_ALSO, "labelled": {**_OF_LABELLED, **_ALSO["pairs"]}}


def readable_columns(kind: str, name: str = "auto") -> list[str]:
    """Return our columns of a format, of `auto` those of every format, that a method on `kind` trains on."""
    also = OPTIONAL_KEYS.get(kind, {})
    formats = [
        item for item in FORMATS_BY_KIND[kind] if name in ("auto", item) and (kind, item) != ("examples", "preference")
    ]
    return list(dict.fromkeys(key for item in formats for key in (*FORMATS_BY_KIND[kind][item], *also.get(item, ()))))


def check_column_names(
    columns: Mapping[str, str], kind: str, name: str, key: str, more: Sequence[str] = ()
) -> list[Problem]:
    """Check the names of columns. For prompts every name is allowed, because rewards may read any column.

    Args:
        columns: Our names and those of the file.
        kind: Kind of rows that the method reads.
        name: The format.
        key: The recipe's key of `columns`.
        more: Columns that the method reads in addition to those of the format.
    """
    problems = []
    for column, file_column in columns.items():
        if not file_column:
            problems.append(Problem(f"{key}.{column}", f"{key}.{column} is empty", "Name a column of the file"))
    known = [*readable_columns(kind, name), *more]
    reader = "a format" if name == "auto" else f"format {name}"
    for column in columns if kind != "prompts" else ():
        if column not in known:
            near = closest_name(column, known)
            meant = f"Did you mean {near}? " if near else ""
            fix = f"{meant}Columns that {reader} reads: {', '.join(known)}"
            problems.append(Problem(f"{key}.{column}", f"{key}.{column}: no column of this name is read", fix))
    return problems


def rename_columns(
    row: Mapping[str, Any], columns: Mapping[str, str], key: str | None = "data.train.columns", *, strict: bool = False
) -> dict[str, Any]:
    """Return `row` with our names: each of `columns` holds what the file's column holds, which loses its own name.

    The file's column may be a value in an object, such as `reward_model.ground_truth`; the object then stays.

    strict: raise UserError, naming `key`, for a column that the row does not have; else it stays absent.
    """
    absent = [f"{ours}: {theirs}" for ours, theirs in columns.items() if not has_column(row, theirs)]
    if absent and strict:
        raise UserError(
            f"{key} names {', '.join(absent)}, and the file has no such column; it has {', '.join(column_names(row))}"
        )
    taken = {*columns, *columns.values()}
    rest = {name: value for name, value in row.items() if name not in taken}
    return rest | {ours: get_column(row, theirs) for ours, theirs in columns.items() if has_column(row, theirs)}


def describe_missing_columns(row: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    """Return the end of a refusal of `row`, as the file has it: those of `columns` that are missing."""
    absent = [f"{ours} is the file's {theirs}" for ours, theirs in columns.items() if not has_column(row, theirs)]
    return f" (by `columns`, {', '.join(absent)}, and this row has {', '.join(column_names(row))})" if absent else ""


_QUESTIONS = ("prompt", "question", "query", "instruction", "input", "problem", "user", "human")
_REPLIES = ("completion", "answer", "response", "output", "solution", "reply", "target", "assistant")
_CHOSEN, _REJECTED = re.compile("chosen|preferred|accepted|better"), re.compile("reject|disprefer|worse")
_ABOUT = re.compile(r"(^|_)(u?u?id|source|category|split|lang|language|model)$", re.IGNORECASE)  # the row, not its text
_NUMBERED = re.compile(r"(.+?)_?([ab12]|0)", re.IGNORECASE)  # response_a, response1


def suggest_mapping(row: Mapping[str, Any], kind: str, key: str | None) -> str:
    """Return advice on a row of unknown format: the end of its refusal, empty if names and values suggest nothing.

    Args:
        row: The row.
        kind: The kind of rows that is read: examples, pairs or prompts.
        key: The recipe's key that maps columns. None if the caller has no such setting; columns are renamed then.
    """
    if len(row) == 1:
        (column, value), *_ = row.items()
        if mark := next((mark for mark in ";\t|" if mark in str(column)), ""):
            return f". If {mark!r} separates its columns: dtrain reads commas, so save the file with commas"
        if isinstance(value, list) and value and isinstance(value[0], Mapping) and not {"role", "from"} & {*value[0]}:
            return f". If {column} is the list of rows: `jq -c '.{column}[]' FILE > rows.jsonl` takes it out"
    if any(re.search(r"\s\S*\s|[.?!]$", str(column)) for column in row):
        return ". If the first line is a row: a CSV file begins with the names of its columns; add prompt,completion"
    if detect_format(row, "examples" if kind == "pairs" else "pairs"):
        return ""
    chats = {str(column): messages for column, value in row.items() if (messages := _list_in(value))}
    texts = [
        str(column)
        for column, value in row.items()
        if isinstance(value, str) and str(column) not in chats and not _ABOUT.search(str(column))
    ]
    talks = [column for column, value in chats.items() if isinstance(value[0], dict) and {"role", "from"} & {*value[0]}]
    question = next((text for text in texts if text.lower() in _QUESTIONS), None)
    reply = next((text for text in texts if text.lower() in _REPLIES and text != question), None)
    rejected = [column for column in [*texts, *talks] if _REJECTED.search(column.lower())]
    chosen = [column for column in [*texts, *talks] if column not in rejected and _CHOSEN.search(column.lower())]
    if kind != "prompts" and len(chosen) == len(rejected) == 1:
        method = ". They look like preferences: set method=dpo and" if kind == "examples" else ", or map them:"
        prompt = {"prompt": question or talks[0]} if question or set(talks) - {*chosen, *rejected} else {}
        return _mapped({**prompt, "chosen": chosen[0], "rejected": rejected[0]}, key, method)
    if kind != "prompts" and (two := _two_replies(texts)):
        return (
            f". If {two[0]} and {two[1]} are two replies: name the better one chosen, the other rejected, row by row, "
            "for method=dpo or method=reward; for method=sft name the better one completion"
        )
    if kind == "pairs":
        return ". A pair is two replies: where a row has one, write the best and the worst of a prompt into one row"
    if talks:
        whole = any(message.get("role", message.get("from")) in _SPEAKING for message in chats[talks[0]])
        ours = "conversations" if "from" in chats[talks[0]][0] else "messages"
        return _mapped({ours: talks[0]}, key) if whole or kind == "prompts" else ""
    if kind == "prompts":
        return _mapped({"question": question or texts[0]}, key) if texts else ""
    if (question and reply) or len(texts) == 2:
        question = question or next(text for text in texts if text != reply)
        reply = reply or next(text for text in texts if text != question)
        context = {"input": "context"} if "context" in texts and "context" not in (question, reply) else {}
        plain = " (a chat; as plain text: prompt and completion)"
        return _mapped({"instruction": question, **context, "output": reply}, key) + plain
    return _mapped({"text": texts[0]}, key) if len(texts) == 1 and not question and len(row) <= 3 else ""


def _list_in(value: Any) -> list[Any]:
    """Return a list, or the one that a string has as JSON, as CSV and some tables hold messages; else an empty one."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = loads(value)
        except ValueError:
            return []
    return value if isinstance(value, list) else []


_SPEAKING = ("assistant", "gpt", "model", "bot", "chatgpt")


def _mapped(pairs: Mapping[str, str], key: str | None, how: str = ", or map them:") -> str:
    named = {mine: json.dumps(its) if " " in its else its for mine, its in pairs.items() if mine != its}
    if key is None:
        renamed_columns = ", ".join(f"{its} to {mine}" for mine, its in named.items())
        return f", such as {renamed_columns}"
    return f"{how} '{key}={{{', '.join(f'{mine}: {its}' for mine, its in named.items())}}}', for one"


def _two_replies(texts: list[str]) -> tuple[str, str] | None:
    """Return two columns whose names differ in their number or letter alone; None where there are none, or more."""
    stems: dict[str, list[str]] = {}
    for text in texts:
        if match := _NUMBERED.fullmatch(text):
            stems.setdefault(match[1].lower(), []).append(text)
    pairs = [names for names in stems.values() if len(names) == 2]
    return (pairs[0][0], pairs[0][1]) if len(pairs) == 1 else None
