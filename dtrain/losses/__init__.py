"""Logits or hidden states to log-probabilities, entropy and top-k, over a vocabulary that may be cut over ranks; and
from those to a loss. Knows no recipe. README.md has every loss with its formula.

    shard, softmax_stats                  a vocabulary over ranks; parts of a softmax, merged
    logprob, entropy, softmax, topk       from logits
    filtering, sampling                   from logits after top-k and top-p
    hidden, head, scaling                 from hidden states, tile by tile; the head's softcap and temperature
    head_filtered, head_kl, head_topk     the same under a filter, between two models, over a teacher's top-k
    next_token, packed, sequence_first    for users, by layout of the logits or hidden states
    context, distillation                 for users, under context parallel; student and teacher
    preference_options, policy_options    the losses by name, with their options, defaults and ranges; no torch
    divergence, length, pair_losses       of pairs: scores, weights of tokens, the formulas
    preference                            of pairs, for users: losses by name
    advantage                             rewards to advantages
    sequences, policy_kl                  sums over sequences; the divergence from a reference
    policy_losses, policy_correction      the formulas; weights for another sampler
    policy_core, policy                   a policy loss over a micro-batch; for users, by name

Names are imported when they are used: the tables of options are read where no torch is.
"""

# ruff: noqa: F401
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.losses.advantage import (
        advantages,
        decoupled_advantages,
        soft_overlong_penalty,
        without_truncated,
        zero_variance_groups,
    )
    from dtrain.losses.context import (
        AllGatherCPTensor,
        _get_tokens_on_this_cp_rank,
        allgather_cp_sharded_tensor,
        cp_shift_next,
    )
    from dtrain.losses.distillation import forward_kl, get_distillation_topk_logprobs_from_logits, mixed_kl, reverse_kl
    from dtrain.losses.entropy import ChunkedDistributedEntropy, DistributedCrossEntropy
    from dtrain.losses.filtering import TrainingSamplingParams, apply_top_k_top_p, need_top_k_or_top_p_filtering
    from dtrain.losses.head import HeadLogprobs, logprobs_from_hidden_states
    from dtrain.losses.head_filtered import filtered_logprobs_from_hidden_states
    from dtrain.losses.head_kl import HeadInput, KlSums, kl_sum_from_hidden_states
    from dtrain.losses.head_topk import TopkKlSums, topk_kl_sum_from_hidden_states, topk_logits_from_hidden_states
    from dtrain.losses.hidden import weighted_logprob_sum
    from dtrain.losses.length import length_desensitised_weights
    from dtrain.losses.logprob import ChunkedDistributedGatherLogprob, ChunkedDistributedLogprob, DistributedLogprob
    from dtrain.losses.next_token import (
        dtensor_from_parallel_logits_to_logprobs,
        from_parallel_logits_to_logprobs,
        get_logprobs_from_vocab_parallel_logits,
        get_next_token_logprobs_from_logits,
    )
    from dtrain.losses.packed import from_parallel_logits_to_logprobs_packed_sequences
    from dtrain.losses.policy import policy_loss, top_entropy_threshold
    from dtrain.losses.policy_core import Counts, PolicySpec, means, policy_terms
    from dtrain.losses.preference import (
        combined_preference_loss,
        preference_loss,
        preference_rewards,
        preference_weights,
        running_mean,
    )
    from dtrain.losses.sampling import (
        ChunkedDistributedLogprobWithSampling,
        DistributedLogprobWithSampling,
        all_to_all_sq2vp,
        all_to_all_vp2sq,
    )
    from dtrain.losses.sequence_first import (
        ChunkedDistributedHiddenStatesToLogprobs,
        from_parallel_hidden_states_to_logprobs,
    )
    from dtrain.losses.sequences import Documents, Rows
    from dtrain.losses.shard import VocabShard, group_all_reduce_sum, group_all_reduce_sum_with_grad
    from dtrain.losses.softmax import (
        _compute_distributed_log_softmax,
        _compute_distributed_softmax,
        vocab_parallel_log_softmax,
    )
    from dtrain.losses.topk import (
        distributed_vocab_topk,
        gather_logits_at_global_indices,
        vocab_parallel_argmax,
        vocab_parallel_gather_columns,
    )

_MODULES = {
    "advantage": "advantages decoupled_advantages soft_overlong_penalty without_truncated zero_variance_groups",
    "context": "AllGatherCPTensor _get_tokens_on_this_cp_rank allgather_cp_sharded_tensor cp_shift_next",
    "distillation": "forward_kl get_distillation_topk_logprobs_from_logits mixed_kl reverse_kl",
    "entropy": "ChunkedDistributedEntropy DistributedCrossEntropy",
    "filtering": "TrainingSamplingParams apply_top_k_top_p need_top_k_or_top_p_filtering",
    "head": "HeadLogprobs logprobs_from_hidden_states",
    "head_filtered": "filtered_logprobs_from_hidden_states",
    "head_kl": "HeadInput KlSums kl_sum_from_hidden_states",
    "head_topk": "TopkKlSums topk_kl_sum_from_hidden_states topk_logits_from_hidden_states",
    "hidden": "weighted_logprob_sum",
    "length": "length_desensitised_weights",
    "logprob": "ChunkedDistributedGatherLogprob ChunkedDistributedLogprob DistributedLogprob",
    "next_token": "dtensor_from_parallel_logits_to_logprobs from_parallel_logits_to_logprobs "
    "get_logprobs_from_vocab_parallel_logits get_next_token_logprobs_from_logits",
    "packed": "from_parallel_logits_to_logprobs_packed_sequences",
    "policy": "policy_loss top_entropy_threshold",
    "policy_core": "Counts PolicySpec means policy_terms",
    "preference": "combined_preference_loss preference_loss preference_rewards preference_weights running_mean",
    "sampling": "ChunkedDistributedLogprobWithSampling DistributedLogprobWithSampling "
    "all_to_all_sq2vp all_to_all_vp2sq",
    "sequence_first": "ChunkedDistributedHiddenStatesToLogprobs from_parallel_hidden_states_to_logprobs",
    "sequences": "Documents Rows",
    "shard": "VocabShard group_all_reduce_sum group_all_reduce_sum_with_grad",
    "softmax": "_compute_distributed_log_softmax _compute_distributed_softmax vocab_parallel_log_softmax",
    "topk": "distributed_vocab_topk gather_logits_at_global_indices vocab_parallel_argmax "
    "vocab_parallel_gather_columns",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
