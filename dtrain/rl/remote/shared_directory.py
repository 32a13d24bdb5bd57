"""Weights in a directory that trainer and servers share: `step-N`, whole once its marker is there. No torch.

The marker is a file, written last, as prime-rl has it (`STABLE`), which leaves it empty; ours holds a mark of its own,
which tells weights that were written again. A reader passes over directories without one.
"""

import re
import secrets
import shutil
from pathlib import Path

from dtrain.base.files import replace_text

MARKER = "STABLE"
_NAME = re.compile(r"step-(\d+)")


def step_directory(shared: Path, version: int) -> Path:
    return shared / f"step-{version}"


def mark(directory: Path) -> None:
    """Mark `directory` as whole, with everything written. Synced to disk."""
    replace_text(directory / MARKER, secrets.token_hex(8))


def mark_of(directory: Path) -> str:
    """Return the mark that tells these weights from others in a directory of this name. Raises OSError where it has
    been deleted."""
    marker = directory / MARKER
    stat = marker.stat()
    return marker.read_text(errors="replace") or f"{stat.st_ino} {stat.st_mtime_ns}"  # of a writer that is not ours


def is_whole(directory: Path) -> bool:
    return (directory / MARKER).is_file()


def version_of(directory: Path) -> int | None:
    """Return N of a directory named step-N; None for other names."""
    match = _NAME.fullmatch(directory.name)
    return int(match[1]) if match else None


def newest(shared: Path) -> tuple[int, Path] | None:
    """Return the highest N of a whole `step-N`, and its directory; None where there is none yet."""
    return max(_whole(shared).items(), default=None)


def prune(shared: Path, current: int, keep: int) -> None:
    """Delete the whole `step-N` but `current` and the newest before it, `keep` in all. Those after it come from a run
    that was resumed from an earlier step. Markers go first: a reader never takes half of one."""
    whole = _whole(shared)
    kept = sorted(version for version in whole if version <= current)[-keep:]
    for version in whole.keys() - kept:
        (whole[version] / MARKER).unlink(missing_ok=True)
        shutil.rmtree(whole[version], ignore_errors=True)


def _whole(shared: Path) -> dict[int, Path]:
    paths = [path for path in shared.glob("step-*") if is_whole(path)]
    return {version: path for path in paths if (version := version_of(path)) is not None}
