"""Routing of tokens to experts in one micro-batch: replayed experts, the balance loss, and counts.

*Replay.* A sparse layer sends a token to the k experts that its router scores highest. If a batch has the stream
`routed_experts`, a token goes to the experts that an inference engine's router chose for the same token instead
(rollout routing replay, arXiv:2510.11370). The weights of the experts, and the gradient, are always this router's own.

*Balance loss.* It is computed for each document (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20). For E experts and
a document of T tokens with k experts each, the loss is E · Σ_e f_e · P_e. f_e is the fraction of the k · T choices that
fell on expert e. P_e is the mean over the tokens of the score of e, where each token's scores are divided by their sum.
For example, with E = 4 and k = 1, a document whose tokens all go to one expert with score 1 has a loss of 4, and equal
use of all experts has a loss of 1.

The mean of the loss over documents and sparse layers is added to the loss of the method. Splitting a batch into
micro-batches or over ranks does not change it: under context parallel, the choices of a document are summed over ranks.

Four objects, by lifetime:

    Routing            one per model: number of experts and layers, process groups. Set when the model is built
    MicroBatchRouting  one per micro-batch, part of its `MicroBatchContext`. Sparse layers read it
    RoutingRecord      one per micro-batch. Sparse layers write it
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
    """Counts and losses of the sparse layers in one micro-batch.

    Every value is stored under the number of its layer. A layer that activation checkpointing computes a second time
    overwrites its value by the same value, so nothing is counted twice.

    Attributes:
        records_choices: Whether `choices` is filled.
        counts: Tokens of this rank for each expert, [E] int64.
        balance_losses: The layer's balance loss, a scalar.
        replays: Number of replayed choices that differ from the router's own, and of all replayed choices, [2] int64.
        choices: The router's own choices for each token, [T, k] int16.
    """

    records_choices: bool = False
    counts: dict[int, Tensor] = field(default_factory=dict)
    balance_losses: dict[int, Tensor] = field(default_factory=dict)
    replays: dict[int, Tensor] = field(default_factory=dict)
    choices: dict[int, Tensor] = field(default_factory=dict)

    def balance_loss(self) -> Tensor:
        """Return the sum of the balance losses of all layers, a scalar."""
        first_counts, *_ = self.counts.values()
        total = torch.zeros((), device=first_counts.device)
        for loss in self.balance_losses.values():
            total = total + loss
        return total

    def choices_by_row(self, num_rows: int) -> Tensor:
        """Return the choices of all layers, [num_rows, S, layers, k] int16."""
        by_layer = [self.choices[layer] for layer in sorted(self.choices)]
        return torch.stack(by_layer, 1).unflatten(0, (num_rows, -1))


@dataclass(frozen=True)
class MicroBatchRouting:
    """Routing in the sparse layers for one micro-batch.

    Attributes:
        document_ids: Number of each token's document in the micro-batch, -1 on padding, [B, S/cp]. Only read for the
            balance loss.
        num_documents: Documents in the micro-batch, over all cp ranks.
        num_real_tokens: Tokens of this rank that are not padding. None if the host does not know it: layers then wait
            for the device to count them.
        replayed_experts: The experts that tokens are sent to, [B, S/cp, layers, k], -1 where the router decides. None
            if it decides everywhere.
        balance: The balance loss. None if there is none.
        record: The layers' record of this micro-batch.
        copies: If documents share tokens that are computed once: for each token of each document, the index of the
            computed token, [n] int64. `document_ids` is then [n], too. None: each token belongs to one document.
    """

    document_ids: Tensor | None = None
    num_documents: int = 0
    num_real_tokens: int | None = None
    replayed_experts: Tensor | None = None
    balance: BalanceLoss | None = None
    record: RoutingRecord = field(default_factory=RoutingRecord)
    copies: Tensor | None = None

    def padded(self, missing: int) -> "MicroBatchRouting":
        """Return the same micro-batch with `missing` tokens of padding at the end of each row, with the same record."""
        document_ids, replayed = self.document_ids, self.replayed_experts
        if document_ids is not None and self.copies is None:
            document_ids = F.pad(document_ids, (0, missing), value=PADDING_SEQ_ID)
        if replayed is not None:
            replayed = F.pad(replayed, (0, 0, 0, 0, 0, missing), value=-1)
        return replace(self, document_ids=document_ids, replayed_experts=replayed)

    def by_document(self, values: Tensor) -> Tensor:
        """Repeat the values [T, ..] of tokens that several documents share for each of them, [n, ..]."""
        return values if self.copies is None else values[self.copies]

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """Return the experts to which the tokens of a layer are sent, and record the choices.

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
        is_replayed = replayed[:, :1] >= 0  # [T, 1]
        # A replayed expert differs if it equals none of the router's own k choices.
        differs = (replayed[:, :, None] != own[:, None]).all(-1) & is_replayed  # [T, k]
        num_differing, num_replayed = self.by_document(differs).sum(), self.by_document(is_replayed).sum()
        self.record.replays[layer] = torch.stack([num_differing, num_replayed * own.shape[1]])
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
            shares: The router's scores of all experts, divided by their sum, [T, E].
            chosen: The chosen experts, [T, k] int64.
            micro_batch: Documents and factor of the loss. The loss itself is added to its record.

        Collectives:
            Under context parallel, one all-reduce of [documents + 1, E + 1].
        """
        owners, balance, num_documents = micro_batch.document_ids, micro_batch.balance, micro_batch.num_documents
        if balance is None or owners is None:
            return weights
        # Padding is counted in a row of its own, after those of the documents. n is T, or more if documents share
        # tokens.
        documents = owners.flatten()
        rows = torch.where(documents == PADDING_SEQ_ID, num_documents, documents)  # [n]
        chosen = micro_batch.by_document(chosen)  # [n, k]

        # One row for each document: the number of its choices by expert, and in the last column its tokens.
        num_columns = self.num_experts + 1
        table = shares.new_zeros(num_documents + 1, num_columns)
        ones = shares.new_ones(chosen.shape)
        table.view(-1).index_add_(0, (rows[:, None] * num_columns + chosen).flatten(), ones.flatten())
        table[:, -1].index_add_(0, rows, ones[:, 0])
        if self.cp is not None and self.cp.size() > 1:
            table = all_reduce(table, self.cp.get_group())

        # The loss of a document is Σ over its tokens and over e of factor_e · share_e, with
        # factor_e = E · f_e / T = E · (choices of e / (k · T)) / T. Its derivative by a share is the factor.
        num_tokens = table[:, -1:].clamp(min=1)
        factors = table[:, :-1] * (self.num_experts / chosen.shape[1]) / num_tokens.square()  # [documents + 1, E]
        factors[-1] = 0
        factors = factors[rows] * balance.weight.to(shares.dtype)  # [n, E]
        if micro_batch.copies is not None:
            # A shared token counts in each of its documents.
            index = (micro_batch.copies,)
            factors = torch.zeros_like(shares).index_put(index, factors, accumulate=True)  # [T, E]
        micro_batch.record.balance_losses[layer] = (factors * shares.detach()).sum()
        # Every tp rank computes the full gradient, and the ranks' gradients are summed.
        ranks = 1 if self.tp is None else self.tp.size()
        return cast(Tensor, _AddGradient.apply(weights, shares, factors * (balance.gradient_scale / ranks)))

    def metrics(self, totals: Tensor) -> dict[str, Tensor]:
        """Compute metrics of steps from the totals of all ranks.

        Args:
            totals: `RoutingTotals.flat` summed over the ranks, one column for each step, [n, steps].

        Returns:
            The metrics of `load_metrics`, [steps] each. If experts were replayed, also `router_replay_differs`: the
            fraction of replayed choices that differ from the router's own.
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
        """Return all totals as one vector, to be summed over ranks with different tokens, [n] float64."""
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
    """Compute how unevenly experts are used. Each metric is the mean over layers.

    Args:
        counts: Tokens of each expert over all ranks, [layers, E, ...].

    Returns:
        `moe_load`: tokens of the expert with the most tokens, relative to the mean. `moe_idle`: fraction of experts
        without a token. Both have the shape [...].

    Example:
        >>> metrics = load_metrics(torch.tensor([[8.0, 4.0, 0.0, 4.0]]))
        >>> metrics["moe_load"].item(), metrics["moe_idle"].item()
        (2.0, 0.25)
    """
    mean = counts.mean(1).clamp(min=1e-9)
    return {"moe_load": (counts.amax(1) / mean).mean(0), "moe_idle": (counts == 0).double().mean((0, 1))}
