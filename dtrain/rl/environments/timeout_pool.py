"""Pool of threads with a time limit for each task: a thread that hangs is given up, and the others go on."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_LATE = 4  # tasks in a row; what they call may be down, and each would take its whole time


class Missed(Enum):
    """Reasons why a task has no outcome: it took too long, or too many before it did."""

    LATE = "late"
    UNTRIED = "untried"


class TimeoutPool(Generic[T]):
    """Pool of `threads` threads, which live from call to call. timeout: seconds that a task may take.

    One thread does tasks one after another in their order, all calls' tasks, until it is given up and another takes its
    place. A thread that is given up does what hangs to its end, if there is one, and no more. Not for several threads
    at once.
    """

    def __init__(self, threads: int, timeout: float):
        self._threads, self._timeout = threads, min(timeout, threading.TIMEOUT_MAX / 2)
        self._idle: list[ThreadPoolExecutor] = []  # of one thread each: another could not take its place alone
        self._given_up: list[Future[T]] = []

    @property
    def stuck(self) -> int:
        """Tasks that were given up and have not ended, each in a thread of its own."""
        self._given_up = [task for task in self._given_up if not task.done()]
        return len(self._given_up)

    def do(self, tasks: Sequence[Callable[[], T]]) -> Iterator[list[tuple[int, T | Missed]]]:
        """Run `tasks`, which raise nothing; yields their indices and outcomes as they come, each index once.

        After MOST_LATE or more tasks that took too long with none between them that did not, those that no thread has
        begun are not tried.
        """
        waiting = deque(enumerate(tasks))
        running: dict[Future[T], tuple[int, ThreadPoolExecutor, float]] = {}  # index, thread, when it is late
        late_in_a_row = 0
        while waiting or running:
            while waiting and len(running) < self._threads:
                index, task = waiting.popleft()
                thread = self._idle.pop() if self._idle else ThreadPoolExecutor(1)
                running[thread.submit(task)] = index, thread, time.monotonic() + self._timeout
            first_due = min(due for _, _, due in running.values())
            done, _ = wait(running, max(0.0, first_due - time.monotonic()), FIRST_COMPLETED)
            late = [future for future, (*_, due) in running.items() if due <= time.monotonic() and not future.done()]
            outcomes: list[tuple[int, T | Missed]] = []
            for future in done:
                index, thread, _ = running.pop(future)
                self._idle.append(thread)
                outcomes.append((index, future.result()))
            late_in_a_row = len(late) + (0 if done else late_in_a_row)
            outcomes += [(running.pop(future)[0], Missed.LATE) for future in late]
            self._given_up += late
            if late_in_a_row >= MOST_LATE:
                outcomes += [(index, Missed.UNTRIED) for index, _ in waiting]
                waiting.clear()
            if outcomes:
                yield outcomes
