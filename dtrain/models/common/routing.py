"""Routing of tokens to experts in one micro-batch: replayed experts, the balance loss, and what the layers counted.

A sparse layer sends a token to the k experts that its router scores highest. If a batch has the stream
`routed_experts`, a token goes to the experts that an engine's router chose for the same token instead (rollout routing
replay, arXiv:2510.11370). The weights of the experts, and the gradient, are always this router's own.

The balance loss is computed for each document (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20). For E experts and a
document of T tokens that each go to k experts, it is E · Σ_e f_e · P_e, where f_e is the share of the k · T choices
that fell on expert e, and P_e is the mean of the tokens' scores at e, each divided by the sum of its token's scores
(those of a softmax as they are). It is 1 if all experts are used equally. The
mean over documents and sparse layers is added to the loss. Splitting a batch into micro-batches or over ranks does not
change it: under context parallel, the choices of a document are summed over its ranks.

Four objects, by how long they live:

    Routing            one per model: number of experts and layers, process groups. Set when the model is built
    MicroBatchRouting  one per micro-batch, part of its `MicroBatchContext`: what the sparse layers read
    RoutingRecord      one per micro-batch: what the sparse layers write
    RoutingTotals      one per optimizer step: the sum of the records of its micro-batches
"""

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtrain.base.batch import PADDING_SEQ_ID
from dtrain.parallel.collectives import all_reduce


@dataclass(frozen=True)
class BalanceLoss:
    """Factors of the balance loss in one micro-batch.

    Attributes:
        weight: Factor of the balance loss of one document in one layer, a scalar tensor.
        gradient_scale: Factor of its gradient. With dynamic loss scaling, the scale of the loss.
    """

    weight: Tensor
    gradient_scale: float = 1.0


@dataclass
class RoutingRecord:
    """What the sparse layers saw in one micro-batch.

    Every value is stored under the number of its layer. A layer that activation checkpointing computes a second time
    stores the same value again, so nothing is counted twice.

    Attributes:
        records_choices: Whether `choices` is filled.
        counts: Tokens of this rank by expert, [E] int64.
        balance_losses: The layer's balance loss, a scalar.
        replays: Replayed choices that the router would have made otherwise, and all replayed choices, [2] int64.
        choices: The router's own choices for each token, [T, k] int16.
    """

    records_choices: bool = False
    counts: dict[int, Tensor] = field(default_factory=dict)
    balance_losses: dict[int, Tensor] = field(default_factory=dict)
    replays: dict[int, Tensor] = field(default_factory=dict)
    choices: dict[int, Tensor] = field(default_factory=dict)

    def balance_loss(self) -> Tensor:
        """Return the sum of the balance losses of all layers, a scalar."""
        zero = torch.zeros((), device=next(iter(self.counts.values())).device)
        return sum(self.balance_losses.values(), zero)

    def choices_by_row(self, num_rows: int) -> Tensor:
        """Return `choices` of all layers, [num_rows, S, layers, k] int16."""
        by_layer = [self.choices[layer] for layer in sorted(self.choices)]
        return torch.stack(by_layer, 1).unflatten(0, (num_rows, -1))


@dataclass(frozen=True)
class MicroBatchRouting:
    """What the sparse layers read about one micro-batch, and the record that they write.

    Attributes:
        document_ids: The number of each token's document in the micro-batch, -1 on padding, [B, S/cp]. Only read for
            the balance loss.
        num_documents: Documents in the whole micro-batch, on all cp ranks.
        num_real_tokens: Tokens of this rank that are not padding. None if the host does not know it: layers then wait
            for the device to count them.
        replayed_experts: The experts that tokens are sent to, [B, S/cp, layers, k], -1 where the router decides. None
            if it decides everywhere.
        balance: The balance loss. None if there is none.
        record: The layers' record of this micro-batch.
    """

    document_ids: Tensor | None = None
    num_documents: int = 0
    num_real_tokens: int | None = None
    replayed_experts: Tensor | None = None
    balance: BalanceLoss | None = None
    record: RoutingRecord = field(default_factory=RoutingRecord)

    def padded(self, missing: int) -> "MicroBatchRouting":
        """Return the same micro-batch with `missing` tokens of padding at the end of each row, with the same record."""
        document_ids, replayed = self.document_ids, self.replayed_experts
        if document_ids is not None:
            document_ids = F.pad(document_ids, (0, missing), value=PADDING_SEQ_ID)
        if replayed is not None:
            replayed = F.pad(replayed, (0, 0, 0, 0, 0, missing), value=-1)
        return replace(self, document_ids=document_ids, replayed_experts=replayed)

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """Return the experts that the tokens of a layer are sent to, and record the choices.

        Args:
            layer: Number of the sparse layer.
            own: The router's own choices, ascending, [T, k] int64.

        Returns:
            The experts, ascending, [T, k] int64.
        """
        if self.record.records_choices:
            self.record.choices[layer] = own.to(torch.int16)
        if self.replayed_experts is None:
            return own
        replayed = self.replayed_experts[:, :, layer].flatten(0, 1).to(own.dtype)  # [T, k]
        is_replayed = replayed[:, :1] >= 0
        differs = (replayed[:, :, None] != own[:, None]).all(-1) & is_replayed  # [T, k]
        self.record.replays[layer] = torch.stack([differs.sum(), is_replayed.sum() * own.shape[1]])
        return torch.where(is_replayed, replayed.sort(-1).values, own)


class Routing:
    """Settings that the sparse layers of a model share. They do not change after the model is built.

    Attributes:
        num_experts: Experts of each sparse layer, E.
        num_layers: Number of sparse layers.
        cp: One-dimensional mesh of context parallel. None for one rank.
        tp: One-dimensional mesh of tensor parallel. None for one rank.
    """

    def __init__(self, num_experts: int, num_layers: int):
        self.num_experts, self.num_layers = num_experts, num_layers
        self.cp: DeviceMesh | None = None
        self.tp: DeviceMesh | None = None

    def add_balance_gradient(
        self, layer: int, weights: Tensor, shares: Tensor, chosen: Tensor, micro_batch: MicroBatchRouting
    ) -> Tensor:
        """Return `weights` unchanged. Their backward adds the gradient of the balance loss to that of `shares`.

        Args:
            layer: Number of the sparse layer.
            weights: Weights of the chosen experts, [T, k].
            shares: The router's scores of all experts, whose sum is 1, [T, E].
            chosen: The chosen experts, [T, k] int64.
            micro_batch: Documents and factor of the loss. The loss itself is added to its record.

        Collectives:
            Under context parallel one all-reduce of [documents + 1, E + 1].
        """
        owners, balance, num_documents = micro_batch.document_ids, micro_batch.balance, micro_batch.num_documents
        if balance is None or owners is None:
            return weights
        # Padding is counted in a row of its own, behind those of the documents.
        documents = owners.flatten()
        rows = torch.where(documents == PADDING_SEQ_ID, num_documents, documents)  # [T]
        # One row for each document: its choices by expert, and in the last column its tokens.
        table = shares.new_zeros(num_documents + 1, self.num_experts + 1)
        ones = shares.new_ones(chosen.shape)
        table.view(-1).index_add_(0, (rows[:, None] * (self.num_experts + 1) + chosen).flatten(), ones.flatten())
        table[:, -1].index_add_(0, rows, ones[:, 0])
        if self.cp is not None and self.cp.size() > 1:
            table = all_reduce(table, self.cp.get_group())
        num_tokens = table[:, -1:].clamp(min=1)
        factors = table[:, :-1] * (self.num_experts / chosen.shape[1]) / num_tokens.square()  # [documents + 1, E]
        factors[-1] = 0
        factors = factors[rows] * balance.weight.to(shares.dtype)  # [T, E]
        micro_batch.record.balance_losses[layer] = (factors * shares.detach()).sum()
        # Every tp rank computes the full gradient, and the ranks' gradients are summed.
        ranks = 1 if self.tp is None else self.tp.size()
        return cast(Tensor, _AddGradient.apply(weights, shares, factors * (balance.gradient_scale / ranks)))

    def metrics(self, totals: Tensor) -> dict[str, Tensor]:
        """Return metrics of steps from `RoutingTotals.flat` summed over all ranks.

        Args:
            totals: One column for each step, [n, steps].

        Returns:
            `loads`, and if experts were replayed `router_replay_differs`, the share of the replayed choices that the
            router would have made otherwise, [steps] each.
        """
        num_counts = self.num_layers * self.num_experts
        counts, replays = totals[:num_counts], totals[num_counts:]
        measured = load_metrics(counts.unflatten(0, (self.num_layers, self.num_experts)))
        if len(replays):
            measured["router_replay_differs"] = replays[0] / replays[1].clamp(min=1)
        return measured


@dataclass
class RoutingTotals:
    """Sum of the records of a step's micro-batches, on this rank.

    Attributes:
        counts: Tokens by sparse layer and expert, [layers, E] float64.
        replays: Replayed choices that differ, and all replayed choices, [2] float64. None if none were replayed.
    """

    counts: Tensor | None = None
    replays: Tensor | None = None

    def add(self, record: RoutingRecord) -> None:
        """Add the record of a micro-batch whose forward is done."""
        by_layer = [record.counts[layer] for layer in sorted(record.counts)]
        counts = torch.stack(by_layer).double()
        self.counts = counts if self.counts is None else self.counts + counts
        if record.replays:
            replays = sum(record.replays.values(), counts.new_zeros(2))
            self.replays = replays if self.replays is None else self.replays + replays

    def flat(self) -> Tensor:
        """Return all totals as one vector, to be summed over the ranks that have other tokens, [n] float64."""
        assert self.counts is not None
        parts = [self.counts.flatten()]
        if self.replays is not None:
            parts.append(self.replays)
        return torch.cat(parts)


class _AddGradient(torch.autograd.Function):
    """Passes `weights` through. The gradient of `shares` is `grad`."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, shares: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.saved_tensors[0], None


def load_metrics(counts: Tensor) -> dict[str, Tensor]:
    """Return how unevenly experts are used, the mean over layers of each figure, [..].

    Args:
        counts: Tokens by expert over all ranks, [layers, E, ..].

    Returns:
        `moe_load`: tokens of the fullest expert relative to the mean. `moe_idle`: share of experts without a token.
    """
    mean = counts.mean(1).clamp(min=1e-9)
    return {"moe_load": (counts.amax(1) / mean).mean(0), "moe_idle": (counts == 0).double().mean((0, 1))}
