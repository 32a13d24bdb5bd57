"""Tensor- and sequence-parallel styles: the sharding of a module's parameters over tp, and the module's collectives.

A style makes parameters DTensors on the tp mesh, also those that are replicated. Modules read them through
`LocalParameters.local` and compute with plain tensors. Where a style changes a forward, the module's own forward
checks its attribute `tp`. `Block`, `Stack`, `VocabEmbedding` and the heads do.

Example: an MLP with hidden size D = 8 and inner size 16 over tp = 2. The gate and up projections are `colwise`, and
down is `rowwise`:

    block        all ranks have the hidden states [B, S, 8]     backward: all-reduce of their gradient
    gate, up     weight [16, 8], rank 0 has rows 0 to 7         [B, S, 8]: half of the inner activations
    down         weight [8, 16], rank 0 has columns 0 to 7      [B, S, 8]: a partial sum of the output
                 forward: all-reduce of the partial sums        [B, S, 8], complete

Between the blocks, activations are replicated over tp. Under sequence parallel they are sharded along the sequence
instead, [B, S/tp, D], with S padded to a multiple of tp in the decoder. An all-gather then enters the block, and a
reduce-scatter leaves it. Both ways send the same bytes: per layer two all-reduces in the forward and two in the
backward, or two all-gathers and two reduce-scatters in each (Korthikanti et al., arXiv:2205.05198, section 4.2.2).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dtrain.parallel.collectives import (
    all_gather,
    all_reduce_in_backward,
    all_reduce_in_forward,
    gather_along,
    reduce_scatter_along,
)
from dtrain.parallel.placement import chunk_bounds, make_dtensor
from dtrain.parallel.size_checks import ModelSizes

SEQUENCE = 1  # the dimension of [B, S, D] that sequence parallel shards


@dataclass(frozen=True)
class LocalView:
    """The view through which a module reads a parameter that is a DTensor on the tp mesh.

    Attributes:
        grad_placement: Placement of the local gradient over tp. Partial: the ranks' gradients are summed. None: the
            parameter is not on the tp mesh.
        select: Selects the part of the local shard that the module computes with. None: all of it.
        is_expert: Whether the parameter is also sharded over ep, the mesh dimension before tp.
    """

    grad_placement: Placement | None
    select: Callable[[Tensor], Tensor] | None = None
    is_expert: bool = False

    def __call__(self, parameter: DTensor) -> Tensor:
        """Return the plain tensor with which the module computes."""
        grad_placements: list[Placement] = []
        if self.is_expert:
            grad_placements.append(Shard(0))
        if self.grad_placement is not None:
            grad_placements.append(self.grad_placement)
        # A parameter that FSDP has not gathered has one mesh dimension more.
        if parameter.device_mesh.ndim != len(grad_placements):
            raise RuntimeError(
                "a tensor-parallel module was used outside the forward of its FSDP root, where its weights are shards: "
                "call the model, or a method registered with register_fsdp_forward_method"
            )
        local = parameter.to_local(grad_placements=grad_placements)
        return local if self.select is None else self.select(local)


class LocalParameters(nn.Module):
    """Base of modules that read their parameters by `local(name)`, so that a style can shard them.

    Attributes:
        keeps_full_precision: Whether the parameters are stored in float32 at least, and used in that dtype.
        local_views: View of each parameter to which a style was applied. Other parameters are read as they are. The
            dict is replaced on the instance, and never modified.
    """

    keeps_full_precision = False
    local_views: dict[str, LocalView] = {}

    def reset_parameters(self) -> None:
        """Do nothing. Modules are built on the meta device, and `init_weights` or a file fills the parameters."""

    def local(self, name: str) -> Tensor:
        """Return the plain tensor with which this rank computes. No collective in the forward.

        Args:
            name: Name of a parameter, for example "weight" with the shape [out, in].

        Returns:
            The parameter itself, or its view, for example [out/tp, in] in a column-parallel layer.
        """
        parameter = getattr(self, name)
        view = self.local_views.get(name)
        return parameter if view is None else view(parameter)

    def with_weight(self, fn: Callable[[Tensor, Tensor], Any], hidden: Tensor) -> Any:
        """Return `fn(hidden, local("weight"))`. Losses read the head's weight in this way.

        If the module is an FSDP unit, this is one of its registered forward methods, so the weight is gathered.
        """
        return fn(hidden, self.local("weight"))


def full_precision_modules(model: nn.Module) -> dict[str, LocalParameters]:
    """Return the modules of `model` with `keeps_full_precision`, by name."""
    modules = {}
    for name, module in model.named_modules():
        if isinstance(module, LocalParameters) and module.keeps_full_precision:
            modules[name] = module
    return modules


@dataclass
class TensorParallel:
    """The tensor-parallel ranks, as a style and the modules of a model see them.

    Attributes:
        mesh: The tp ranks, one dimension.
        sequence_parallel: Whether activations between blocks are sharded along the sequence. Switched off for a while
            by `without_sequence_parallel`.
        key_heads: Key heads of layers that do not have a number of their own.
    """

    mesh: DeviceMesh
    sequence_parallel: bool
    key_heads: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """Index of this rank."""
        return self.mesh.get_local_rank()

    @property
    def group(self) -> Any:
        """The process group."""
        return self.mesh.get_group()

    def local_start(self, length: int) -> int:
        """Return the index at which this rank's shard of `length` elements starts."""
        return chunk_bounds(length, self.size, self.rank)[0]

    def enter(self, hidden: Tensor) -> Tensor:
        """Enter a block: return the full hidden states, whose gradients are summed over tp.

        Args:
            hidden: [B, S, D], or [B, S/tp, D] under sequence parallel.

        Returns:
            [B, S, D].
        """
        if self.sequence_parallel:
            return gather_along(hidden, SEQUENCE, self.group)
        return all_reduce_in_backward(hidden, self.group)

    def leave(self, partial: Tensor) -> Tensor:
        """Leave a block: sum the ranks' partial results.

        Args:
            partial: [B, S, D].

        Returns:
            [B, S, D], or [B, S/tp, D] under sequence parallel.
        """
        if self.sequence_parallel:
            return reduce_scatter_along(partial, SEQUENCE, self.group)
        return all_reduce_in_forward(partial, self.group)


class Block(nn.Module):
    """Base of attention and MLP blocks, whose forward begins with `enter`, once for all projections.

    `enter` is a call and not a hook. Activation checkpointing therefore stores the sharded input [B, S/tp, D], and the
    backward gathers it again.

    Attributes:
        tp: The tensor-parallel ranks, set by the style `block`.
    """

    tp: TensorParallel | None = None

    def enter(self, hidden: Tensor) -> Tensor:
        """Return `TensorParallel.enter(hidden)`, or `hidden` [B, S, D] itself without tensor parallel."""
        return hidden if self.tp is None else self.tp.enter(hidden)


class VocabEmbedding(LocalParameters, nn.Embedding):
    """Embedding whose rows are sharded over tp.

    Each rank looks up the tokens of its own rows and uses zeros for the others, so the sum over ranks is the embedding.

    Attributes:
        tp: The tensor-parallel ranks, set by the style `vocab_embedding`.
    """

    tp: TensorParallel | None = None

    def forward(self, ids: Tensor) -> Tensor:
        """Embed ids, int64 [B, S], to [B, S, D], or to [B, S/tp, D] under sequence parallel."""
        weight = self.local("weight")
        if self.tp is None:
            return F.embedding(ids, weight, self.padding_idx)
        start, end = chunk_bounds(self.num_embeddings, self.tp.size, self.tp.rank)
        is_local = (ids >= start) & (ids < end)
        if weight.shape[0] == 0:
            # torch cannot look up in an empty table. All tokens belong to other ranks, so any row will do. Adding the
            # sum of the empty weight, 0, keeps the weight in the graph.
            weight = weight.new_zeros(1, self.embedding_dim) + weight.sum()
        rows = F.embedding(torch.where(is_local, ids - start, 0), weight)
        if self.padding_idx is not None:
            # As in F.embedding, the padding token's row gets no gradient.
            rows = torch.where((ids == self.padding_idx)[..., None], rows.detach(), rows)
        return self.tp.leave(torch.where(is_local[..., None], rows, 0))


class VocabHead(LocalParameters, nn.Linear):
    """Output layer whose rows, one per token of the vocabulary, are sharded over tp.

    dtrain's own models have no bias here. Those of transformers may have one.

    Attributes:
        tp: The tensor-parallel ranks, set by the style `vocab_head`.
    """

    tp: TensorParallel | None = None

    def with_weight(self, fn: Callable[[Tensor, Tensor], Any], hidden: Tensor) -> Any:
        """Override `LocalParameters.with_weight`.

        A bias becomes a further column of the weight, and the hidden states get a further element 1, so losses need to
        know nothing of it.
        """
        weight = self.local("weight")
        if self.bias is not None:
            weight = torch.cat([weight, self.local("bias")[:, None]], dim=1)
            hidden = torch.cat([hidden, hidden.new_ones((*hidden.shape[:-1], 1))], dim=-1)
        return fn(hidden, weight)

    @property
    def vocab_start(self) -> int | None:
        """First token id of this rank's shard. None if the head is not sharded."""
        return None if self.tp is None else chunk_bounds(self.out_features, self.tp.size, self.tp.rank)[0]

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] of hidden states [..., D]. No collective.

        Under tensor parallel the result is a DTensor that is sharded over V.
        """
        bias = None if self.bias is None else self.local("bias")
        logits = F.linear(hidden, self.local("weight"), bias)
        if self.tp is None:
            return logits
        shape = torch.Size((*logits.shape[:-1], self.out_features))
        stride = tuple(shape[dim + 1 :].numel() for dim in range(len(shape)))
        vocab_dim = Shard(len(shape) - 1)
        return DTensor.from_local(logits, self.tp.mesh, [vocab_dim], run_check=False, shape=shape, stride=stride)


class ScoreHead(LocalParameters, nn.Linear):
    """Output layer of a classifier, [labels, D], whose columns are sharded over tp. No bias.

    Attributes:
        tp: The tensor-parallel ranks, set by the style `score_head`.
        vocab_start: Always None, because it has no vocabulary (see `VocabHead`).
    """

    tp: TensorParallel | None = None
    vocab_start: int | None = None

    def product(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Multiply hidden states by a weight.

        Args:
            hidden: [..., D], the same on every tp rank.
            weight: This rank's columns, [labels, D/tp].

        Returns:
            [..., labels], complete on every tp rank.

        Collectives:
            Under tensor parallel one all-reduce.
        """
        if self.tp is None:
            return F.linear(hidden, weight)
        start, end = chunk_bounds(self.in_features, self.tp.size, self.tp.rank)
        return all_reduce_in_forward(F.linear(hidden[..., start:end], weight), self.tp.group)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute outputs [..., labels] of hidden states [..., D]. Under tensor parallel one all-reduce."""
        return self.product(hidden, self.local("weight"))


class RowContext(Protocol):
    """The part of a micro-batch's context that `Stack` needs (`models.common.micro_batch.MicroBatchContext`)."""

    @property
    def cache(self) -> Any:
        """KV cache. None in training."""
        ...

    def padded(self, num_tokens: int, missing: int) -> Self:
        """Return the context of rows of `num_tokens` with `missing` more tokens of padding at their ends."""
        ...


class Stack(nn.Module):
    """Base of decoders: the embedding and the layers.

    A family implements `states` for one process. `forward` adds what tensor parallel needs around it.

    Attributes:
        layers: Decoder layers.
        vision_layers: Layers of a vision tower, if the model has one.
        tp: The tensor-parallel ranks, set by the style `decoder`.
    """

    layers: nn.ModuleList
    vision_layers: Iterable[nn.Module] = ()
    tp: TensorParallel | None = None

    def states(self, input_ids: Tensor, context: Any) -> Tensor:
        """Compute hidden states for one process.

        Args:
            input_ids: Token ids, [B, S].
            context: The context of the micro-batch.

        Returns:
            [B, S, D], or [B, S/tp, D] under sequence parallel.
        """
        raise NotImplementedError

    def forward(self, input_ids: Tensor, context: RowContext) -> Tensor:
        """Compute hidden states.

        Args:
            input_ids: Token ids, [B, S].
            context: The context of the micro-batch.

        Returns:
            [B, S, D], complete on every tp rank.

        Raises:
            ValueError: If there is a KV cache under sequence parallel.

        Collectives:
            Those of `states`. Under tensor parallel also one all-reduce of the gradient in the backward, or under
            sequence parallel one all-gather in the forward and one reduce-scatter in the backward.
        """
        tp = self.tp
        num_tokens = input_ids.shape[1]
        if tp is None:
            return self.states(input_ids, context)
        if not tp.sequence_parallel:
            return all_reduce_in_backward(self.states(input_ids, context), tp.group)
        if context.cache is not None:
            raise ValueError(
                "a KV cache cannot be used with sequence parallel. Call the model inside "
                "`without_sequence_parallel(model)`"
            )
        # Sequence parallel needs a multiple of tp. Context parallel divides the padded sequence into two halves, so the
        # length must be even, too.
        missing = -num_tokens % math.lcm(2, tp.size)
        if missing:
            input_ids = F.pad(input_ids, (0, missing))
        hidden = self.states(input_ids, context.padded(num_tokens, missing))  # [B, (S + missing)/tp, D]
        return gather_along(hidden, SEQUENCE, tp.group)[:, :num_tokens]


class ParallelModel(nn.Module):
    """The interface of a model to this package.

    Attributes:
        plan: Tensor-parallel plan: pattern of module names to name of a style.
        config: Sizes of the model.
        model: Decoder.
        head: Output layer.
    """

    plan: Mapping[str, str]
    config: ModelSizes
    model: Stack

    @property
    def head(self) -> "VocabHead | ScoreHead":
        raise NotImplementedError


Style = Callable[[Any, TensorParallel], None]


@dataclass(frozen=True)
class AdapterStyle:
    """A style for linear layers that also shards the parameters of their adapters.

    `apply.apply_plan` refuses other functions on a layer with an adapter, whose matrices they do not know.

    Attributes:
        function: Shards a layer, for example by `colwise`.
    """

    function: Style

    def __call__(self, module: Any, tp: TensorParallel) -> None:
        """Shard a layer."""
        self.function(module, tp)


# Parameters of a linear layer with one row per output, and those with one column per input. `weight_codes` and
# `weight_scales` are a weight in NF4, and `lora_..` belong to an adapter.
_WEIGHT = ("weight", "weight_codes", "weight_scales")
_PER_OUTPUT = (*_WEIGHT, "bias", "lora_B", "lora_magnitude")
_PER_INPUT = (*_WEIGHT, "lora_A")


def colwise(module: LocalParameters, tp: TensorParallel, dim: int = 0) -> None:
    """Shard the outputs of a linear layer whose input has entered its block.

    An adapter's A is replicated. Each rank uses A's result only for its own outputs, so A's gradients are summed.

    Args:
        module: The layer.
        tp: The tensor-parallel ranks.
        dim: Dimension of the outputs in the weight.
    """
    distribute_parameters(module, tp, _PER_OUTPUT, Shard(dim))
    distribute_parameters(module, tp, ["lora_A"], Replicate(), grad=Partial())


def colwise_kv(module: LocalParameters, tp: TensorParallel) -> None:
    """Shard a projection to keys or values by heads.

    If there are fewer heads than ranks, the weight is replicated, and each rank computes the head that its queries
    read. Gradients are summed. For example, with 2 key heads over tp = 4, ranks 0 and 1 compute head 0, and ranks 2 and
    3 compute head 1.

    The number of heads is the layer's `key_heads`, or that of the model.
    """
    num_heads: int = getattr(module, "key_heads", None) or tp.key_heads
    if num_heads % tp.size == 0:
        return colwise(module, tp)
    local_head = tp.rank // (tp.size // num_heads)

    def select_head(full: Tensor) -> Tensor:
        head_size = full.shape[0] // num_heads
        return full[local_head * head_size : (local_head + 1) * head_size]

    distribute_parameters(module, tp, _PER_OUTPUT, Replicate(), grad=Partial(), select=select_head)
    distribute_parameters(module, tp, ["lora_A"], Replicate(), grad=Partial())


def rowwise(module: LocalParameters, tp: TensorParallel) -> None:
    """Shard the inputs of a linear layer, and sum its partial outputs, which leave the block."""
    rowwise_within(module, tp)
    module.register_forward_hook(lambda module, inputs, output: tp.leave(output))


def rowwise_within(module: LocalParameters, tp: TensorParallel, dim: int = 1) -> None:
    """Shard the inputs of a linear layer in a block that sums the partial outputs itself.

    Only the first rank adds the bias. An adapter's B is replicated and its result is part of the sum, so B's gradients
    are summed.

    Args:
        module: The layer.
        tp: The tensor-parallel ranks.
        dim: Dimension of the inputs in the weight.
    """
    is_first = tp.rank == 0

    def select_bias(bias: Tensor) -> Tensor:
        return bias if is_first else bias * 0

    distribute_parameters(module, tp, _PER_INPUT, Shard(dim))
    distribute_parameters(module, tp, ("lora_B", "lora_magnitude"), Replicate(), grad=Partial())
    distribute_parameters(module, tp, ["bias"], Replicate(), grad=Partial(), select=select_bias)
    module.tp = tp  # type: ignore[assignment]  # nn.Module's stub has a Tensor or a Module for every attribute


def set_tensor_parallel(module: Block | Stack, tp: TensorParallel) -> None:
    """Let a `Block` enter its hidden states, or a `Stack` complete its results."""
    module.tp = tp


def within(module: Block, tp: TensorParallel) -> None:
    """Do nothing: the style of a `Block` inside another one, which communicates for both."""


def sequence(module: LocalParameters, tp: TensorParallel) -> None:
    """Replicate a norm between blocks, or a linear layer that every rank computes in full.

    Under sequence parallel, each rank computes only its own tokens, so gradients are summed.
    """
    gradient = Partial() if tp.sequence_parallel else Replicate()
    distribute_parameters(module, tp, module._parameters, Replicate(), grad=gradient)
    module.sequence_tp = tp  # type: ignore[assignment]  # as above


def latent(module: LocalParameters, tp: TensorParallel) -> None:
    """Replicate a norm or linear layer of a block that runs before the block's input enters tensor parallel.

    Every rank computes the layer in full, and under sequence parallel only for its own tokens, exactly as with the
    style `sequence`. This style has its own name because a plan allows `sequence` outside of blocks only. The layer's
    output, and not the hidden states, then enters the block.
    """
    sequence(module, tp)


def replicated(module: LocalParameters, tp: TensorParallel) -> None:
    """Replicate a module outside of blocks, which every rank computes in full: a module without a style."""
    distribute_parameters(module, tp, module._parameters, Replicate())


def summed(module: LocalParameters, tp: TensorParallel) -> None:
    """Replicate a module with which each rank computes another part of the results, so gradients are summed.

    In a block this is a norm over each head of q or k (each rank has other heads) or a router (each rank weights its
    own part of the results). Outside of blocks it is a vision tower (each rank encodes other images).
    """
    distribute_parameters(module, tp, module._parameters, Replicate(), grad=Partial())


def expert_colwise(module: LocalParameters, tp: TensorParallel) -> None:
    """Shard the outputs of each expert's matrix, [E, out, in], and bias, [E, out], as `colwise` does."""
    colwise(module, tp, 1)


def expert_rowwise(module: LocalParameters, tp: TensorParallel) -> None:
    """Shard the inputs of each expert's matrix, [E, out, in], as `rowwise_within` does. Biases are [E, out]."""
    rowwise_within(module, tp, 2)


def heads(module: LocalParameters, tp: TensorParallel) -> None:
    """Shard the rows of a module in a block whose parameters have rows for each head or channel."""
    distribute_parameters(module, tp, module._parameters, Shard(0))


def vocab_rows(module: VocabEmbedding | VocabHead, tp: TensorParallel) -> None:
    """Shard an embedding or a head over the vocabulary."""
    distribute_parameters(module, tp, ["weight", "bias"], Shard(0))
    module.tp = tp


def score_head(module: ScoreHead, tp: TensorParallel) -> None:
    """Shard the columns of a classifier's head."""
    distribute_parameters(module, tp, ["weight"], Shard(1))
    module.tp = tp


STYLES: dict[str, Style] = {
    "block": set_tensor_parallel,
    "colwise": colwise,
    "colwise_kv": colwise_kv,
    "decoder": set_tensor_parallel,
    "expert_colwise": expert_colwise,
    "expert_rowwise": expert_rowwise,
    "head_norm": summed,
    "heads": heads,
    "latent": latent,
    "router": summed,
    "rowwise": rowwise,
    "rowwise_within": rowwise_within,
    "score_head": score_head,
    "sequence": sequence,
    "summed": summed,
    "vocab_embedding": vocab_rows,
    "vocab_head": vocab_rows,
    "within": within,
}
# The module class that each style needs. Styles that are not listed need `LocalParameters`.
STYLE_MODULES: dict[str, type[nn.Module]] = {
    "block": Block,
    "decoder": Stack,
    "score_head": ScoreHead,
    "vocab_embedding": VocabEmbedding,
    "vocab_head": VocabHead,
    "within": Block,
}


@contextmanager
def without_sequence_parallel(model: nn.Module) -> Iterator[None]:
    """Context in which `model` runs without sequence parallel, as decoding needs: one token cannot be sharded.

    Tensor parallel stays. The previous state is restored also if an error is raised. No backward is allowed inside,
    because the gradients of norms would be wrong.
    """
    switched_off: dict[int, TensorParallel] = {}  # modules share these objects
    for module in model.modules():
        tp = getattr(module, "tp", None)
        if tp is not None and tp.sequence_parallel:
            switched_off[id(tp)] = tp
    try:
        for tp in switched_off.values():
            tp.sequence_parallel = False
        yield
    finally:
        for tp in switched_off.values():
            tp.sequence_parallel = True


def gather_vocabulary(logits: Tensor) -> Tensor:
    """Gather logits that are sharded over the vocabulary.

    Args:
        logits: [B, V], a DTensor of a `VocabHead`, or any other tensor, which is returned itself.

    Returns:
        [B, V], complete on every tp rank.

    Collectives:
        One all-gather for a DTensor.
    """
    if not isinstance(logits, DTensor):
        return logits
    num_ranks, vocab_size = logits.device_mesh.size(), logits.shape[1]
    local = logits.to_local()
    # All shards must have ceil(V / tp) columns. Only the last ones are shorter, so their padding ends up behind V.
    max_columns = -(-vocab_size // num_ranks)
    padded = F.pad(local, (0, max_columns - local.shape[1]))
    return all_gather(padded, 1, logits.device_mesh.get_group())[:, :vocab_size]


def distribute_parameters(
    module: LocalParameters,
    tp: TensorParallel,
    names: Iterable[str],
    placement: Placement,
    *,
    grad: Placement | None = None,
    select: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Make parameters DTensors on the tp mesh, and set their views. No collective.

    All ranks must have the same values before.

    Args:
        module: The module.
        tp: The tensor-parallel ranks.
        names: Names of parameters. Those that the module does not have are skipped.
        placement: Placement of the parameters.
        grad: Placement of their local gradients. None: as the parameters.
        select: See `LocalView.select`.
    """
    for name in names:
        full = module._parameters.get(name)
        if full is None:
            continue
        if not isinstance(full, DTensor):
            local = full.detach()
            if isinstance(placement, Shard):
                start, end = chunk_bounds(full.shape[placement.dim], tp.size, tp.rank)
                local = local.narrow(placement.dim, start, end - start).clone()
            dtensor = make_dtensor(local, tp.mesh, [placement], full)
            module._parameters[name] = nn.Parameter(dtensor, requires_grad=full.requires_grad)
        module.local_views = {**module.local_views, name: LocalView(grad or placement, select)}
