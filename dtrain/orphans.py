"""A process that ends with the one that started it."""

import ctypes
import os
import signal
import sys
import threading
import time

POLL_SECONDS = 0.5


def end_with(parent: int, status: int = 1) -> None:
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


def _watch(parent: int, status: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(status)
