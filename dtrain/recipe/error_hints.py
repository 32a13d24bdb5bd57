"""Hints about mistyped YAML, numbers, and characters pasted from a page (error_hints.toml): ends of error messages.

`load` finds the mistake; a hint is empty where nothing is known. No recipe is read here.
"""

import re
import tomllib
import unicodedata
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_NEEDED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping such as {name: value}",
}
_PASTED = {copy: character for character, copies in _FILE["look_alikes"].items() for copy in copies}


def of_yaml(problem: Any) -> str:
    """Return the hint for a problem that the YAML parser reports."""
    return next((fix for part, fix in _FILE["yaml"].items() if part in str(problem)), "")


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
