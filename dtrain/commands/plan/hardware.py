"""Devices of base/gpus.toml, and the estimate of a step's time by their numbers alone.

The estimate adds up:

- matrix products, at the share of the peak that they `reach`. Attention counts hidden pairs too, so a kernel that
  reaches 60% on a causal row is counted with 30% of the peak.
- all other operations, at `USABLE_BANDWIDTH` of the memory's bandwidth.
- messages: the time of their bytes, and of one hop for each rank of the ring. Messages of FSDP and of replicas, and
  activations that move to the host and back, overlap with all computing. Messages of cp overlap with the products
  before the wait for them. Messages of tp overlap with nothing.
- the optimizer's step, which takes at least as long as its state on the host needs to arrive. The way back overlaps.

Left out are the start of kernels, stragglers, other traffic, the input pipeline, saving, and a ring's overlap with
computing.

Against what torchtitan has published of its own runs of these shapes (docs/performance.md, benchmarks/), in tokens/s of
a GPU: Llama 3 8B on 64 A100 3,055 for its 2,904 to 2,973; 70B on 64 A100 324 for 323 to 331; 8B on 8 H100 with a memory
of 2.4 TB/s 7,039 for 6,667 compiled, 5,762 not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dtrain.base.hardware import BOARDS, find_board
from dtrain.commands.plan.step import Step
from dtrain.launch.devices import DeviceFacts
from dtrain.recipe import Sizes

USABLE_BANDWIDTH = 0.8  # of the memory's that elementwise kernels reach, and of the links' that large messages reach
HOP_SECONDS = {True: 1e-6, False: 5e-6}  # seconds from rank to rank of a ring, inside a node and between nodes
USABLE_MEMORY = 0.92  # of the memory: CUDA's context, NCCL's buffers and the allocator's gaps take the rest

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Hardware:
    """A device and its links, as base/gpus.toml explains them. arithmetic: by dtype of the operands, without the dtypes
    that it does not compute in; per_node: devices of a node."""

    name: str
    memory_gib: float
    arithmetic: dict[torch.dtype, float]
    bandwidth: float
    inside: float
    between: float
    host: float
    reach: float
    per_node: int = 8

    @property
    def budget(self) -> int:
        """The bytes that tensors may take."""
        return int(self.memory_gib * USABLE_MEMORY * 2**30)


def _hardware(board: Mapping[str, Any]) -> Hardware:
    rates = zip(_DTYPES, board["arithmetic"], strict=True)
    return Hardware(**{**board, "arithmetic": {dtype: rate for dtype, rate in rates if rate}})


GPUS = {key: _hardware(board) for key, board in BOARDS.items()}


def hardware_of(device: DeviceFacts) -> tuple[Hardware, tuple[str, ...]]:
    """Return the row of `GPUS` of a device at hand, and lines for the terminal. In place of one that is not there the
    first row stands in, with the device's name and memory, and without bfloat16 where the device has none."""
    board = find_board(device.name)
    if board is not None:
        return GPUS[board], ()
    first = next(iter(GPUS.values()))
    arithmetic = dict(first.arithmetic)
    if not device.has_bfloat16:
        del arithmetic[torch.bfloat16]
    hardware = replace(first, name=device.name, memory_gib=device.memory / 2**30, arithmetic=arithmetic)
    return hardware, (f"{device.name} is not in the table of GPUs: times are those of an {first.name}",)


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step. arithmetic: matrix products; memory: all other operations; optimizer: its step;
    hidden: sent beside the computing; exposed: sent after it; host: activations to host memory and back, beside the
    computing."""

    arithmetic: float
    memory: float
    optimizer: float
    hidden: float
    exposed: float
    host: float = 0.0

    @property
    def total(self) -> float:
        computing = self.arithmetic + self.memory
        return max(computing, self.hidden, self.host) + self.exposed + self.optimizer


def estimate_step(step: Step, sizes: Sizes, hardware: Hardware) -> StepTime:
    """Return the estimated time of `step` on every rank of `sizes`."""

    def products(flops: float, dtype: torch.dtype) -> float:
        return flops / (hardware.arithmetic.get(dtype, hardware.arithmetic[torch.float32]) * hardware.reach)

    arithmetic = sum(products(flops, dtype) for dtype, flops in step.flops.items())
    memory = step.bytes_moved / (hardware.bandwidth * USABLE_BANDWIDTH)
    touched = 2 * step.parameters + step.gradients + 2 * step.optimizer_state
    hidden = exposed = 0.0
    for collective, (count, size) in step.traffic.items():
        dimension, kind, ranks, on_host = collective
        seconds = 0.0 if on_host else wire_time(dimension, kind, ranks, count, size, sizes, hardware)
        beside = seconds
        if dimension not in ("fsdp", "dp_replicate"):
            computed = (
                products(flops, dtype) for (of, dtype), flops in step.overlapped_flops.items() if of == collective
            )
            beside = min(seconds, sum(computed))
        hidden, exposed = hidden + beside, exposed + seconds - beside
    copies = step.offloaded_bytes / (hardware.host * USABLE_BANDWIDTH)
    visits = step.host_optimizer_bytes / (hardware.host * USABLE_BANDWIDTH)  # to the device, and back at the same time
    optimizer = max(touched / (hardware.bandwidth * USABLE_BANDWIDTH), visits)
    return StepTime(arithmetic, memory, optimizer, hidden, exposed, copies)


def wire_time(
    dimension: str, kind: str, ranks: int, count: float, size: float, sizes: Sizes, hardware: Hardware
) -> float:
    """Return the seconds for `count` messages of `size` bytes in all, one after the other, by a ring's algorithm. They
    go by the node's links where the group lies in one node, else by the network cards of the group's ranks in a node
    together."""
    if ranks == 1:
        return 0.0
    share = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}.get(kind)
    sent = size if share is None else size * (share * (ranks - 1) / ranks)
    rounds = {"all-reduce": 2, "send": 0}.get(kind, 1)
    stride, group = _ranks_of(dimension, sizes)
    per_node, bandwidth = hardware.per_node, hardware.inside
    if stride * group > per_node:
        bandwidth = min(bandwidth, hardware.between * max(1, per_node // stride))
    between = min(ranks, max(1, ranks * stride // per_node)) if ranks * stride > per_node else 0
    seconds = (
        (rounds * (ranks - 1) or 1) * (HOP_SECONDS[False] * between + HOP_SECONDS[True] * (ranks - between)) / ranks
    )
    return sent / (bandwidth * USABLE_BANDWIDTH) + count * seconds


def _ranks_of(dimension: str, sizes: Sizes) -> tuple[int, int]:
    """Return the stride between the ranks of a group over `dimension`, and its size: tp's ranks are next to each other,
    then cp's."""
    strides = {
        "tp": (1, sizes.tp),
        "cp": (sizes.tp, sizes.cp),
        "ep": (sizes.tp, sizes.ep),
        "fsdp": (sizes.tp, sizes.dp_shard * sizes.cp),
        "dp_replicate": (sizes.tp * sizes.cp * sizes.dp_shard, sizes.dp_replicate),
    }
    return strides.get(dimension, (1, sizes.world_size))


def gib(size: float) -> str:
    if size < 2**13:
        return f"{size:,.0f} B"
    return f"{size / 2**30:,.2f} GiB" if size >= 2**27 else f"{size / 2**20:,.2f} MiB"


def seconds(time: float) -> str:
    return f"{time:,.2f} s" if time >= 0.1 or time == 0 else f"{time * 1e3:,.2f} ms"
