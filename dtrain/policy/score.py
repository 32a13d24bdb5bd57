"""What a loss may ask of the model: log-probabilities of a micro-batch's labels, from inside the root's forward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.batch import IGNORE, PADDING_DOCUMENT, Batch
from dtrain.losses import weighted_logprob_sum

Loss = Callable[["LogprobSource", Batch, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


class LogprobSource:
    """The head of one micro-batch's forward. Valid only inside the loss it is handed to."""

    def __init__(self, hidden: Tensor, head_weight: Tensor, batch: Batch, softcap: float | None):
        self._hidden = hidden  # [B, S, D]
        self._head_weight = head_weight  # [V, D]
        self._batch = batch
        self._softcap = softcap

    def weighted_sum(self, token_weights: Tensor | None = None) -> Tensor:
        """Σ token_weights · log p(label) over the labelled positions, a scalar; weights [B, S] or None for ones.

        The weights are constants. Weights of unlabelled positions are not read.
        """
        index = self._batch["label_index"]
        weights = (
            torch.ones(index.shape, device=index.device)
            if token_weights is None
            else token_weights.flatten().index_select(0, index)
        )
        return weighted_logprob_sum(
            self._hidden.flatten(0, 1),
            self._head_weight,
            self._batch["labels"].flatten().index_select(0, index),
            weights,
            index,
            softcap=self._softcap,
        )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A host micro-batch on `device`, with `label_index` [T]: the flat positions that have a label.

    The index is made on the host, where it costs no synchronisation.
    """
    index = (batch["labels"].flatten() != IGNORE).nonzero().squeeze(1)
    return {name: tensor.to(device, non_blocking=True) for name, tensor in {**batch, "label_index": index}.items()}


def forward_loss(
    model: nn.Module, batch: Batch, device: torch.device, loss_fn: Loss, global_seqs: Tensor, global_tokens: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """`loss_fn`'s loss and metrics on one host micro-batch, the graph ready for backward.

    The global counts are scalars on `device`. Rows of one document each take the plain causal kernel.
    """
    packed = bool((batch["seq_ids"] > PADDING_DOCUMENT + 1).any())
    on_device = to_device(batch, device)

    def at_head(hidden: Tensor, head_weight: Tensor) -> Any:
        source = LogprobSource(hidden, head_weight, on_device, model.config.final_logit_softcapping)
        return loss_fn(source, on_device, global_seqs, global_tokens)

    return model.with_head(
        at_head,
        on_device["input_ids"],
        position_ids=on_device["position_ids"] if packed else None,
        seq_ids=on_device["seq_ids"] if packed else None,
    )
