#!/usr/bin/env python3
"""Writes docs/metrics.md: every field of metrics.jsonl with its unit, what it means and which methods write it.

    .venv/bin/python tools/metrics_reference.py

All of it comes from dtrain/training/metrics/records.py, and from `measures` of each method. tests/test_docs.py compares
the page.
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dtrain.training import METHODS, method_class
from dtrain.training.metrics.records import EVALUATION, FIELDS, MetricField

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
HEAD = """# Every field of metrics.jsonl

`tools/metrics_reference.py` writes this page from
[dtrain/training/metrics/fields.toml](../dtrain/training/metrics/fields.toml).

A run writes `runs/<name>/metrics.jsonl`, one JSON object a line: a training row for each optimizer step, a row for each
validation, and one for each evaluation of a set of `eval`. Numbers are of all ranks and micro-batches together, unless
the table says otherwise. They are not rounded. [Trackers](trackers.md) show the same names.
"""


def reference() -> str:
    """The page's text."""
    return "\n".join(
        [
            HEAD,
            "## Training and validation rows",
            "",
            "A method's own field has `val_` before its name in a validation row.",
            "",
            *_table(FIELDS, "methods"),
            "",
            "## Evaluation rows",
            "",
            "Each name has `eval_` before it, or `eval_<set>_` where `eval` is a table of sets.",
            "",
            *_table(EVALUATION, None),
            "",
        ]
    )


def _table(fields: Iterable[MetricField], methods: str | None) -> list[str]:
    head = ["field", "unit", "meaning", *([methods] if methods else []), "written with"]
    rows = ["| " + " | ".join(head) + " |", "| " + " | ".join(["---"] * len(head)) + " |"]
    for one in fields:
        named = ", ".join(name for name in METHODS if one.name in method_class(name).measures) or "all"
        cells = [f"`{one.name}`", one.unit, one.meaning, *([named] if methods else []), one.where]
        cells[-1] = re.sub(r"[a-z]+\.[a-z_.]+(=\w+)?", r"`\g<0>`", cells[-1])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


if __name__ == "__main__":
    PAGE.write_text(reference())
