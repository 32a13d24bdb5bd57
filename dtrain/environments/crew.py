"""Threads that do tasks side by side, each within a time: one that hangs is given up, and the others go on."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_LATE = 4  # tasks in a row; what is asked of may be down, and each would take its whole time


class Missed(Enum):
    """Why a task has no outcome: it took too long, or too many before it did."""

    LATE = "late"
    UNTRIED = "untried"


class Crew(Generic[T]):
    """`threads` threads, which live from call to call. timeout: seconds that a task may take.

    One thread does tasks one after another in their order, all calls' tasks, until it is given up and another takes its
    place. A thread that is given up does what hangs to its end, if there is one, and no more. Not for several threads
    at once.
    """

    def __init__(self, threads: int, timeout: float):
        self._threads, self._timeout = threads, timeout
        self._tasks: queue.SimpleQueue[tuple[int, Callable[[], T]]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, T]] = queue.SimpleQueue()
        self._members: list[_Member[T]] = []
        self._given_up: list[_Member[T]] = []

    @property
    def stuck(self) -> int:
        """Threads that were given up and have not ended."""
        self._given_up = [member for member in self._given_up if member.is_alive()]
        return len(self._given_up)

    def do(self, tasks: Sequence[Callable[[], T]]) -> Iterator[list[tuple[int, T | Missed]]]:
        """Places and outcomes of `tasks`, which raise nothing, as they come; each place once.

        After MOST_LATE or more tasks that took too long with none between them that did not, those that no thread has
        begun are not tried.
        """
        for place, task in enumerate(tasks):
            self._tasks.put((place, task))
        left, late_in_a_row = len(tasks), 0
        while left:
            while len(self._members) < min(self._threads, left):
                self._members.append(_Member(self._tasks, self._done))
            found: list[tuple[int, T | Missed]] = [*self._outcomes()]
            late = self._give_up_late()
            late_in_a_row = len(late) + (0 if found else late_in_a_row)
            found += [(place, Missed.LATE) for place in late]
            if late_in_a_row >= MOST_LATE:
                found += [(place, Missed.UNTRIED) for place, _ in _taken(self._tasks)]
            left -= len(found)
            if found:
                yield found

    def _outcomes(self) -> list[tuple[int, T]]:
        """Those that there are; where there is none, what comes before a task is late."""
        now = time.monotonic()
        first_due = min((since for member in self._members if (since := member.since) is not None), default=now)
        try:
            first = self._done.get(timeout=max(0.0, first_due + self._timeout - now))
        except queue.Empty:
            return []
        return [first, *_taken(self._done)]

    def _give_up_late(self) -> list[int]:
        """The places of tasks that take too long; their threads leave the crew."""
        late = {member: place for member in self._members if (place := member.give_up(self._timeout)) is not None}
        self._given_up += late
        self._members = [member for member in self._members if member not in late]
        return [*late.values()]


class _Member(threading.Thread, Generic[T]):
    """since: when its task began, None between tasks."""

    def __init__(self, tasks: "queue.SimpleQueue[tuple[int, Callable[[], T]]]", done: "queue.SimpleQueue"):
        super().__init__(daemon=True)
        self._tasks, self._done = tasks, done
        self._lock = threading.Lock()
        self._place, self.since = 0, None
        self._is_given_up = False
        self.start()

    def run(self) -> None:
        while True:
            self._place, task = self._tasks.get()
            self.since = time.monotonic()
            outcome = task()
            with self._lock:  # an outcome, or late: never both
                if self._is_given_up:
                    return
                self.since = None
                self._done.put((self._place, outcome))

    def give_up(self, timeout: float) -> int | None:
        """Leave this thread to its task where that takes longer; the task's place."""
        with self._lock:
            if self.since is None or time.monotonic() < self.since + timeout:
                return None
            self._is_given_up = True
            return self._place


def _taken(waiting: "queue.SimpleQueue[T]") -> list[T]:
    """What stands in a queue, taken out."""
    found = []
    while True:
        try:
            found.append(waiting.get_nowait())
        except queue.Empty:
            return found
