"""Layers computed over tiles of their tokens, so that what a token takes inside a layer is there for one tile at a time
(ALST, arXiv:2506.13996, section 3.1, which tiles the MLP).

A tile is computed without a graph in the forward, and again in the backward, where its gradients are taken and let go.
Gradients of parameters are added up over the tiles in float32 at least, and rounded once. What comes before attention
and what comes after it are functions of each token alone, but for a mixture of experts, which counts and sorts tokens:
it is not tiled, nor is linear attention before its convolution.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from dtrain.base.fused import rounds
from dtrain.memory.selective_checkpointing import TileComputing
from dtrain.models.common.decoder import Attention, CausalLM, Layer
from dtrain.parallel.placement import local_tensor

TOKENS = 4096  # of a tile, over all rows


class Tiles:
    """`function` of a layer, of tensors [B, n, ..] and, under sequence parallel, [B, tp · n, ..], over tiles of the n.

    layer: whose parameters it reads. A tile under sequence parallel is the same run of tokens of every rank, so that a
    rank enters and leaves blocks as it does with whole rows. computing: told while a tile is computed. Of rows within
    one tile it is `function`.
    """

    def __init__(self, function: Callable[..., Any], layer: nn.Module, model: CausalLM, computing: TileComputing):
        self.function, self.layer, self.model, self.computing = function, layer, model, computing

    def __call__(self, *tensors: Tensor) -> Any:
        """`function(*tensors)`. Its collectives are sent once for each tile; every rank has as many."""
        rows, length = tensors[0].shape[:2]
        ranks = max(tensor.shape[1] for tensor in tensors) // length
        count = -(-rows * ranks * length // TOKENS)
        if count <= 1:
            return self.function(*tensors)
        size = -(-length // count)
        tiles = [slice(start, min(start + size, length)) for start in range(0, length, size)]
        run = _Run(self, tiles, length, length * ranks, [tensor.requires_grad for tensor in tensors])
        if not torch.is_grad_enabled():
            return run.as_returned(run.outputs(tensors))
        kept = cast(tuple[Tensor, ...], _Keep.apply(*tensors))
        node = next((tensor.grad_fn for tensor in kept if tensor.grad_fn is not None), None)
        return run.as_returned(_Tiled.apply(run, node, *kept, *run.parameters))


class _Run:
    """Call of a function over `tiles` of `length` tokens; tokens: with those of other ranks of sequence parallel;
    needed: of each input, whether its gradient is."""

    def __init__(self, of: Tiles, tiles: list[slice], length: int, tokens: int, needed: list[bool]):
        self.of, self.tiles, self.length, self.tokens, self.needed = of, tiles, length, tokens, needed
        self.parameters = [parameter for parameter in of.layer.parameters() if parameter.requires_grad]
        self.returns_tuple = False

    def part(self, tensor: Tensor, tile: slice) -> Tensor:
        """The tile of `tensor` [B, length, ..], or [B, ranks · length, ..] of every rank: [B, (ranks ·) tile, ..]."""
        if tensor.shape[1] == self.length:
            return tensor[:, tile]
        return tensor.unflatten(1, (-1, self.length))[:, :, tile].flatten(1, 2)

    def put(self, whole: Tensor, part: Tensor, tile: slice) -> None:
        """Write `part` as the tile of `whole`, in the shapes of `part`."""
        parts = part.unflatten(1, (-1, tile.stop - tile.start))
        whole.unflatten(1, (-1, self.length))[:, :, tile] = parts

    @contextmanager
    def tile(self, tile: slice) -> Iterator[None]:
        """Inside, one tile is computed: adapters drop what they drop of it."""
        adapters, computing = self.of.model.adapters, self.of.computing
        numbers = None if adapters is None else adapters.tokens
        computing.now = True
        if adapters is not None and numbers is not None:  # sequence parallel has padded the rows
            adapters.tokens = self.part(F.pad(numbers, (0, self.tokens - numbers.shape[1])), tile)
        try:
            yield
        finally:
            computing.now = False
            if adapters is not None:
                adapters.tokens = numbers

    def compute(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        output = self.of.function(*tensors)
        self.returns_tuple = isinstance(output, tuple)
        return output if isinstance(output, tuple) else (output,)

    def as_returned(self, outputs: tuple[Tensor, ...]) -> Any:
        return outputs if self.returns_tuple else outputs[0]

    def outputs(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The outputs over all tiles, without a graph."""
        wholes: list[Tensor] = []
        for tile in rounds(self.tiles, tensors[0]):
            with self.tile(tile):
                parts = self.compute([self.part(tensor, tile) for tensor in tensors])
            if not wholes:
                for part in parts:
                    ranks = part.shape[1] // (tile.stop - tile.start)
                    wholes.append(part.new_empty(len(part), ranks * self.length, *part.shape[2:]))
            for whole, part in zip(wholes, parts, strict=True):
                self.put(whole, part, tile)
        return tuple(wholes)

    def gradients(self, tile: slice, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradients of a tile's inputs, of those that are needed, and its part of the parameters'."""
        parts = [self.part(tensor, tile).detach() for tensor in inputs]
        parts = [part.requires_grad_(need) for part, need in zip(parts, self.needed, strict=True)]
        with torch.enable_grad():
            outputs = self.compute(parts)
        pairs = [(out, self.part(grad, tile)) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        wanted = [*(part for part in parts if part.requires_grad), *self.parameters]
        return torch.autograd.grad([out for out, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True)


class _Keep(torch.autograd.Function):
    """Keeps tensors for the backward of what is computed after it. A checkpoint around a layer computes no further
    again than it has to, to the last tensor that is kept: so it computes no tile."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, ...]:
        return grads


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, node: Any, *tensors: Tensor):
        inputs = tensors[: len(run.needed)]
        ctx.run, ctx.node = run, node
        if node is None:
            ctx.save_for_backward(*inputs)
        return run.outputs(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        run = ctx.run
        inputs = (ctx if ctx.node is None else ctx.node).saved_tensors
        of_inputs = [
            torch.empty_like(tensor) if need else None for tensor, need in zip(inputs, run.needed, strict=True)
        ]
        of_parameters = [_Sum() for _ in run.parameters]
        for tile in rounds(run.tiles, inputs[0]):
            with run.tile(tile):  # its backward too, which may compute parts of it again
                parts = run.gradients(tile, inputs, grads)
            for whole, part in zip((whole for whole in of_inputs if whole is not None), parts, strict=False):
                run.put(whole, torch.zeros_like(run.part(whole, tile)) if part is None else part, tile)
            for total, part in zip(of_parameters, parts[sum(run.needed) :], strict=True):
                total.add(part)
            del parts
        return None, None, *of_inputs, *(total.rounded() for total in of_parameters)


class _Sum:
    """Sum of a parameter's gradients over tiles, in max(float32, its dtype)."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.dtype = torch.float32
        self.placed: Callable[[Tensor], Tensor] = lambda local: local

    def add(self, grad: Tensor | None) -> None:
        """Add a gradient, whose placement on the tp mesh is that of all; None: the parameter was not read."""
        if grad is None:
            return
        local = local_tensor(grad)
        if self.total is not None:
            self.total += local
            return
        self.dtype = local.dtype
        self.total = local.to(torch.promote_types(local.dtype, torch.float32), copy=True)
        if isinstance(grad, DTensor):
            mesh, placements, shape, stride = grad.device_mesh, grad.placements, grad.shape, grad.stride()
            self.placed = lambda local: DTensor.from_local(
                local, mesh, placements, run_check=False, shape=shape, stride=stride
            )

    def rounded(self) -> Tensor | None:
        """The sum in the parameter's dtype, placed as its parts were, in place of what was added up; None where it was
        not read."""
        total, self.total = self.total, None
        return None if total is None else self.placed(total.to(self.dtype))


def tile_layers(model: CausalLM, kind: str) -> TileComputing:
    """Compute what lies in the layers of `model` after attention over tiles, and with kind "all" what lies before it
    too, compiled where it is. No collective. Returns what says whether a tile is being computed."""
    computing = TileComputing()
    for layer in cast(list[Layer], model.model.layers):
        before, after = layer.regions or (layer.before, layer.after)
        if kind == "all" and isinstance(layer.mixer, Attention):
            before = Tiles(before, layer, model, computing)
        if not layer.is_sparse:
            after = Tiles(after, layer, model, computing)
        layer.regions = before, after
    return computing
