"""The losses of a run as a small picture (SVG): the training loss as a line, the validation's as dots."""

import math
from collections.abc import Sequence

from dtrain.run.metrics.records import Point

WIDTH, HEIGHT, LEFT, BELOW, ABOVE = 640, 320, 60, 40, 16
MOST = 500  # points of a line; neighbours are averaged beyond that
TRAIN, VAL, INK, GRID = "#2a6fbb", "#d1495b", "#555555", "#dddddd"


def svg(train: Sequence[Point], val: Sequence[Point]) -> str:
    """Return the picture as SVG; there is at least one point."""
    both = [*train, *val]
    left, right = min(step for step, _ in both), max(step for step, _ in both)
    values = [value for _, value in both]
    low, high, step = _axis(min(values), max(values))

    def place(point: Point) -> str:
        x = LEFT + (WIDTH - LEFT - ABOVE) * ((point[0] - left) / (right - left) if right > left else 0.5)
        y = ABOVE + (HEIGHT - ABOVE - BELOW) * (1 - (point[1] - low) / (high - low))
        return f"{x:.1f},{y:.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for number in range(round((high - low) / step) + 1):
        value = low + number * step
        y = place((left, value)).split(",")[1]
        lines.append(f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - ABOVE}" y2="{y}" stroke="{GRID}"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end">{value:.4g}</text>')
    for value, anchor in ((left, "start"), (right, "end")) if right > left else ((left, "middle"),):
        x = place((value, low)).split(",")[0]
        lines.append(f'<text x="{x}" y="{HEIGHT - BELOW + 20}" text-anchor="{anchor}">step {value:g}</text>')
    if train:
        path = " ".join(map(place, _thinned(train)))
        lines.append(f'<polyline points="{path}" fill="none" stroke="{TRAIN}" stroke-width="1.5"/>')
    for point in _thinned(val):
        x, y = place(point).split(",")
        lines.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{VAL}"/>')
    names = [("training loss", TRAIN, train), ("validation loss", VAL, val)]
    for number, (name, colour) in enumerate((name, colour) for name, colour, points in names if points):
        below = ABOVE + 14 + 18 * number
        lines.append(f'<text x="{WIDTH - ABOVE - 8}" y="{below}" text-anchor="end" fill="{colour}">{name}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _axis(low: float, high: float) -> tuple[float, float, float]:
    """Return round ends around the values, and the distance of the grid lines."""
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
