"""The result of a conversion: a recipe, comments on its values, and what could not be carried over."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

from dtrain.recipe.saved import unflatten


class LostKey(NamedTuple):
    """A key of the file that the recipe does not express.

    Attributes:
        key: The dotted key in the file.
        value: Its value there.
        reason: Why it is not carried over, and what to do instead.
    """

    key: str
    value: Any
    reason: str


@dataclass
class Conversion:
    """A file of another tool as a recipe.

    Attributes:
        tool: The tool's name, or None if its keys indicate none.
        version: The version whose defaults were filled in.
        values: Dotted key of the recipe and its value, in the order of docs/recipe.md.
        comments: For some of these keys, where the value comes from if the file does not give it.
        notes: Differences that no key of a recipe expresses.
        lost: Keys of the file that are not carried over.
    """

    tool: str | None
    version: str
    values: dict[str, Any]
    comments: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lost: list[LostKey] = field(default_factory=list)

    @property
    def method(self) -> str:
        """The recipe's method."""
        return str(self.values["method"])

    def recipe(self) -> dict[str, Any]:
        """Return the recipe as nested mappings."""
        return unflatten(self.values)

    def text(self) -> str:
        """Return the recipe as YAML with its comments, then the notes and the lost keys as comments."""
        lines = _yaml_lines(self.values, self.comments)
        lines += [_comment(note) for note in self.notes]
        if self.lost:
            lines.append("# not carried over:")
            lines += [_comment(f"  {lost.key}: {lost.reason}") for lost in self.lost]
        return "\n".join(lines)

    def answer(self) -> str:
        """Return the end of the error for a file of another tool that was given as a recipe: the converted recipe."""
        if self.tool is None:
            head = (
                "it is written for another tool, whose defaults are not known here; what has a key here, as a recipe, "
                "to copy"
            )
        else:
            head = (
                f"it is written for {self.tool}; as a recipe, to copy, with the defaults of {self.tool} {self.version}"
            )
        return f"{head} (train.global_batch is that of one GPU):\n{self.text()}"


def _yaml_lines(values: Mapping[str, Any], comments: Mapping[str, str]) -> list[str]:
    """Return dotted keys as lines of YAML in block style, each with its comment."""
    lines: list[str] = []
    open_sections: list[str] = []
    for key, value in values.items():
        *sections, leaf = key.split(".")
        num_shared = 0
        while num_shared < len(sections) and sections[: num_shared + 1] == open_sections[: num_shared + 1]:
            num_shared += 1
        for depth in range(num_shared, len(sections)):
            lines.append(f"{'  ' * depth}{sections[depth]}:")
        open_sections = sections
        dumped = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
        text = dumped.strip().removesuffix("...").strip()
        line = f"{'  ' * len(sections)}{leaf}: {text}"
        lines.append(f"{line}  # {comments[key]}" if key in comments else line)
    return lines


def _comment(text: str) -> str:
    """Return a text as comment lines. It may show a value of the file that has several lines."""
    return "\n".join(f"# {line}" for line in text.split("\n"))
