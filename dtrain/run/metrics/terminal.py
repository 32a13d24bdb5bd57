"""Text for a terminal: a stranger's words made harmless, and small plots of curves. No torch."""

import re
from collections.abc import Sequence

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a character of braille: rows of left and right

Point = tuple[float, float]


def printable(text: str) -> str:
    """`text` whose control characters are written out, `\\x1b` say: a model's words must not steer a terminal. So are
    halves of surrogate pairs, which cannot be printed."""
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def one_line(text: str, most: int) -> str:
    """`text` on one line of at most `most` characters, its end cut."""
    text = printable(" ".join(text[: 4 * most].split()))
    return text if len(text) <= most else text[: most - 1] + "…"


def plot(points: Sequence[Point], width: int = 56, height: int = 5, among: Sequence[Point] = ()) -> list[str]:
    """Lines of text with the curve through `points` (x, y), in order of x, all finite. Without two points at different
    x there is no curve, and no line. among: points whose range, too, has room, so that several plots have one scale.

    Each column of dots has the range of the values that fall there, so that no extreme is lost.
    """
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return []
    every = [*points, *among]
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    low, high = min(y for _, y in every), max(y for _, y in every)
    columns, rows = 2 * width, 4 * height

    def row(y: float) -> int:  # from the top; a constant lies in the middle
        return round((high / 2 - y / 2) / (high / 2 - low / 2) * (rows - 1)) if high > low else rows // 2

    cells = [[0] * width for _ in range(height)]

    def fill(column: int, first: int, last: int) -> None:
        for at in range(min(first, last), max(first, last) + 1):
            cells[at // 4][column // 2] |= _DOTS[at % 4][column % 2]

    before: tuple[int, int] | None = None
    for x, y in points:
        here = round((x - left) / (right - left) * (columns - 1)), row(y)
        if before is None or here[0] == before[0]:
            fill(here[0], here[1] if before is None else before[1], here[1])
        else:
            steps, rise = here[0] - before[0], here[1] - before[1]
            last = before[1]
            for number in range(1, steps + 1):
                at = before[1] + round(rise * number / steps)
                fill(before[0] + number, last + (at > last) - (at < last), at)
                last = at
        before = here
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"] if height > 1 else [f"{high:.4g}"]
    margin = max(map(len, labels))
    lines = [
        f"{label:>{margin}} ┤{''.join(chr(0x2800 + dots) for dots in cells[number])}".rstrip("\u2800 ")
        for number, label in enumerate(labels)
    ]
    ends = f"{left:g}", f"{right:g}"
    return [*lines, f"{'':>{margin}}  {ends[0]}{ends[1]:>{max(1, width - len(ends[0]))}}"]
