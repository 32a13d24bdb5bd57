"""Activations in host memory between forward and backward.

The tensors that a layer saves for the backward are copied to the host while later layers compute, and are copied back
while the backward of later layers computes. autograd's hooks of saved tensors see these tensors. Under activation
checkpointing they are the layer's inputs. For example, in a model with 4 layers:

    forward of layer 1    its tensors begin to move to the host
    forward of layer 3    at its end layer 1's tensors are freed on the device: at most 2 layers are being copied
    forward of layer 4    its tensors stay on the device, because the backward needs them first
    backward of layer 4   layer 3's tensors begin to move back
    backward of layer 3   layer 2's tensors begin to move back

A storage is moved as one piece and once, even if several saved tensors are views of it. Parameters stay on the device,
and so do small storages and the tensors that a layer shares with other layers (its arguments after the hidden states).

On CUDA the copies run on two streams of their own, one in each direction. Before the memory of a copied storage is used
again, the computing stream waits for the copy.

    ActivationOffloader   hooks around the forward of each layer
    _LayerPass            the saved storages of one forward of a layer
    _SavedStorage         one storage, on the device or on the host
    HostMemory            host buffers and copies on a CPU. PinnedMemory on CUDA
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dtrain.base.torch_functions import in_backward, storage_key
from dtrain.models.common.micro_batch import LayerContext
from dtrain.parallel.placement import local_tensor

MIN_OFFLOAD_BYTES = 2**14
"""Smaller storages stay on the device."""

MAX_COPYING_LAYERS = 2
"""Number of layers whose storages may be being copied to the host at the same time."""


class HostMemory:
    """Host memory for the activations of a device, and the copies to it and back.

    This class is for a CPU, where a copy is complete when the function returns. Buffers are reused.

    Attributes:
        allocated_bytes: Bytes of all buffers.
        copied_bytes: Bytes copied so far, in both directions.
        releases_buffers: Whether free buffers are released if a buffer of another size is needed.
    """

    releases_buffers = True

    def __init__(self) -> None:
        self.allocated_bytes = self.copied_bytes = 0
        self._free: dict[int, deque[Tensor]] = {}  # free buffers by size

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
        """Mark a buffer as free. Copies from it that have begun will end before new copies to it begin."""
        self._free.setdefault(buffer.numel(), deque()).append(buffer)

    def _get_buffer(self, size: int) -> Tensor:
        """Return a free or new buffer of `size` bytes or more."""
        size = self.buffer_size(size)
        free = self._free.get(size)
        if free:
            return free.pop()
        if self.releases_buffers:
            for free_buffers in self._free.values():
                while free_buffers:
                    self.allocated_bytes -= free_buffers.pop().numel()
        self.allocated_bytes += size
        return self.allocate(size)

    def buffer_size(self, size: int) -> int:
        """Return the size of a buffer for `size` bytes."""
        return size

    def allocate(self, size: int) -> Tensor:
        """Allocate a buffer, uint8 [size]."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy bytes [n], after everything that has been computed and copied so far."""
        to.copy_(source)

    def record(self, *, outward: bool) -> Any:
        """Return an event after the copies in one direction that have begun so far.

        Args:
            outward: True for copies to the host, False for copies to the device.
        """

    def wait(self, event: Any) -> None:
        """Make all later computations wait for an event."""


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
        """Override `HostMemory.can_offload`."""
        return tensor.is_cuda

    def buffer_size(self, size: int) -> int:
        """Override `HostMemory.buffer_size`: torch rounds the size of pinned memory up to a power of two."""
        return 1 << (size - 1).bit_length()

    def allocate(self, size: int) -> Tensor:
        """Override `HostMemory.allocate`."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Override `HostMemory.copy`: begin the copy on the stream of its direction."""
        stream, other = (self._in, self._out) if to.is_cuda else (self._out, self._in)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        stream.wait_stream(other)  # it may still write or read the buffer
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def record(self, *, outward: bool) -> torch.cuda.Event:
        """Override `HostMemory.record`."""
        stream = self._out if outward else self._in
        return stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        """Override `HostMemory.wait`."""
        torch.cuda.current_stream(self.device).wait_event(event)


class _SavedStorage:
    """A storage that a layer has saved for its backward.

    Attributes:
        layer_pass: The forward of the layer.
        device: Device of the storage.
        size: Its bytes.
        device_bytes: Its contents on the device, uint8 [size]. None while they are on the host.
        host_buffer: Its contents on the host. None while they are on the device.
    """

    host_buffer: Tensor | None = None

    def __init__(self, device_bytes: Tensor, layer_pass: "_LayerPass"):
        self.layer_pass, self.device, self.size = layer_pass, device_bytes.device, device_bytes.numel()
        self.device_bytes: Tensor | None = device_bytes if layer_pass.is_last else None
        if not layer_pass.is_last:
            self.host_buffer = layer_pass.memory.send(device_bytes)

    def fetch(self) -> None:
        """Begin to copy the storage back, if it is on the host."""
        if self.host_buffer is not None:
            self.device_bytes = self.layer_pass.memory.fetch(self.host_buffer, self.size, self.device)
            self.host_buffer = None

    def __del__(self) -> None:
        if self.host_buffer is not None:
            self.layer_pass.memory.release(self.host_buffer)
        # Once this object is gone, the allocator gives its memory to other tensors. They must wait for the copy to it.
        self.layer_pass.wait_for_arrival()


class _LayerPass:
    """Saved storages of one forward of a layer.

    Args:
        layer: The layer.
        memory: The host memory.
        previous: The pass of the layer before in the same forward. None for the first layer.
        stay: Keys of the storages that stay on the device (`storage_key`).
        is_last: Whether it is the last layer, whose storages all stay.

    Attributes:
        leaving: Storages that are being copied to the host.
    """

    def __init__(
        self, layer: nn.Module, memory: HostMemory, previous: "_LayerPass | None", stay: set[int], is_last: bool
    ):
        self.memory, self.previous, self.is_last = memory, previous, is_last
        self.leaving: list[Tensor] = []
        self._layer: nn.Module | None = layer  # until the keys of its parameters are read
        self._stay = stay
        # By storage key and version. Only autograd keeps a storage alive, so that it is freed with the graph.
        self._saved: dict[tuple[int, int], weakref.ref[_SavedStorage]] = {}
        self._arrival: Any = None
        self._is_fetched = False

    def pack(self, tensor: Tensor) -> Any:
        """Pack a saved tensor for autograd: the tensor itself, or a `_PackedTensor`."""
        if type(tensor) is not Tensor or not self.memory.can_offload(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if self._layer is not None:
            # Read at the first saved tensor, because FSDP has gathered the parameters by then.
            self._stay |= {storage_key(local_tensor(parameter)) for parameter in self._layer.parameters()}
            self._layer = None
        num_bytes = storage.nbytes()
        is_divisible = num_bytes % tensor.itemsize == 0
        if storage_key(tensor) in self._stay or num_bytes < MIN_OFFLOAD_BYTES or not is_divisible:
            return tensor
        key = storage_key(tensor), tensor._version
        saved = self._saved[key]() if key in self._saved else None
        if saved is None:
            with torch.no_grad():
                full = tensor.detach().as_strided((num_bytes // tensor.itemsize,), (1,), 0)
                saved = _SavedStorage(full.view(torch.uint8), self)
            self._saved[key] = weakref.ref(saved)
            self.leaving.append(full)  # while it is referenced, no other storage can have its key
        return _PackedTensor(saved, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())

    def fetch(self) -> None:
        """Begin to copy the layer's storages back. Does nothing from the second call on."""
        if self._is_fetched or self.is_last:
            return
        for reference in self._saved.values():
            saved = reference()
            if saved is not None:
                saved.fetch()
        self._arrival = self.memory.record(outward=False)
        self._is_fetched = True

    def wait_for_arrival(self) -> None:
        """Make all later computations wait for the fetched storages."""
        if self._arrival is not None:
            self.memory.wait(self._arrival)
            self._arrival = None


class _PackedTensor(NamedTuple):
    """A saved tensor: its storage, and its view of the storage."""

    saved: _SavedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def _unpack(packed: Tensor | _PackedTensor) -> Tensor:
    """Return the saved tensor that `_LayerPass.pack` has packed.

    Also begins to fetch the storages of the layer before, whose backward comes next.
    """
    if isinstance(packed, Tensor):
        return packed
    layer_pass = packed.saved.layer_pass
    with torch.no_grad():
        layer_pass.fetch()
        layer_pass.wait_for_arrival()
        if layer_pass.previous is not None:
            layer_pass.previous.fetch()
        device_bytes = packed.saved.device_bytes
        assert device_bytes is not None
        return device_bytes.view(packed.dtype).as_strided(packed.shape, packed.stride, packed.offset)


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
        # For each layer whose storages are being copied to the host: an event after the copies, and the storages.
        self._leaving: deque[tuple[Any, list[Tensor]]] = deque()
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._make_enter_hook(index, index + 1 == len(layers)), prepend=True)
            layer.register_forward_hook(self._leave, always_call=True)

    def _make_enter_hook(self, index: int, is_last: bool) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """Return the hook before the forward of the layer at `index`."""

        def enter(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            # A recomputed layer saves tensors that are needed at once.
            if in_backward():
                return
            if index == 0:
                self._free_copied(0)  # an error may have ended the last forward
            if not torch.is_grad_enabled():
                return
            stay = {storage_key(tensor) for tensor in _shared_tensors(inputs)}
            previous = self._pass if index > 0 else None
            self._pass = _LayerPass(layer, self.memory, previous, stay, is_last)
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pass.pack, _unpack)
            self._hooks.__enter__()

        return enter

    def _leave(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
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
            event, storages = self._leaving.popleft()
            self.memory.wait(event)
            storages.clear()


def _shared_tensors(inputs: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors in a layer's arguments after the hidden states, which other layers read too."""
    tensors = []
    for argument in inputs[1:]:
        values = argument.shared_values() if isinstance(argument, LayerContext) else argument
        tensors += [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return tensors
