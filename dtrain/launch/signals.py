"""The answer of a run to signals: the first asks it to stop, a second one ends it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from dtrain.base.orphans import descendants, kill
from dtrain.launch.watch import LOOK_SECONDS

SAME_SECONDS = 1.0  # two signals closer than this are one: `timeout` and torchrun pass on what the group got too
END_SECONDS = 5.0  # for the main thread to unwind after a second signal
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # the last is how batch systems announce a pre-emption


@contextmanager
def on_signals(
    ask: Callable[[int], None], signals: Iterable[int] = STOP_SIGNALS, look: Callable[[], None] | None = None
) -> Iterator[None]:
    """The first of `signals` calls `ask`, and from then on `look` is called every LOOK_SECONDS, in a thread; a second
    one raises KeyboardInterrupt with its number, and where the block does not end by that, the process ends within
    seconds. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()
    asked_at: list[float] = []
    last: list[int] = []
    ended = threading.Event()

    def handle(signum: int, frame: object) -> None:
        if os.getpid() != owner:  # a forked helper: the run's own process decides for both
            if signum == signal.SIGTERM:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
        elif not asked_at:
            asked_at.append(time.monotonic())
            ask(signum)
        elif time.monotonic() - asked_at[0] > SAME_SECONDS:
            last.append(signum)
            raise KeyboardInterrupt(signum)

    def insist() -> None:
        while not ended.wait(LOOK_SECONDS):
            if asked_at and look is not None:
                look()
            if last and not ended.wait(END_SECONDS):  # code of the user's may catch everything
                kill(descendants(owner))
                os._exit(128 + last[0])

    threading.Thread(target=insist, daemon=True).start()
    previous = {signum: signal.signal(signum, handle) for signum in signals}
    try:
        yield
    finally:
        ended.set()
        for signum, handler in previous.items():
            signal.signal(signum, handler)
