"""Memory of this host that a process may take. Imports no torch."""

import os
import re
from contextlib import suppress
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def total_memory() -> int:
    """Return the bytes of this host's memory, or of the control group where that has fewer."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *_numbers(_CGROUP / "memory.max")])


def host_memory(processes: int = 1) -> int:
    """Return the bytes that are free for each of so many processes of this host."""
    free = total_memory()
    with suppress(OSError):
        if available := re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text()):
            free = min(free, int(available[1]) * 1024)
    used = _numbers(_CGROUP / "memory.current")
    if used and _numbers(_CGROUP / "memory.max"):
        free = min(free, total_memory() - used[0])
    return max(0, free) // processes


def _numbers(file: Path) -> list[int]:
    """Return the number in `file`; [] where there is none: no control group, or one without a limit."""
    with suppress(OSError, ValueError):
        return [int(file.read_text())]
    return []
