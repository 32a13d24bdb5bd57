"""Child processes that end with their parent, and killing a process with all of its descendants.

`python orphans.py PARENT COMMAND ...` runs a command that ends with the process PARENT (on Linux).
"""

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
    """End this process as soon as its parent has ended, for whatever reason.

    On Linux the kernel kills this process. On other systems a thread polls, and ends it.

    Args:
        parent: Process id of the parent. If it has ended already, this call ends the process.
        status: Exit status, except for a process that the kernel kills.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent, status), daemon=True).start()
    if os.getppid() != parent:
        os._exit(status)


def kill_all(pids: list[int]) -> None:
    """Kill processes. Some may have ended already; stopped processes are killed too."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Return the process ids of all descendants of a process. Only Linux knows them; elsewhere the list is empty."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            # "pid (command) state parent ...", where the command may contain blanks and brackets
            fields = stat.read_text().rsplit(")", 1)[1].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    pids = [pid]
    for parent in pids:  # the list grows during the loop
        pids += children.get(parent, [])
    return pids[1:]


def _watch(parent: int, status: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(status)


def main() -> None:
    """Replace this process with a command that ends with the process PARENT: orphans.py PARENT COMMAND ..."""
    parent, *command = sys.argv[1:]
    end_with_parent(int(parent))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
