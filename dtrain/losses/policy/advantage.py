"""Advantages from rewards, relative to the other completions of the same prompt or of the batch.

Computed on the host over all completions of a rollout at once. Sums are exact (math.fsum), so that the advantages have
the same bits for every order of the completions.

Example: one group with the rewards 1, 2, 3.

    baseline=group, scale=group                   mean 2, deviation 1              -0.9999  0    0.9999
    baseline=group, scale=none                    mean 2                           -1       0    1
    baseline=leave_one_out, scale=none            means 2.5, 2, 1.5 of the others  -1.5     0    1.5
    baseline=leave_one_out, scale=leave_one_out   deviations 0.707, 1.414, 0.707   -2.121   0    2.121
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Baseline = Literal["group", "leave_one_out", "batch", "none"]
Scale = Literal["group", "leave_one_out", "batch", "none"]
Groups = int | Tensor | Sequence[int]


def advantages(
    rewards: Tensor,
    groups: Groups,
    *,
    baseline: Baseline = "group",
    scale: Scale = "group",
    eps: float | None = None,
) -> Tensor:
    """Compute (reward - baseline) / (standard deviation + eps).

    If all rewards of the group (or of the batch, if baseline or scale is "batch") are equal, the advantage is exactly
    0. With scale="leave_one_out", if the other rewards of the group are equal, the advantage is not divided, because
    their deviation is 0.

    Args:
        rewards: [N]. NaN means unknown: such a reward is left out of all means, and its advantage is 0.
        groups: The size of consecutive groups, or the group of each completion, [N], in any order.
        baseline: "group": the mean of the group (GRPO). "leave_one_out": the mean of the group's other rewards (RLOO).
            "batch": the mean of all rewards (REINFORCE++). "none": 0.
        scale: "group": the standard deviation of the group. "leave_one_out": that of the group's other rewards, which
            is NeMo-RL's default together with the baseline "leave_one_out". "batch": that of all rewards. "none": 1
            (Dr. GRPO). Deviations have Bessel's correction (n - 1), and are 0 for one reward.
        eps: None: 1e-4, or 1e-6 for scale="leave_one_out", as in NeMo-RL. The other defaults are those of TRL 1.16.

    Returns:
        [N], in max(float32, the dtype of `rewards`).

    Raises:
        ValueError: For an unknown baseline or scale, a group size that does not divide N, or an infinite reward.

    Example:
        >>> advantages(torch.tensor([1.0, 2.0, 3.0]), groups=3, baseline="group", scale="none")
        tensor([-1.,  0.,  1.])

    Reference:
        GRPO: Shao et al., arXiv:2402.03300. RLOO: Ahmadian et al., arXiv:2402.14740. REINFORCE++: arXiv:2501.03262.
        Scale by the batch: arXiv:2508.08221. Dr. GRPO: Liu et al., arXiv:2503.20783.
    """
    for key, word, known in (("baseline", baseline, get_args(Baseline)), ("scale", scale, get_args(Scale))):
        if word not in known:
            raise ValueError(f"{key}={word!r} must be one of {', '.join(known)}")
    values, ids, by_group = _grouped(rewards, groups)
    batch = _KnownRewards(values)

    def advantage_of(value: float, group: _KnownRewards) -> float:
        """Return the advantage of a reward in its group."""
        centre = {"group": group, "leave_one_out": group, "batch": batch, "none": None}[baseline]
        spread = {"group": group, "leave_one_out": None, "batch": batch, "none": None}[scale]
        if math.isnan(value) or any(known is not None and known.is_constant for known in (centre, spread)):
            return 0.0
        gap = value if centre is None else value - centre.mean
        if baseline == "leave_one_out":
            # value - (sum - value) / (n - 1) = (value - sum / n) · n / (n - 1)
            gap *= group.count / (group.count - 1)
        if scale == "leave_one_out":
            deviation = group.deviation_without(value)
            return gap / (deviation + (1e-6 if eps is None else eps)) if deviation else gap
        return gap if spread is None else gap / (spread.deviation + (1e-4 if eps is None else eps))

    return _like(rewards, [advantage_of(value, by_group[group]) for value, group in zip(values, ids, strict=True)])


def decoupled_advantages(rewards: Tensor, weights: Sequence[float], groups: Groups, *, eps: float = 1e-4) -> Tensor:
    """Compute advantages from several rewards, each of which is normalised before they are added.

    Each reward is normalised in its group, so that a reward with a large spread does not hide the others. Then their
    weighted sum is normalised over the batch.

    Args:
        rewards: K rewards of N completions, [K, N]. NaN means unknown: it is left out of the sum. A completion without
            any known reward has the advantage 0.
        weights: Weights of the rewards, [K].
        groups: As in `advantages`.
        eps: As in `advantages`.

    Returns:
        [N], in max(float32, the dtype of `rewards`).

    Raises:
        ValueError: As in `advantages`, or if there are not K weights.

    Reference:
        GDPO, arXiv:2601.05242. It is normalize_then_sum in TRL 1.16.
    """
    if rewards.dim() != 2 or len(weights) != rewards.shape[0]:
        raise ValueError(f"rewards {tuple(rewards.shape)} and {len(weights)} weights do not fit: pass [K, N] and K")
    normalised = [advantages(reward.double(), groups, eps=eps).tolist() for reward in rewards]  # K lists of N
    known = [[not math.isnan(value) for value in _values(reward)] for reward in rewards]
    sums = []
    for completion in range(rewards.shape[1]):
        terms = []
        for weight, values, is_known in zip(weights, normalised, known, strict=True):
            if is_known[completion]:
                terms.append(weight * values[completion])
        sums.append(math.fsum(terms) if terms else math.nan)
    total = torch.tensor(sums, dtype=torch.float64)
    return _like(rewards, advantages(total, groups, baseline="batch", scale="batch", eps=eps).tolist())


def zero_variance_groups(rewards: Tensor, groups: Groups) -> Tensor:
    """Return the completions of groups whose known rewards are all equal, [N] bool. Groups without any are included.

    Such a group has no gradient, so dynamic sampling excludes it. Arguments and errors are those of `advantages`.

    Example:
        >>> zero_variance_groups(torch.tensor([1.0, 1.0, 0.0, 1.0]), groups=2)
        tensor([ True,  True, False, False])

    Reference:
        DAPO: Yu et al., arXiv:2503.14476, section 3.2.
    """
    _, ids, by_group = _grouped(rewards, groups)
    return torch.tensor([by_group[group].is_constant for group in ids], dtype=torch.bool)


def soft_overlong_penalty(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """Return penalties that are added to the rewards of long completions, [N] float64.

    The penalty is 0 up to max_length - cache tokens, and falls linearly to -1 at max_length.

    Args:
        lengths: Tokens of each completion, [N].
        max_length: The length from which the penalty is -1.
        cache: The number of tokens over which the penalty falls from 0 to -1.

    Raises:
        ValueError: Unless 0 < cache <= max_length.

    Example:
        >>> soft_overlong_penalty(torch.tensor([80, 90, 100]), max_length=100, cache=20)
        tensor([-0.0000, -0.5000, -1.0000], dtype=torch.float64)

    Reference:
        DAPO's soft overlong punishment: Yu et al., arXiv:2503.14476, equation 13.
    """
    if not 0 < cache <= max_length:
        raise ValueError(f"cache={cache} must be above 0 and at most max_length={max_length}")
    unpenalised_length = max_length - cache
    return -((lengths.to(torch.float64) - unpenalised_length) / cache).clamp(0, 1)


def without_truncated(mask: Tensor, truncated: Tensor) -> Tensor:
    """Return the mask [B, T] with all tokens of truncated completions, [B] bool, set to False.

    Reference:
        DAPO's overlong filtering: Yu et al., arXiv:2503.14476, section 3.4.
    """
    return mask.bool() & ~truncated.bool()[:, None]


class _KnownRewards:
    """Statistics of the rewards of a group that are not NaN.

    Attributes:
        count: Their number.
        is_constant: Whether they are all equal, or there are none.
        mean: Their mean, 0 if there are none.
        deviation: Their standard deviation with n - 1, exactly 0 if they are equal.
    """

    def __init__(self, values: Iterable[float]):
        known = [value for value in values if not math.isnan(value)]
        self.count = len(known)
        self.is_constant = len(set(known)) < 2
        self.mean = math.fsum(known) / len(known) if known else 0.0
        spread = math.fsum((value - self.mean) ** 2 for value in known)
        self.deviation = 0.0 if self.is_constant else math.sqrt(spread / (len(known) - 1))
        self._known = known
        self._without: dict[float, float] = {}

    def deviation_without(self, value: float) -> float:
        """Return the standard deviation of the other rewards, without one that is `value`. 0 if they are all equal."""
        if value not in self._without:
            others = list(self._known)
            others.remove(value)
            self._without[value] = _KnownRewards(others).deviation
        return self._without[value]


def _grouped(rewards: Tensor, groups: Groups) -> tuple[list[float], list[int], dict[int, _KnownRewards]]:
    """Return the reward of each completion, the group of each completion, and the statistics of each group."""
    values = _values(rewards)
    ids = _ids(groups, len(values))
    members: dict[int, list[float]] = {}
    for value, group in zip(values, ids, strict=True):
        members.setdefault(group, []).append(value)
    return values, ids, {group: _KnownRewards(rewards_of_group) for group, rewards_of_group in members.items()}


def _values(rewards: Tensor) -> list[float]:
    """Return rewards as numbers, after checking that none is infinite."""
    values = rewards.to(torch.float64).tolist()
    if any(math.isinf(value) for value in values):
        raise ValueError("rewards contain an infinite value. They must be finite, or NaN if unknown")
    return values


def _ids(groups: Groups, count: int) -> list[int]:
    """Return the group of each of `count` completions."""
    if isinstance(groups, int):
        if groups < 1 or count % groups:
            raise ValueError(f"groups of {groups} do not divide {count} rewards")
        return [completion // groups for completion in range(count)]
    ids = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    if len(ids) != count:
        raise ValueError(f"{len(ids)} group ids for {count} rewards: pass one per reward")
    return ids


def _like(rewards: Tensor, values: list[float]) -> Tensor:
    """Return values as a tensor on the device of the rewards, in max(float32, their dtype)."""
    wide = torch.promote_types(rewards.dtype, torch.float32)
    return torch.tensor(values, dtype=torch.float64).to(rewards.device, wide)
