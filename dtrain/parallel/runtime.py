"""Facts of a rank about itself: its place in the world, its device, and whether it was asked to stop."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


class StopFlag:
    """Set by a signal handler, read by the trainer between steps. `signum` is 0 until a signal came."""

    def __init__(self) -> None:
        self.signum = 0

    def request(self, signum: int) -> None:
        self.signum = signum


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
