"""The card that a pretend world has: how many, which model, how much memory. Loads no torch."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Card:
    """memory: bytes; an allocation beyond them fails as CUDA's does. hollow: what it holds is counted and never
    touched: kernels give memory of the right shape, the host reads ones. kernels: what torch is built for. refusal: the
    driver's, at the start of CUDA."""

    devices: int | None = None  # None: as many as the world has ranks
    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    memory: int = 80 * GIB
    hollow: bool = False
    uuid: str | None = None  # None: one of its own
    kernels: tuple[str, ...] = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
    refusal: str | None = None
