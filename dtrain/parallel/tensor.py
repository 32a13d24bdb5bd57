"""Tensor- and sequence-parallel styles: how one module's parameters lie on the tp mesh, and what it sends.

Parameters become DTensors on the tp mesh, replicated ones too; the modules read them through `LocalParameters` and
compute on plain tensors. Where a style changes a forward, the module's own forward asks its `tp`: `Block`, `Stack`,
`VocabEmbedding` and the heads, of which models are built. Activations are plain tensors too: between attention and
MLP blocks replicated over tp, or, under sequence parallel, cut along the sequence: [B, S/tp, D], S padded to a multiple
of tp inside the decoder.

What a layer sends over tp, forward and backward alike: two all-reduces, or, under sequence parallel, two all-gathers
and two reduce-scatters (Korthikanti et al., arXiv:2205.05198, section 4.2.2).
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

SEQUENCE = 1  # the dimension of [B, S, D] that sequence parallel cuts


@dataclass(frozen=True)
class LocalView:
    """The view by which a module reads a parameter placed on the tp mesh.

    grad: how the ranks' local gradients stand to the whole one (Partial: they are summed); of: what of the local part.
    is_expert: whether the parameter is cut over ep too, before tp.
    """

    grad: Placement | None
    of: Callable[[Tensor], Tensor] | None = None
    is_expert: bool = False

    def __call__(self, parameter: DTensor) -> Tensor:
        grads = ([Shard(0)] if self.is_expert else []) + ([] if self.grad is None else [self.grad])
        if parameter.device_mesh.ndim != len(grads):
            raise RuntimeError(
                "a tensor-parallel module was used outside the forward of its FSDP root, where its weights are shards: "
                "call the model, or a method registered with register_fsdp_forward_method"
            )
        local = parameter.to_local(grad_placements=grads)
        return local if self.of is None else self.of(local)


class LocalParameters(nn.Module):
    """A module that computes with its parameters as `local(name)` gives them.

    `local_views` holds a LocalView for each parameter that a style has placed; without one it is the parameter itself.
    keeps_full_precision: its parameters are held, and computed with, in float32 at least.
    """

    keeps_full_precision = False
    local_views: dict[str, LocalView] = {}  # replaced on the instance, never changed

    def reset_parameters(self) -> None:
        """Do nothing: `init_weights` or a file fills the parameters, which are built on meta."""

    def local(self, name: str) -> Tensor:
        """The plain tensor that this rank computes with: the parameter of that name, such as a weight [out, in],
        or what its view takes of it, [out/tp, in] where it is column-parallel. No collective forward."""
        parameter = getattr(self, name)
        view = self.local_views.get(name)
        return parameter if view is None else view(parameter)

    def with_weight(self, fn: Callable[[Tensor, Tensor], Any], hidden: Tensor) -> Any:
        """Return `fn(hidden, local("weight"))`: a loss reads a head's weight so. Where FSDP makes the module a unit, a
        registered forward method."""
        return fn(hidden, self.local("weight"))


def full_precision_modules(model: nn.Module) -> dict[str, LocalParameters]:
    """By name the modules of `model` that keep their precision."""
    modules = ((name, module) for name, module in model.named_modules() if isinstance(module, LocalParameters))
    return {name: module for name, module in modules if module.keeps_full_precision}


@dataclass
class TensorParallel:
    """The place where a style is applied: the one-dimensional tp mesh, whether the sequence is cut, and the model's key
    heads."""

    mesh: DeviceMesh
    sequence_parallel: bool  # switched off for a while by `without_sequence_parallel`
    key_heads: int  # of layers that do not say how many they have

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def group(self) -> Any:
        return self.mesh.get_group()

    def local_start(self, length: int) -> int:
        """The first of `length` elements that this rank's share has."""
        return chunk_bounds(length, self.size, self.rank)[0]

    def enter(self, hidden: Tensor) -> Tensor:
        """Into a block: [B, S or S/tp, D] → [B, S, D], whose gradients are summed over tp."""
        return (
            gather_along(hidden, SEQUENCE, self.group)
            if self.sequence_parallel
            else all_reduce_in_backward(hidden, self.group)
        )

    def leave(self, partial: Tensor) -> Tensor:
        """Out of a block: the ranks' partial [B, S, D] → their sum [B, S or S/tp, D]."""
        if self.sequence_parallel:
            return reduce_scatter_along(partial, SEQUENCE, self.group)
        return all_reduce_in_forward(partial, self.group)


class Block(nn.Module):
    """An attention or MLP block. Its forward begins with `enter`, once for all its projections.

    It is a call inside the forward and no hook: activation checkpointing then keeps the cut input [B, S/tp, D], and
    gathers it again in the backward."""

    tp: TensorParallel | None = None  # set by the style `block`

    def enter(self, hidden: Tensor) -> Tensor:
        """`TensorParallel.enter`; hidden [B, S, D] as it is without tensor parallel."""
        return hidden if self.tp is None else self.tp.enter(hidden)


class VocabEmbedding(LocalParameters, nn.Embedding):
    """A lookup in this rank's rows of the vocabulary; tokens of other ranks give zeros, and the sum is right."""

    tp: TensorParallel | None = None  # set by the style `vocab_embedding`

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, S] int64 -> [B, S, D], or [B, S/tp, D] under sequence parallel."""
        weight = self.local("weight")
        if self.tp is None:
            return F.embedding(ids, weight, self.padding_idx)
        start, end = chunk_bounds(self.num_embeddings, self.tp.size, self.tp.rank)
        mine = (ids >= start) & (ids < end)
        if weight.shape[0] == 0:
            # torch has no lookup in an empty table; every token is another rank's.
            weight = weight.new_zeros(1, self.embedding_dim) + weight.sum()
        rows = F.embedding(torch.where(mine, ids - start, 0), weight)
        if self.padding_idx is not None:
            # As F.embedding does: the padding token's row gets no gradient.
            rows = torch.where((ids == self.padding_idx)[..., None], rows.detach(), rows)
        return self.tp.leave(torch.where(mine[..., None], rows, 0))


class VocabHead(LocalParameters, nn.Linear):
    """The logits of this rank's rows of the vocabulary. No bias."""

    tp: TensorParallel | None = None  # set by the style `vocab_head`

    @property
    def vocab_start(self) -> int | None:
        """The first of these rows; None where the head is whole."""
        return None if self.tp is None else chunk_bounds(self.out_features, self.tp.size, self.tp.rank)[0]

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> logits [..., V]; under tensor parallel a DTensor sharded on V. No collective."""
        logits = F.linear(hidden, self.local("weight"))
        if self.tp is None:
            return logits
        shape = torch.Size((*logits.shape[:-1], self.out_features))
        stride = tuple(shape[dim + 1 :].numel() for dim in range(len(shape)))
        last = Shard(len(shape) - 1)
        return DTensor.from_local(logits, self.tp.mesh, [last], run_check=False, shape=shape, stride=stride)


class ScoreHead(LocalParameters, nn.Linear):
    """The scores of a classifier, [labels, D]; over tp each rank multiplies some of the D. No bias."""

    tp: TensorParallel | None = None  # set by the style `score_head`
    vocab_start: int | None = None

    def product(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """hidden [..., D], weight [labels, D/tp] -> [..., labels], whole on every tp rank. Over tp one all-reduce."""
        if self.tp is None:
            return F.linear(hidden, weight)
        start, end = chunk_bounds(self.in_features, self.tp.size, self.tp.rank)
        return all_reduce_in_forward(F.linear(hidden[..., start:end], weight), self.tp.group)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> [..., labels]"""
        return self.product(hidden, self.local("weight"))


class RowContext(Protocol):
    """What `Stack` needs of the context of a micro-batch (`models.common.micro_batch.MicroBatchContext`)."""

    @property
    def cache(self) -> Any:
        """KV cache. None in training."""
        ...

    def padded(self, num_tokens: int, missing: int) -> Self:
        """Return the context of rows of `num_tokens` with `missing` more tokens of padding at their ends."""
        ...


class Stack(nn.Module):
    """The embedding and layers of a decoder: `states` is one process's forward, `forward` the same over tp."""

    layers: nn.ModuleList
    vision_layers: Iterable[nn.Module] = ()  # of a tower beside the decoder
    tp: TensorParallel | None = None  # set by the style `decoder`

    def states(self, input_ids: Tensor, context: Any) -> Tensor:
        """Compute hidden states [B, S, D] of ids [B, S], sharded as the styles of the modules within.

        Args:
            input_ids: Token ids.
            context: The context of the micro-batch.
        """
        raise NotImplementedError

    def forward(self, input_ids: Tensor, context: RowContext) -> Tensor:
        """Compute hidden states [B, S, D], complete on every tp rank. In the backward, gradients are summed over tp."""
        tp, num_tokens = self.tp, input_ids.shape[1]
        if tp is None:
            return self.states(input_ids, context)
        if not tp.sequence_parallel:
            return all_reduce_in_backward(self.states(input_ids, context), tp.group)
        if context.cache is not None:
            raise ValueError(
                "a cache does not go with sequence parallel; read it inside `without_sequence_parallel(model)`"
            )
        # Context parallel cuts the padded sequence in two again.
        missing = -num_tokens % math.lcm(2, tp.size)
        if missing:
            input_ids = F.pad(input_ids, (0, missing))
        hidden = self.states(input_ids, context.padded(num_tokens, missing))  # [B, (S + missing)/tp, D]
        return gather_along(hidden, SEQUENCE, tp.group)[:, :num_tokens]


class ParallelModel(nn.Module):
    """The interface of a model to this package: its plan (module pattern -> style), its sizes, decoder and head."""

    plan: Mapping[str, str]
    config: ModelSizes
    model: Stack

    @property
    def head(self) -> "VocabHead | ScoreHead":
        raise NotImplementedError


Style = Callable[[Any, TensorParallel], None]


# Parameters of a linear layer with a row for each of its outputs, and with a column for each of its inputs.
_OF_WEIGHT = ("weight", "weight_codes", "weight_scales")
_OF_OUTPUTS = (*_OF_WEIGHT, "bias", "lora_B", "lora_magnitude")
_OF_INPUTS = (*_OF_WEIGHT, "lora_A")


def colwise(module: LocalParameters, tp: TensorParallel, dim: int = 0) -> None:
    """A linear layer that computes its share of the outputs, on an input that its block has entered with. An adapter's
    A is whole on every rank; what it computes goes on in this rank's outputs alone, so its gradients are summed. dim:
    of the outputs in a weight."""
    _place(module, tp, _OF_OUTPUTS, Shard(dim))
    _place(module, tp, ["lora_A"], Replicate(), grad=Partial())


def colwise_kv(module: LocalParameters, tp: TensorParallel) -> None:
    """Cut keys and values as `colwise` does, whose heads the layer's `key_heads` counts. Fewer heads than ranks: each
    rank computes the head that its queries read, from a replicated weight, whose gradients are summed."""
    heads: int = getattr(module, "key_heads", None) or tp.key_heads
    if heads % tp.size == 0:
        return colwise(module, tp)
    mine = tp.rank // (tp.size // heads)

    def rows(whole: Tensor) -> Tensor:
        head = whole.shape[0] // heads
        return whole[mine * head : (mine + 1) * head]

    _place(module, tp, _OF_OUTPUTS, Replicate(), grad=Partial(), view=rows)
    _place(module, tp, ["lora_A"], Replicate(), grad=Partial())


def rowwise(module: LocalParameters, tp: TensorParallel) -> None:
    """A linear layer that computes its share of the inputs' sum, and leaves the block."""
    rowwise_within(module, tp)
    module.register_forward_hook(lambda module, inputs, output: tp.leave(output))


def rowwise_within(module: LocalParameters, tp: TensorParallel, dim: int = 1) -> None:
    """Cut a block that adds up itself as `rowwise` does. The bias is added once. What an adapter adds is a share of the
    same sum: B is whole on every rank, its gradients are summed. dim: of the inputs in a weight."""
    first = tp.rank == 0
    _place(module, tp, _OF_INPUTS, Shard(dim))
    _place(module, tp, ("lora_B", "lora_magnitude"), Replicate(), grad=Partial())
    _place(module, tp, ["bias"], Replicate(), grad=Partial(), view=lambda whole: whole if first else whole * 0)
    module.tp = tp  # type: ignore[assignment]  # nn.Module's stub has a Tensor or a Module for every attribute


def holder(module: Block | Stack, tp: TensorParallel) -> None:
    """A `Block`, whose hidden states enter it here, or a `Stack`, whose hidden states come out whole."""
    module.tp = tp


def within(module: Block, tp: TensorParallel) -> None:
    """A `Block` inside another, whose hidden states have entered, and leave with those of the other."""


def sequence(module: LocalParameters, tp: TensorParallel) -> None:
    """A norm between blocks, or a linear layer that is whole on every rank. Under sequence parallel a rank computes its
    tokens, and the weights' gradients are summed."""
    _place(module, tp, module._parameters, Replicate(), grad=Partial() if tp.sequence_parallel else Replicate())
    module.sequence_tp = tp  # type: ignore[assignment]  # as above


def latent(module: LocalParameters, tp: TensorParallel) -> None:
    """A norm or linear layer of a block that runs before the block's input enters tensor parallel.

    Every rank computes it in full, under sequence parallel for its own tokens, exactly as under `sequence`. The name is
    another one because a plan allows `sequence` outside of blocks only: here the output, not the hidden states, enters
    the block.
    """
    sequence(module, tp)


def replicated(module: LocalParameters, tp: TensorParallel) -> None:
    """A module outside blocks that every rank computes whole, as one process does: what a plan leaves out."""
    _place(module, tp, module._parameters, Replicate())


def summed(module: LocalParameters, tp: TensorParallel) -> None:
    """A module that is whole on every rank, and whose gradients are summed: in a block a norm over each head of q or k,
    of which a rank norms its own, or a router, by which it weighs its share of the results; outside of blocks a vision
    tower, by which it encodes its share of the images."""
    _place(module, tp, module._parameters, Replicate(), grad=Partial())


def expert_colwise(module: LocalParameters, tp: TensorParallel) -> None:
    """Cut each expert's matrix of [E, out, in], and its bias of [E, out], as `colwise` does."""
    colwise(module, tp, 1)


def expert_rowwise(module: LocalParameters, tp: TensorParallel) -> None:
    """Cut each expert's matrix of [E, out, in] as `rowwise_within` does; biases are [E, out]."""
    rowwise_within(module, tp, 2)


def heads(module: LocalParameters, tp: TensorParallel) -> None:
    """A module in a block whose parameters have rows for each head or channel: a rank has those of its heads."""
    _place(module, tp, module._parameters, Shard(0))


def vocab_rows(module: VocabEmbedding | VocabHead, tp: TensorParallel) -> None:
    """A `VocabEmbedding` or `VocabHead` of this rank's rows of the vocabulary."""
    _place(module, tp, ["weight"], Shard(0))
    module.tp = tp


def score_head(module: ScoreHead, tp: TensorParallel) -> None:
    """A `ScoreHead`, whose columns the ranks share out."""
    _place(module, tp, ["weight"], Shard(1))
    module.tp = tp


STYLES: dict[str, Style] = {
    "block": holder,
    "colwise": colwise,
    "colwise_kv": colwise_kv,
    "decoder": holder,
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
# The class of module that each style needs; those not listed here need LocalParameters.
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
    """Inside, sequence parallel cuts nothing in `model`: a forward is that of tensor parallel alone, which decodes one
    token at a time. No backward: the gradients of the norms would be wrong. After, as before, whatever happens."""
    cutting = {id(tp): tp for module in model.modules() if (tp := getattr(module, "tp", None)) and tp.sequence_parallel}
    try:
        for tp in cutting.values():
            tp.sequence_parallel = False
        yield
    finally:
        for tp in cutting.values():
            tp.sequence_parallel = True


def gather_vocabulary(logits: Tensor) -> Tensor:
    """[B, V] whole on every tp rank, from a head's DTensor sharded on V; a plain tensor as it is. One all-gather."""
    if not isinstance(logits, DTensor):
        return logits
    size, vocabulary = logits.device_mesh.size(), logits.shape[1]
    local = logits.to_local()
    # Every rank holds ceil(V / tp) columns but the last ones, whose padding lies beyond V once all are joined.
    padded = F.pad(local, (0, -(-vocabulary // size) - local.shape[1]))
    return all_gather(padded, 1, logits.device_mesh.get_group())[:, :vocabulary]


def _place(
    module: LocalParameters,
    tp: TensorParallel,
    names: Iterable[str],
    placement: Placement,
    *,
    grad: Placement | None = None,
    view: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Make the parameters `names`, as far as they are there, DTensors placed so, and `module.local(name)` what this
    rank computes with. No collective.

    grad: the placement of the local gradients (Partial: they are summed; default: the parameter's). view: from the
    local part to what this rank computes with.
    The ranks must hold the same values before.
    """
    for name in names:
        whole = module._parameters.get(name)
        if whole is None:
            continue
        if not isinstance(whole, DTensor):
            local = whole.detach()
            if isinstance(placement, Shard):
                start, end = chunk_bounds(whole.shape[placement.dim], tp.size, tp.rank)
                local = local.narrow(placement.dim, start, end - start).clone()
            placed = make_dtensor(local, tp.mesh, [placement], whole)
            module._parameters[name] = nn.Parameter(placed, requires_grad=whole.requires_grad)
        module.local_views = {**module.local_views, name: LocalView(grad or placement, view)}
