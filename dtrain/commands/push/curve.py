"""The losses of a run as a small picture (SVG): the training loss as a line, the validation's as dots."""

import math
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Template

from dtrain.run.metrics.records import Point

WIDTH, HEIGHT, LEFT, BELOW, ABOVE = 640, 320, 60, 40, 16
MOST = 500  # points of a line; neighbours are averaged beyond that


def svg(train: Sequence[Point], val: Sequence[Point]) -> str:
    """Return the picture as SVG; there is at least one point."""
    first, last = (find(step for step, _ in [*train, *val]) for find in (min, max))
    low, high, step = _axis([value for _, value in [*train, *val]])

    def x(at: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - ABOVE) * ((at - first) / (last - first) if last > first else 0.5):.1f}"

    def y(value: float) -> str:
        return f"{ABOVE + (HEIGHT - ABOVE - BELOW) * (1 - (value - low) / (high - low)):.1f}"

    values = [low + number * step for number in range(round((high - low) / step) + 1)]
    ends = [(first, "start"), (last, "end")] if last > first else [(first, "middle")]
    names = [("training loss", "#2a6fbb", train), ("validation loss", "#d1495b", val)]
    text = Path(__file__).with_name("curve.svg.jinja").read_text("utf-8")
    return Template(text, trim_blocks=True, keep_trailing_newline=True).render(
        {
            "width": WIDTH,
            "height": HEIGHT,
            "left": LEFT,
            "right": WIDTH - ABOVE,
            "top": ABOVE,
            "bottom": HEIGHT - BELOW,
        },
        grid=[(y(value), f"{value:.4g}") for value in values],
        ends=[(x(at), f"{at:g}", anchor) for at, anchor in ends],
        train=[f"{x(at)},{y(value)}" for at, value in _thinned(train)],
        val=[(x(at), y(value)) for at, value in _thinned(val)],
        names=[(name, colour) for name, colour, points in names if points],
    )


def _axis(values: Sequence[float]) -> tuple[float, float, float]:
    """Return round ends around the values, and the distance of the grid lines."""
    low, high = min(values), max(values)
    if high <= low:
        low, high = low - 0.5, high + 0.5
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    return math.floor(low / step) * step, math.ceil(high / step) * step, step


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most MOST points: the means of neighbours."""
    size = -(-len(points) // MOST)
    groups = [points[start : start + size] for start in range(0, len(points), size or 1)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
