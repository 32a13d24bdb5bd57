#!/usr/bin/env python3
"""The losses of a run as a picture, from its metrics.jsonl, as `dtrain push` draws them for a model card.

.venv/bin/python tools/draw_curves.py runs/quickstart docs/quickstart.svg
"""

import json
import sys
from pathlib import Path

from dtrain.push import curve


def main(run: str, out: str) -> None:
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    picture = curve.svg(curve.points(rows, "loss"), curve.points(rows, "val_loss"))
    Path(out).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
