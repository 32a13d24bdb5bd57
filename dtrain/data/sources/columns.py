"""A file's own names of columns: renaming them to dtrain's names, and suggestions if no format is recognised.

With `data.train.columns={messages: dialog}`, the row {"dialog": [...], "id": 7} becomes {"id": 7, "messages": [...]}.

This module does not import torch.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.base.errors import Problem, UserError
from dtrain.base.json_files import loads
from dtrain.base.nested_columns import column_names, get_column, has_column
from dtrain.base.ranges import closest_name
from dtrain.data.formats.formats import FORMATS_BY_KIND, LABELS, detect_format

# Columns that a format reads in addition to its required keys, by kind of rows and format.
_EXAMPLE_KEYS: Mapping[str, tuple[str, ...]] = {
    "tokenized": ("labels",),
    "messages": ("tools", "system"),
    "sharegpt": ("system", "tools"),
    "alpaca": ("input", "system", "history", "tools"),
    "prompt_completion": ("tools", "system"),
}
_PAIR_KEYS: Mapping[str, tuple[str, ...]] = {
    "preference": ("prompt", "system", "tools", "question", "conversations", "instruction", "input", "history")
}
_LABELLED_KEYS = {name: (*keys, *LABELS) for name, keys in _EXAMPLE_KEYS.items()}
OPTIONAL_KEYS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "examples": _EXAMPLE_KEYS,
    "pairs": _PAIR_KEYS,
    "labelled": {**_LABELLED_KEYS, **_PAIR_KEYS},
}


def readable_columns(kind: str, name: str = "auto") -> list[str]:
    """Return the columns that dtrain reads of rows in a format.

    Args:
        kind: Kind of rows that the method trains on.
        name: The format; "auto" for all formats of this kind.

    Example:
        >>> readable_columns("examples", "prompt_completion")
        ['prompt', 'completion', 'tools', 'system']
    """
    optional_keys = OPTIONAL_KEYS.get(kind, {})
    columns = []
    for format_name, required_keys in FORMATS_BY_KIND[kind].items():
        if name not in ("auto", format_name):
            continue
        if kind == "examples" and format_name == "preference":
            continue  # recognised only to be refused
        columns += [*required_keys, *optional_keys.get(format_name, ())]
    return list(dict.fromkeys(columns))


def check_column_names(
    columns: Mapping[str, str], kind: str, name: str, key: str, more: Sequence[str] = ()
) -> list[Problem]:
    """Check the names of columns. For prompts every name is allowed, because rewards may read any column.

    Args:
        columns: dtrain's names of columns, each with the name that the file uses.
        kind: Kind of rows that the method trains on.
        name: The format.
        key: The recipe's key of `columns`.
        more: Columns that the method reads in addition to those of the format.

    Returns:
        A problem for each wrong name.
    """
    problems = []
    for column, file_column in columns.items():
        if not file_column:
            problems.append(Problem(f"{key}.{column}", f"{key}.{column} is empty", "Name a column of the file"))
    if kind == "prompts":
        return problems
    readable = [*readable_columns(kind, name), *more]
    reader = "a format" if name == "auto" else f"format {name}"
    for column in columns:
        if column not in readable:
            near = closest_name(column, readable)
            meant = f"Did you mean {near}? " if near else ""
            fix = f"{meant}Columns that {reader} reads: {', '.join(readable)}"
            problems.append(Problem(f"{key}.{column}", f"{key}.{column}: no column of this name is read", fix))
    return problems


def rename_columns(
    row: Mapping[str, Any], columns: Mapping[str, str], key: str | None = "data.train.columns", *, strict: bool = False
) -> dict[str, Any]:
    """Return a row with dtrain's names of columns.

    A column of the file may be a value in an object, such as `reward_model.ground_truth`. The object is then kept.

    Args:
        row: The row as the file writes it.
        columns: dtrain's names of columns, each with the name that the file uses.
        key: The recipe's key of `columns`, for messages.
        strict: Whether a column that the row does not have is an error. Otherwise it is left out.

    Raises:
        UserError: With `strict`, if the row does not have a column.

    Example:
        >>> rename_columns({"dialog": ["..."], "id": 7}, {"messages": "dialog"})
        {'id': 7, 'messages': ['...']}
    """
    if strict:
        absent = _absent_columns(row, columns)
        if absent:
            names = ", ".join(f"{column}: {file_column}" for column, file_column in absent.items())
            raise UserError(
                f"{key} names {names}, and the file has no such column; it has {', '.join(column_names(row))}"
            )
    replaced = {*columns, *columns.values()}
    result = {name: value for name, value in row.items() if name not in replaced}
    for column, file_column in columns.items():
        if has_column(row, file_column):
            result[column] = get_column(row, file_column)
    return result


def describe_missing_columns(row: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    """Return the end of an error for a row that lacks some of `columns`; "" if it lacks none.

    Args:
        row: The row as the file writes it.
        columns: dtrain's names of columns, each with the name that the file uses.
    """
    absent = _absent_columns(row, columns)
    if not absent:
        return ""
    names = ", ".join(f"{column} is the file's {file_column}" for column, file_column in absent.items())
    return f" (by `columns`, {names}, and this row has {', '.join(column_names(row))})"


def _absent_columns(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of `columns` whose file column is missing in a row."""
    return {column: name for column, name in columns.items() if not has_column(row, name)}


# Names of columns in public data sets.
_QUESTION_NAMES = ("prompt", "question", "query", "instruction", "input", "problem", "user", "human")
_REPLY_NAMES = ("completion", "answer", "response", "output", "solution", "reply", "target", "assistant")
_CHOSEN_NAME = re.compile("chosen|preferred|accepted|better")
_REJECTED_NAME = re.compile("reject|disprefer|worse")
# Columns about the row, which are no text to train on.
_METADATA_NAME = re.compile(r"(^|_)(u?u?id|source|category|split|lang|language|model)$", re.IGNORECASE)
_NUMBERED_NAME = re.compile(r"(.+?)_?([ab12]|0)", re.IGNORECASE)  # response_a, response1
_ASSISTANT_NAMES = ("assistant", "gpt", "model", "bot", "chatgpt")


@dataclass(frozen=True)
class _RowColumns:
    """Guesses about the columns of a row in no known format, by their names and values.

    Attributes:
        lists: Columns with lists that are not empty, by name.
        texts: Columns with text, without those about the row.
        chats: Columns with messages.
        question: The text column that is named like a prompt, such as "question".
        reply: The text column that is named like a completion, such as "answer".
        chosen: Columns that are named like a better completion, such as "preferred".
        rejected: Columns that are named like a worse completion, such as "rejected_response".
    """

    lists: dict[str, list[Any]]
    texts: list[str]
    chats: list[str]
    question: str | None
    reply: str | None
    chosen: list[str]
    rejected: list[str]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "_RowColumns":
        lists = {}
        texts = []
        for name, value in row.items():
            column = str(name)
            items = _read_list(value)
            if items:
                lists[column] = items
            elif isinstance(value, str) and not _METADATA_NAME.search(column):
                texts.append(column)
        chats = [column for column, items in lists.items() if isinstance(items[0], dict) and _is_message(items[0])]
        question = _first_with_name(texts, _QUESTION_NAMES)
        reply = _first_with_name([text for text in texts if text != question], _REPLY_NAMES)
        contents = [*texts, *chats]
        rejected = [column for column in contents if _REJECTED_NAME.search(column.lower())]
        chosen = [column for column in contents if column not in rejected and _CHOSEN_NAME.search(column.lower())]
        return cls(lists, texts, chats, question, reply, chosen, rejected)


def _read_list(value: Any) -> list[Any]:
    """Return a list, or the list in a JSON text, as CSV files and some tables write messages; else an empty list."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = loads(value)
        except ValueError:
            return []
    return value if isinstance(value, list) else []


def _is_message(value: Mapping[str, Any]) -> bool:
    return "role" in value or "from" in value


def _first_with_name(columns: Sequence[str], names: Sequence[str]) -> str | None:
    for column in columns:
        if column.lower() in names:
            return column
    return None


def suggest_mapping(row: Mapping[str, Any], kind: str, key: str | None) -> str:
    """Suggest how to read a row of unknown format: the end of its error, "" if names and values suggest nothing.

    Args:
        row: The row.
        kind: Kind of rows that the method trains on: examples, pairs or prompts.
        key: The recipe's key that maps columns. None if the caller has no such setting, so columns must be renamed in
            the file.

    Example:
        >>> suggest_mapping({"question": "2 + 2", "solution": "4"}, "examples", "data.train.columns")
        ", or map them: 'data.train.columns={instruction: question, output: solution}', for one (a chat; as plain text: prompt and completion)"
    """  # noqa: E501 (the example's result is one line)
    hint = _file_hint(row)
    if hint:
        return hint
    if detect_format(row, "examples" if kind == "pairs" else "pairs"):
        return ""  # the error names the method for this kind of rows
    columns = _RowColumns.of(row)
    if kind != "prompts":
        hint = _preference_hint(columns, kind, key)
        if hint:
            return hint
    if kind == "pairs":
        return ". A pair is two replies: where a row has one, write the best and the worst of a prompt into one row"
    if columns.chats:
        chat = columns.chats[0]
        messages = columns.lists[chat]
        if kind != "prompts" and not any(_is_from_assistant(message) for message in messages):
            return ""
        column = "conversations" if "from" in messages[0] else "messages"
        return _describe_mapping({column: chat}, key)
    if kind == "prompts":
        if not columns.texts:
            return ""
        return _describe_mapping({"question": columns.question or columns.texts[0]}, key)
    return _text_hint(columns, len(row), key)


def _file_hint(row: Mapping[str, Any]) -> str:
    """Return a hint on a file that is written in another way than dtrain reads it; "" if nothing suggests this."""
    if len(row) == 1:
        for column, value in row.items():
            for separator in ";\t|":
                if separator in str(column):
                    return (
                        f". If {separator!r} separates its columns: dtrain reads commas, so save the file with commas"
                    )
            if isinstance(value, list) and value and isinstance(value[0], Mapping) and not _is_message(value[0]):
                return f". If {column} is the list of rows: `jq -c '.{column}[]' FILE > rows.jsonl` takes it out"
    # A name with two words or more, or with the end of a sentence, is probably a value.
    if any(re.search(r"\s\S*\s|[.?!]$", str(column)) for column in row):
        return ". If the first line is a row: a CSV file begins with the names of its columns; add prompt,completion"
    return ""


def _preference_hint(columns: _RowColumns, kind: str, key: str | None) -> str:
    """Return a hint on rows that look like preferences; "" if they do not."""
    if len(columns.chosen) == 1 and len(columns.rejected) == 1:
        chosen, rejected = columns.chosen[0], columns.rejected[0]
        mapping = {"chosen": chosen, "rejected": rejected}
        other_chats = [column for column in columns.chats if column not in (chosen, rejected)]
        prompt = columns.question or (other_chats[0] if other_chats else None)
        if prompt:
            mapping = {"prompt": prompt, **mapping}
        how = ". They look like preferences: set method=dpo and" if kind == "examples" else ", or map them:"
        return _describe_mapping(mapping, key, how)
    two = _two_replies(columns.texts)
    if two:
        return (
            f". If {two[0]} and {two[1]} are two replies: name the better one chosen, the other rejected, row by row, "
            "for method=dpo or method=reward; for method=sft name the better one completion"
        )
    return ""


def _two_replies(texts: Sequence[str]) -> list[str] | None:
    """Return two columns whose names differ only in their number or letter; None if there are none, or more."""
    columns_by_stem: dict[str, list[str]] = {}
    for text in texts:
        match = _NUMBERED_NAME.fullmatch(text)
        if match:
            columns_by_stem.setdefault(match[1].lower(), []).append(text)
    pairs = [columns for columns in columns_by_stem.values() if len(columns) == 2]
    return pairs[0] if len(pairs) == 1 else None


def _is_from_assistant(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role", message.get("from")) in _ASSISTANT_NAMES


def _text_hint(columns: _RowColumns, num_columns: int, key: str | None) -> str:
    """Return a hint on rows of text: a question and a reply, or one text; "" if nothing suggests this."""
    texts, question, reply = columns.texts, columns.question, columns.reply
    if (question and reply) or len(texts) == 2:
        # Of two texts, one may have a known name. The other one is then its counterpart.
        question = question or [text for text in texts if text != reply][0]
        reply = reply or [text for text in texts if text != question][0]
        mapping = {"instruction": question}
        if "context" in texts and "context" not in (question, reply):
            mapping["input"] = "context"
        mapping["output"] = reply
        return _describe_mapping(mapping, key) + " (a chat; as plain text: prompt and completion)"
    if len(texts) == 1 and not question and num_columns <= 3:
        return _describe_mapping({"text": texts[0]}, key)
    return ""


def _describe_mapping(mapping: Mapping[str, str], key: str | None, how: str = ", or map them:") -> str:
    """Return the end of a hint: the setting of `key` for a mapping of names, or the columns to rename."""
    changed = {}
    for column, file_column in mapping.items():
        if column != file_column:
            changed[column] = json.dumps(file_column) if " " in file_column else file_column
    if key is None:
        return f", such as {', '.join(f'{file_column} to {column}' for column, file_column in changed.items())}"
    entries = ", ".join(f"{column}: {file_column}" for column, file_column in changed.items())
    return f"{how} '{key}={{{entries}}}', for one"
