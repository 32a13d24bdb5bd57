"""The terminal: a progress bar where there is one, plain lines every so often where output is piped."""

import time
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Progress of a run on `stream`; without control characters unless the stream is a terminal."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._bar: tqdm | None = None
        self._first = self._total = 0
        self._started = self._last_line = 0.0

    def start(self, step: int, total_steps: int) -> None:
        """`step` steps of `total_steps` are done."""
        self._first, self._total = step, total_steps
        self._started = time.monotonic()
        self._last_line = float("-inf")
        if self._stream.isatty():
            self._bar = tqdm(total=total_steps, initial=step, unit="step", file=self._stream, dynamic_ncols=True)

    def update(self, row: Mapping[str, int | float]) -> None:
        """Step row["step"] is done."""
        step = row["step"]
        if self._bar is not None:
            self._bar.set_postfix_str(_summary(row), refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES or step == self._total:
            self._last_line = now
            left = (now - self._started) / max(1, step - self._first) * (self._total - step)
            self.say(f"step {step}/{self._total}  {_summary(row)}  {tqdm.format_interval(left)} left")

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _summary(row: Mapping[str, int | float]) -> str:
    shown = {
        "loss": lambda value: f"loss {value:.4f}",
        "reward_mean": lambda value: f"reward {value:.3f}",
        "grad_norm": lambda value: f"grad norm {value:.3g}",
        "lr": lambda value: f"lr {value:.2e}",
        "tokens_per_sec": lambda value: f"{tqdm.format_sizeof(value)} tokens/s",
        "mfu": lambda value: f"mfu {100 * value:.1f}%",
        "mem_gib": lambda value: f"{value:.1f} GiB",
    }
    return "  ".join(show(row[name]) for name, show in shown.items() if name in row)
