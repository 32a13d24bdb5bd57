"""State that the sparse layers of a model share: the experts they take, what they saw of a micro-batch, and the
loss that balances them.

A layer takes its router's k likeliest experts, or where a batch has `routed_experts` those that an engine's router took
of the same token (rollout routing replay, arXiv:2510.11370). Their weights, and the gradient, are this router's own.

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

from dtrain.base.batch import PADDING_DOCUMENT
from dtrain.parallel.collectives import all_reduce


class Routing:
    """Shared by the sparse layers of a model; the policy says before each micro-batch what it is, and reads after it
    what they saw.

    experts: of a layer. cp, tp: the meshes of one dimension, None for one rank. documents: the number of each token's
    document in the micro-batch [B, S/cp], and how many there are. real_tokens: how many of this rank's tokens in it are
    no padding; None: not known, and layers wait for it. weight: of the balance loss of one document and
    layer, a scalar; None: there is none. scale: of the gradients, beside it. counts: of the step, on this rank,
    [layers, E] float64. replayed: the experts that the micro-batch's tokens go to, [B, S/cp, layers, k] integers, below
    0 where the router decides; None: everywhere. differing: of the step, on this rank, how many of the replayed choices
    the router would have made otherwise, and how many there were, [2] float64. noted: where a dict is set, every
    layer's choices [T, k] of the last forward by its number, for an engine that tells them.
    """

    def __init__(self, experts: int, layers: int):
        self.experts, self.layers = experts, layers
        self.cp: DeviceMesh | None = None
        self.tp: DeviceMesh | None = None
        self.documents: tuple[Tensor, int] | None = None
        self.real_tokens: int | None = None
        self.weight: Tensor | None = None
        self.scale = 1.0
        self.counts: Tensor | None = None
        self.replayed: Tensor | None = None
        self.differing: Tensor | None = None
        self.noted: dict[int, Tensor] | None = None
        self._counts: dict[int, Tensor] = {}  # by layer: set again, not added to, where a layer is computed again
        self._losses: dict[int, Tensor] = {}
        self._differing: dict[int, Tensor] = {}

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """The experts [T, k] that tokens go to in this layer, ascending, where its router would take `own` [T, k]."""
        if self.noted is not None:
            self.noted[layer] = own.to(torch.int16)
        if self.replayed is None:
            return own
        rows = self.replayed[:, :, layer]  # [B, S/cp, k]
        missing = len(own) // len(rows) - rows.shape[1]  # what sequence parallel has padded
        replayed = F.pad(rows, (0, 0, 0, missing), value=-1).flatten(0, 1).to(own.dtype)  # [T, k]
        is_replayed = replayed[:, :1] >= 0
        others = (replayed[:, :, None] != own[:, None]).all(-1) & is_replayed  # [T, k]
        self._differing[layer] = torch.stack([others.sum(), is_replayed.sum() * own.shape[1]])
        return torch.where(is_replayed, replayed.sort(-1).values, own)

    def last_choices(self, rows: int) -> Tensor:
        """Return where the tokens of the last forward, of so many rows, went: `noted` as [rows, S, layers, k] int16."""
        assert self.noted is not None
        return torch.stack([self.noted[layer] for layer in range(self.layers)], 1).unflatten(0, (rows, -1))

    def see(self, layer: int, counts: Tensor) -> None:
        """counts [E] int64 of this rank's tokens by expert, in the sparse layer of this number."""
        self._counts[layer] = counts

    def begin(self, weight: Tensor | None, scale: float) -> None:
        """Prepare for the micro-batches of a step. weight, scale: as above."""
        self.weight, self.scale, self.counts, self.differing = weight, scale, None, None

    def end(self) -> None:
        """Clean up after the micro-batches of a step."""
        self.weight = self.replayed = self.real_tokens = None

    def add(self) -> Tensor:
        """Add the counts of a micro-batch to those of the step. Returns the sum of its balance losses, a scalar."""
        counts = torch.stack([self._counts[layer] for layer in sorted(self._counts)]).double()
        loss = sum(self._losses.values(), torch.zeros((), device=counts.device))
        self.counts = counts if self.counts is None else self.counts + counts
        if self._differing:
            differing = sum(self._differing.values(), counts.new_zeros(2))
            self.differing = differing if self.differing is None else self.differing + differing
        self._counts, self._losses, self._differing = {}, {}, {}
        return loss

    def seen(self) -> Tensor:
        """Return what the step saw on this rank, to be summed over the ranks that have other tokens: [n] float64."""
        assert self.counts is not None
        return torch.cat([self.counts.flatten(), *([] if self.differing is None else [self.differing])])

    def measures(self, seen: Tensor) -> dict[str, Tensor]:
        """Return the measures of `seen` over all ranks, a column for each step, [n, steps]: `loads`, and the share of
        the replayed choices that the router would have made otherwise, [steps] each."""
        counts, differing = seen[: self.layers * self.experts], seen[self.layers * self.experts :]
        measured = loads(counts.unflatten(0, (self.layers, self.experts)))
        return measured | (
            {"router_replay_differs": differing[0] / differing[1].clamp(min=1)} if len(differing) else {}
        )

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
    """Return the loads of counts [layers, E, ..] of a step, over all ranks: the fullest expert's share of the mean, and
    the share of experts without a token, each the mean over the layers, [..]."""
    mean = counts.mean(1).clamp(min=1e-9)
    return {"moe_load": (counts.amax(1) / mean).mean(0), "moe_idle": (counts == 0).double().mean((0, 1))}
