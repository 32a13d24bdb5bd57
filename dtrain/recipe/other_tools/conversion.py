"""The result of a conversion: a recipe, comments on its values, and what could not be carried over.

A key that is not carried over is of one of two kinds. If it may change a number, such as a schedule that dtrain does
not have, the file is not run as it is: its user writes the recipe to a file, reads what it lacks, and runs that. If it
changes no number, such as a tracker or how often a checkpoint is saved, the run says so and starts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import yaml

from dtrain.recipe.saved import unflatten

MAX_NAMED_KEYS = 8  # in one line


class LostKey(NamedTuple):
    """A key of the file that the recipe does not express.

    Attributes:
        key: The dotted key in the file.
        value: Its value there.
        reason: Why it is not carried over, and what to do instead.
        recipe_keys: The recipe's keys that it is for. Whoever sets one of them on the command line has decided.
        changes_numbers: Whether a run without it may have other numbers.
    """

    key: str
    value: Any
    reason: str
    recipe_keys: tuple[str, ...] = ()
    changes_numbers: bool = True


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
        counts_all_gpus: Whether train.global_batch is that of all GPUs, as the tool writes it, or of one GPU.
    """

    tool: str | None
    version: str
    values: dict[str, Any]
    comments: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    lost: list[LostKey] = field(default_factory=list)
    counts_all_gpus: bool = False

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
        blocking = self.blocking()
        if blocking:
            lines.append("# not carried over, and may change numbers:")
            lines += [_comment(f"  {lost.key}: {lost.reason}") for lost in blocking]
        harmless = [lost for lost in self.lost if not lost.changes_numbers]
        if harmless:
            lines.append("# left out, because no number depends on it:")
            lines += [_comment(f"  {lost.key}: {lost.reason}") for lost in harmless]
        return "\n".join(lines)

    @property
    def source(self) -> str:
        """The tool with its version, as a phrase for messages."""
        return f"{self.tool} {self.version}" if self.tool else "another tool, which dtrain does not know"

    def with_values(self, values: Mapping[str, Any], comment: str) -> "Conversion":
        """Return the conversion with other values, each of which gets a comment if it is new or another one."""
        comments = {}
        for key, value in values.items():
            if key not in self.values or self.values[key] != value:
                comments[key] = comment
            elif key in self.comments:
                comments[key] = self.comments[key]
        return replace(self, values=dict(values), comments=comments)

    def blocking(self, decided: Collection[str] = ()) -> list[LostKey]:
        """Return the lost keys that may change numbers.

        Args:
            decided: Keys of the recipe that the user sets on the command line. Lost keys for them are left out.
        """
        found = []
        for lost in self.lost:
            is_decided = any(_is_within(key, name) for key in decided for name in lost.recipe_keys)
            if lost.changes_numbers and not is_decided:
                found.append(lost)
        return found

    def describe_blocking(self, decided: Collection[str] = ()) -> list[tuple[str, str]]:
        """Return (keys, reason) of what `blocking` returns. Keys of one section with the same reason are joined."""
        names: dict[tuple[str, str], list[str]] = {}
        for lost in self.blocking(decided):
            section = lost.key.partition(".")[0]
            names.setdefault((section, lost.reason), []).append(lost.key)
        return [(_join(found), reason) for (_, reason), found in names.items()]

    def left_out(self) -> str:
        """Return a line with the lost keys that change no number; an empty text if there are none."""
        names = [lost.key for lost in self.lost if not lost.changes_numbers]
        if not names:
            return ""
        shown = ", ".join(names[:MAX_NAMED_KEYS])
        more = f" and {len(names) - MAX_NAMED_KEYS} more" if len(names) > MAX_NAMED_KEYS else ""
        return f"left out, because no number depends on it: {shown}{more}"


def _join(names: Sequence[str]) -> str:
    """Return the first three of these names, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _is_within(key: str, name: str) -> bool:
    """Check whether one of two dotted keys is the other, or a section or an entry of it."""
    key, name = key.replace("[", ".["), name.replace("[", ".[")
    return f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.")


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
