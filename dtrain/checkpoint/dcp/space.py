"""Disk space of a run's saves: what one takes, what the retention keeps of them, and what is free."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from dtrain.checkpoint.dcp.pieces import Piece
from dtrain.checkpoint.dcp.retention import Retention


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of a save of `tensors` by all ranks. Its other files are small. No collective."""
    pieces = map(Piece.of, tensors.values())
    return sum(piece.global_size.numel() * piece.local.element_size() for piece in pieces)


def free_bytes(directory: Path) -> int:
    """Return the bytes that this user may still write in `directory`, which need not exist yet."""
    existing = next(parent for parent in (directory.absolute(), *directory.absolute().parents) if parent.is_dir())
    return shutil.disk_usage(existing).free


def shown_bytes(size: int) -> str:
    """Return a number of bytes as people read it.

    >>> shown_bytes(3 << 30), shown_bytes(1536), shown_bytes(12)
    ('3.0 GiB', '1.5 KiB', '12 bytes')
    """
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size} bytes"


def saves_at_once(retention: Retention, saves: int | None = None) -> int | None:
    """Return the largest number of saves that lie on the disk together; None if the retention sets no limit.

    A save is deleted only after the next one is complete, so there is one more than `keep_last` for a moment.

    Args:
        retention: Which saves stay.
        saves: The number of saves that the run makes; None if it is not known.
    """
    if retention.keep_last is None or retention.keep_every is not None:
        return saves
    most = retention.keep_last + 1 + (retention.keep_best is not None)
    return most if saves is None else min(most, saves)


def space_line(size: int, retention: Retention, saves: int | None) -> str:
    """Return what the saves of a run take, for the terminal.

    Args:
        size: Bytes of one save.
        retention: Which saves stay.
        saves: The number of saves that the run makes; None if it is not known.
    """
    keys = {"keep_last": retention.keep_last, "keep_every": retention.keep_every, "keep_best": retention.keep_best}
    named = ", ".join(f"checkpoint.{key}={value}" for key, value in keys.items() if value is not None)
    named = named or "checkpoint.keep_last=null"
    most = saves_at_once(retention, saves)
    if most is None:
        return f"{shown_bytes(size)} each, and {named} sets no limit to their number"
    return f"{shown_bytes(size)} each, at most {most} at a time ({named}): {shown_bytes(size * most)}"
