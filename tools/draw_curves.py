#!/usr/bin/env python3
"""The losses of a run as a picture, from its metrics.jsonl, as `dtrain push` draws them for a model card.

.venv/bin/python tools/draw_curves.py runs/quickstart docs/quickstart.svg
"""

import sys
from pathlib import Path

from dtrain.commands.push.card import svg
from dtrain.training.metrics import records


def main(run: str, out: str) -> None:
    rows = list(records.read_rows(Path(run) / "metrics.jsonl"))
    picture = svg(records.curve_points(rows, "loss"), records.curve_points(rows, "val_loss"))
    Path(out).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
