"""Reader of a run's record, also while the run still goes: rows of JSON lines, its recipe. No torch."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from dtrain.base.errors import UserError
from dtrain.base.json_files import check_shape, loads, read_text

Point = tuple[float, float]

AVERAGED = 10  # steps at either end whose mean a curve is told by
LARGEST = 1e300  # what sums and differences of are still numbers
LONGEST = 1 << 24  # bytes of a line that is read
PARTS = 100_000  # entries of a recipe, with what its aliases repeat
_MARK = 64  # bytes before the place that was read to, by which a file is known again


class Lines:
    """The whole lines of a file that others write to: `look` gives those that are new.

    A file that was cut or replaced, as a resume does, is read from its beginning again: `times` counts these.
    `skipped`: lines longer than LONGEST.
    """

    def __init__(self, path: Path):
        self.path = path
        self.times = self.skipped = 0
        self._end, self._mark = 0, b""

    def look(self) -> Iterator[tuple[int, bytes]]:
        """Yield each new line that is whole, with the place where it begins. None where there is no file."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self._end - _MARK))
                if file.read(min(self._end, _MARK)) != self._mark:
                    self.times, self.skipped, self._end, self._mark = self.times + 1, 0, 0, b""
                    file.seek(0)
                while line := file.readline(LONGEST):
                    start, is_whole, mark = self._end, line.endswith(b"\n"), self._mark + line[-_MARK:]
                    while not mark.endswith(b"\n"):
                        if not (rest := file.readline(LONGEST)):
                            return  # torn, or still being written
                        mark = mark[-_MARK:] + rest[-_MARK:]
                    self._end, self._mark = file.tell(), mark[-_MARK:]
                    if is_whole:
                        yield start, line
                    else:
                        self.skipped += 1
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror or error}") from error


def row_of(line: bytes) -> dict[str, Any] | None:
    """The row that a line holds; None where it is damaged."""
    try:
        row = loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file of JSON lines. Damaged lines, and a last one that is torn, are none; nor is a missing file."""
    for _, line in Lines(path).look():
        if (row := row_of(line)) is not None:
            yield row


def number(value: Any) -> float | None:
    """A number of a row, NaN and infinities among them; None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def is_sound(value: float) -> bool:
    """Return whether a value can be drawn and summed: neither NaN nor infinite, nor near that."""
    return abs(value) <= LARGEST


def points(rows: Iterable[Mapping[str, Any]], field: str) -> list[Point]:
    """(step, value) of the rows that have that field, as a sound number."""
    pairs = ((number(row.get("step")), number(row.get(field))) for row in rows)
    return [(x, y) for x, y in pairs if x is not None and y is not None and is_sound(x) and is_sound(y)]


def ends(field: str, values: Sequence[float]) -> tuple[float, float, int]:
    """The first and the last value of a curve, each the mean of so many; of all validation rows one alone, so that it
    is no chance."""
    count = 1 if field.startswith(("val_", "eval_")) else max(1, min(AVERAGED, len(values) // 2))
    return fmean(values[:count]), fmean(values[-count:]), count


def read_recipe(directory: Path) -> dict[str, Any]:
    """The tree of a run's config.yaml; nothing where there is none. Raises UserError where it is damaged."""
    path = directory / "config.yaml"
    if not path.is_file():
        return {}
    try:
        tree = yaml.safe_load(read_text(path))
        check_shape(tree, PARTS)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    return tree if isinstance(tree, dict) else {}
