"""What the sparse layers of a model have in common: what they saw of a micro-batch, and the loss that balances them.

The balance loss is that of each document (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20): for experts e of E, a
document of T tokens and k experts a token, E · Σ_e f_e · P_e with f_e the share of the k · T choices that fell on e and
P_e the mean of the tokens' softmax at e. It is 1 where all are alike. The mean over documents and sparse layers is
added to the loss. No split of a batch changes it: under cp the choices of a document are summed over its ranks.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.batch import PADDING_DOCUMENT
from dtrain.parallel.collectives import all_reduce


class Routing:
    """Shared by the sparse layers of a model; the policy says before each micro-batch what it is, and reads after it
    what they saw.

    experts: of a layer. cp, tp: the meshes of one dimension, None for one rank. documents: the number of each token's
    document in the micro-batch [B, S/cp], and how many there are. weight: of the balance loss of one document and
    layer, a scalar; None: there is none. scale: of the gradients, beside it. counts: of the step, on this rank,
    [layers, E] float64.
    """

    def __init__(self, experts: int, layers: int):
        self.experts, self.layers = experts, layers
        self.cp: DeviceMesh | None = None
        self.tp: DeviceMesh | None = None
        self.documents: tuple[Tensor, int] | None = None
        self.weight: Tensor | None = None
        self.scale = 1.0
        self.counts: Tensor | None = None
        self._counts: dict[int, Tensor] = {}  # by layer: set again, not added to, where a layer is computed again
        self._losses: dict[int, Tensor] = {}

    def see(self, layer: int, counts: Tensor) -> None:
        """counts [E] int64 of this rank's tokens by expert, in the sparse layer of this number."""
        self._counts[layer] = counts

    def begin(self, weight: Tensor | None, scale: float) -> None:
        """Before the micro-batches of a step. weight, scale: as above."""
        self.weight, self.scale, self.counts = weight, scale, None

    def add(self) -> Tensor:
        """After each: its counts join those of the step. Returns the sum of its balance losses, a scalar."""
        counts = torch.stack([self._counts[layer] for layer in sorted(self._counts)]).double()
        loss = sum(self._losses.values(), torch.zeros((), device=counts.device))
        self.counts = counts if self.counts is None else self.counts + counts
        self._counts, self._losses = {}, {}
        return loss

    def balanced(self, layer: int, weights: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """The weights [T, k] of a layer's choices [T, k], unchanged; their backward adds the balance loss's gradient to
        that of shares [T, E]. Under cp one all-reduce of [documents, E + 1]."""
        if self.weight is None or self.documents is None:
            return weights
        owners, count = self.documents
        documents = F.pad(owners, (0, len(shares) // len(owners) - owners.shape[1]), value=PADDING_DOCUMENT).flatten()
        slots = torch.where(documents == PADDING_DOCUMENT, count, documents)  # [T], padding in a row of its own
        table = shares.new_zeros(count + 1, self.experts + 1)  # choices by document and expert, and its tokens
        ones = shares.new_ones(chosen.shape)
        table.view(-1).index_add_(0, (slots[:, None] * (self.experts + 1) + chosen).flatten(), ones.flatten())
        table[:, -1].index_add_(0, slots, ones[:, 0])
        if self.cp is not None and self.cp.size() > 1:
            table = all_reduce(table, self.cp.get_group())
        tokens = table[:, -1:].clamp(min=1)
        factors = table[:, :-1] * (self.experts / chosen.shape[1]) / tokens.square()  # [documents + 1, E]
        factors[-1] = 0
        factors = factors[slots] * self.weight.to(shares.dtype)
        self._losses[layer] = (factors * shares.detach()).sum()
        ranks = 1 if self.tp is None else self.tp.size()  # each of which computes all of it, and whose sum is taken
        return cast(Tensor, _Beside.apply(weights, shares, factors * (self.scale / ranks)))


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, shares: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.saved_tensors[0], None


def loads(counts: Tensor) -> dict[str, Tensor]:
    """Of counts [layers, E, ..] of a step, over all ranks: the fullest expert's share of the mean, and the share of
    experts without a token, each the mean over the layers, [..]."""
    mean = counts.mean(1).clamp(min=1e-9)
    return {"moe_load": (counts.amax(1) / mean).mean(0), "moe_idle": (counts == 0).double().mean((0, 1))}
