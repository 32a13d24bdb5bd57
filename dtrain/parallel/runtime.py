"""Facts of a rank about itself: its place in the world, its device, and whether it was asked to stop."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


class StopFlag:
    """Set by a signal handler, read by the trainer between steps. `signum` is 0 until a signal came.

    The other way round it tells of the main thread, for who watches whether it hangs: `progress`, to which the thread
    adds for each thing that it gets done, and `is_saving`, while it writes, which may take long.
    """

    def __init__(self) -> None:
        self.signum = self.progress = 0
        self.is_saving = False

    def request(self, signum: int) -> None:
        self.signum = signum

    @contextmanager
    def saving(self) -> Iterator[None]:
        before, self.is_saving = self.is_saving, True
        try:
            yield
        finally:
            self.is_saving = before


@dataclass(frozen=True)
class Runtime:
    """A rank of a run. Made by `launch`; packages below read it and never the environment.

    planned: where a plan is worked out beside the run, what it says of the peak (`words`, `size` in bytes), waited for
    so many seconds.
    collective_timeout: seconds, as of `launch.collective_timeout`; mesh.py knows what None means.
    chosen: lines on the sizes that the recipe left to `auto`; machine: what these were chosen for, on rank 0.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    stop: StopFlag = field(default_factory=StopFlag)
    planned: Callable[[float], Any] | None = None
    collective_timeout: float | None = None
    chosen: tuple[str, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        return self.rank == 0
