"""Tensor- and sequence-parallel styles: how one module's parameters lie on the tp mesh, and what it sends.

Parameters become DTensors on the tp mesh, replicated ones too; the modules read them through `LocalParameters` and
compute on plain tensors. Activations are plain tensors too: between attention and MLP blocks replicated over tp, or,
under sequence parallel, cut along the sequence: [B, S/tp, D], S padded to a multiple of tp inside the decoder.

What a layer sends over tp, forward and backward alike: two all-reduces, or, under sequence parallel, two all-gathers
and two reduce-scatters (Korthikanti et al., arXiv:2205.05198, section 4.2.2).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dtrain.parallel.collectives import all_gather, enter_region, gather_along, leave_region, scatter_sum_along
from dtrain.parallel.placement import LocalView, chunk_bounds

SEQUENCE = 1  # the dimension of [B, S, D] that sequence parallel cuts


@dataclass
class TensorParallel:
    """Where a style is applied: the one-dimensional tp mesh, whether the sequence is cut, and the model's key heads."""

    mesh: DeviceMesh
    sequence: bool  # switched off for a while by `whole_sequences`
    key_heads: int

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def group(self) -> Any:
        return self.mesh.get_group()

    def enter(self, hidden: Tensor) -> Tensor:
        """Into a block: [B, S or S/tp, D] → [B, S, D], whose gradients are summed over tp."""
        return gather_along(hidden, SEQUENCE, self.group) if self.sequence else enter_region(hidden, self.group)

    def leave(self, partial: Tensor) -> Tensor:
        """Out of a block: the ranks' partial [B, S, D] → their sum [B, S or S/tp, D]."""
        if self.sequence:
            return scatter_sum_along(partial, SEQUENCE, self.group)
        return leave_region(partial, self.group)


Style = Callable[[nn.Module, TensorParallel], None]


def colwise(module: nn.Module, tp: TensorParallel) -> None:
    """A linear layer that computes its share of the outputs, on an input that its block has entered with."""
    _place(module, tp, "weight", Shard(0))
    _place(module, tp, "bias", Shard(0))


def colwise_kv(module: nn.Module, tp: TensorParallel) -> None:
    """As `colwise`, for keys and values. Fewer heads than ranks: each rank computes the head that its queries read,
    from a replicated weight, whose gradients are summed."""
    if tp.key_heads % tp.size == 0:
        return colwise(module, tp)
    head = module.out_features // tp.key_heads
    mine = tp.rank // (tp.size // tp.key_heads)
    rows = slice(mine * head, (mine + 1) * head)
    for name in ("weight", "bias"):
        _place(module, tp, name, Replicate(), grad=Partial(), view=lambda whole: whole[rows])


def rowwise(module: nn.Module, tp: TensorParallel) -> None:
    """A linear layer that computes its share of the inputs' sum, and leaves the block. Its bias is added once."""
    _place(module, tp, "weight", Shard(1))
    first = tp.rank == 0
    _place(module, tp, "bias", Replicate(), grad=Partial(), view=lambda whole: whole if first else whole * 0)
    module.register_forward_hook(lambda module, inputs, output: tp.leave(output))


def block(module: nn.Module, tp: TensorParallel) -> None:
    """An attention or MLP block: its first argument, the hidden states, enters here once for all its projections.

    In its forward, not in a hook: what checkpointing computes again begins with it and keeps the cut hidden states."""
    _adopt(module, _Block)
    module.tp = tp


def sequence(module: nn.Module, tp: TensorParallel) -> None:
    """A norm between blocks. Under sequence parallel a rank norms its tokens, and the weights' gradients are summed."""
    _place(module, tp, "weight", Replicate(), grad=Partial() if tp.sequence else Replicate())


def replicated(module: nn.Module, tp: TensorParallel) -> None:
    """A module outside blocks that every rank computes whole, as one process does: what a plan leaves out."""
    for name in module._parameters:
        _place(module, tp, name, Replicate())


def head_norm(module: nn.Module, tp: TensorParallel) -> None:
    """A norm over each head of q or k: a rank norms its heads, and the weights' gradients are summed."""
    _place(module, tp, "weight", Replicate(), grad=Partial())


def vocab_embedding(module: nn.Embedding, tp: TensorParallel) -> None:
    """A lookup in this rank's rows of the vocabulary; tokens of other ranks give zeros, and the sum is right."""
    start, end = chunk_bounds(module.num_embeddings, tp.size, tp.rank)
    _place(module, tp, "weight", Shard(0))
    _adopt(module, _VocabEmbedding)
    module.vocab_start, module.vocab_end, module.tp = start, end, tp


def vocab_head(module: nn.Linear, tp: TensorParallel) -> None:
    """The head's logits of this rank's rows of the vocabulary: a DTensor [B, S, V] sharded on V.

    `module.vocab_start`, the first of these rows, says that the head is cut."""
    _place(module, tp, "weight", Shard(0))
    vocabulary = module.out_features
    module.vocab_start, _ = chunk_bounds(vocabulary, tp.size, tp.rank)

    def wrap(module: nn.Module, inputs: tuple, logits: Tensor) -> DTensor:
        shape = torch.Size((*logits.shape[:-1], vocabulary))
        stride = tuple(shape[dim + 1 :].numel() for dim in range(len(shape)))
        last = Shard(len(shape) - 1)
        return DTensor.from_local(logits, tp.mesh, [last], run_check=False, shape=shape, stride=stride)

    module.register_forward_hook(wrap)


def decoder(module: nn.Module, tp: TensorParallel) -> None:
    """The stack of layers: hidden states come out whole, [B, S, D] on every rank, their gradients summed over tp."""
    _adopt(module, _Decoder)
    module.tp = tp


STYLES: dict[str, Style] = {
    "block": block,
    "colwise": colwise,
    "colwise_kv": colwise_kv,
    "decoder": decoder,
    "head_norm": head_norm,
    "rowwise": rowwise,
    "sequence": sequence,
    "vocab_embedding": vocab_embedding,
    "vocab_head": vocab_head,
}


@contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """Inside, sequence parallel cuts nothing in `model`: a forward is that of tensor parallel alone, which decodes one
    token at a time. No backward: the gradients of the norms would be wrong. After, as before, whatever happens."""
    cutting = {id(tp): tp for module in model.modules() if (tp := getattr(module, "tp", None)) and tp.sequence}
    try:
        for tp in cutting.values():
            tp.sequence = False
        yield
    finally:
        for tp in cutting.values():
            tp.sequence = True


def gather_vocabulary(logits: Tensor) -> Tensor:
    """[B, V] whole on every tp rank, from a head's DTensor sharded on V; a plain tensor as it is. One all-gather."""
    if not isinstance(logits, DTensor):
        return logits
    size, vocabulary = logits.device_mesh.size(), logits.shape[1]
    local = logits.to_local()
    # Every rank holds ceil(V / tp) columns but the last ones, whose padding lies beyond V once all are joined.
    padded = F.pad(local, (0, -(-vocabulary // size) - local.shape[1]))
    return all_gather(padded, 1, logits.device_mesh.get_group())[:, :vocabulary]


class _Block:
    def forward(self, hidden: Tensor, *rest: Any) -> Tensor:
        return super().forward(self.tp.enter(hidden), *rest)


class _VocabEmbedding:
    def forward(self, ids: Tensor) -> Tensor:
        mine = (ids >= self.vocab_start) & (ids < self.vocab_end)
        rows = torch.where(mine, ids - self.vocab_start, 0)
        weight = self.local("weight")
        if weight.shape[0] == 0:
            # torch has no lookup in an empty table; every token is another rank's.
            weight = weight.new_zeros(1, self.embedding_dim) + weight.sum()
        found = F.embedding(rows, weight)
        if self.padding_idx is not None:
            # As F.embedding does: the padding token's row gets no gradient.
            found = torch.where((ids == self.padding_idx)[..., None], found.detach(), found)
        return self.tp.leave(torch.where(mine[..., None], found, 0))


class _Decoder:
    def forward(self, input_ids: Tensor, position_ids=None, seq_ids=None, cache=None) -> Tensor:
        tp, length = self.tp, input_ids.shape[1]
        if not tp.sequence:
            return enter_region(super().forward(input_ids, position_ids, seq_ids, cache), tp.group)
        if cache is not None:
            raise ValueError("a cache does not go with sequence parallel; read it inside `whole_sequences(model)`")
        # Context parallel cuts the padded sequence in two again.
        missing = -length % math.lcm(2, tp.size)
        if missing:
            # Beyond every position of every rank, and a document of their own: no token sees them.
            input_ids = F.pad(input_ids, (0, missing))
            position_ids = None if position_ids is None else F.pad(position_ids, (0, missing), value=2**30)
            seq_ids = None if seq_ids is None else F.pad(seq_ids, (0, missing), value=-1)
        hidden = super().forward(input_ids, position_ids, seq_ids)  # [B, (S + missing)/tp, D]
        return gather_along(hidden, SEQUENCE, tp.group)[:, :length]


def _place(
    module: nn.Module,
    tp: TensorParallel,
    name: str,
    placement: Placement,
    *,
    grad: Placement | None = None,
    view: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Make parameter `name` a DTensor placed so, and `module.local(name)` what this rank computes with. No collective.

    grad: how the local gradients of the ranks stand to the whole (default: as the parameter). view: of the local part.
    The ranks must hold the same values before.
    """
    whole = module._parameters.get(name)
    if whole is None:
        return
    if not isinstance(whole, DTensor):
        local = whole.detach()
        if isinstance(placement, Shard):
            start, end = chunk_bounds(whole.shape[placement.dim], tp.size, tp.rank)
            local = local.narrow(placement.dim, start, end - start).clone()
        placed = DTensor.from_local(
            local, tp.mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        module._parameters[name] = nn.Parameter(placed, requires_grad=whole.requires_grad)
    module.local_views = {**module.local_views, name: LocalView(grad or placement, view)}


def _adopt(module: nn.Module, behaviour: type) -> None:
    """Give a module the methods of `behaviour` above those of its own class, whose name it keeps."""
    if not isinstance(module, behaviour):
        kind = type(module)
        module.__class__ = type(kind.__name__, (behaviour, kind), {"__module__": kind.__module__})
