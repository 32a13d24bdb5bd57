"""Log-probabilities of targets from hidden states and the head's weight: the logits exist one tile at a time.

The backward computes the tiles again: four products of the head in all, and no more memory than a tile besides the two
gradients. For a sum with known weights, `weighted_sum` needs three products.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.losses.head.softmax import Wanted, softmax_rows
from dtrain.losses.head.sources import HeadLogits, Scaling
from dtrain.losses.head.vocabulary import VocabShard, block


@dataclass
class TrainingSamplingParams:
    """Filters by which completions were sampled. top_k None or −1, top_p 1.0, temperature 1.0: off.

    The functions here read top_k and top_p; who calls them has divided the logits by the temperature.
    """

    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0


def need_top_k_or_top_p_filtering(sampling_params: TrainingSamplingParams | None) -> bool:
    """Return whether `sampling_params` leave any token out."""
    if sampling_params is None:
        return False
    top_k, top_p = sampling_params.top_k, sampling_params.top_p
    return (top_k is not None and top_k > 0) or (top_p is not None and top_p != 1.0)


class HeadLogprobs(NamedTuple):
    """Values per token, shaped as the targets. They are 0 where there is no target.

    Attributes:
        logprobs: log p(target), differentiable.
        entropy: -Σ p·log p, differentiable. None if it was not asked for.
        log_p2: log Σ p², without gradient. None if it was not asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    log_p2: Tensor | None = None


def logprobs_from_hidden_states(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    shard: VocabShard | None = None,
    entropy: bool = False,
    log_p2: bool = False,
    index: Tensor | None = None,
    tile: tuple[int, int] | None = None,
) -> HeadLogprobs:
    """Compute log softmax(softcap · tanh(hidden · weightᵀ / softcap) / temperature) at targets.

    Values, products and sums are computed in max(float32, the dtypes). Gradients come in the inputs' dtypes; the
    weight's is summed in the compute dtype. The backward may run any number of times.

    Args:
        hidden: Hidden states [..., D], any floating dtype.
        weight: The head's weight [V, D], or with `shard` this rank's rows of it.
        targets: Ids of the full vocabulary [...], int64, the same on every rank. A target outside [0, V), -100
            included, gives 0 everywhere and no gradient, whatever its hidden state holds.
        temperature: Divides the logits.
        softcap: The softcap of the logits. None for none.
        shard: This rank's part of the vocabulary. None if the vocabulary is not sharded.
        entropy: Whether to compute the entropy.
        log_p2: Whether to compute log Σ p².
        index: Flat positions that have a target, [T] int64, each once. Whoever knows them on the host saves a GPU the
            work on the others. Without it a CPU finds them, and a GPU, which would have to stop for that, computes all.
        tile: Tokens and ids of the largest tile of logits. None for the usual size.

    Returns:
        The values on every rank. Gradients are the shard's own: hidden's must still be summed over the group.

    Raises:
        ValueError: If the temperature or the softcap is not positive.

    Collectives:
        One all-gather of 3 to 5 numbers per token in the forward, none in the backward.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    flat_targets = targets.flatten()
    if index is None:
        index = _positions_with_target(flat_targets, None if shard is not None else len(weight))
    max_rows, max_columns = tile or _tile_size(len(index), hidden.device.type)
    make_source = partial(
        HeadLogits,
        index=index,
        max_rows=max_rows,
        max_columns=max_columns,
        scaling=Scaling(temperature, softcap),
    )
    ids = flat_targets.index_select(0, index).unsqueeze(-1)
    wanted = Wanted(neg_entropy=entropy or log_p2, squares=log_p2)
    values = softmax_rows(make_source, flat, weight, ids=ids, shard=shard, wanted=wanted)

    def placed(value: Tensor) -> Tensor:
        return value.new_zeros(flat_targets.shape).index_copy(0, index, value).view(targets.shape)

    return HeadLogprobs(
        logprobs=placed(values.logprobs.squeeze(-1)),
        entropy=placed(-values.neg_entropy) if entropy and values.neg_entropy is not None else None,
        log_p2=None if values.log_p2 is None else placed(values.log_p2),
    )


def _tile_size(tokens: int, device_type: str) -> tuple[int, int]:
    """Return the tokens and the ids of a tile. The largest block of logits has a fixed number of elements: of few
    tokens a tile has more ids."""
    most_rows, columns = block(device_type)
    rows = max(1, min(most_rows, tokens))
    return rows, max(columns, most_rows * columns // rows)


def _positions_with_target(targets: Tensor, vocab_size: int | None) -> Tensor:
    """Return the positions of targets [N] that are ids, as far as this is known; on a GPU all positions."""
    if targets.is_cuda:
        return torch.arange(len(targets), device=targets.device)
    has_target = targets >= 0
    if vocab_size is not None:
        has_target &= targets < vocab_size
    return has_target.nonzero().squeeze(1)
