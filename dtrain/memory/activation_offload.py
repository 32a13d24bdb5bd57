"""Activations in host memory: what layers keep for the backward goes there beside the forward, and comes back ahead of
it.

Autograd's hooks of saved tensors around each layer see what it keeps: under activation checkpointing its inputs.
Storages move whole, each once however many tensors are views of it. Parameters stay, small storages, and what a layer
is handed beside its hidden states, for other layers read it too; so does what the last layer keeps, which is wanted
first.

On CUDA the copies have two streams of their own, out and in. A storage on its way out is let go of when later layers
are done; what computes waits for the copy there, so that the memory is free to it. When the backward comes to a layer,
what the layer before it keeps is fetched.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dtrain.base.torch_functions import in_backward
from dtrain.models.common.micro_batch import LayerContext
from dtrain.parallel.placement import local_tensor

SMALL = 2**14  # bytes of a storage that stays
ON_THEIR_WAY = 2  # layers whose storages may be on their way out


class HostMemory:
    """Buffers of host memory, and the copies to them and back, of a device whose copies the host waits for. bytes: of
    all buffers; copied: out and back so far; is_given_back: free buffers make room for those of other sizes."""

    is_given_back = True

    def __init__(self) -> None:
        self.bytes = self.copied = 0
        self._free: dict[int, deque[Tensor]] = {}  # by size

    def moves(self, tensor: Tensor) -> bool:
        """Return whether `tensor` [..] lies on the device."""
        return True

    def send(self, flat: Tensor) -> Tensor:
        """Return a buffer that the bytes `flat` [n], uint8 on the device, are on their way to."""
        buffer = self._take(flat.numel())
        self.copied += flat.numel()
        self.copy(buffer[: flat.numel()], flat)
        return buffer

    def fetch(self, buffer: Tensor, size: int, device: torch.device) -> Tensor:
        """Return memory of `device`, [size] uint8, that the bytes of `buffer` are on their way to; it is free then."""
        self.copied += size
        flat = torch.empty(size, dtype=torch.uint8, device=device)
        self.copy(flat, buffer[:size])
        self.give(buffer)
        return flat

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back, for other bytes."""
        self._free.setdefault(buffer.numel(), deque()).append(buffer)

    def _take(self, size: int) -> Tensor:
        size = self.taken(size)
        if free := self._free.get(size):
            return free.pop()
        if self.is_given_back:
            for others in self._free.values():
                while others:
                    self.bytes -= others.pop().numel()
        self.bytes += size
        return self.new(size)

    def taken(self, size: int) -> int:
        """Return the size of the buffer for `size` bytes."""
        return size

    def new(self, size: int) -> Tensor:
        """Return a new buffer [size] uint8."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy bytes [n], behind what has been computed and copied so far."""
        to.copy_(source)

    def mark(self, *, outward: bool) -> Any:
        """Return a mark behind what has been copied so far, out or in."""

    def wait_for(self, mark: Any) -> None:
        """Let what is computed from now on begin behind a mark."""


class PinnedMemory(HostMemory):
    """Pinned memory, and copies beside what computes on `device`, of type cuda. torch keeps what is given back."""

    is_given_back = False

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def moves(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def taken(self, size: int) -> int:
        """Override `HostMemory.taken`: torch rounds pinned memory up to a power of two."""
        return 1 << (size - 1).bit_length()

    def new(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")

    def copy(self, to: Tensor, source: Tensor) -> None:
        stream, other = (self._in, self._out) if to.is_cuda else (self._out, self._in)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        stream.wait_stream(other)  # which wrote the buffer, or reads it yet
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)

    def mark(self, *, outward: bool) -> torch.cuda.Event:
        return (self._out if outward else self._in).record_event()

    def wait_for(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)


class _Kept:
    """A storage that a layer keeps: on the host until the layer's are fetched, or all the time on the device."""

    buffer: Tensor | None = None

    def __init__(self, flat: Tensor, layer: "_LayerPass"):
        self.layer, self.device, self.size = layer, flat.device, flat.numel()
        self.flat: Tensor | None = flat if layer.is_last else None
        if not layer.is_last:
            self.buffer = layer.memory.send(flat)

    def fetch(self) -> None:
        if self.buffer is not None:
            self.flat, self.buffer = self.layer.memory.fetch(self.buffer, self.size, self.device), None

    def __del__(self) -> None:
        if self.buffer is not None:
            self.layer.memory.give(self.buffer)
        self.layer.arrive()  # its memory is free to what computes, once it is nobody's


class _LayerPass:
    """A layer in one forward. before: the layer before it in the same. stay: the storages that do not move."""

    def __init__(
        self, layer: nn.Module, memory: HostMemory, before: "_LayerPass | None", stay: set[int], is_last: bool
    ):
        self.memory, self.before, self.is_last = memory, before, is_last
        self.leaving: list[Tensor] = []  # storages on their way out
        self._layer: nn.Module | None = layer
        self._stay = stay
        self._kept: dict[tuple[int, int], weakref.ref[_Kept]] = {}  # by storage and version
        self._arrival: Any = None
        self._is_fetched = False

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps of a tensor [..]: itself, or what `_unpack` takes."""
        if type(tensor) is not Tensor or not self.memory.moves(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if self._layer is not None:  # now, for FSDP has gathered them
            self._stay |= {storage_key(local_tensor(parameter)) for parameter in self._layer.parameters()}
            self._layer = None
        if storage_key(tensor) in self._stay or storage.nbytes() < SMALL or storage.nbytes() % tensor.itemsize:
            return tensor
        key = storage_key(tensor), tensor._version
        kept = self._kept[key]() if key in self._kept else None
        if kept is None:
            with torch.no_grad():
                whole = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
                kept = _Kept(whole.view(torch.uint8), self)
            self._kept[key] = weakref.ref(kept)
            self.leaving.append(whole)  # held, so that no other storage has its key
        return kept, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def fetch(self) -> None:
        """Fetch what is kept, once."""
        if self._is_fetched or self.is_last:
            return
        for reference in self._kept.values():
            if (kept := reference()) is not None:
                kept.fetch()
        self._arrival, self._is_fetched = self.memory.mark(outward=False), True

    def arrive(self) -> None:
        """Let what is computed from now on begin behind what was fetched."""
        if self._arrival is not None:
            self.memory.wait_for(self._arrival)
            self._arrival = None


def _unpack(packed: Any) -> Tensor:
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
    """Hooks of `layers`, in the order of their forwards, by which what they keep moves to `memory` and back. Attached
    after activation checkpointing, whose hooks lie within. No collective."""

    def __init__(self, layers: Sequence[nn.Module], memory: HostMemory):
        self.memory = memory
        self._hooks: Any = None
        self._pass: _LayerPass | None = None
        self._leaving: deque[tuple[Any, list[Tensor]]] = deque()
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._entered(index, index + 1 == len(layers)), prepend=True)
            layer.register_forward_hook(self._left, always_call=True)

    def _entered(self, index: int, is_last: bool) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def enter(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            # A layer that is computed again keeps what the backward wants at once.
            if in_backward():
                return
            if index == 0:
                self._let_go(0)  # of a forward that an error ended, too
            if not torch.is_grad_enabled():
                return
            stay = {storage_key(tensor) for tensor in _shared_tensors(inputs)}
            self._pass = _LayerPass(layer, self.memory, self._pass if index else None, stay, is_last)
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pass.pack, _unpack)
            self._hooks.__enter__()

        return enter

    def _left(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if self._hooks is None or self._pass is None or in_backward():
            return
        self._hooks.__exit__()
        self._hooks = None
        self._leaving.append((self.memory.mark(outward=True), self._pass.leaving))
        self._let_go(0 if self._pass.is_last else ON_THEIR_WAY)

    def _let_go(self, most: int) -> None:
        """Let go of storages that are out, or wait until they are, but for the `most` last layers'."""
        while len(self._leaving) > most:
            mark, storages = self._leaving.popleft()
            self.memory.wait_for(mark)
            storages.clear()


def _shared_tensors(inputs: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors that a layer is called with besides its hidden states, which other layers read too."""
    tensors = []
    for argument in inputs[1:]:
        values = argument.shared_values() if isinstance(argument, LayerContext) else argument
        tensors += [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return tensors


def storage_key(tensor: Tensor) -> int:
    """Return what tells the storage of `tensor` [...] from all others that live."""
    return tensor.untyped_storage()._cdata
