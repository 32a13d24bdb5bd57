"""Layers that are computed tile by tile, so that their intermediate tensors exist for one tile of tokens at a time.

ALST (arXiv:2506.13996, section 3.1) does this for MLPs. For example, a row of 32,768 tokens has 8 tiles of 4,096, and
an MLP with 14,336 hidden features makes tensors [4096, 14336] instead of [32768, 14336].

In the forward, a tile is computed without a graph. In the backward it is computed again with a graph, its gradients are
computed, and its tensors are freed. Gradients of parameters are summed over the tiles in float32 or better, and rounded
once:

    forward    for each tile: outputs[tile] = function(inputs[tile])                         no graph
    backward   for each tile: outputs = function(inputs[tile])                               with a graph
                              input_grads[tile], parameter_grads += gradients of the tile

The parts of a layer before and after attention compute each token by itself, so they can be tiled. There are two
exceptions. A mixture of experts counts and sorts tokens, and linear attention has a convolution over neighbouring
tokens in its part before.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

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
"""Approximate number of tokens in a tile, over all rows and all ranks of sequence parallel."""


class TiledPart:
    """A part of a layer that is computed tile by tile. Rows that fit into one tile are computed as written.

    Under sequence parallel, a tile consists of the same positions of every rank's tokens, so that the collectives of
    the part work as they do with full rows.

    Args:
        function: The part, called as `function(hidden, adapters, *tensors)` with tensors [B, n, ...] or, under sequence
            parallel, [B, tp * n, ...].
        layer: The layer, whose parameters `function` reads.
    """

    def __init__(self, function: Callable[..., Any], layer: nn.Module):
        self.function, self.layer = function, layer

    def __call__(self, hidden: Tensor, adapters: AdapterContext | None, *others: Tensor) -> Any:
        """Compute `function(hidden, adapters, *others)` tile by tile. Each tile has the dropout of its own tokens.

        Args:
            hidden: This rank's hidden states, [B, n, D].
            adapters: The micro-batch's context of adapters.
            others: Further tensors, [B, n, ...], or under sequence parallel [B, tp * n, ...].

        Collectives:
            Those of `function`, once for each tile. Every rank has the same number of tiles.
        """
        inputs = (hidden, *others)
        num_rows, length = hidden.shape[:2]
        num_ranks = max(tensor.shape[1] for tensor in inputs) // length  # under sequence parallel
        num_tiles = -(-num_rows * num_ranks * length // TILE_TOKENS)
        if num_tiles <= 1:
            return self.function(hidden, adapters, *others)
        tile_length = -(-length // num_tiles)
        tiles = [slice(start, min(start + tile_length, length)) for start in range(0, length, tile_length)]
        run = _TiledRun(self, tiles, length, adapters, [tensor.requires_grad for tensor in inputs])
        if not torch.is_grad_enabled():
            return run.as_returned(run.outputs(inputs))
        saved_inputs = cast(tuple[Tensor, ...], _SaveInputs.apply(*inputs))
        save_node = None
        for tensor in saved_inputs:
            if tensor.grad_fn is not None:
                save_node = tensor.grad_fn  # the same for all of them
                break
        return run.as_returned(_Tiled.apply(run, save_node, *saved_inputs, *run.parameters))


class _TileGradients(NamedTuple):
    """Gradients of one tile.

    Attributes:
        inputs: Gradients of the inputs that need one.
        parameters: The tile's part of the gradients of the parameters.
    """

    inputs: tuple[Tensor | None, ...]
    parameters: tuple[Tensor | None, ...]


class _TiledRun:
    """A call of `TiledPart`: its tiles, and the gradients that it needs.

    Attributes:
        part: The tiled part.
        tiles: The tiles, as slices of this rank's tokens.
        length: This rank's tokens per row.
        adapters: The micro-batch's context of adapters.
        needs_grad: For each input, whether its gradient is needed.
        parameters: Trained parameters of the layer.
        returns_tuple: Whether the function returns a tuple of tensors. Known after the first tile.
    """

    def __init__(
        self, part: TiledPart, tiles: list[slice], length: int, adapters: AdapterContext | None, needs_grad: list[bool]
    ):
        self.part, self.tiles, self.length, self.adapters, self.needs_grad = part, tiles, length, adapters, needs_grad
        self.parameters = [parameter for parameter in part.layer.parameters() if parameter.requires_grad]
        self.returns_tuple = False

    def select(self, tensor: Tensor, tile: slice) -> Tensor:
        """Return a tile of a tensor.

        Args:
            tensor: [B, length, ...], or with the tokens of every rank [B, ranks * length, ...].
            tile: The tile.

        Returns:
            [B, tile, ...] or [B, ranks * tile, ...].
        """
        if tensor.shape[1] == self.length:
            return tensor[:, tile]
        return tensor.unflatten(1, (-1, self.length))[:, :, tile].flatten(1, 2)

    def write(self, full: Tensor, tile: slice, values: Tensor) -> None:
        """Write a tile of a tensor. The shapes are those of `select`."""
        values_by_rank = values.unflatten(1, (-1, tile.stop - tile.start))
        full.unflatten(1, (-1, self.length))[:, :, tile] = values_by_rank

    def adapters_of(self, tile: slice) -> AdapterContext | None:
        """Return the context of adapters for the tokens of a tile."""
        if self.adapters is None or self.adapters.dropout_tokens is None:
            return self.adapters
        return replace(self.adapters, dropout_tokens=self.select(self.adapters.dropout_tokens, tile))

    def compute(self, tensors: list[Tensor], tile: slice) -> tuple[Tensor, ...]:
        """Return the function's outputs for a tile, as a tuple."""
        hidden, *others = tensors
        output = self.part.function(hidden, self.adapters_of(tile), *others)
        self.returns_tuple = isinstance(output, tuple)
        return output if isinstance(output, tuple) else (output,)

    def as_returned(self, outputs: tuple[Tensor, ...]) -> Any:
        """Return outputs in the form in which the function returns them."""
        return outputs if self.returns_tuple else outputs[0]

    def outputs(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compute the outputs of all tiles, without a graph."""
        full_outputs: list[Tensor] = []
        for tile in uniform_iterations(self.tiles, inputs[0]):
            with storing_nothing():
                tile_outputs = self.compute([self.select(tensor, tile) for tensor in inputs], tile)
            if not full_outputs:
                for output in tile_outputs:
                    num_ranks = output.shape[1] // (tile.stop - tile.start)
                    full_shape = len(output), num_ranks * self.length, *output.shape[2:]
                    full_outputs.append(output.new_empty(full_shape))
            for full, output in zip(full_outputs, tile_outputs, strict=True):
                self.write(full, tile, output)
        return tuple(full_outputs)

    def gradients(self, tile: slice, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> _TileGradients:
        """Compute the gradients of one tile.

        Args:
            tile: The tile.
            inputs: The inputs of all tiles.
            grads: The gradients of all tiles' outputs.
        """
        tile_inputs = []
        for tensor, needs_grad in zip(inputs, self.needs_grad, strict=True):
            tile_inputs.append(self.select(tensor, tile).detach().requires_grad_(needs_grad))
        with torch.enable_grad():
            outputs = self.compute(tile_inputs, tile)
        roots, root_grads = [], []
        for output, grad in zip(outputs, grads, strict=True):
            if output.requires_grad:
                roots.append(output)
                root_grads.append(self.select(grad, tile))
        leaves = [tensor for tensor in tile_inputs if tensor.requires_grad]
        found = torch.autograd.grad(roots, [*leaves, *self.parameters], root_grads, allow_unused=True)
        return _TileGradients(inputs=found[: len(leaves)], parameters=found[len(leaves) :])


class _SaveInputs(torch.autograd.Function):
    """Saves the inputs of the tiles for their backward.

    A checkpoint around the layer stops its recomputation at the last tensor that the backward needs. As this function
    saves the inputs and `_Tiled` saves nothing, that tensor is one of the inputs, and no tile is computed in vain.
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
    """Computes the tiles without a graph in the forward, and again with a graph in the backward."""

    @staticmethod
    def forward(ctx: Any, run: _TiledRun, save_node: Any, *tensors: Tensor):
        inputs = tensors[: len(run.needs_grad)]
        ctx.run, ctx.save_node = run, save_node
        if save_node is None:  # no input has a graph, so `_SaveInputs` has saved nothing
            ctx.save_for_backward(*inputs)
        return run.outputs(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        run = ctx.run
        inputs = (ctx if ctx.save_node is None else ctx.save_node).saved_tensors
        input_grads: list[Tensor | None] = []
        for tensor, needs_grad in zip(inputs, run.needs_grad, strict=True):
            input_grads.append(torch.empty_like(tensor) if needs_grad else None)
        full_grads = [grad for grad in input_grads if grad is not None]
        parameter_sums = [_GradientSum() for _ in run.parameters]
        for tile in uniform_iterations(run.tiles, inputs[0]):
            # The tile's own backward is inside the context too, because it may recompute checkpointed parts.
            with storing_nothing():
                of_tile = run.gradients(tile, inputs, grads)
            for full, grad in zip(full_grads, of_tile.inputs, strict=True):
                if grad is None:
                    grad = torch.zeros_like(run.select(full, tile))
                run.write(full, tile, grad)
            for total, grad in zip(parameter_sums, of_tile.parameters, strict=True):
                total.add(grad)
            # Free the tile's gradients before the next tile is computed.
            del of_tile
        return None, None, *input_grads, *(total.rounded() for total in parameter_sums)


class _GradientSum:
    """Sum of a parameter's gradients over tiles, in float32 or better."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.first_grad_dtype = torch.float32
        self.to_placement: Callable[[Tensor], Tensor] = _keep_local

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
        self.first_grad_dtype = local.dtype
        self.total = local.to(torch.promote_types(local.dtype, torch.float32), copy=True)
        if isinstance(grad, DTensor):
            # `from_local` is called with the global shape, because a shard may be uneven.
            self.to_placement = partial(
                DTensor.from_local,
                device_mesh=grad.device_mesh,
                placements=grad.placements,
                run_check=False,
                shape=grad.shape,
                stride=grad.stride(),
            )

    def rounded(self) -> Tensor | None:
        """Return the sum in the gradients' dtype and placement, and free it. None if no tile read the parameter."""
        if self.total is None:
            return None
        total, self.total = self.total, None
        return self.to_placement(total.to(self.first_grad_dtype))


def _keep_local(local: Tensor) -> Tensor:
    return local


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
