"""Top-k and top-p filtering of full rows of logits, as sampling engines do it, for log-probabilities under the same
rule.

Top-p (nucleus sampling): Holtzman et al., arXiv:1904.09751, section 3.1. Top-k: Fan et al., arXiv:1805.04833.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dtrain.losses.softmax_stats import compute_dtype

# Rows sorted at once: a sort holds values and indices of all of them.
ROWS_PER_SORT = 256


@dataclass
class TrainingSamplingParams:
    """How completions were sampled. top_k None or −1, top_p 1.0, temperature 1.0: off.

    The functions here read top_k and top_p; who calls them has divided the logits by the temperature.
    """

    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0


def _has_top_k(top_k: int | None) -> bool:
    return top_k is not None and top_k > 0


def _has_top_p(top_p: float | None) -> bool:
    return top_p is not None and top_p != 1.0


def need_top_k_or_top_p_filtering(sampling_params: TrainingSamplingParams | None) -> bool:
    """Whether `sampling_params` leave any token out."""
    return sampling_params is not None and (_has_top_k(sampling_params.top_k) or _has_top_p(sampling_params.top_p))


def apply_top_k_top_p(
    logits: Tensor, top_k: int | None, top_p: float, chunk_size: int | None = ROWS_PER_SORT
) -> tuple[Tensor, Tensor | None]:
    """logits [.., V] -> (logits with −inf where filtered, the mask of what is kept [.., V]); differentiable.

    Top-k first (tokens that tie with the k-th stay; top_k > V means V), then top-p over what is left, renormalised: the
    most likely tokens up to and with the one that makes the sum reach top_p, at least one, equal ones by lower id.
    With neither on: the logits themselves, and None. chunk_size: rows sorted at once, None for all.
    """
    if not _has_top_k(top_k) and not _has_top_p(top_p):
        return logits, None
    with torch.no_grad():
        rows = logits.reshape(-1, logits.shape[-1])
        mask = torch.empty(rows.shape, dtype=torch.bool, device=logits.device)
        step = chunk_size or max(len(rows), 1)
        for start in range(0, len(rows), step):
            mask[start : start + step] = kept(rows[start : start + step], top_k, top_p)
        mask = mask.view(logits.shape)
    return logits.masked_fill(~mask, -float("inf")), mask


def kept(logits: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """The mask of the tokens of logits [n, V] that pass the filter, [n, V]."""
    mask = None
    if _has_top_k(top_k):
        mask = logits >= logits.topk(min(top_k, logits.shape[-1]), -1).values[:, -1:]
        if not _has_top_p(top_p):
            return mask
        logits = logits.masked_fill(~mask, -float("inf"))
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    p = torch.softmax(ordered, -1, dtype=compute_dtype(logits.dtype))
    before = p.cumsum(-1).sub_(p)  # the probability of all that are likelier
    stays = before < top_p
    stays[:, 0] = True
    nucleus = torch.empty_like(stays).scatter_(-1, ids, stays)
    return nucleus if mask is None else nucleus & mask
