"""Chunks of rows of a data file, their limits, and the check of a table's names. Torch is not imported."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.base.errors import UserError

CHUNK_ROWS = 256
CHUNK_BYTES = 1 << 20
ROW_BYTES = 1 << 24  # of one row: a million tokens, as text or as ids with labels, are less


@dataclass(frozen=True)
class Chunk:
    """Neighbouring rows of one file: (line, row) pairs; a row is still bytes where `parse` has to read it.

    `size` is the number of bytes of the file that the chunk stands for: a progress bar adds them up to the file's size.
    """

    file: str
    rows: list[tuple[int, Any]]
    size: int


def refuse_doubled(place: str, names: Sequence[str]) -> None:
    """Raise UserError where a name stands twice among the columns of a table."""
    doubled = [repr(name[:80]) for name, count in Counter(names).items() if count > 1]
    if doubled:
        raise UserError(f"{place}: several columns have the same name: {', '.join(doubled)}; keep one of each")
