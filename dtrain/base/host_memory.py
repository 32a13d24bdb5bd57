"""Memory and processors of this host that a process may take. Imports no torch."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_CGROUP = Path("/sys/fs/cgroup")
# Of version 2 of control groups, and of version 1: limit, use, and the key of pages that a limit gives back.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def num_cores() -> int:
    """Return the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_memory() -> int:
    """Return the bytes of this host's memory, or of the control group where that has fewer."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *(limit for limit, _ in _groups())])


def host_memory(processes: int = 1) -> int:
    """Return the bytes that are free for each of so many processes of this host."""
    free = total_memory()
    with suppress(OSError):
        if available := re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text()):
            free = min(free, int(available[1]) * 1024)
    free = min([free, *(limit - used for limit, used in _groups())])
    return max(0, free) // processes


def _groups() -> Iterator[tuple[int, int]]:
    """Yield limit and use in bytes of the control groups with a limit that this process is in. Pages of files that
    were not used lately are not in use."""
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            top = _CGROUP / controllers
            group = top / path.lstrip("/")
            for directory in (group, *group.parents):
                if directory.is_relative_to(top):
                    yield from _limit(directory)


def _limit(group: Path) -> Iterator[tuple[int, int]]:
    for limit, used, reclaimable in _FILES:
        with suppress(OSError, ValueError):
            pages = re.search(rf"^{reclaimable} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            most, now = (int((group / name).read_text()) for name in (limit, used))
            yield most, max(0, now - (int(pages[1]) if pages else 0))
