"""Weights of tokens by their completion's length and their partner's."""

import torch
from torch import Tensor

_IGNORE = -100


def length_desensitised_weights(document_ids: Tensor, labels: Tensor, ld_alpha: float) -> Tensor:
    """The weights of the labels' log-probabilities under LD-DPO (Liu et al., arXiv:2409.06411), float64, of labels'
    shape: 1 up to the length of the pair's shorter completion, ld_alpha beyond it, 0 where there is no label.

    document_ids, labels: int64 of one shape, [B, S] padded or packed. Documents 2i and 2i + 1 are a pair; the ids count
    from 0 through the batch, −1 is padding, a document's positions stand in their order. labels are already shifted,
    −100 where there is none; a completion's tokens are its document's labels, counted from the first.

    The weights are for policy and reference alike, as in TRL 1.16; TRL 0.24 left the reference whole and counted
    positions from the row's beginning, the prompt included. Raises ValueError for ld_alpha outside [0, 1] and for a
    document without its partner. Reads the number of documents on the host.
    """
    if not 0 <= ld_alpha <= 1:
        raise ValueError(f"ld_alpha={ld_alpha}: from 0 to 1")
    if labels.numel() == 0:
        return torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
    documents = int(document_ids.max()) + 1
    if documents % 2:
        raise ValueError(f"{documents} documents are no pairs: the last has no partner")
    ids = document_ids.flatten() + 1  # padding is 0
    has_label = (labels.flatten() != _IGNORE) & (ids > 0)
    counted = has_label.cumsum(0)  # labels up to here, this one among them
    before = torch.full((documents + 1,), labels.numel(), device=labels.device)
    before = before.scatter_reduce(0, ids, counted - has_label.long(), "amin")
    lengths = torch.zeros_like(before).index_add(0, ids, has_label.long())[1:]
    shorter = lengths.view(-1, 2).amin(1).repeat_interleave(2)  # [documents]
    shorter = torch.cat([shorter.new_zeros(1), shorter])
    position = counted - before[ids]  # 1 at the completion's first token
    weights = has_label.to(torch.float64)
    weights = torch.where(position > shorter[ids], ld_alpha * weights, weights)
    return weights.view(labels.shape)
