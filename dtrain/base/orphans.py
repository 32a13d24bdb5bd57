"""Processes that end with their parent, and the end of a process with all its descendants."""

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

POLL_SECONDS = 0.5


def end_with_parent(parent: int, status: int = 1) -> None:
    """End this process when `parent`, the process that started it, has ended, however that was.

    On Linux the kernel kills it; elsewhere a thread looks, and ends it with `status`. So does this call where `parent`
    is gone already.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent, status), daemon=True).start()
    if os.getppid() != parent:
        os._exit(status)


def kill_all(pids: list[int]) -> None:
    """End these processes, which may be gone, stopped ones too."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Return the descendants of process `pid`, as Linux knows them; elsewhere none is found."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            children.setdefault(int(stat.read_text().rsplit(")", 1)[1].split()[1]), []).append(int(stat.parent.name))
    pids = [pid]
    for parent in pids:
        pids += children.get(parent, [])
    return pids[1:]


def _watch(parent: int, status: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(status)


def main() -> None:
    """Run a command in place of this process, which on Linux ends with its parent: orphans.py PARENT COMMAND ..."""
    parent, *command = sys.argv[1:]
    end_with_parent(int(parent))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
