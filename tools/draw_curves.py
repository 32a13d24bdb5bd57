#!/usr/bin/env python3
"""The loss of a run as an SVG, from its metrics.jsonl. Needs no package; readable on light and dark pages.

.venv/bin/python tools/draw_curves.py runs/quickstart docs/quickstart.svg
"""

import json
import math
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 300, 64, 34, 20, 42
GREY, BLUE, ORANGE = "#768390", "#2f81f7", "#d9480f"


def curves(rows: list[dict], title: str) -> str:
    """Training losses as a line and validation losses as points, over the steps, on a logarithmic scale."""
    train = [(row["step"], row["loss"]) for row in rows if row.get("loss", 0) > 0]
    val = [(row["step"], row["val_loss"]) for row in rows if row.get("val_loss", 0) > 0]
    values = [value for _, value in train + val]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    last = max(step for step, _ in train)

    def x(step: float) -> float:
        return round(LEFT + step / last * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(TOP + (high - math.log10(value)) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    def text(at: float, over: float, words: str, anchor: str, colour: str = GREY) -> str:
        return f'<text x="{at}" y="{over}" text-anchor="{anchor}" fill="{colour}">{words}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13">',
        f"<title>{title}</title>",
        text(LEFT, 18, title, "start"),
        text(WIDTH - RIGHT - 130, 18, "training", "end", BLUE),
        text(WIDTH - RIGHT, 18, "validation (points)", "end", ORANGE),
    ]
    for power in range(low, high + 1):
        line = f'<path d="M{LEFT} {y(10**power)}H{WIDTH - RIGHT}" stroke="{GREY}" stroke-opacity="0.3"/>'
        parts += [line, text(LEFT - 8, y(10**power) + 4, f"{10.0**power:g}", "end")]
    parts += [text(x(last * part / 4), HEIGHT - 22, f"{last * part / 4:g}", "middle") for part in range(5)]
    parts.append(text(x(last / 2), HEIGHT - 4, "optimizer step", "middle"))
    points = " ".join(f"{x(step)},{y(loss)}" for step, loss in train)
    parts.append(f'<polyline points="{points}" fill="none" stroke="{BLUE}" stroke-width="1.5"/>')
    parts += [f'<circle cx="{x(step)}" cy="{y(loss)}" r="5" fill="{ORANGE}"/>' for step, loss in val]
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(run: str, out: str) -> None:
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    Path(out).write_text(curves(rows, f"loss of {run}"), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
