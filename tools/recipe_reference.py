#!/usr/bin/env python3
"""Writes docs/recipe.md: every key of a recipe with its type, its default and what it means.

    .venv/bin/python tools/recipe_reference.py

All of it comes from dtrain/recipe/schema.py and rollouts.py and the methods' files in dtrain/methods/: the sections'
docstrings, their fields, and the text under each field.
tests/test_docs.py holds the page to it.
"""

import ast
import inspect
import json
import re
import sys
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

sys.path.insert(0, str(Path(__file__).parents[1]))

from dtrain.recipe.schema import make_recipe_type
from dtrain.training import SECTIONS

PAGE = Path(__file__).parents[1] / "docs" / "recipe.md"
HEAD = """# Every key of a recipe

`tools/recipe_reference.py` writes this page from [dtrain/recipe/schema.py](../dtrain/recipe/schema.py) and the sections
of [dtrain/methods](../dtrain/methods/README.md). A key that a recipe leaves out has its default.
[recipes/README.md](../recipes/README.md) shows how to write recipes and overrides.
"""
WORDS = {int: "whole number", float: "number", bool: "true, false", str: "text", type(None): "null", Any: "any value"}


def reference() -> str:
    """The page's text."""
    places: dict[type, str] = {}
    _find(make_recipe_type(SECTIONS, SECTIONS), "", places)
    return "\n".join([HEAD, *(_section(section, places) for section in places)])


def _find(section: type, place: str, places: dict[type, str]) -> None:
    """Each section and the place where it first stands, in the schema's order."""
    if section in places:
        return
    places[section] = place
    for name, hint in get_type_hints(section).items():
        for inner, ending in _sections(hint).items():
            _find(inner, f"{place}.{name}{ending}".lstrip("."), places)


def _sections(hint: Any, ending: str = "") -> dict[Any, str]:
    """The sections of a type, each with " entries" where a list holds them."""
    if is_dataclass(hint):
        return {hint: ending}
    ending = " entries" if get_origin(hint) is list else ending
    return {section: end for one in get_args(hint) for section, end in _sections(one, ending).items()}


def _section(section: type, places: dict[type, str]) -> str:
    place, hints, texts = places[section], get_type_hints(section), _texts(section, places)
    ranges = get_type_hints(section, include_extras=True)
    prefix = f"{place}." if place and " " not in place else ""
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for field in fields(section):
        if field.name not in texts:  # of a section that this one derives from
            continue
        inner = [*_sections(hints[field.name])]
        links = {one: f"[section](#{re.sub(r'[^a-z_-]', '', places[one].replace(' ', '-'))})" for one in inner}
        text = texts[field.name] or _told(inner[0], places)
        default = "" if links and field.default is MISSING else f"`{_default(field)}`"
        kind = _switch(ranges[field.name]) or _kind(hints[field.name], links)
        cells = (f"`{prefix}{field.name}`", kind, default, text)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([f"## {place or 'The root'}", "", _told(section, places), "", *rows, ""])


def _told(section: type, places: dict[type, str]) -> str:
    """A section's docstring, without its name at the head."""
    text = " ".join(inspect.cleandoc(section.__doc__ or "").split()).removeprefix(f"`{places[section]}`: ")
    return text[:1].upper() + text[1:]


def _texts(section: type, places: dict[type, str]) -> dict[str, str]:
    """Field -> the text under it, of the class and of those above it that are no sections of their own."""
    found: dict[str, str] = {}
    for one in reversed(section.__mro__):
        if one.__module__ == "types":  # of `make_recipe_type`, whose sections speak for themselves
            found |= {field.name: "" for field in fields(one) if field.name not in found}
            continue
        if not is_dataclass(one) or one in places and one is not section:
            continue
        name = ""
        for node in ast.parse(inspect.getsource(one)).body[0].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
                found[name] = ""
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
                found[name] = " ".join(str(node.value.value).split())
    return found


def _switch(hint: Any) -> str:
    """Return the values of a key whose range is such as "auto, true or false". Empty for any other key."""
    for _, phrase in getattr(hint, "__metadata__", ()):
        match = re.fullmatch(r"(\w+), true or false", phrase)
        if match:
            return f"`{match[1]}`, `true`, `false`"
    return ""


def _kind(hint: Any, links: dict[type, str]) -> str:
    """A type in words."""
    if hint in links:
        return links[hint]
    inner = [f"`{one}`" if get_origin(hint) is Literal else _kind(one, links) for one in get_args(hint)]
    if get_origin(hint) is list:
        return f"list of {inner[0]}"
    if get_origin(hint) is dict:
        return f"mapping of text to {inner[1]}"
    return ", ".join(inner) or WORDS[hint]


def _default(field: Field) -> str:
    """As YAML writes it in a line."""
    value = field.default if field.default_factory is MISSING else field.default_factory()
    value = [asdict(one) if is_dataclass(one) else one for one in value] if isinstance(value, list) else value
    return value if isinstance(value, str) else json.dumps(value).replace('"', "").replace("e-0", "e-")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
