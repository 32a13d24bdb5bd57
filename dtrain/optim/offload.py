"""Optimizer state in pinned host memory, whose parts are copied to the device for their step.

Copies run on two streams of their own, in and out, beside the arithmetic of other parts. The device holds a ring of
buffers of it: one that is computed with, the next on its way in, the last on its way out.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

State = dict[str, Tensor]

RING = 3
_ALIGNED = 256  # bytes


@dataclass
class _Buffer:
    """Buffer of the ring. arrived, left: its contents are on the device, and back on the host."""

    memory: Tensor | None = None
    arrived: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    left: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class StateOffloader:
    """Copier of tensors of pinned host memory to `device`, of type cuda, and back."""

    def __init__(self, device: torch.device):
        self.device = device
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._ring = [_Buffer() for _ in range(RING)]

    def through(self, parts: Sequence[State]) -> Iterator[State]:
        """Yield each of `parts`, tensors [..] on the host, as tensors on the device for the time of one iteration; the
        values that these have at its end go back to the host's. At the end the host has waited for all of it."""
        main, size = torch.cuda.current_stream(self.device), largest(parts)
        for buffer in self._ring:
            if buffer.memory is None or buffer.memory.numel() < size:
                with torch.cuda.stream(self._in):
                    buffer.memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        brought = [self._bring(index, part) for index, part in enumerate(parts[: RING - 1])]
        for index, part in enumerate(parts):
            buffer, there = self._ring[index % RING], brought.pop(0)
            main.wait_event(buffer.arrived)
            yield there
            self._out.wait_stream(main)
            with torch.cuda.stream(self._out):
                for key, tensor in part.items():
                    tensor.copy_(there[key], non_blocking=True)
                buffer.left.record(self._out)
            if index + RING - 1 < len(parts):
                brought.append(self._bring(index + RING - 1, parts[index + RING - 1]))
        self._out.synchronize()

    def _bring(self, index: int, part: State) -> State:
        buffer, there, end = self._ring[index % RING], {}, 0
        assert buffer.memory is not None
        with torch.cuda.stream(self._in):
            self._in.wait_event(buffer.left)
            for key, tensor in part.items():
                region = buffer.memory[end : end + tensor.nbytes]
                there[key] = region.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
                end += _aligned_size(tensor)
            buffer.arrived.record(self._in)
        return there


def largest(parts: Iterable[State]) -> int:
    """Return the bytes of a buffer that holds the tensors [..] of any of `parts`; the device has `RING` of them."""
    return max((sum(map(_aligned_size, part.values())) for part in parts), default=0)


def _aligned_size(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED
