"""Losses from hidden states or logits, over a vocabulary that may be sharded over ranks. README.md has all formulas.

head           losses from hidden states and the head's weight, one tile of logits at a time; used by training
logits         losses from logits in each layout: plain, vocabulary-parallel, DTensor
token_options  losses of supervised fine-tuning: the table of names and options
user_losses    losses of users, which a recipe names by an import path
value_checks   the check of what a user's loss returns
policy         policy-gradient losses: formulas, options, advantages
preference     preference losses: of pairs (DPO), and of single replies that are marked good or bad (KTO)
"""

from dtrain.losses.head.filtered import apply_top_k_top_p, filtered_logprobs_from_hidden_states
from dtrain.losses.head.kl import (
    KlSums,
    forward_kl,
    generalized_jsd,
    jsd_sum_from_hidden_states,
    kl_sum_from_hidden_states,
    mixed_kl,
    reverse_kl,
)
from dtrain.losses.head.logprobs import (
    HeadLogprobs,
    TrainingSamplingParams,
    logprobs_from_hidden_states,
    need_top_k_or_top_p_filtering,
)
from dtrain.losses.head.topk import TopkKlSums, topk_kl_sum_from_hidden_states, topk_logits_from_hidden_states
from dtrain.losses.head.vocabulary import HeadInput, VocabShard
from dtrain.losses.head.weighted_sum import TokenSums, token_loss_sums, weighted_logprob_sum
from dtrain.losses.logits.groups import (
    AllGatherCPTensor,
    _get_tokens_on_this_cp_rank as _get_tokens_on_this_cp_rank,
    allgather_cp_sharded_tensor,
    cp_shift_next,
    group_all_reduce_sum,
    group_all_reduce_sum_with_grad,
)
from dtrain.losses.logits.logprob import (
    ChunkedDistributedEntropy,
    ChunkedDistributedGatherLogprob,
    ChunkedDistributedLogprob,
    DistributedCrossEntropy,
    DistributedLogprob,
    _compute_distributed_log_softmax as _compute_distributed_log_softmax,
    _compute_distributed_softmax as _compute_distributed_softmax,
    vocab_parallel_log_softmax,
)
from dtrain.losses.logits.next_token import (
    ChunkedDistributedLogprobWithSampling,
    DistributedLogprobWithSampling,
    all_to_all_sq2vp,
    all_to_all_vp2sq,
    dtensor_from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs,
    from_parallel_logits_to_logprobs_packed_sequences,
    get_logprobs_from_vocab_parallel_logits,
    get_next_token_logprobs_from_logits,
)
from dtrain.losses.logits.sequence_first import (
    ChunkedDistributedHiddenStatesToLogprobs,
    from_parallel_hidden_states_to_logprobs,
)
from dtrain.losses.logits.topk import (
    distributed_vocab_topk,
    gather_logits_at_global_indices,
    get_distillation_topk_logprobs_from_logits,
    vocab_parallel_argmax,
    vocab_parallel_gather_columns,
)
from dtrain.losses.policy.advantage import (
    advantages,
    decoupled_advantages,
    soft_overlong_penalty,
    without_truncated,
    zero_variance_groups,
)
from dtrain.losses.policy.formulas import Documents, RowSequences
from dtrain.losses.policy.terms import Counts, PolicySpec, means, policy_loss, policy_terms, top_entropy_threshold
from dtrain.losses.preference.losses import (
    combined_preference_loss,
    length_desensitised_weights,
    preference_loss,
    preference_rewards,
    preference_weights,
    running_mean,
)

__all__ = [
    "AllGatherCPTensor",
    "ChunkedDistributedEntropy",
    "ChunkedDistributedGatherLogprob",
    "ChunkedDistributedHiddenStatesToLogprobs",
    "ChunkedDistributedLogprob",
    "ChunkedDistributedLogprobWithSampling",
    "Counts",
    "DistributedCrossEntropy",
    "DistributedLogprob",
    "DistributedLogprobWithSampling",
    "Documents",
    "HeadInput",
    "HeadLogprobs",
    "KlSums",
    "PolicySpec",
    "RowSequences",
    "TokenSums",
    "TopkKlSums",
    "TrainingSamplingParams",
    "VocabShard",
    "advantages",
    "all_to_all_sq2vp",
    "all_to_all_vp2sq",
    "allgather_cp_sharded_tensor",
    "apply_top_k_top_p",
    "combined_preference_loss",
    "cp_shift_next",
    "decoupled_advantages",
    "distributed_vocab_topk",
    "dtensor_from_parallel_logits_to_logprobs",
    "filtered_logprobs_from_hidden_states",
    "forward_kl",
    "from_parallel_hidden_states_to_logprobs",
    "from_parallel_logits_to_logprobs",
    "from_parallel_logits_to_logprobs_packed_sequences",
    "gather_logits_at_global_indices",
    "generalized_jsd",
    "get_distillation_topk_logprobs_from_logits",
    "get_logprobs_from_vocab_parallel_logits",
    "get_next_token_logprobs_from_logits",
    "group_all_reduce_sum",
    "group_all_reduce_sum_with_grad",
    "jsd_sum_from_hidden_states",
    "kl_sum_from_hidden_states",
    "length_desensitised_weights",
    "logprobs_from_hidden_states",
    "means",
    "mixed_kl",
    "need_top_k_or_top_p_filtering",
    "policy_loss",
    "policy_terms",
    "preference_loss",
    "preference_rewards",
    "preference_weights",
    "reverse_kl",
    "running_mean",
    "soft_overlong_penalty",
    "token_loss_sums",
    "top_entropy_threshold",
    "topk_kl_sum_from_hidden_states",
    "topk_logits_from_hidden_states",
    "vocab_parallel_argmax",
    "vocab_parallel_gather_columns",
    "vocab_parallel_log_softmax",
    "weighted_logprob_sum",
    "without_truncated",
    "zero_variance_groups",
]
