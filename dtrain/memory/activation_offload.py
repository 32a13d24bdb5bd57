"""Activations in host memory between forward and backward.

The tensors that a layer saves for the backward are copied to the host while later layers compute, and are copied back
while the backward of later layers computes. autograd's hooks of saved tensors see them. Under activation checkpointing
they are the layer's inputs. For example, in a model with 4 layers:

    forward of layer 1    its tensors begin to move to the host
    forward of layer 3    at its end layer 1's tensors are freed on the device: at most 2 layers are on their way
    forward of layer 4    its tensors stay on the device, because the backward needs them first
    backward of layer 4   layer 3's tensors begin to move back
    backward of layer 3   layer 2's tensors begin to move back

A storage moves as one piece, once, however many saved tensors are views of it. Parameters stay on the device, and so do
small storages and the tensors that a layer receives besides its hidden states, because other layers read them too.

On CUDA the copies run on two streams of their own, one in each direction. Before the memory of a copied storage is used
again, the computing stream waits for the copy.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dtrain.base.torch_functions import in_backward, storage_key
from dtrain.models.common.micro_batch import LayerContext
from dtrain.parallel.placement import local_tensor

MIN_OFFLOAD_BYTES = 2**14
"""Bytes; smaller storages stay on the device."""

MAX_COPYING_LAYERS = 2
"""Layers whose storages may be on their way to the host at a time."""


class HostMemory:
    """Host memory for the activations of a device, and the copies to it and back.

    This class is for a CPU, where a copy is done when the function returns. Buffers are used again.

    Attributes:
        bytes: Bytes of all buffers.
        copied: Bytes that were copied so far, in both directions.
        releases_buffers: Whether free buffers are released if a buffer of another size is needed.
    """

    releases_buffers = True

    def __init__(self) -> None:
        self.allocated_bytes = self.copied_bytes = 0
        self._free: dict[int, deque[Tensor]] = {}  # by size

    def can_offload(self, tensor: Tensor) -> bool:
        """Check whether a tensor is on the device, and not on the host already."""
        return True

    def send(self, flat: Tensor) -> Tensor:
        """Begin to copy bytes to the host.

        Args:
            flat: uint8 [n] on the device.

        Returns:
            The buffer, uint8, of n bytes or more.
        """
        buffer = self._get_buffer(flat.numel())
        self.copied_bytes += flat.numel()
        self.copy(buffer[: flat.numel()], flat)
        return buffer

    def fetch(self, buffer: Tensor, size: int, device: torch.device) -> Tensor:
        """Begin to copy bytes back to the device, and mark their buffer as free.

        Args:
            buffer: Buffer that `send` returned.
            size: Number of bytes.
            device: The device.

        Returns:
            uint8 [size] on the device.
        """
        self.copied_bytes += size
        flat = torch.empty(size, dtype=torch.uint8, device=device)
        self.copy(flat, buffer[:size])
        self.release(buffer)
        return flat

    def release(self, buffer: Tensor) -> None:
        """Mark a buffer as free. Copies from it that have begun end before others to it."""
        self._free.setdefault(buffer.numel(), deque()).append(buffer)

    def _get_buffer(self, size: int) -> Tensor:
        """Return a free or new buffer of `size` bytes or more."""
        size = self.buffer_size(size)
        free = self._free.get(size)
        if free:
            return free.pop()
        if self.releases_buffers:
            for others in self._free.values():
                while others:
                    self.allocated_bytes -= others.pop().numel()
        self.allocated_bytes += size
        return self.allocate(size)

    def buffer_size(self, size: int) -> int:
        """Return the size of a buffer for `size` bytes."""
        return size

    def allocate(self, size: int) -> Tensor:
        """Allocate a buffer, uint8 [size]."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy bytes [n], after everything that was computed and copied so far."""
        to.copy_(source)

    def record(self, *, outward: bool) -> Any:
        """Return a mark after the copies that have begun so far.

        Args:
            outward: Whether the copies are those to the host, or those to the device.
        """

    def wait(self, mark: Any) -> None:
        """Make everything that is computed from now on wait for a mark."""


class PinnedMemory(HostMemory):
    """Pinned host memory of a CUDA device, whose copies run while the device computes.

    Args:
        device: The device.
    """

    releases_buffers = False  # torch's allocator would keep released pinned memory

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def can_offload(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def buffer_size(self, size: int) -> int:
        """Override `HostMemory.taken`: torch rounds the size of pinned memory up to a power of two."""
        return 1 << (size - 1).bit_length()

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")

    def copy(self, to: Tensor, source: Tensor) -> None:
        stream, other = (self._in, self._out) if to.is_cuda else (self._out, self._in)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        stream.wait_stream(other)  # it may still write or read the buffer
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def record(self, *, outward: bool) -> torch.cuda.Event:
        return (self._out if outward else self._in).record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)


class _Kept:
    """A storage that a layer has saved.

    Attributes:
        layer: The layer's pass.
        device: Device of the storage.
        size: Its bytes.
        flat: Its bytes on the device, uint8 [size]; None while they are on the host.
        buffer: Its bytes on the host; None while they are on the device.
    """

    buffer: Tensor | None = None

    def __init__(self, flat: Tensor, layer: "_LayerPass"):
        self.layer, self.device, self.size = layer, flat.device, flat.numel()
        self.flat: Tensor | None = flat if layer.is_last else None
        if not layer.is_last:
            self.buffer = layer.memory.send(flat)

    def fetch(self) -> None:
        """Begin to copy the storage back, if it is on the host."""
        if self.buffer is not None:
            self.flat = self.layer.memory.fetch(self.buffer, self.size, self.device)
            self.buffer = None

    def __del__(self) -> None:
        if self.buffer is not None:
            self.layer.memory.release(self.buffer)
        # Once this object is gone, the allocator gives its memory to other tensors. They must wait for the copy to it.
        self.layer.arrive()


class _LayerPass:
    """Saved storages of one forward of a layer.

    Args:
        layer: The layer.
        memory: The host memory.
        before: The same forward's pass of the layer before; None for the first.
        stay: Keys of the storages that stay on the device (`storage_key`).
        is_last: Whether it is the last layer, whose storages all stay.

    Attributes:
        leaving: Storages that are being copied to the host.
    """

    def __init__(
        self, layer: nn.Module, memory: HostMemory, before: "_LayerPass | None", stay: set[int], is_last: bool
    ):
        self.memory, self.before, self.is_last = memory, before, is_last
        self.leaving: list[Tensor] = []
        self._layer: nn.Module | None = layer  # until the keys of its parameters are read
        self._stay = stay
        self._kept: dict[tuple[int, int], weakref.ref[_Kept]] = {}  # by storage key and version
        self._arrival: Any = None
        self._is_fetched = False

    def pack(self, tensor: Tensor) -> Any:
        """Return a stand-in for autograd to store: the tensor itself, or the argument of `_unpack`."""
        if type(tensor) is not Tensor or not self.memory.can_offload(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if self._layer is not None:
            # Read at the first saved tensor, because FSDP has gathered the parameters by then.
            self._stay |= {storage_key(local_tensor(parameter)) for parameter in self._layer.parameters()}
            self._layer = None
        if (
            storage_key(tensor) in self._stay
            or storage.nbytes() < MIN_OFFLOAD_BYTES
            or storage.nbytes() % tensor.itemsize
        ):
            return tensor
        key = storage_key(tensor), tensor._version
        kept = self._kept[key]() if key in self._kept else None
        if kept is None:
            with torch.no_grad():
                whole = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
                kept = _Kept(whole.view(torch.uint8), self)
            self._kept[key] = weakref.ref(kept)
            self.leaving.append(whole)  # while it is referenced, no other storage can have its key
        return kept, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def fetch(self) -> None:
        """Begin to copy the layer's storages back. Does nothing from the second call on."""
        if self._is_fetched or self.is_last:
            return
        for reference in self._kept.values():
            kept = reference()
            if kept is not None:
                kept.fetch()
        self._arrival = self.memory.record(outward=False)
        self._is_fetched = True

    def arrive(self) -> None:
        """Make everything that is computed from now on wait for the fetched storages."""
        if self._arrival is not None:
            self.memory.wait(self._arrival)
            self._arrival = None


def _unpack(packed: Any) -> Tensor:
    """Return the tensor of which autograd stored `packed`, and begin to fetch the storages of the layer before."""
    if isinstance(packed, Tensor):
        return packed
    kept, dtype, shape, stride, offset = packed
    with torch.no_grad():
        kept.layer.fetch()
        kept.layer.arrive()
        if kept.layer.before is not None:
            kept.layer.before.fetch()
        return kept.flat.view(dtype).as_strided(shape, stride, offset)


class ActivationOffloader:
    """Hooks of a model's layers that move their saved tensors to the host and back. No collective.

    They must be attached after activation checkpointing, so that its hooks are inside these.

    Args:
        layers: The layers, in the order of their forwards.
        memory: The host memory.
    """

    def __init__(self, layers: Sequence[nn.Module], memory: HostMemory):
        self.memory = memory
        self._hooks: Any = None
        self._pass: _LayerPass | None = None
        self._leaving: deque[tuple[Any, list[Tensor]]] = deque()  # of each layer: a mark after its copies, its storages
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._entered(index, index + 1 == len(layers)), prepend=True)
            layer.register_forward_hook(self._left, always_call=True)

    def _entered(self, index: int, is_last: bool) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """Return the hook before the forward of the layer at `index`."""

        def enter(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            # The tensors that a recomputed layer saves are needed at once.
            if in_backward():
                return
            if index == 0:
                self._free_copied(0)  # an error may have ended the last forward
            if not torch.is_grad_enabled():
                return
            stay = {storage_key(tensor) for tensor in _shared_tensors(inputs)}
            self._pass = _LayerPass(layer, self.memory, self._pass if index else None, stay, is_last)
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pass.pack, _unpack)
            self._hooks.__enter__()

        return enter

    def _left(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Hook after the forward of a layer, also if it raises an error."""
        if self._hooks is None or self._pass is None or in_backward():
            return
        self._hooks.__exit__()
        self._hooks = None
        self._leaving.append((self.memory.record(outward=True), self._pass.leaving))
        self._free_copied(0 if self._pass.is_last else MAX_COPYING_LAYERS)

    def _free_copied(self, num_layers: int) -> None:
        """Free the device's memory of copied storages, except those of the last `num_layers` layers."""
        while len(self._leaving) > num_layers:
            mark, storages = self._leaving.popleft()
            self.memory.wait(mark)
            storages.clear()


def _shared_tensors(inputs: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors that a layer is called with besides its hidden states, which other layers read too."""
    tensors = []
    for argument in inputs[1:]:
        values = argument.shared_values() if isinstance(argument, LayerContext) else argument
        tensors += [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return tensors
