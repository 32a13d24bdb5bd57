"""The context-parallel helpers that NeMo-RL's users know, on `parallel.layout`'s head-tail layout."""

import torch
from torch import Tensor

from dtrain.losses.shard import Group, group_rank, group_size
from dtrain.parallel.collectives import gather_along
from dtrain.parallel.layout import gather_sequence, shard_sequence


class AllGatherCPTensor:
    """The whole sequence from every cp rank's head-tail part."""

    @staticmethod
    def apply(tensor: Tensor, cp_group: Group, seq_dim: int = 1) -> Tensor:
        """tensor [.., S/cp, ..] -> [.., S, ..] in natural order; the tensor itself without a group.

        Backward the incoming gradients are summed over cp and cut: the true derivative where every cp rank owns a loss.
        One all-gather, backward one reduce-scatter. Raises ValueError for parts of odd length.
        """
        if group_size(cp_group) == 1:
            return tensor
        if tensor.shape[seq_dim] % 2:
            raise ValueError(f"a cp rank's part has two equal chunks; {tensor.shape[seq_dim]} tokens cannot be cut so")
        return gather_sequence(tensor, cp_group, seq_dim)


def allgather_cp_sharded_tensor(tensor: Tensor, cp_group: Group, seq_dim: int = 1) -> Tensor:
    """`AllGatherCPTensor.apply`: gradients are summed over cp."""
    return AllGatherCPTensor.apply(tensor, cp_group, seq_dim)


def _get_tokens_on_this_cp_rank(input_ids: Tensor, cp_rank: int, cp_size: int, seq_dim: int = 1) -> Tensor:
    """[.., S, ..] -> this cp rank's head-tail part [.., S/cp, ..]; the tensor itself for cp_size 1. No collective.

    Raises ValueError where 2·cp does not divide S.
    """
    return input_ids if cp_size == 1 else shard_sequence(input_ids, cp_rank, cp_size, seq_dim)


def cp_shift_next(x: Tensor, cp_group: Group = None, *, fill: float) -> Tensor:
    """out[:, t] = x[:, t + 1] over the global sequence cut contiguously over cp, `fill` after its end.

    x [B, S/cp, ..]. One all-gather of [B, 1, ..]; differentiable, gradients summed over cp.
    """
    end = torch.full_like(x[:, :1], fill)
    size, rank = group_size(cp_group), group_rank(cp_group)
    if size > 1:
        firsts = gather_along(x[:, :1], 1, cp_group)  # [B, cp, ..]
        following = torch.cat([firsts[:, 1:], end], 1)
        end = following[:, rank : rank + 1]
    return torch.cat([x[:, 1:], end], 1)
