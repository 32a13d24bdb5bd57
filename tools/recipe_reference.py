#!/usr/bin/env python3
"""Writes docs/recipe.md: every key of a recipe with its type, its default and what it means.

    .venv/bin/python tools/recipe_reference.py

dtrain/recipe/key_docs.py reads all of it from dtrain/recipe/schema.py and rollouts.py and from
dtrain/methods/sections.py: the docstrings of the sections, their fields, and the text under each field. `dtrain help`
prints the same. tests/test_docs.py compares the page.
"""

import re
import sys
from functools import partial
from pathlib import Path
from typing import get_type_hints

sys.path.insert(0, str(Path(__file__).parents[1]))

from dtrain.recipe.key_docs import document_section, inner_sections, section_text
from dtrain.recipe.schema import make_recipe_type
from dtrain.training import SECTIONS

PAGE = Path(__file__).parents[1] / "docs" / "recipe.md"
HEAD = """# Every key of a recipe

`tools/recipe_reference.py` writes this page from [dtrain/recipe/schema.py](../dtrain/recipe/schema.py) and the sections
of [dtrain/methods](../dtrain/methods/README.md). A key that a recipe leaves out has its default.
[recipes/README.md](../recipes/README.md) shows how to write recipes and overrides.
"""


def reference() -> str:
    """Return the page's text."""
    places: dict[type, str] = {}
    _find(make_recipe_type(SECTIONS, SECTIONS), "", places)
    return "\n".join([HEAD, *(_section(section, places) for section in places)])


def _find(section: type, place: str, places: dict[type, str]) -> None:
    """Add each section with its first place in a recipe to `places`, in the schema's order."""
    if section in places:
        return
    places[section] = place
    for name, hint in get_type_hints(section).items():
        for inner, ending in inner_sections(hint).items():
            _find(inner, f"{place}.{name}{ending}".lstrip("."), places)


def _section(section: type, places: dict[type, str]) -> str:
    """Return the part of the page about a section."""
    place = places[section]
    prefix = f"{place}." if place and " " not in place else ""
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for doc in document_section(section, separate=places):
        kind = doc.type_text(partial(_link, places), choice="`{}`")
        default = f"`{doc.default}`" if doc.default or not doc.sections else ""
        cells = (f"`{prefix}{doc.name}`", kind, default, doc.text)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([f"## {place or 'The root'}", "", section_text(section), "", *rows, ""])


def _link(places: dict[type, str], section: type) -> str:
    """Return a link to the part of the page about a section."""
    anchor = re.sub(r"[^a-z_-]", "", places[section].replace(" ", "-"))
    return f"[section](#{anchor})"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
