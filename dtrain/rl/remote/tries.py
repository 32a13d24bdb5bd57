"""`Tries`: failed tries of one call to servers, and the growing pauses between them."""

import math
import threading
import time
from dataclasses import dataclass, field

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 15.0  # seconds between tries, doubled each time


@dataclass
class Tries:
    """Failed tries of one call, by url. `until` bounds it; `stop` is set where it is not wanted any more."""

    until: float
    stop: threading.Event
    errors: dict[str, list[str]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return max(0.1, self.until - time.monotonic())

    def count(self, url: str) -> int:
        return len(self.errors.get(url, []))

    def note(self, url: str, error: object) -> None:
        self.errors.setdefault(url, []).append(str(error))

    def wait(self, url: str, most: float = math.inf) -> bool:
        """Wait before the next try at `url`; False where there is none: `most` have failed, no time is left, or it is
        not wanted any more."""
        pause = pause_after(self.count(url))
        if self.count(url) >= most or self.stop.is_set() or time.monotonic() + pause > self.until:
            return False
        self.stop.wait(pause)
        return True

    def summary(self) -> str:
        lines = [f"{url}: {len(errors)} tries, the last: {errors[-1]}" for url, errors in self.errors.items()]
        return "; ".join(lines) or "none could be asked"


def pause_after(count: int) -> float:
    """Return the seconds before the next try after `count` failures."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (count - 1))
