"""Hints about mistyped YAML, numbers, and characters pasted from a page: ends of error messages.

`load` finds the mistake; a hint is empty where nothing is known. No recipe is read here.
"""

import re
import unicodedata
from types import NoneType
from typing import Any, get_args, get_origin

_QUOTE = ": quote a text that begins so"
_PARSERS = (
    ("<block end>", ": keys of one section begin in the same column, those of a section inside it two blanks later"),
    ("another document", ": a recipe has one; leave out the line ---"),
    ("<document start>", ": a recipe holds lines `key: value`; a file of rows is named in it, as data.train.path"),
    ("duplicate key", ": keep one of the two"),
    ("'\\t'", ": indent with blanks, not with a tab"),
    ("cannot start any token", _QUOTE),
    ("expected alphabetic or numeric character", _QUOTE),
    ("undefined alias", _QUOTE),
    ("mapping values are not allowed", ": keys of one section begin in one column; a text with a colon is quoted"),
    ("unexpected end of stream", ": a quote is not closed"),
    ("but got '<stream end>'", ": a bracket is not closed"),
    ("constructor for the tag", ": leave out the word that begins with !"),
    ("no viable alternative", ": ${ is closed by }"),
    ("Incompatible key type", ": a key is a word"),
    ("unhashable key", ": a key is one word, without brackets"),
)
"""What the YAML parser says, in part, and what to add."""
_NEEDED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping such as {name: value}",
}
_QUOTES = dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u00b4", "'")
_QUOTES |= dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb", '"')
_DASHES = dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-")
_OTHERS = {"\u2024": ".", "\uff0e": ".", "\uff1a": ":", "\uff0c": ",", "\uff1d": "="}
_PASTED = _QUOTES | _DASHES | _OTHERS


def of_yaml(problem: Any) -> str:
    """Return the hint for a problem that the YAML parser reports."""
    return next((fix for part, fix in _PARSERS if part in str(problem)), "")


def pasted(text: Any) -> str:
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


def in_number(value: Any, kinds: list) -> str:
    """Return the hint for a number that is written with a comma in it or behind it, or with a second =."""
    if not isinstance(value, str) or not {int, float} & {*kinds}:
        return ""
    if re.fullmatch(r"=+ *[-\d.e]+", value):
        return ": write one ="
    if not re.fullmatch(r"[\d.]+,[\d.]*(e-?\d+)?", value):
        return ""
    is_left_out = value.endswith(",") or float not in kinds
    return ": leave out the comma" if is_left_out else f": write {value.replace(',', '.')}"


def in_list(value: Any, kinds: list, usual: Any) -> str:
    """Return the hint for a list that is written without its brackets; usual: the setting's own value, which shows how
    many numbers it takes."""
    if isinstance(usual, list) and len(usual) > 1 and isinstance(value, int | float) and not isinstance(value, bool):
        return f": it has {len(usual)}, such as [{', '.join(map(str, usual))}]"
    if not any(get_origin(kind) is list for kind in kinds) or not isinstance(value, str | int | float):
        return ""
    return "" if isinstance(value, bool) else f": write [{', '.join(re.split(r'[, ]+', str(value)))}]"


def share(value: Any) -> str:
    """Return the hint for a share that is written in percent."""
    is_percent = isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?%", value)
    return f": write {float(value[:-1]) / 100:g}" if is_percent else ""


def stuck(word: Any) -> bool:
    """Return whether `word` is a key and its value, without the blank between them that YAML wants."""
    return isinstance(word, str) and re.fullmatch(r"\w+:\S+", word) is not None


def needed(kinds: list) -> str:
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


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error."""
    return (str(error).splitlines() or [type(error).__name__])[0]
