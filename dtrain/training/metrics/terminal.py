"""The terminal: the progress bar and lines of a run, escaping of control characters, and small plots. No torch.

On a terminal, lines have colours, and a progress bar stays below them. A line is printed for every N-th step. N is the
smallest number of 1, 2, 5, 10, ... for which a run prints at most `LINES_OF_A_RUN` such lines. If the output is piped,
lines have no control characters, and a line for a step is printed every few seconds.
"""

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 5.0  # if the output is piped
LINES_OF_A_RUN = 20  # lines of steps on a terminal, if they come faster than one in `LONGEST_SILENCE` seconds
LONGEST_SILENCE = 60.0  # seconds
STEPS_TO_GUESS_BY = 3  # before the duration of the run is estimated; the first step is slower and is not counted
SECONDS_TO_GUESS_BY = 1.0
BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {elapsed}<{remaining}{postfix}"
# Escape sequences of terminals (ANSI X3.64).
_BOLD, _DIM, _YELLOW, _RED, _END = "\x1b[1m", "\x1b[2m", "\x1b[33m", "\x1b[31m", "\x1b[0m"


class Progress:
    """Progress of a run on a stream, without control characters unless the stream is a terminal.

    Args:
        stream: The stream, for example stderr.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._bar: tqdm | None = None
        self._start_step = 0
        self._total_steps = 0
        self._started_at = 0.0  # time.monotonic()
        self._last_line_at = 0.0
        self._is_estimated = False  # whether the duration of the run was printed
        self._after_first_step: tuple[int, float] | None = None  # the first step that was done here, and its time

    def start(self, step: int, total_steps: int) -> None:
        """Start the bar.

        Args:
            step: Steps that are done.
            total_steps: Steps of the whole run.
        """
        self._start_step = step
        self._total_steps = total_steps
        self._started_at = time.monotonic()
        self._last_line_at = float("-inf")
        self._is_estimated = False
        self._after_first_step = None
        if self._is_terminal:
            self._bar = tqdm(total=total_steps, initial=step, file=self._stream, dynamic_ncols=True, bar_format=BAR)

    def update(self, row: Mapping[str, int | float]) -> None:
        """Advance the bar to the step of a row of metrics, and print a line for it if one is due."""
        step, now = int(row["step"]), time.monotonic()
        num_done = step - self._start_step
        is_last = step == self._total_steps
        seconds_left = (now - self._started_at) / max(1, num_done) * (self._total_steps - step)
        if self._after_first_step is None:
            self._after_first_step = (step, now)
        else:
            self._estimate_duration(step, now)
        if self._bar is not None:  # before the line, after which tqdm draws the bar again
            self._bar.set_postfix_str(_bar_text(row), refresh=False)
            self._bar.update(step - self._bar.n)
        if self._is_due(step, num_done, now) or is_last:
            self._last_line_at = now
            self.print_line(self._step_line(row, seconds_left))

    def _estimate_duration(self, step: int, now: float) -> None:
        """Print the estimated rest of a long run, once, as soon as a few steps were timed."""
        if self._is_estimated or step == self._total_steps or self._after_first_step is None:
            return
        first_step, first_time = self._after_first_step
        elapsed = now - first_time
        if step - self._start_step < STEPS_TO_GUESS_BY or elapsed < SECONDS_TO_GUESS_BY:
            return
        self._is_estimated = True
        steps_left = self._total_steps - step
        seconds_left = elapsed / (step - first_step) * steps_left
        if seconds_left >= LONGEST_SILENCE:
            self.print_line(f"{'time':<10}about {tqdm.format_interval(seconds_left)} for the {steps_left} steps left")

    def _step_line(self, row: Mapping[str, int | float], seconds_left: float) -> str:
        """Return the line of a step. On a terminal the line has as many columns as fit into the width."""
        fields = _format_fields(row)
        if self._bar is None:
            line = f"step {int(row['step'])}/{self._total_steps}  {'  '.join(fields.values())}"
            return f"{line}  {tqdm.format_interval(seconds_left)} left"
        digits = len(str(self._total_steps))
        line = f"step {int(row['step']):>{digits}}/{self._total_steps}"
        width = self._bar.format_dict["ncols"] or shutil.get_terminal_size((1000, 0)).columns
        for name, field in fields.items():
            column = f"  {field:<{_WIDTHS.get(name, 0)}}".replace(" tokens/s", " tok/s")
            if len(line) + len(column.rstrip()) <= width:
                line += column
        return line.rstrip()

    def _is_due(self, step: int, num_done: int, now: float) -> bool:
        """Check whether a line is due for a step that is not the last one."""
        silence = now - self._last_line_at
        if self._bar is None:
            return silence >= SECONDS_BETWEEN_LINES
        return num_done == 1 or step % _line_interval(self._total_steps) == 0 or silence >= LONGEST_SILENCE

    def print_line(self, text: str) -> None:
        """Print lines above the bar, with control characters escaped."""
        text = printable(text)
        if self._is_terminal:
            text = "\n".join(_add_colour(line) for line in text.split("\n"))
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """End the bar. What is printed later comes below it."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _line_interval(total_steps: int) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that gives a run at most `LINES_OF_A_RUN` lines.

    >>> [_line_interval(total) for total in (20, 21, 100, 800)]
    [1, 2, 5, 50]
    """
    smallest = -(-total_steps // LINES_OF_A_RUN)
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= smallest:
                return factor * power
        power *= 10


def _add_colour(line: str) -> str:
    """Add colour to a line, by its beginning: warnings, notes, steps, and the labels of tables."""
    if line.startswith("warning:"):
        return f"{_RED}{line}{_END}"
    if line.startswith("note:"):
        return f"{_YELLOW}{line}{_END}"
    step = re.match(r"step +\d+/\d+", line)
    if step is not None:
        fields = re.sub(r"((?:loss|reward) \S+)", rf"{_BOLD}\1{_END}", line[step.end() :], count=1)
        return f"{_DIM}{step[0]}{_END}{fields}"
    return re.sub(r"^([a-z]+)( {2,}|: )", rf"{_BOLD}\1{_END}\2", line)


# The fields of a row that the line of a step shows, in its order.
_FORMATS = {
    "loss": lambda value: f"loss {value:.4f}",
    "reward_mean": lambda value: f"reward {value:.3f}",
    "grad_norm": lambda value: f"grad norm {value:.3g}",
    "lr": lambda value: f"lr {value:.2e}",
    "tokens_per_sec": lambda value: f"{tqdm.format_sizeof(value)} tokens/s",
    "mfu": lambda value: f"mfu {100 * value:.1f}%",
    "mem_gib": lambda value: f"{value:.1f} GiB",
}
_WIDTHS = {"grad_norm": 17, "tokens_per_sec": 14}  # columns of fields whose length varies, with " tokens/s" in full


def _format_fields(row: Mapping[str, int | float]) -> dict[str, str]:
    return {name: show(row[name]) for name, show in _FORMATS.items() if name in row}


def _bar_text(row: Mapping[str, int | float]) -> str:
    """Return the text next to the bar: the loss or the reward, and the speed."""
    names = ("reward_mean" if "reward_mean" in row else "loss", "tokens_per_sec")
    text = " ".join(_FORMATS[name](row[name]) for name in names if name in row)
    return text.replace(" tokens/s", " tok/s")


# Control characters except for tab and line break, and halves of surrogate pairs, which no encoding can write.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

Point = tuple[float, float]


def printable(text: str) -> str:
    r"""Write the control characters of a text as escapes, because text of a model must not control the terminal.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def shorten_to_line(text: str, max_chars: int) -> str:
    r"""Put a text on one line of at most `max_chars` characters. The end is cut.

    >>> shorten_to_line("one\n two three", 10)
    'one two t…'
    """
    start = text[: 4 * max_chars]  # a text may be long; white space and escapes change its length
    line = printable(" ".join(start.split()))
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"


class _DotGrid:
    """A grid of dots in braille characters: each character has 2 columns and 4 rows of dots.

    Attributes:
        num_columns: Columns of dots.
        num_rows: Rows of dots, counted from the top.
    """

    # The bits of the dots in a character of the Unicode block that begins at U+2800, for each of its rows: left, right.
    _BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))

    def __init__(self, width: int, height: int):
        self.num_columns = 2 * width
        self.num_rows = 4 * height
        self._cells = [[0] * width for _ in range(height)]

    def fill(self, column: int, first_row: int, last_row: int) -> None:
        """Set the dots of a column between two rows, both included. The rows may be in any order."""
        for row in range(min(first_row, last_row), max(first_row, last_row) + 1):
            self._cells[row // 4][column // 2] |= self._BITS[row % 4][column % 2]

    def connect(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        """Draw a line of dots from `start`, which is set already, to `end` (column, row)."""
        start_column, start_row = start
        end_column, end_row = end
        if end_column == start_column:
            self.fill(end_column, start_row, end_row)
            return
        num_steps = end_column - start_column
        rise = end_row - start_row
        previous = start_row
        for step in range(1, num_steps + 1):
            row = start_row + round(rise * step / num_steps)
            # A steep line sets several dots of a column. They begin next to the last dot of the column before.
            first = previous
            if row > previous:
                first = previous + 1
            elif row < previous:
                first = previous - 1
            self.fill(start_column + step, first, row)
            previous = row

    def lines(self) -> list[str]:
        """Return the rows of characters."""
        return ["".join(chr(0x2800 + bits) for bits in row) for row in self._cells]


def plot(points: Sequence[Point], width: int = 56, height: int = 5, same_scale: Sequence[Point] = ()) -> list[str]:
    """Plot a curve with characters. Every value has a dot in its column, so no extreme value is lost.

    Args:
        points: The points (x, y) of the curve in the order of x, all finite.
        width: Characters of a line, without the labels of the y axis.
        height: Lines, without the labels of the x axis.
        same_scale: Further points that the axes have room for, so that several plots can have the same scale.

    Returns:
        The lines. There are none for fewer than two points, or if all have the same x.
    """
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return []
    in_range = [*points, *same_scale]
    left, right = min(x for x, _ in in_range), max(x for x, _ in in_range)
    low, high = min(y for _, y in in_range), max(y for _, y in in_range)
    grid = _DotGrid(width, height)

    def position(x: float, y: float) -> tuple[int, int]:
        column = round((x - left) / (right - left) * (grid.num_columns - 1))
        if high == low:
            return column, grid.num_rows // 2
        # Halves, because the difference of two large values may overflow.
        return column, round((high / 2 - y / 2) / (high / 2 - low / 2) * (grid.num_rows - 1))

    previous: tuple[int, int] | None = None
    for x, y in points:
        current = position(x, y)
        grid.connect(current if previous is None else previous, current)
        previous = current

    labels = [f"{high:.4g}"]
    if height > 1:
        labels += [""] * (height - 2) + [f"{low:.4g}"]
    margin = max(len(label) for label in labels)
    lines = []
    for label, row in zip(labels, grid.lines(), strict=True):
        lines.append(f"{label:>{margin}} ┤{row}".rstrip("\u2800 "))
    first_x, last_x = f"{left:g}", f"{right:g}"
    x_labels = f"{first_x}{last_x:>{max(1, width - len(first_x))}}"
    return [*lines, f"{'':>{margin}}  {x_labels}"]
