"""Hidden states to log-probabilities, entropy and top-k, over a vocabulary that may be cut over ranks; and from those
to a loss. Knows no recipe. README.md has every loss with its formula.

    vocabulary                           a vocabulary over ranks and in tiles; parts of a softmax, merged
    hidden, head                         from hidden states, tile by tile: a sum with known weights; values by token
    head_filtered, head_kl, head_topk    the same under a filter, between two models, over a teacher's top-k
    head_jsd                             between two models and their mixture
    preference_options, policy_options   the losses by name: options, defaults and ranges; no torch
    pair_losses, preference              of pairs: the formulas; losses by name, weights of tokens
    unpaired                             of single replies: the formulas
    policy_losses, policy_core           sums over sequences, the formulas; a policy loss over a micro-batch
    advantage                            rewards to advantages

Names are imported when they are used: the tables of options are read where no torch is. Those for callers from outside,
from logits by layout, are in `dtrain.faces`.
"""

# ruff: noqa: F401
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.faces.distillation import get_distillation_topk_logprobs_from_logits
    from dtrain.faces.groups import (
        AllGatherCPTensor,
        _get_tokens_on_this_cp_rank,
        allgather_cp_sharded_tensor,
        cp_shift_next,
        group_all_reduce_sum,
        group_all_reduce_sum_with_grad,
    )
    from dtrain.faces.logprob import ChunkedDistributedGatherLogprob, ChunkedDistributedLogprob, DistributedLogprob
    from dtrain.faces.next_token import (
        dtensor_from_parallel_logits_to_logprobs,
        from_parallel_logits_to_logprobs,
        get_logprobs_from_vocab_parallel_logits,
        get_next_token_logprobs_from_logits,
    )
    from dtrain.faces.packed import from_parallel_logits_to_logprobs_packed_sequences
    from dtrain.faces.policy_loss import policy_loss
    from dtrain.faces.sampling import (
        ChunkedDistributedLogprobWithSampling,
        DistributedLogprobWithSampling,
        all_to_all_sq2vp,
        all_to_all_vp2sq,
    )
    from dtrain.faces.sequence_first import (
        ChunkedDistributedHiddenStatesToLogprobs,
        from_parallel_hidden_states_to_logprobs,
    )
    from dtrain.faces.softmax import (
        ChunkedDistributedEntropy,
        DistributedCrossEntropy,
        _compute_distributed_log_softmax,
        _compute_distributed_softmax,
        vocab_parallel_log_softmax,
    )
    from dtrain.faces.topk import (
        distributed_vocab_topk,
        gather_logits_at_global_indices,
        vocab_parallel_argmax,
        vocab_parallel_gather_columns,
    )
    from dtrain.losses.advantage import (
        advantages,
        decoupled_advantages,
        soft_overlong_penalty,
        without_truncated,
        zero_variance_groups,
    )
    from dtrain.losses.head import (
        HeadLogprobs,
        TrainingSamplingParams,
        logprobs_from_hidden_states,
        need_top_k_or_top_p_filtering,
    )
    from dtrain.losses.head_filtered import apply_top_k_top_p, filtered_logprobs_from_hidden_states
    from dtrain.losses.head_jsd import jsd_sum_from_hidden_states
    from dtrain.losses.head_kl import (
        HeadInput,
        KlSums,
        forward_kl,
        generalized_jsd,
        kl_sum_from_hidden_states,
        mixed_kl,
        reverse_kl,
    )
    from dtrain.losses.head_topk import TopkKlSums, topk_kl_sum_from_hidden_states, topk_logits_from_hidden_states
    from dtrain.losses.hidden import TokenSums, token_loss_sums, weighted_logprob_sum
    from dtrain.losses.policy_core import Counts, PolicySpec, means, policy_terms, top_entropy_threshold
    from dtrain.losses.policy_losses import Documents, RowSequences
    from dtrain.losses.preference import (
        combined_preference_loss,
        length_desensitised_weights,
        preference_loss,
        preference_rewards,
        preference_weights,
        running_mean,
    )
    from dtrain.losses.vocabulary import VocabShard

_MODULES = {
    "losses.advantage": "advantages decoupled_advantages soft_overlong_penalty without_truncated zero_variance_groups",
    "losses.head": "HeadLogprobs TrainingSamplingParams logprobs_from_hidden_states need_top_k_or_top_p_filtering",
    "losses.head_filtered": "apply_top_k_top_p filtered_logprobs_from_hidden_states",
    "losses.head_jsd": "jsd_sum_from_hidden_states",
    "losses.head_kl": "HeadInput KlSums forward_kl generalized_jsd kl_sum_from_hidden_states mixed_kl reverse_kl",
    "losses.head_topk": "TopkKlSums topk_kl_sum_from_hidden_states topk_logits_from_hidden_states",
    "losses.hidden": "TokenSums token_loss_sums weighted_logprob_sum",
    "losses.policy_core": "Counts PolicySpec means policy_terms top_entropy_threshold",
    "losses.preference": "combined_preference_loss length_desensitised_weights preference_loss preference_rewards "
    "preference_weights running_mean",
    "losses.policy_losses": "Documents RowSequences",
    "losses.vocabulary": "VocabShard",
    "faces.distillation": "get_distillation_topk_logprobs_from_logits",
    "faces.groups": "AllGatherCPTensor _get_tokens_on_this_cp_rank allgather_cp_sharded_tensor cp_shift_next "
    "group_all_reduce_sum group_all_reduce_sum_with_grad",
    "faces.logprob": "ChunkedDistributedGatherLogprob ChunkedDistributedLogprob DistributedLogprob",
    "faces.next_token": "dtensor_from_parallel_logits_to_logprobs from_parallel_logits_to_logprobs "
    "get_logprobs_from_vocab_parallel_logits get_next_token_logprobs_from_logits",
    "faces.packed": "from_parallel_logits_to_logprobs_packed_sequences",
    "faces.policy_loss": "policy_loss",
    "faces.sampling": "ChunkedDistributedLogprobWithSampling DistributedLogprobWithSampling all_to_all_sq2vp "
    "all_to_all_vp2sq",
    "faces.sequence_first": "ChunkedDistributedHiddenStatesToLogprobs from_parallel_hidden_states_to_logprobs",
    "faces.softmax": "ChunkedDistributedEntropy DistributedCrossEntropy _compute_distributed_log_softmax "
    "_compute_distributed_softmax vocab_parallel_log_softmax",
    "faces.topk": "distributed_vocab_topk gather_logits_at_global_indices vocab_parallel_argmax "
    "vocab_parallel_gather_columns",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"dtrain.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
