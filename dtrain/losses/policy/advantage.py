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
    _check_choice("baseline", baseline, get_args(Baseline))
    _check_choice("scale", scale, get_args(Scale))
    if eps is None:
        eps = 1e-6 if scale == "leave_one_out" else 1e-4
    values, ids, statistics_of_groups = _grouped(rewards, groups)
    batch = _RewardStatistics(values)
    results = []
    for value, group in zip(values, ids, strict=True):
        results.append(_advantage(value, statistics_of_groups[group], batch, baseline, scale, eps))
    return _like(rewards, results)


def _check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError if a value is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{key}={value!r} must be one of {', '.join(choices)}")


def _advantage(
    reward: float,
    group: "_RewardStatistics",
    batch: "_RewardStatistics",
    baseline: Baseline,
    scale: Scale,
    eps: float,
) -> float:
    """Return the advantage of a reward, given the statistics of its group and of the batch."""
    if math.isnan(reward):
        return 0.0
    # If the rewards are equal, rounding must not make the advantage anything but 0.
    reads_group = baseline in ("group", "leave_one_out") or scale == "group"
    reads_batch = "batch" in (baseline, scale)
    if (reads_group and group.is_constant) or (reads_batch and batch.is_constant):
        return 0.0

    difference = reward
    if baseline == "batch":
        difference = reward - batch.mean
    elif baseline == "group":
        difference = reward - group.mean
    elif baseline == "leave_one_out":
        # reward - (sum - reward) / (n - 1) = (reward - sum / n) · n / (n - 1)
        difference = (reward - group.mean) * (group.count / (group.count - 1))

    if scale == "none":
        return difference
    if scale == "leave_one_out":
        deviation = group.deviation_without(reward)
        return difference / (deviation + eps) if deviation else difference
    deviation = batch.deviation if scale == "batch" else group.deviation
    return difference / (deviation + eps)


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
    normalised, is_known = [], []  # K lists of N
    for rewards_of_one in rewards:
        normalised.append(advantages(rewards_of_one.double(), groups, eps=eps).tolist())
        is_known.append([not math.isnan(value) for value in _values(rewards_of_one)])
    totals = []
    for completion in range(rewards.shape[1]):
        terms = []
        for k, weight in enumerate(weights):
            if is_known[k][completion]:
                terms.append(weight * normalised[k][completion])
        totals.append(math.fsum(terms) if terms else math.nan)
    total = torch.tensor(totals, dtype=torch.float64)
    result = advantages(total, groups, baseline="batch", scale="batch", eps=eps)
    return _like(rewards, result.tolist())


def zero_variance_groups(rewards: Tensor, groups: Groups) -> Tensor:
    """Return the completions of groups whose known rewards are all equal, [N] bool. Groups without any are included.

    Such a group has no gradient, so dynamic sampling excludes it. Arguments and errors are those of `advantages`.

    Example:
        >>> zero_variance_groups(torch.tensor([1.0, 1.0, 0.0, 1.0]), groups=2)
        tensor([ True,  True, False, False])

    Reference:
        DAPO: Yu et al., arXiv:2503.14476, section 3.2.
    """
    _, ids, statistics_of_groups = _grouped(rewards, groups)
    return torch.tensor([statistics_of_groups[group].is_constant for group in ids], dtype=torch.bool)


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


class _RewardStatistics:
    """Statistics of the rewards of a group that are not NaN.

    Attributes:
        count: Their number.
        is_constant: Whether they are all equal, or there are none.
        mean: Their mean, 0 if there are none.
        deviation: Their standard deviation with n - 1, exactly 0 if they are equal.
    """

    def __init__(self, values: Iterable[float]):
        self._rewards = [value for value in values if not math.isnan(value)]
        self.count = len(self._rewards)
        self.is_constant = len(set(self._rewards)) < 2
        self.mean = 0.0
        if self._rewards:
            self.mean = math.fsum(self._rewards) / self.count
        self.deviation = 0.0
        if not self.is_constant:
            squares = math.fsum((value - self.mean) ** 2 for value in self._rewards)
            self.deviation = math.sqrt(squares / (self.count - 1))
        self._deviations_without: dict[float, float] = {}  # by the reward that is left out

    def deviation_without(self, value: float) -> float:
        """Return the standard deviation of the other rewards, without one that is `value`. 0 if they are all equal."""
        if value not in self._deviations_without:
            remaining = list(self._rewards)
            remaining.remove(value)
            self._deviations_without[value] = _RewardStatistics(remaining).deviation
        return self._deviations_without[value]


def _grouped(rewards: Tensor, groups: Groups) -> tuple[list[float], list[int], dict[int, _RewardStatistics]]:
    """Return the reward of each completion, the group of each completion, and the statistics of each group."""
    values = _values(rewards)
    ids = _ids(groups, len(values))
    rewards_of_groups: dict[int, list[float]] = {}
    for value, group in zip(values, ids, strict=True):
        rewards_of_groups.setdefault(group, []).append(value)
    statistics = {group: _RewardStatistics(group_rewards) for group, group_rewards in rewards_of_groups.items()}
    return values, ids, statistics


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
