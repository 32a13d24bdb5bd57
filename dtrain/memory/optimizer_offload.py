"""Optimizer state in pinned host memory, which is copied to the device part by part for its update.

Copies run on two CUDA streams of their own, one in each direction, while the device computes with other parts. The
device has a ring of three buffers: the update computes with the first, the second is being filled, and the third is
being copied back. For example, while part 4 is updated, part 5 arrives and part 3 leaves:

    buffer 0    part 0 in    update    out    part 3 in    update    out
    buffer 1              part 1 in    update    out    part 4 in    update ...
    buffer 2                        part 2 in    update    out    part 5 in ...
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

State = dict[str, Tensor]

RING_BUFFERS = 3
"""Number of buffers on the device."""

_ALIGNMENT = 256
"""A tensor in a buffer begins at a multiple of this number of bytes."""


@dataclass
class _Buffer:
    """Buffer of the ring.

    Attributes:
        memory: Bytes on the device. None before the first use.
        arrived: Recorded after the contents were copied to the device.
        left: Recorded after the contents were copied back to the host.
    """

    memory: Tensor | None = None
    arrived: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    left: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class StateOffloader:
    """Copies tensors of pinned host memory to a CUDA device and back.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._in = torch.cuda.Stream(device)
        self._out = torch.cuda.Stream(device)
        self._ring = [_Buffer() for _ in range(RING_BUFFERS)]

    def for_each(self, parts: Sequence[State], update: Callable[[int, State], None]) -> None:
        """Call `update(index, copy)` for each part, and copy back what `update` has written.

        The host waits for all copies at the end, and nowhere else.

        Args:
            parts: Tensors in pinned host memory, by key.
            update: Receives a part's index and copies of its tensors on the device, which it may use until it returns.
        """
        main = torch.cuda.current_stream(self.device)
        self._allocate(_largest_part_size(parts))
        # Two parts are copied in before the first update. The third buffer stays free for the part that leaves.
        arriving = [self._copy_in(index, part) for index, part in enumerate(parts[: RING_BUFFERS - 1])]
        for index, part in enumerate(parts):
            buffer = self._ring[index % RING_BUFFERS]
            copies = arriving.pop(0)
            main.wait_event(buffer.arrived)
            update(index, copies)
            # Copy the results back as soon as the update has computed them.
            self._out.wait_stream(main)
            with torch.cuda.stream(self._out):
                for key, tensor in part.items():
                    tensor.copy_(copies[key], non_blocking=True)
                buffer.left.record(self._out)
            # Begin to fill the buffer of the part before this one. `_copy_in` waits until that part has left.
            next_index = index + RING_BUFFERS - 1
            if next_index < len(parts):
                arriving.append(self._copy_in(next_index, parts[next_index]))
        self._out.synchronize()

    def _allocate(self, size: int) -> None:
        """Give each buffer at least `size` bytes."""
        for buffer in self._ring:
            if buffer.memory is None or buffer.memory.numel() < size:
                # Allocated on the stream that fills the buffer, because torch's allocator orders the reuse of memory by
                # stream.
                with torch.cuda.stream(self._in):
                    buffer.memory = torch.empty(size, dtype=torch.uint8, device=self.device)

    def _copy_in(self, index: int, part: State) -> State:
        """Begin to copy a part into its buffer, as soon as the buffer's last contents have left."""
        buffer = self._ring[index % RING_BUFFERS]
        assert buffer.memory is not None
        copies: State = {}
        end = 0
        with torch.cuda.stream(self._in):
            self._in.wait_event(buffer.left)
            for key, tensor in part.items():
                region = buffer.memory[end : end + tensor.nbytes]
                copies[key] = region.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
                end += _aligned_bytes(tensor)
            buffer.arrived.record(self._in)
        return copies


def ring_bytes(parts: Iterable[State]) -> int:
    """Return the bytes on the device of the ring for `parts`."""
    return RING_BUFFERS * _largest_part_size(parts)


def _largest_part_size(parts: Iterable[State]) -> int:
    """Return the bytes of a buffer that has room for any of `parts`."""
    return max((_part_size(part) for part in parts), default=0)


def _part_size(part: State) -> int:
    """Return the bytes that a part takes in a buffer."""
    return sum(_aligned_bytes(tensor) for tensor in part.values())


def _aligned_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, rounded up to the alignment."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
