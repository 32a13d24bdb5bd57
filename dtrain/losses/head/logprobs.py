"""Log-probabilities of targets from hidden states and the head's weight. Logits are computed one tile at a time.

The backward computes the tiles again. That makes four matrix products with the head: logits, logits again, and the
gradients of hidden states and weight. Memory is one tile and the two gradients. For a sum with known weights,
`weighted_sum` needs only three products.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dtrain.losses.head.softmax import RequestedStatistics, softmax_rows
from dtrain.losses.head.sources import HeadLogits, Scaling
from dtrain.losses.head.vocabulary import VocabShard, block


@dataclass
class TrainingSamplingParams:
    """Sampling parameters of completions.

    Functions of logits read `top_k` and `top_p` only: their caller has divided the logits by the temperature. Functions
    of hidden states read all three.

    Attributes:
        top_k: Number of tokens to sample from. None, 0 or -1: all.
        top_p: Probability mass to sample from. 1.0: all.
        temperature: Divides the logits.
    """

    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0


def need_top_k_or_top_p_filtering(sampling_params: TrainingSamplingParams | None) -> bool:
    """Check whether top-k or top-p excludes tokens from sampling. None means that nothing is excluded.

    Example:
        >>> need_top_k_or_top_p_filtering(TrainingSamplingParams(top_k=-1, temperature=0.7))
        False
        >>> need_top_k_or_top_p_filtering(TrainingSamplingParams(top_p=0.9))
        True
    """
    if sampling_params is None:
        return False
    top_k, top_p = sampling_params.top_k, sampling_params.top_p
    return (top_k is not None and top_k > 0) or (top_p is not None and top_p != 1.0)


class HeadLogprobs(NamedTuple):
    """Values per token, in the shape of the targets. 0 at positions without a target.

    Attributes:
        logprobs: log p(target). Differentiable.
        entropy: -Σ p·log p. Differentiable. None if it was not requested.
        log_p2: log Σ p², without gradient. None if it was not requested.
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

    Everything is computed in max(float32, the dtypes), and the weight's gradient is summed over the tiles in that
    dtype. The gradients are returned in the dtypes of the inputs. The backward may run any number of times.

    Args:
        hidden: Hidden states [..., D], any floating dtype.
        weight: The head's weight [V, D], or with `shard` this rank's rows of it.
        targets: Ids of the full vocabulary [...], int64, the same on every rank. A target outside [0, V), -100
            included, gives values of 0 and no gradient, even if its hidden state is NaN.
        temperature: Divides the logits.
        softcap: See `sources.Scaling`. None: no softcap.
        shard: This rank's part of the vocabulary. None if the vocabulary is not sharded.
        entropy: Whether to compute the entropy.
        log_p2: Whether to compute log Σ p².
        index: Flat positions that have a target, [T] int64, each once. Only these are computed. None: on a CPU the
            positions are searched. On a GPU all positions are computed, because a search would wait for the device.
        tile: Tokens and ids of the largest tile of logits. None: `vocabulary.block`.

    Returns:
        The values, on every rank. The gradient of `weight` is complete. The gradient of `hidden` is this rank's part
        and must be summed over the group.

    Raises:
        ValueError: If the temperature or the softcap is not positive.

    Collectives:
        One all-gather of 3 to 5 numbers per token in the forward, none in the backward.

    Example:
        Equal logits of 4 ids give every target the probability 1/4. Targets of -100 give 0.

        >>> hidden, weight = torch.ones(2, 3), torch.ones(4, 3)
        >>> logprobs_from_hidden_states(hidden, weight, torch.tensor([1, -100])).logprobs
        tensor([-1.3863,  0.0000])
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
    requested = RequestedStatistics(neg_entropy=entropy or log_p2, squares=log_p2)
    values = softmax_rows(make_source, flat, weight, ids=ids, shard=shard, requested=requested)

    def in_shape_of_targets(value: Tensor) -> Tensor:
        """Scatter the values of `index` [T] to the shape of the targets, with 0 elsewhere."""
        return value.new_zeros(flat_targets.shape).index_copy(0, index, value).view(targets.shape)

    logprobs = in_shape_of_targets(values.logprobs.squeeze(-1))
    entropies = log_p2_of_targets = None
    if entropy and values.neg_entropy is not None:
        entropies = in_shape_of_targets(-values.neg_entropy)
    if values.log_p2 is not None:
        log_p2_of_targets = in_shape_of_targets(values.log_p2)
    return HeadLogprobs(logprobs, entropies, log_p2_of_targets)


def _tile_size(tokens: int, device_type: str) -> tuple[int, int]:
    """Return the number of tokens and of ids of a tile.

    A tile has a fixed number of elements, so if there are few tokens it has more ids. For example, on a CPU: 512 tokens
    and 1,024 ids, or 64 tokens and 8,192 ids.
    """
    max_rows, columns = block(device_type)
    rows = max(1, min(max_rows, tokens))
    return rows, max(columns, max_rows * columns // rows)


def _positions_with_target(targets: Tensor, vocab_size: int | None) -> Tensor:
    """Return the positions of targets [N] that are ids; on a GPU all positions.

    Without `vocab_size`, targets beyond the vocabulary are included. `softmax_rows` gives them a value of 0.
    """
    if targets.is_cuda:
        return torch.arange(len(targets), device=targets.device)
    has_target = targets >= 0
    if vocab_size is not None:
        has_target &= targets < vocab_size
    return has_target.nonzero().squeeze(1)
