"""Rewards to advantages: against the other completions of a prompt, or of the batch. On the host, over all completions
of a rollout at once.

Sums are exact (math.fsum), so that nothing depends on the order of the completions, to the last bit.
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
    """(reward − baseline) ÷ (standard deviation + eps), [N], in max(float32, the dtype of rewards).

    rewards [N], NaN where none is known: these count nowhere, and their advantage is 0. groups: the size of groups that
    follow one another, or each completion's group [N], in any order.

    baseline: group, its mean (GRPO: Shao et al., arXiv:2402.03300); leave_one_out, the mean of the group's others
    (RLOO: Ahmadian et al., arXiv:2402.14740), where there is one; batch, the mean of all (REINFORCE++:
    arXiv:2501.03262); none, 0. scale: the standard deviation of the group's rewards, of its others (NeMo-RL's default,
    with the baseline leave_one_out), of all rewards (arXiv:2508.08221), or none (Dr. GRPO: Liu et al.,
    arXiv:2503.20783), with Bessel's correction, 0 for one reward alone. eps: None for 1e-4, beside leave_one_out for
    NeMo-RL's 1e-6. The defaults are TRL 1.16's.

    Where the rewards that the baseline is the mean of, or whose deviation divides, are all the same, the advantage is
    exactly 0; but under the scale leave_one_out it is then not divided, as the one reward that differs from equal
    others is what its group teaches. Raises ValueError for an unknown word, a size that does not divide N, and infinite
    rewards.
    """
    for key, word, known in (("baseline", baseline, get_args(Baseline)), ("scale", scale, get_args(Scale))):
        if word not in known:
            raise ValueError(f"{key}={word!r}; there are {', '.join(known)}")
    values, ids, by_group = _grouped(rewards, groups)
    everyone = _Known(values)

    def of(value: float, own: _Known) -> float:
        compared = {"group": own, "leave_one_out": own, "batch": everyone, "none": None}[baseline]
        spread = {"group": own, "leave_one_out": None, "batch": everyone, "none": None}[scale]
        if math.isnan(value) or any(group is not None and group.is_constant for group in (compared, spread)):
            return 0.0
        gap = value if compared is None else value - compared.mean
        if baseline == "leave_one_out":
            gap *= own.count / (own.count - 1)
        if scale == "leave_one_out":
            deviation = own.deviation_without(value)
            return gap / (deviation + (1e-6 if eps is None else eps)) if deviation else gap
        return gap if spread is None else gap / (spread.deviation + (1e-4 if eps is None else eps))

    return _like(rewards, [of(value, by_group[group]) for value, group in zip(values, ids, strict=True)])


def decoupled_advantages(rewards: Tensor, weights: Sequence[float], groups: Groups, *, eps: float = 1e-4) -> Tensor:
    """[N]: each of K rewards [K, N] normalised in its group, their weighted sum normalised over the batch (GDPO:
    arXiv:2601.05242; TRL 1.16's normalize_then_sum), so that no reward drowns in another's spread.

    A reward that is NaN is left out of the sum; a completion without any has advantage 0. Raises ValueError as
    `advantages` does, and for another number of weights than K.
    """
    if rewards.dim() != 2 or len(weights) != rewards.shape[0]:
        raise ValueError(f"rewards {tuple(rewards.shape)} and {len(weights)} weights: [K, N] and K are needed")
    parts = [advantages(column.double(), groups, eps=eps).tolist() for column in rewards]
    known = [[not math.isnan(value) for value in _values(column)] for column in rewards]
    sums = []
    for column in range(rewards.shape[1]):
        terms = [w * part[column] for w, part, is_known in zip(weights, parts, known, strict=True) if is_known[column]]
        sums.append(math.fsum(terms) if terms else math.nan)
    total = torch.tensor(sums, dtype=torch.float64)
    return _like(rewards, advantages(total, groups, baseline="batch", scale="batch", eps=eps).tolist())


def zero_variance_groups(rewards: Tensor, groups: Groups) -> Tensor:
    """[N] bool: true at the completions of groups that teach nothing, all known rewards being the same (or none).

    For dynamic sampling (DAPO: Yu et al., arXiv:2503.14476, section 3.2), which leaves them out, and for the fraction
    that is logged. Arguments and errors as in `advantages`.
    """
    _, ids, by_group = _grouped(rewards, groups)
    return torch.tensor([by_group[group].is_constant for group in ids], dtype=torch.bool)


def soft_overlong_penalty(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """[N], to be added to the rewards: 0 up to max_length − cache tokens, from there down to −1 at max_length and
    beyond (DAPO's soft overlong punishment: Yu et al., arXiv:2503.14476, equation 13). lengths [N]: tokens.

    Raises ValueError unless 0 < cache ≤ max_length.
    """
    if not 0 < cache <= max_length:
        raise ValueError(f"cache={cache} must be above 0 and at most max_length={max_length}")
    free = max_length - cache
    return -((lengths.to(torch.float64) - free) / cache).clamp(0, 1)


def without_truncated(mask: Tensor, truncated: Tensor) -> Tensor:
    """mask [B, T] less the completions that did not end by themselves, truncated [B] bool (DAPO's overlong filtering:
    Yu et al., arXiv:2503.14476, section 3.4)."""
    return mask.bool() & ~truncated.bool()[:, None]


class _Known:
    """The rewards of a group that are known."""

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
        """The standard deviation of the others of one that is `value`; 0 where these are all the same."""
        if value not in self._without:
            others = list(self._known)
            others.remove(value)
            self._without[value] = _Known(others).deviation
        return self._without[value]


def _grouped(rewards: Tensor, groups: Groups) -> tuple[list[float], list[int], dict[int, _Known]]:
    """The rewards and the group of each completion, and the rewards that are known of each group."""
    values = _values(rewards)
    ids = _ids(groups, len(values))
    members: dict[int, list[float]] = {}
    for value, group in zip(values, ids, strict=True):
        members.setdefault(group, []).append(value)
    return values, ids, {group: _Known(of_group) for group, of_group in members.items()}


def _values(rewards: Tensor) -> list[float]:
    values = rewards.to(torch.float64).tolist()
    if any(math.isinf(value) for value in values):
        raise ValueError("rewards: an infinite one has no advantage; NaN says that none is known")
    return values


def _ids(groups: Groups, count: int) -> list[int]:
    if isinstance(groups, int):
        if groups < 1 or count % groups:
            raise ValueError(f"groups of {groups} do not divide {count} rewards")
        return [place // groups for place in range(count)]
    ids = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    if len(ids) != count:
        raise ValueError(f"{len(ids)} group ids for {count} rewards; one each is needed")
    return ids


def _like(rewards: Tensor, values: list[float]) -> Tensor:
    wide = torch.promote_types(rewards.dtype, torch.float32)
    return torch.tensor(values, dtype=torch.float64).to(rewards.device, wide)
