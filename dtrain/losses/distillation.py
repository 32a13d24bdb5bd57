"""From a student's logits and a teacher's to a distillation loss: log-probabilities at the teacher's top-k, and the
Kullback-Leibler divergences between them.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.losses.context import allgather_cp_sharded_tensor
from dtrain.losses.entropy import ChunkedDistributedEntropy
from dtrain.losses.logprob import logprob_at
from dtrain.losses.next_token import local_logits
from dtrain.losses.shard import Group, shard_start
from dtrain.losses.topk import gather_logits_at_global_indices, shard_like


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
        logits, start, tp_group, cp_group = local_logits(student_logits)
    elif vocab_parallel_group is not None:
        if vocab_parallel_rank is None:
            raise ValueError("vocab_parallel_rank is needed with vocab_parallel_group")
        logits = student_logits
        start = shard_start(logits.shape[-1], vocab_parallel_rank, tp_group, logits.device)
    else:
        logits, start = student_logits, 0
    length = ids.shape[1]
    if zero_outside_topk:
        local_ids = shard_like(ids, logits.shape[1], cp_group)
        student = logprob_at(logits, local_ids, start, tp_group)
        student = allgather_cp_sharded_tensor(student, cp_group)[:, :length]
    else:
        end = start + logits.shape[-1]
        student = gather_logits_at_global_indices(
            logits, ids, tp_group, cp_group, vocab_start_index=start, vocab_end_index=end
        ).log_softmax(-1)
    teacher = teacher_topk_logits.to(student.device, student.dtype).log_softmax(-1)
    neg_entropy = None
    if calculate_entropy:
        neg_entropy = ChunkedDistributedEntropy.apply(logits, None, tp_group)
        neg_entropy = allgather_cp_sharded_tensor(neg_entropy, cp_group)[:, : length - 1]
    return student[:, :-1], teacher[:, :-1], neg_entropy


def forward_kl(student_logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Σ p_teacher · (log p_teacher − log p_student) over the last dimension, [.., K] -> [..]; 0 where p_teacher is 0
    (Hinton et al., arXiv:1503.02531)."""
    return _expected(teacher_logprobs, teacher_logprobs, student_logprobs)


def reverse_kl(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    student_neg_entropy: Tensor | None = None,
    log_outside: float = -100.0,
) -> Tensor:
    """Σ p_student · (log p_student − log p_teacher) over the last dimension, [.., K] -> [..] (Gu et al.,
    arXiv:2306.08543).

    With student_neg_entropy [..], Σ p·log p over the whole vocabulary, the log-probabilities are those at the teacher's
    top-k, and the rest of the student counts against a teacher whose log-probability there is `log_outside`.
    """
    inside = _expected(student_logprobs, student_logprobs, teacher_logprobs)
    if student_neg_entropy is None:
        return inside
    p = student_logprobs.exp()
    rest_entropy = student_neg_entropy - torch.where(p == 0, 0, p * student_logprobs).sum(-1)
    return inside + rest_entropy - log_outside * (1 - p.sum(-1))


def mixed_kl(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    weight: float = 0.5,
    student_neg_entropy: Tensor | None = None,
    log_outside: float = -100.0,
) -> Tensor:
    """weight · forward_kl + (1 − weight) · reverse_kl, [.., K] -> [..]; weight in [0, 1], else ValueError."""
    if not 0 <= weight <= 1:
        raise ValueError(f"weight={weight}: the forward KL's share lies between 0 and 1")
    reverse = reverse_kl(student_logprobs, teacher_logprobs, student_neg_entropy, log_outside)
    return weight * forward_kl(student_logprobs, teacher_logprobs) + (1 - weight) * reverse


def _expected(of: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Σ exp(of) · (first − second) over the last dimension, 0 where exp(of) is 0; gradients finite there too."""
    p = of.exp()
    nowhere = p == 0
    difference = torch.where(nowhere, 0, first) - torch.where(nowhere, 0, second)
    return (p * difference).sum(-1)
