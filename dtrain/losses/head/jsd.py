"""The generalized Jensen-Shannon divergence between two models' next-token distributions, from their hidden states and
heads as in `kl`: four tiles of logits are held at once, and the gradient is formed in the forward.
"""

import math

import torch
from torch import Tensor

from dtrain.losses.head.kl import HeadInput, KlSums, tiles_of_both
from dtrain.losses.head.logprobs import Scaling
from dtrain.losses.head.vocabulary import Group, Stats, VocabShard, group_rank, group_size, merge, part_stats, product
from dtrain.losses.head.weighted_sum import TiledSum
from dtrain.parallel.collectives import all_gather


def jsd_sum_from_hidden_states(
    student: HeadInput,
    teacher: HeadInput,
    index: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    shard: VocabShard | None = None,
    rows_per_tile: int | None = None,
) -> KlSums:
    """Σ over tokens index [T] of beta · KL(p_teacher || m) + (1 − beta) · KL(p_student || m), where
    m = beta · p_teacher + (1 − beta) · p_student (Agarwal et al., arXiv:2306.13649, equation 1).

    Arguments, values, gradients, `shard` and errors as `kl_sum_from_hidden_states`; two all-gathers of four numbers per
    token and tile. Raises ValueError for a beta outside (0, 1).
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta={beta}: the teacher's share of the mixture lies between 0 and 1")
    tokens, others, group = tiles_of_both(student, teacher, index, shard, rows_per_tile)
    scalings = Scaling(temperature, student.softcap), Scaling(temperature, teacher.softcap)
    total, forward, reverse = _jsd_sums(tokens, others, scalings, beta, group).unbind()
    return KlSums(tokens.with_gradient(total), forward, reverse)


@torch.no_grad()
def _jsd_sums(
    tokens: TiledSum, others: TiledSum, scalings: tuple[Scaling, Scaling], beta: float, group: Group
) -> Tensor:
    """The divergence, and the KL in either direction [3]; leaves the divergence's gradient with `tokens`."""
    sums = torch.zeros(3, dtype=tokens.dtype, device=tokens.hidden.device)
    memory = tokens.memory(4)
    for (tile, mine), (_, theirs) in zip(tokens.tiles(), others.tiles(), strict=True):
        scratch, own, gap, q = (tensor[: len(mine)] for tensor in memory)  # [t, V/tp]
        logits = scalings[0].logits_(product(mine, tokens.operand.t(), out=scratch))
        slope = scalings[0].slope(logits) if tokens.wants_gradient else None
        students = part_stats(logits, own)
        logits = scalings[1].logits_(product(theirs, others.operand.t(), out=scratch))
        teachers = part_stats(logits, gap)
        of_student, of_teacher = _log_shares(students, teachers, group)
        log_q, log_p = own.add_(of_student[:, None]), gap.add_(of_teacher[:, None])  # of the whole vocabulary
        torch.add(log_q, math.log1p(-beta), out=scratch)
        torch.logaddexp(scratch, torch.add(log_p, math.log(beta), out=q), out=scratch)
        above = torch.sub(log_q, scratch, out=scratch)  # log q − log m
        torch.exp(log_q, out=q)
        gap = log_p.sub_(log_q)  # log p − log q
        reverse, student = -torch.linalg.vecdot(q, gap), torch.linalg.vecdot(q, above)
        p = log_q.add_(gap).exp_()
        forward = torch.linalg.vecdot(p, gap)
        teacher = torch.linalg.vecdot(p, gap.add_(above))  # log p − log m
        parts = torch.stack([forward, reverse, student, teacher])
        if group_size(group) > 1:
            parts = all_gather(parts[None], 0, group).sum(0)
        forward, reverse, student, teacher = parts
        sums += torch.stack([(beta * teacher + (1 - beta) * student).sum(), forward.sum(), reverse.sum()])
        if not tokens.wants_gradient:
            continue
        # d/dz = (1 − beta) · q · (log q − log m − KL(q || m)): what the mixture's own change adds sums to nothing.
        grad = above.sub_(student[:, None]).mul_(q).mul_(1 - beta)
        if slope is not None:
            grad.mul_(slope)
        tokens.add_gradient(grad, tile, mine)
    return sums


def _log_shares(students: Stats, teachers: Stats, group: Group) -> tuple[Tensor, Tensor]:
    """The log of this rank's share of either model's probability, [t] each. One all-gather."""
    if group_size(group) == 1:
        none = torch.zeros_like(students.m)
        return none, none
    message = torch.stack([students.m, students.l, teachers.m, teachers.l])
    gathered, rank = all_gather(message[None], 0, group).transpose(0, 1), group_rank(group)  # [4, ranks, t]
    student, teacher = (merge(Stats(*gathered[i : i + 2].unbind()))[1][rank] for i in (0, 2))
    return student, teacher
