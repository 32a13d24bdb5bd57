"""Contents of the Markdown pages: fenced blocks, the commands in them, inline code, links and tables.

Code stands in fences that name their language: `sh` holds commands and nothing else, `text` what a terminal shows,
where a line that begins with `$ ` is a command too.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = ("sh", "text", "yaml", "python")
_HIDDEN = {".git", ".venv", ".pytest_cache", ".ruff_cache", "build", "dist", "runs", "node_modules"}
_FENCE = re.compile(r"^( *)```(\w*) *$")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")


@dataclass(frozen=True)
class Block:
    language: str
    line: int  # of its first line, from 1
    text: str


@dataclass(frozen=True)
class Command:
    """A command of a page, as a shell splits it. fails: its comment says that it does."""

    words: tuple[str, ...]
    line: int
    fails: bool


class Page:
    def __init__(self, path: Path):
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.blocks: list[Block] = []
        self.prose = ""  # the page without its blocks, its lines in their places
        self._read()

    def _read(self) -> None:
        inside: list[str] | None = None
        for number, line in enumerate(self.text.splitlines(), 1):
            fence = _FENCE.match(line)
            if fence and inside is None:
                inside, language, first = [], fence[2], number + 1
                assert language in LANGUAGES, f"{self.path}:{number}: a block names one of {', '.join(LANGUAGES)}"
            elif fence:
                self.blocks.append(Block(language, first, "\n".join(inside)))
                inside = None
            elif inside is not None:
                inside.append(line)
            else:
                assert not re.match(r" {4,}\S|\t", line), f"{self.path}:{number}: code stands in fences"
            self.prose += "\n" if fence or inside is not None else f"{line}\n"
        assert inside is None, f"{self.path}: the last block does not end"

    @property
    def commands(self) -> list[Command]:
        found = []
        for block in self.blocks:
            if block.language == "sh":
                found += _commands(block.text, block.line)
            elif block.language == "text":
                shown = "\n".join(line[2:] if line.startswith("$ ") else "" for line in block.text.splitlines())
                found += _commands(shown, block.line)
        return found

    @property
    def links(self) -> list[str]:
        return _LINK.findall(self.prose)

    @property
    def inline(self) -> list[str]:
        """Inline code, line breaks as spaces."""
        return [" ".join(code.split()) for code in _CODE.findall(self.prose)]

    @property
    def tables(self) -> list[list[list[str]]]:
        """Tables as rows of cells, the header first."""
        tables: list[list[list[str]]] = []
        is_inside = False
        for line in self.prose.splitlines():
            if not line.startswith("|"):
                is_inside = False
                continue
            if not is_inside:
                tables.append([])
            is_inside = True
            if not re.fullmatch(r"[|\s:-]+", line):
                tables[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        return tables


def _commands(text: str, first: int) -> list[Command]:
    found, whole, start = [], "", first
    for number, line in enumerate(text.splitlines(), first):
        start = start if whole else number
        whole += line
        if whole.endswith("\\"):
            whole = whole[:-1]
            continue
        words = shlex.split(whole, comments=True)
        if words:
            found.append(Command(tuple(words), start, bool(re.search(r"\s# fails\b", whole))))
        whole = ""
    return found


def all_pages() -> list[Path]:
    """Every Markdown page of the repository."""
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(path for path in found if not _HIDDEN & set(path.parts))
