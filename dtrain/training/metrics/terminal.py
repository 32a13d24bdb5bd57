"""The terminal: lines that stay, and a bar below them where there is a terminal; a stranger's words made harmless, and
small plots of curves. No torch.

A terminal has colours, a bar that fits into 80 columns, and the numbers of every so manyth step. Where output is piped
there are the same lines without control characters, one every few seconds.
"""

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 5.0  # where output is piped
LINES_OF_A_RUN = 20  # that stay on a terminal, or one each `LONGEST_SILENCE` seconds
LONGEST_SILENCE = 60.0
STEPS_TO_GUESS_BY = 3  # the first, which is slower than the others, not counted
SECONDS_TO_GUESS_BY = 1.0
BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {elapsed}<{remaining}{postfix}"
_BOLD, _DIM, _YELLOW, _RED, _END = "\x1b[1m", "\x1b[2m", "\x1b[33m", "\x1b[31m", "\x1b[0m"


class Progress:
    """Progress of a run on `stream`; without control characters unless the stream is a terminal."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._bar: tqdm | None = None
        self._first = self._total = 0
        self._started = self._last_line = 0.0
        self._is_guessed = False
        self._second: tuple[int, float] | None = None  # the first step that was done, and when

    def start(self, step: int, total_steps: int) -> None:
        """`step` steps of `total_steps` are done."""
        self._first, self._total = step, total_steps
        self._started = time.monotonic()
        self._last_line = float("-inf")
        self._is_guessed, self._second = False, None
        if self._is_terminal:
            self._bar = tqdm(total=total_steps, initial=step, file=self._stream, dynamic_ncols=True, bar_format=BAR)

    def update(self, row: Mapping[str, int | float]) -> None:
        """Step row["step"] is done."""
        step, now = int(row["step"]), time.monotonic()
        done, ends = step - self._first, step == self._total
        left = (now - self._started) / max(1, done) * (self._total - step)
        if self._second is None:
            self._second = step, now
        elif (
            not self._is_guessed
            and done >= STEPS_TO_GUESS_BY
            and not ends
            and now - self._second[1] >= SECONDS_TO_GUESS_BY
        ):
            self._is_guessed = True
            guess = (now - self._second[1]) / (step - self._second[0]) * (self._total - step)
            if guess >= LONGEST_SILENCE:
                self.say(f"{'time':<10}about {tqdm.format_interval(guess)} for the {self._total - step} steps left")
        if self._bar is not None:  # before the line, behind which it is drawn again
            self._bar.set_postfix_str(_short(row), refresh=False)
            self._bar.update(step - self._bar.n)
        if self._is_due(step, done, now) or ends:
            self._last_line = now
            self.say(self._line(row, left))

    def _line(self, row: Mapping[str, int | float], left: float) -> str:
        """The numbers of a step: on a terminal in columns, as many as fit into its width."""
        if self._bar is None:
            whole = f"step {int(row['step'])}/{self._total}  {'  '.join(_fields(row).values())}"
            return f"{whole}  {tqdm.format_interval(left)} left"
        line = f"step {int(row['step']):>{len(str(self._total))}}/{self._total}"
        room = self._bar.format_dict["ncols"] or shutil.get_terminal_size((1000, 0)).columns
        for name, field in _fields(row).items():
            field = f"  {field:<{_WIDTHS.get(name, 0)}}".replace(" tokens/s", " tok/s")
            if len(line) + len(field.rstrip()) <= room:
                line += field
        return line.rstrip()

    def _is_due(self, step: int, done: int, now: float) -> bool:
        since = now - self._last_line
        if self._bar is None:
            return since >= SECONDS_BETWEEN_LINES
        return done == 1 or step % _stride(self._total) == 0 or since >= LONGEST_SILENCE

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        text = printable(text)
        if self._is_terminal:
            text = "\n".join(map(_coloured, text.split("\n")))
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _stride(total: int) -> int:
    """The least of 1, 2, 5, 10, 20, ... of which a run of `total` steps has `LINES_OF_A_RUN` or fewer."""
    least, power = -(-total // LINES_OF_A_RUN), 1
    while True:
        for part in (1, 2, 5):
            if part * power >= least:
                return part * power
        power *= 10


def _coloured(line: str) -> str:
    if line.startswith("warning:"):
        return f"{_RED}{line}{_END}"
    if line.startswith("note:"):
        return f"{_YELLOW}{line}{_END}"
    if match := re.match(r"step +\d+/\d+", line):
        rest = re.sub(r"((?:loss|reward) \S+)", rf"{_BOLD}\1{_END}", line[match.end() :], count=1)
        return f"{_DIM}{match[0]}{_END}{rest}"
    return re.sub(r"^([a-z]+)( {2,}|: )", rf"{_BOLD}\1{_END}\2", line)


_SHOWN = {
    "loss": lambda value: f"loss {value:.4f}",
    "reward_mean": lambda value: f"reward {value:.3f}",
    "grad_norm": lambda value: f"grad norm {value:.3g}",
    "lr": lambda value: f"lr {value:.2e}",
    "tokens_per_sec": lambda value: f"{tqdm.format_sizeof(value)} tokens/s",
    "mfu": lambda value: f"mfu {100 * value:.1f}%",
    "mem_gib": lambda value: f"{value:.1f} GiB",
}
_WIDTHS = {"grad_norm": 17, "tokens_per_sec": 14}  # of the fields that differ in length, " tokens/s" written out


def _fields(row: Mapping[str, int | float]) -> dict[str, str]:
    return {name: show(row[name]) for name, show in _SHOWN.items() if name in row}


def _short(row: Mapping[str, int | float]) -> str:
    names = ("reward_mean" if "reward_mean" in row else "loss", "tokens_per_sec")
    return " ".join(_SHOWN[name](row[name]) for name in names if name in row).replace(" tokens/s", " tok/s")


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a character of braille: rows of left and right

Point = tuple[float, float]


def printable(text: str) -> str:
    """`text` whose control characters are written out, `\\x1b` say: a model's words must not steer a terminal. So are
    halves of surrogate pairs, which cannot be printed."""
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def shorten_to_line(text: str, most: int) -> str:
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
