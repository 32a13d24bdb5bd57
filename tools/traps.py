#!/usr/bin/env python3
"""Writes docs/traps.md: what went wrong in other trainers, its public thread, and the test that holds it right here.

    tools/traps

Each row is a mark of a test, `@pytest.mark.trap(name, thread, cost, answer)`. Without an answer it is the first
sentence of the test's docstring. tests/traps/test_page.py holds the page to the marks.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "traps.md"
THREAD = re.compile(r"([\w.-]+/[\w.-]+) (PR)?#(\d+)")
HEAD = """# What went wrong in other trainers

`tools/traps` writes this page from the marks `trap` of the tests. Each row is a mistake that was made in public, the
thread that tells of it, what it costs, and the test that fails here when dtrain makes it too. The right answer of a
test comes from elsewhere: float64 by hand, transformers, PEFT, or numbers that TRL gave.
"""
TOPICS = {  # the folder or the file of a test -> its heading
    "losses": "Losses and methods",
    "methods": "Losses and methods",
    "test_losses": "Losses and methods",
    "data": "Text, tokens and rows",
    "environments": "Text, tokens and rows",
    "test_text": "Text, tokens and rows",
    "models": "Models and attention",
    "attention": "Models and attention",
    "test_models": "Models and attention",
    "parallel": "Many processes",
    "policy": "Many processes",
    "test_preflight": "Many processes",
    "test_experts": "Many processes",
    "test_parallel": "Many processes",
    "test_picture_runs": "Many processes",
    "test_trainer": "Training",
    "test_every_pair": "Training",
    "test_optim": "Training",
    "test_sizing": "Training",
    "optimizers": "Training",
    "test_training": "Training",
    "adapters": "Adapters",
    "test_adapters": "Adapters",
    "checkpoint": "Saving and resuming",
    "test_resume": "Saving and resuming",
    "rollout": "Rollouts and servers",
    "remote": "Rollouts and servers",
    "serve": "Rollouts and servers",
}


@dataclass(frozen=True)
class Trap:
    """A mark `trap` of a test. path: of the test's file, from the repository's root."""

    path: Path
    test: str
    name: str
    thread: str
    cost: str
    answer: str

    @property
    def topic(self) -> str:
        parts = [part for part in self.path.with_suffix("").parts[1:] if part != "traps"]
        return TOPICS[parts[0]]

    def row(self) -> str:
        repository, pull, number = THREAD.fullmatch(self.thread).groups()  # type: ignore[union-attr]
        link = f"https://github.com/{repository}/{'pull' if pull else 'issues'}/{number}"
        test = f"[{self.test.removeprefix('test_')}](../{self.path})"
        return f"| {self.name} | [{self.thread}]({link}) | {self.cost} | {test} | {self.answer} |"


def traps() -> list[Trap]:
    """Every mark `trap`, by topic, file and line."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [trap for path in files for trap in _of_file(path)]
    topics = list(dict.fromkeys(TOPICS.values()))
    return sorted(found, key=lambda trap: topics.index(trap.topic))


def _of_file(path: Path) -> Iterator[Trap]:
    text = path.read_text()
    for node in ast.parse(text).body if "pytest.mark.trap(" in text else ():
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.trap":
                name, thread, cost, *answer = (ast.literal_eval(word) for word in mark.args)
                told = answer[0] if answer else _first_sentence(ast.get_docstring(node) or "")
                yield Trap(path.relative_to(ROOT), node.name, name, thread, cost, told)


def _first_sentence(text: str) -> str:
    return re.split(r"\.(?:\s|$)", " ".join(text.split()))[0]


def page() -> str:
    """The page's text."""
    lines, topic = [HEAD.rstrip()], ""
    for trap in traps():
        if trap.topic != topic:
            topic = trap.topic
            lines += ["", f"## {topic}", "", "| trap | thread | what it costs | test | our answer |"]
            lines.append("| --- | --- | --- | --- | --- |")
        lines.append(trap.row())
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE.relative_to(ROOT)}: {len(traps())} traps")
