"""The GPUs of base/gpus.toml, and the estimate of a step's time from their data sheets.

The estimated time is the sum of

- matrix products, at the share of the peak that they `reach`. Attention counts masked pairs too, so a kernel that
  reaches 60% on a causal row is counted as reaching 30% of the peak.
- all other operations, at `USABLE_BANDWIDTH` of the memory's bandwidth.
- messages: the time of their bytes, and of one hop for each rank of the ring. Messages of FSDP and of replicas, and
  activations that move to the host and back, overlap with all computing. Messages of cp overlap with the products
  before the wait for them. Messages of tp overlap with nothing.
- the optimizer's step. If its state is on the host, the step takes at least as long as the transfer to the device. The
  transfer back overlaps.

Not included are the start of kernels, stragglers, other traffic, the input pipeline, saving, and a ring's overlap with
computing.

Comparison with torchtitan's published runs of these shapes (docs/performance.md, benchmarks/), in tokens/s per GPU:

    Llama 3 8B on 64 A100                             estimate 3,055    published 2,904 to 2,973
    Llama 3 70B on 64 A100                            estimate   324    published 323 to 331
    Llama 3 8B on 8 H100 with a memory of 2.4 TB/s    estimate 7,039    published 6,667 compiled, 5,762 not compiled
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dtrain.base.hardware import BOARDS, DeviceFacts, find_board
from dtrain.commands.plan.step import Step
from dtrain.recipe import Sizes

USABLE_BANDWIDTH = 0.8  # share of the bandwidth of memory and links that elementwise kernels and large messages reach
# Seconds from one rank of a ring to the next.
HOP_SECONDS_INSIDE_NODE = 1e-6
HOP_SECONDS_BETWEEN_NODES = 5e-6
USABLE_MEMORY = 0.92  # share of the memory that tensors can use: CUDA's context, NCCL and the allocator use the rest

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Hardware:
    """A device and its links, as base/gpus.toml describes them.

    Attributes:
        name: Name of the device.
        memory_gib: Memory in GiB.
        arithmetic: Peak FLOP/s by dtype of the operands. A dtype is missing if the device does not compute in it.
        bandwidth: Bandwidth of the memory in bytes/s.
        inside: Bandwidth to the other devices of the node in bytes/s, each way.
        between: Bandwidth of a device's network card in bytes/s, each way.
        host: Bandwidth to the host's memory in bytes/s, each way.
        reach: Share of the peak arithmetic that matrix products reach.
        per_node: Devices of a node.
    """

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
        """The bytes that tensors may use."""
        return int(self.memory_gib * USABLE_MEMORY * 2**30)


def _hardware(board: Mapping[str, Any]) -> Hardware:
    """Build the hardware of an entry of base/gpus.toml, where 0 stands for a dtype without arithmetic."""
    arithmetic = {}
    for dtype, rate in zip(_DTYPES, board["arithmetic"], strict=True):
        if rate:
            arithmetic[dtype] = rate
    return Hardware(**{**board, "arithmetic": arithmetic})


GPUS = {key: _hardware(board) for key, board in BOARDS.items()}


def hardware_of(device: DeviceFacts) -> tuple[Hardware, tuple[str, ...]]:
    """Return the entry of `GPUS` for a device of this machine, and lines for the terminal.

    A device that is not in the table gets the numbers of the first entry, with its own name and memory, and without
    bfloat16 if it does not support it.
    """
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
    """Estimated seconds of an optimizer step.

    Attributes:
        arithmetic: Matrix products and attention.
        memory: All other operations.
        optimizer: The optimizer's update.
        hidden: Communication during computing.
        exposed: Communication while nothing computes.
        host: Activations to host memory and back, during computing.
    """

    arithmetic: float
    memory: float
    optimizer: float
    hidden: float
    exposed: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """The time of the whole step."""
        computing = self.arithmetic + self.memory
        return max(computing, self.hidden, self.host) + self.exposed + self.optimizer


def estimate_step(step: Step, sizes: Sizes, hardware: Hardware) -> StepTime:
    """Estimate the time of a step.

    Args:
        step: The traced step of a rank.
        sizes: The mesh.
        hardware: The devices.
    """

    def product_seconds(flops: float, dtype: torch.dtype) -> float:
        rate = hardware.arithmetic.get(dtype, hardware.arithmetic[torch.float32])
        return flops / (rate * hardware.reach)

    arithmetic = sum(product_seconds(flops, dtype) for dtype, flops in step.flops.items())
    memory_bandwidth = hardware.bandwidth * USABLE_BANDWIDTH
    memory = step.bytes_moved / memory_bandwidth
    hidden = exposed = 0.0
    for collective, (count, size) in step.traffic.items():
        dimension, kind, ranks, on_host = collective
        seconds = 0.0 if on_host else wire_time(dimension, kind, ranks, count, size, sizes, hardware)
        if dimension in ("fsdp", "dp_replicate"):
            overlapped = seconds
        else:
            # Only the products between the start of the collective and the wait for it can hide it.
            computing = 0.0
            for (other, dtype), flops in step.overlapped_flops.items():
                if other == collective:
                    computing += product_seconds(flops, dtype)
            overlapped = min(seconds, computing)
        hidden += overlapped
        exposed = exposed + seconds - overlapped
    host_bandwidth = hardware.host * USABLE_BANDWIDTH
    offload = step.offloaded_bytes / host_bandwidth
    # The update reads parameters, gradients and state, and writes parameters and state.
    touched = 2 * step.parameters + step.gradients + 2 * step.optimizer_state
    # State on the host comes to the device, and goes back at the same time.
    optimizer = max(touched / memory_bandwidth, step.host_optimizer_bytes / host_bandwidth)
    return StepTime(arithmetic, memory, optimizer, hidden, exposed, offload)


def wire_time(
    dimension: str, kind: str, ranks: int, count: float, size: float, sizes: Sizes, hardware: Hardware
) -> float:
    """Return the seconds of messages that are sent one after the other by a ring algorithm.

    A group inside a node uses the node's links. Otherwise the ranks of the group in a node share their network cards.

    Args:
        dimension: Dimension of the mesh.
        kind: Kind of collective.
        ranks: Number of ranks of the group.
        count: Number of messages.
        size: Bytes of all messages together.
        sizes: The mesh.
        hardware: The devices.
    """
    if ranks == 1:
        return 0.0
    # In a ring, a rank sends (n-1)/n of the message, for an all-reduce twice. Other messages are sent as they are.
    num_rings = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}.get(kind)
    sent = size if num_rings is None else size * (num_rings * (ranks - 1) / ranks)
    num_hops = {"all-reduce": 2, "send": 0}.get(kind, 1) * (ranks - 1) or 1
    stride, group_size = _stride_and_size(dimension, sizes)
    per_node, bandwidth = hardware.per_node, hardware.inside
    if stride * group_size > per_node:
        ranks_in_node = max(1, per_node // stride)
        bandwidth = min(bandwidth, hardware.between * ranks_in_node)
    hops_between_nodes = 0
    if ranks * stride > per_node:
        hops_between_nodes = min(ranks, max(1, ranks * stride // per_node))
    hops_inside_node = ranks - hops_between_nodes
    ring_seconds = HOP_SECONDS_BETWEEN_NODES * hops_between_nodes + HOP_SECONDS_INSIDE_NODE * hops_inside_node
    return sent / (bandwidth * USABLE_BANDWIDTH) + count * (num_hops * ring_seconds / ranks)


def _stride_and_size(dimension: str, sizes: Sizes) -> tuple[int, int]:
    """Return the distance between neighbouring ranks of a group, and the group's size.

    The ranks of tp are next to each other, then those of cp. For example, with tp=2 and cp=2 the cp group of rank 0 has
    ranks 0 and 2, so its stride is 2.
    """
    strides = {
        "tp": (1, sizes.tp),
        "cp": (sizes.tp, sizes.cp),
        "ep": (sizes.tp, sizes.ep),
        "fsdp": (sizes.tp, sizes.dp_shard * sizes.cp),
        "dp_replicate": (sizes.tp * sizes.cp * sizes.dp_shard, sizes.dp_replicate),
    }
    return strides.get(dimension, (1, sizes.world_size))


def gib(size: float) -> str:
    """Format a number of bytes.

    Example:
        >>> gib(512), gib(3 * 2**20), gib(3 * 2**30)
        ('512 B', '3.00 MiB', '3.00 GiB')
    """
    if size < 2**13:
        return f"{size:,.0f} B"
    return f"{size / 2**30:,.2f} GiB" if size >= 2**27 else f"{size / 2**20:,.2f} MiB"


def seconds(time: float) -> str:
    """Format a time.

    Example:
        >>> seconds(1.5), seconds(0.0025)
        ('1.50 s', '2.50 ms')
    """
    return f"{time:,.2f} s" if time >= 0.1 or time == 0 else f"{time * 1e3:,.2f} ms"
