"""Log-probabilities of targets from hidden states under the filter that they were drawn with: top-k, then top-p.

A filter needs whole rows of logits, so tokens are taken in chunks, each computed again in the backward.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dtrain.losses.filtering import TrainingSamplingParams
from dtrain.losses.sampling import DistributedLogprobWithSampling
from dtrain.losses.shard import VocabShard
from dtrain.losses.softmax_stats import compute_dtype

# Tokens whose logits exist at once.
_CHUNK = {"cpu": 256, "cuda": 2048}


def filtered_logprobs_from_hidden_states(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    sampling: TrainingSamplingParams,
    *,
    softcap: float | None = None,
    shard: VocabShard | None = None,
    index: Tensor,
) -> Tensor:
    """log p(target) of the distribution that is left after temperature, top-k and top-p, shaped as targets [..]; 0
    where there is no target, −inf (and no gradient) where the filter leaves it out.

    hidden [.., D], weight [V, D] or with `shard` this rank's rows of it, targets [..] int64 global ids, index [T] int64
    the flat positions of targets. Computed in max(float32, the dtypes). With `shard` the values come back on every
    rank, and hidden's gradient has still to be summed over the group; per chunk one all-to-all and one all-reduce
    forward, two and one in the backward.
    """
    group = None if shard is None else shard.group
    step = _CHUNK.get(hidden.device.type, _CHUNK["cuda"])
    rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, index)  # [T, D]
    chosen = targets.flatten().index_select(0, index)
    dtype = torch.promote_types(compute_dtype(hidden.dtype), weight.dtype)

    def of_chunk(rows: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        logits = rows.to(dtype) @ weight.to(dtype).t()  # [t, V/tp]
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        logits = logits / sampling.temperature
        return DistributedLogprobWithSampling.apply(
            logits[None], chosen[None], group, sampling.top_k, sampling.top_p, not torch.is_grad_enabled()
        )[0]

    parts = [
        checkpoint(of_chunk, rows[start : start + step], weight, chosen[start : start + step], use_reentrant=False)
        for start in range(0, len(index), step)
    ]
    # Without a target the sum over nothing keeps hidden and weight in the graph, whose collectives go on.
    values = torch.cat(parts) if parts else rows.to(dtype).sum(1) + weight[:0].to(dtype).sum()
    return values.new_zeros(targets.numel()).index_copy(0, index, values).view(targets.shape)
