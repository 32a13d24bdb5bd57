"""Layers that are computed tile by tile, so that their intermediate tensors exist for one tile of tokens at a time.

ALST (arXiv:2506.13996, section 3.1) does this for MLPs. For example, a row of 32,768 tokens has 8 tiles of 4,096, and
an MLP with 14,336 hidden features makes tensors [4096, 14336] in place of [32768, 14336].

A tile is computed without a graph in the forward, and again in the backward, where its gradients are computed and its
tensors are freed. Gradients of parameters are added up over the tiles in float32 or better, and rounded once.

The part of a layer before attention and the part after it compute each token by itself, so they can be tiled. There are
two exceptions. A mixture of experts counts and sorts tokens, and linear attention has a convolution over neighbouring
tokens in its part before.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from dtrain.base.fused import uniform_iterations
from dtrain.memory.activation_checkpointing import storing_nothing
from dtrain.models.common.decoder import Attention, CausalLM, Layer
from dtrain.models.common.micro_batch import AdapterContext
from dtrain.parallel.placement import local_tensor

TILE_TOKENS = 4096
"""Tokens of a tile, about, over all rows and all ranks of sequence parallel."""


class TiledPart:
    """A part of a layer that is computed tile by tile. Rows within one tile are computed as written.

    Under sequence parallel, a tile consists of the same positions of every rank's tokens, so that the collectives of
    the part work as they do with full rows.

    Args:
        function: The part, called as `function(hidden, adapters, *tensors)` with tensors [B, n, ..] and, under
            sequence parallel, [B, tp * n, ..].
        layer: The layer, whose parameters `function` reads.
    """

    def __init__(self, function: Callable[..., Any], layer: nn.Module):
        self.function, self.layer = function, layer

    def __call__(self, hidden: Tensor, adapters: AdapterContext | None, *others: Tensor) -> Any:
        """Return `function(hidden, adapters, *others)`. Each tile has the dropout of its own tokens.

        Collectives:
            Those of `function`, once for each tile. Every rank has the same number of tiles.
        """
        tensors = (hidden, *others)
        rows, length = hidden.shape[:2]
        ranks = max(tensor.shape[1] for tensor in tensors) // length
        count = -(-rows * ranks * length // TILE_TOKENS)
        if count <= 1:
            return self.function(hidden, adapters, *others)
        size = -(-length // count)
        tiles = [slice(start, min(start + size, length)) for start in range(0, length, size)]
        run = _Run(self, tiles, length, adapters, [tensor.requires_grad for tensor in tensors])
        if not torch.is_grad_enabled():
            return run.as_returned(run.outputs(tensors))
        kept = cast(tuple[Tensor, ...], _Keep.apply(*tensors))
        node = next((tensor.grad_fn for tensor in kept if tensor.grad_fn is not None), None)
        return run.as_returned(_Tiled.apply(run, node, *kept, *run.parameters))


class _Run:
    """A call of `Tiles`: its tiles, and the gradients that it needs.

    Attributes:
        of: The tiled part.
        tiles: The tiles, as slices of this rank's tokens.
        length: This rank's tokens per row.
        adapters: The micro-batch's context of adapters.
        needed: For each input, whether its gradient is needed.
        parameters: Trained parameters of the layer.
        returns_tuple: Whether the function returns a tuple of tensors; known after the first tile.
    """

    def __init__(
        self, of: TiledPart, tiles: list[slice], length: int, adapters: AdapterContext | None, needed: list[bool]
    ):
        self.of, self.tiles, self.length, self.adapters, self.needed = of, tiles, length, adapters, needed
        self.parameters = [parameter for parameter in of.layer.parameters() if parameter.requires_grad]
        self.returns_tuple = False

    def part(self, tensor: Tensor, tile: slice) -> Tensor:
        """Return a tile of a tensor.

        Args:
            tensor: [B, length, ..], or with the tokens of every rank [B, ranks * length, ..].
            tile: The tile.

        Returns:
            [B, tile, ..] or [B, ranks * tile, ..].
        """
        if tensor.shape[1] == self.length:
            return tensor[:, tile]
        return tensor.unflatten(1, (-1, self.length))[:, :, tile].flatten(1, 2)

    def put(self, whole: Tensor, part: Tensor, tile: slice) -> None:
        """Write a tile of a tensor, with the shapes of `part`."""
        parts = part.unflatten(1, (-1, tile.stop - tile.start))
        whole.unflatten(1, (-1, self.length))[:, :, tile] = parts

    def adapters_of(self, tile: slice) -> AdapterContext | None:
        """Return the context of adapters for the tokens of a tile."""
        if self.adapters is None or self.adapters.dropout_tokens is None:
            return self.adapters
        return replace(self.adapters, dropout_tokens=self.part(self.adapters.dropout_tokens, tile))

    def compute(self, tensors: list[Tensor], tile: slice) -> tuple[Tensor, ...]:
        """Return the function's outputs for a tile, as a tuple."""
        hidden, *others = tensors
        output = self.of.function(hidden, self.adapters_of(tile), *others)
        self.returns_tuple = isinstance(output, tuple)
        return output if isinstance(output, tuple) else (output,)

    def as_returned(self, outputs: tuple[Tensor, ...]) -> Any:
        """Return outputs in the form in which the function returns them."""
        return outputs if self.returns_tuple else outputs[0]

    def outputs(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the outputs of all tiles, without a graph."""
        wholes: list[Tensor] = []
        for tile in uniform_iterations(self.tiles, tensors[0]):
            with storing_nothing():
                parts = self.compute([self.part(tensor, tile) for tensor in tensors], tile)
            if not wholes:
                for part in parts:
                    ranks = part.shape[1] // (tile.stop - tile.start)
                    wholes.append(part.new_empty(len(part), ranks * self.length, *part.shape[2:]))
            for whole, part in zip(wholes, parts, strict=True):
                self.put(whole, part, tile)
        return tuple(wholes)

    def gradients(self, tile: slice, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Return the gradients of one tile.

        Args:
            tile: The tile.
            inputs: The inputs of all tiles.
            grads: The gradients of all tiles' outputs.

        Returns:
            The gradients of the tile's inputs that need one, then the tile's share of the parameters' gradients.
        """
        parts = [self.part(tensor, tile).detach() for tensor in inputs]
        parts = [part.requires_grad_(need) for part, need in zip(parts, self.needed, strict=True)]
        with torch.enable_grad():
            outputs = self.compute(parts, tile)
        pairs = [(out, self.part(grad, tile)) for out, grad in zip(outputs, grads, strict=True) if out.requires_grad]
        wanted = [*(part for part in parts if part.requires_grad), *self.parameters]
        return torch.autograd.grad([out for out, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True)


class _Keep(torch.autograd.Function):
    """Saves the inputs of the tiles for their backward.

    A checkpoint around the layer stops its recomputation at the last tensor that the backward needs. This is one of the
    inputs, so no tile is computed in vain.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, ...]:
        return grads


class _Tiled(torch.autograd.Function):
    """Tiles without a graph in the forward. The backward computes each again with a graph."""

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
        for tile in uniform_iterations(run.tiles, inputs[0]):
            # The tile's own backward is inside the context too, because it may recompute checkpointed parts.
            with storing_nothing():
                parts = run.gradients(tile, inputs, grads)
            for whole, part in zip((whole for whole in of_inputs if whole is not None), parts, strict=False):
                run.put(whole, torch.zeros_like(run.part(whole, tile)) if part is None else part, tile)
            for total, part in zip(of_parameters, parts[sum(run.needed) :], strict=True):
                total.add(part)
            del parts
        return None, None, *of_inputs, *(total.rounded() for total in of_parameters)


class _Sum:
    """Sum of a parameter's gradients over tiles, in float32 or better."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.dtype = torch.float32
        self.placed: Callable[[Tensor], Tensor] = lambda local: local

    def add(self, grad: Tensor | None) -> None:
        """Add the gradient of a tile. None: the tile did not read the parameter.

        All gradients of a parameter have the same placement on the tp mesh.
        """
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
        """Return the sum in the gradients' dtype and placement, and free it. None if no tile read the parameter."""
        total, self.total = self.total, None
        return None if total is None else self.placed(total.to(self.dtype))


def tile_layers(model: CausalLM, kind: str) -> None:
    """Compute the layers of a model in tiles. No collective.

    Args:
        model: The model. Parts that are compiled stay compiled, inside the tiles.
        kind: "mlp" for the part of a layer after attention, "all" for the part before attention too.
    """
    for layer in cast(list[Layer], model.model.layers):
        before, after = layer.regions or (layer.before_attention, layer.after_attention)
        if kind == "all" and isinstance(layer.mixer, Attention):
            before = TiledPart(before, layer)
        if not layer.is_sparse:
            after = TiledPart(after, layer)
        layer.regions = before, after
