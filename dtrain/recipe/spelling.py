"""Hints for messages about mistyped YAML and numbers (error_hints.toml), and other tools' names (key_aliases.toml).

key_aliases.toml has the names of keys and values in other tools, and dtrain's names for the same things. A word is
looked up by the last part of an unknown key, so `learning_rate` and `training_args.learning_rate` get one answer, or by
the last two where the file names these; `sequence_packing.enabled` is looked up as `sequence_packing`.
"""

import re
import tomllib
import unicodedata
from collections.abc import Collection
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from dtrain.base import ranges

_HINTS = tomllib.loads(Path(__file__).with_name("error_hints.toml").read_text(encoding="utf-8"))
_NEEDED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping such as {name: value}",
}
_PASTED = {copy: character for character, copies in _HINTS["look_alikes"].items() for copy in copies}

_ALIASES = tomllib.loads(Path(__file__).with_name("key_aliases.toml").read_text(encoding="utf-8"))


def yaml_hint(problem: Any) -> str:
    """Return the hint for a problem that the YAML parser reports."""
    return next((fix for part, fix in _HINTS["yaml"].items() if part in str(problem)), "")


def pasted_character_hint(text: Any) -> str:
    """Return the hint for a text with a character that looks like one of the keyboard's and is another."""
    if not isinstance(text, str):
        return ""
    for character in text:
        name = unicodedata.name(character, "")
        meant = _PASTED.get(character) or (" " if unicodedata.category(character) == "Zs" and character != " " else "")
        if meant or (name.startswith(("CYRILLIC", "GREEK")) and len(text.encode()) < 2 * len(text)):
            fix = f"type {meant}" if meant.strip() else "type a blank" if meant else "type the word anew"
            return f": it holds U+{ord(character):04X}, {name.lower()}, not the character it looks like: {fix}"
    return ""


def number_hint(value: Any, kinds: list) -> str:
    """Return the hint for a number that is written with a comma in it or behind it, or with a second =."""
    if not isinstance(value, str) or not {int, float} & {*kinds}:
        return ""
    if re.fullmatch(r"=+ *[-\d.e]+", value):
        return ": write one ="
    if not re.fullmatch(r"[\d.]+,[\d.]*(e-?\d+)?", value):
        return ""
    is_left_out = value.endswith(",") or float not in kinds
    return ": leave out the comma" if is_left_out else f": write {value.replace(',', '.')}"


def list_hint(value: Any, kinds: list, usual: Any) -> str:
    """Return the hint for a list that is written without its brackets; usual: the setting's own value, which shows how
    many numbers it takes."""
    if isinstance(usual, list) and len(usual) > 1 and isinstance(value, int | float) and not isinstance(value, bool):
        return f": it has {len(usual)}, such as [{', '.join(map(str, usual))}]"
    if not any(get_origin(kind) is list for kind in kinds) or not isinstance(value, str | int | float):
        return ""
    return "" if isinstance(value, bool) else f": write [{', '.join(re.split(r'[, ]+', str(value)))}]"


def percent_hint(value: Any) -> str:
    """Return the hint for a share that is written in percent."""
    is_percent = isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?%", value)
    return f": write {float(value[:-1]) / 100:g}" if is_percent else ""


def lacks_space_after_colon(word: Any) -> bool:
    """Return whether `word` is a key and its value, without the blank between them that YAML wants."""
    return isinstance(word, str) and re.fullmatch(r"\w+:\S+", word) is not None


def type_description(kinds: list) -> str:
    """Return the description of a type by its alternatives `kinds`, such as "text or null"."""
    names = []
    for kind in kinds:
        if get_origin(kind) is dict and (numbers := {int: "whole numbers", float: "numbers"}.get(get_args(kind)[1])):
            names.append(f"a mapping from names to {numbers}")
        elif get_origin(kind) is list:
            inner = _NEEDED[get_args(kind)[0]].removeprefix("a whole ").removeprefix("a ")
            names.append(f"a list of {'texts' if inner == 'text' else 'numbers'}")
        else:
            names.append("null" if kind is NoneType else _NEEDED[get_origin(kind) or kind])
    return " or ".join(names)


def invert_table(table: dict[str, str]) -> dict[str, str]:
    """Return text by word, of a table from a text to words with blanks between them."""
    return {word: text for text, words in table.items() for word in words.split()}


DTRAIN_KEYS = invert_table(_ALIASES["keys"])
UNNEEDED_KEYS = invert_table(_ALIASES["needless"])
UNSUPPORTED_KEYS = invert_table(_ALIASES["not_yet"])
KEY_FAMILIES = invert_table(_ALIASES["families"])  # beginnings of words
METHODS_BY_LOSS = invert_table(_ALIASES["methods"])  # words for a method, where a loss is asked for
VALUES_BY_KEY = {key: invert_table(table) for key, table in _ALIASES["values"].items()}  # of a key: our value by word


def explain_unknown_key(key: str) -> str | None:
    """Return the answer to the unknown `key`, with dots or without; None where dtrain has no answer of its own."""
    parts = _key_parts(key)
    for word in (".".join(parts[-2:]), parts[-1]):
        if word in DTRAIN_KEYS:
            return f"dtrain's word for it is {DTRAIN_KEYS[word]}"
        if word in UNNEEDED_KEYS:
            return f"dtrain needs no key for it: {UNNEEDED_KEYS[word]}"
        if word in UNSUPPORTED_KEYS:
            return f"dtrain does not have this yet: {UNSUPPORTED_KEYS[word]}"
    family = next((word for prefix, word in KEY_FAMILIES.items() if parts[-1].startswith(prefix)), None)
    return explain_unknown_key(family) if family else None


def find_dtrain_value(key: str, value: Any) -> str | None:
    """Return our word for a `value` of `key` as other tools or people say it, with its remark; None where unknown."""
    return VALUES_BY_KEY.get(key, {}).get(str(value).lower())


def value_hint(key: str, value: str, known: Collection[str]) -> str:
    """Return the end of a refusal of `value` at `key`.

    It names the value that was meant, the method that `value` is, the nearest name in `known`, or all of them.
    """
    near = find_dtrain_value(key, value)
    if near:
        return f"; did you mean {near}?"
    return method_hint(key, value) or ranges.name_hint(value, known)


def method_hint(key: str, value: Any) -> str:
    """Return the end of a refusal of `value` at `key`, if the key is a method's loss and the value another method.

    >>> method_hint("dpo.loss", "kto_pair")
    '; set method=kto, which trains single replies that are marked as wanted or not'
    """
    section, _, leaf = key.partition(".")
    other = METHODS_BY_LOSS.get(str(value).lower(), "")
    if leaf != "loss" or not other or other.startswith(f"method={section},"):
        return ""
    return f"; set {other}"


def find_dtrain_key(key: str, value: Any) -> tuple[str, Any] | None:
    """Return another tool's key as ours, with its value, whose word may yet be another tool's (`our_word_for`); None
    where the table does not say that it is the same thing."""
    parts = _key_parts(key)
    entry = key if key in VALUES_BY_KEY else DTRAIN_KEYS.get(".".join(parts[-2:])) or DTRAIN_KEYS.get(parts[-1]) or ""
    same = re.fullmatch(r"([a-z_0-9.]+)(=[^\s:,]+)?(?:,.*)?", entry)
    if not same or value is None or (same[2] and value is not True):
        return None
    return same[1], same[2].removeprefix("=") if same[2] else value


def _key_parts(key: str) -> list[str]:
    return key.lower().replace("-", "_").removesuffix(".enabled").split(".")
