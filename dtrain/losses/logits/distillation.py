"""From a student's logits and a teacher's top-k to the log-probabilities that `losses.forward_kl` and the like take."""

from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.losses.head.vocabulary import Group
from dtrain.losses.logits.groups import allgather_cp_sharded_tensor, shard_bounds, shard_like
from dtrain.losses.logits.logprob import logprob_at
from dtrain.losses.logits.next_token import local_logits
from dtrain.losses.logits.softmax import ChunkedDistributedEntropy
from dtrain.losses.logits.topk import gather_logits_at_global_indices


def get_distillation_topk_logprobs_from_logits(
    student_logits: Tensor | DTensor,
    teacher_topk_logits: Tensor,
    teacher_topk_indices: Tensor,
    zero_outside_topk: bool,
    calculate_entropy: bool,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: Group = None,
    context_parallel_group: Group = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Student's and teacher's log-probabilities at the teacher's top-k tokens, both [B, S − 1, K], and the student's
    negative entropy Σ p·log p over the whole vocabulary [B, S − 1] where `calculate_entropy`, else None.

    student_logits: this rank's shard [B, S/cp, V/tp] with a group and its rank there, a DTensor on ("tp",) or
    ("cp", "tp"), or plain [B, S, V]; head-tail over cp. teacher_topk_logits, teacher_topk_indices [B, S, K] in natural
    order. Position t goes with position t; the last is dropped.

    The teacher is normalised over its top-k. The student is too, unless zero_outside_topk (the teacher is taken to be
    zero elsewhere): then its log-probabilities are those over the whole vocabulary.
    float32 (float64 from float64). Under cp incoming gradients are summed over cp. Raises ValueError for K = 0.
    """
    ids = teacher_topk_indices.to(student_logits.device)
    if ids.shape[-1] == 0:
        raise ValueError("topk must be positive: the teacher gives no token")
    tp_group, cp_group = vocab_parallel_group, context_parallel_group
    if isinstance(student_logits, DTensor):
        logits, bounds, tp_group, cp_group = local_logits(student_logits)
    else:
        logits, bounds = student_logits, shard_bounds(student_logits, vocab_parallel_rank, tp_group)
    length = ids.shape[1]
    if zero_outside_topk:
        student = logprob_at(logits, shard_like(ids, logits.shape[1], cp_group), *bounds, tp_group)
        student = allgather_cp_sharded_tensor(student, cp_group)[:, :length]
    else:
        student = gather_logits_at_global_indices(
            logits, ids, tp_group, cp_group, vocab_start_index=bounds[0], vocab_end_index=bounds[1]
        ).log_softmax(-1)
    teacher = teacher_topk_logits.to(student.device, student.dtype).log_softmax(-1)
    neg_entropy = None
    if calculate_entropy:
        neg_entropy = ChunkedDistributedEntropy.apply(logits, None, tp_group)
        neg_entropy = allgather_cp_sharded_tensor(neg_entropy, cp_group)[:, : length - 1]
    return student[:, :-1], teacher[:, :-1], neg_entropy
