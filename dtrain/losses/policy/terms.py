"""A policy loss and its metrics over one micro-batch.

`PolicySpec` names the loss and its options. `policy_terms` computes it over padded or packed rows, which may be sharded
over context-parallel ranks. It returns sums over this rank's tokens. The loss is already divided by counts of the
global batch, so that the sum over micro-batches and over dp and cp ranks is the loss of the global batch. Example:
three completions of 2, 4 and 6 tokens, whose losses per token are 1, 2 and 3, in two micro-batches [2, 4] and [6]:

    normalisation "tokens"       (2 · 1 + 4 · 2) / 12 + (6 · 3) / 12 = 10/12 + 18/12 = 2.33
    normalisation "sequences"    (1 + 2) / 3          + 3 / 3        = 1 + 1         = 2

The steps are `_tokens` (inputs in one dtype, ratios, weights of the sampler's correction), a function of `formulas`
(the surrogate), and `_loss_of_tokens` (masks, weights and the KL term). `_metric_totals` computes the metrics.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtrain.base.ranges import name_hint
from dtrain.losses.policy.formulas import (
    FORMULAS,
    RowSequences,
    Sequences,
    Surrogate,
    Tokens,
    bounded_exp,
    correction,
    is_known,
    k3_of,
    kl_term,
    mean_by_sequence,
    off_policy_mask,
)
from dtrain.losses.policy.options import LOSSES, SHARED, PolicyLoss, find_loss, is_loss_name, problems
from dtrain.losses.value_checks import check_loss_values


@dataclass(frozen=True)
class PolicySpec:
    """A policy loss by name, with its options.

    Attributes:
        name: A key of `options.LOSSES`, or the import path of a loss of your own (`losses.user_losses`).
        clip: ε_low and ε_high.
        beta: Weight of the KL term.
        options: Options of the loss and of `options.SHARED`, completed with the defaults.

    Raises:
        ValueError: For an unknown name or option, or a value out of its range.
    """

    name: str = "dapo"
    clip: Sequence[float] = (0.2, 0.2)
    beta: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_loss_name(self.name):
            raise ValueError(f"{self.name!r} is no policy loss{name_hint(self.name, LOSSES)}")
        if errors := problems(self.name, self.clip, self.beta, self.options):
            raise ValueError(str(errors[0]))
        object.__setattr__(self, "clip", tuple(float(bound) for bound in self.clip))
        with_defaults = {**SHARED, **self.loss.options, **self.options}
        object.__setattr__(self, "options", MappingProxyType(with_defaults))

    @property
    def loss(self) -> PolicyLoss:
        """The entry of `options.LOSSES`, or the user's loss."""
        return find_loss(self.name)

    def divisor(self, counts: "Counts") -> Tensor | float:
        """Return the divisor of the sum over the tokens of the global batch, a scalar.

        Args:
            counts: Counts over the global batch.

        Raises:
            ValueError: If the loss divides by `max_completion_length`, and it is None.
        """
        if self.loss.normalisation == "tokens":
            return _or_one(counts.tokens)
        if self.loss.normalisation != "longest":
            return _or_one(counts.sequences)
        if counts.max_completion_length is None:
            raise ValueError(f"{self.name} divides by max_completion_length, which is not given")
        return _or_one(counts.sequences) * counts.max_completion_length


class Counts(NamedTuple):
    """Counts over the global batch.

    Attributes:
        tokens: Number of trained tokens.
        sequences: Number of sequences, including those without a trained token, as in TRL.
        max_completion_length: Longest possible completion, for dr_grpo.
        high_entropy_tokens: Number of tokens above the entropy threshold, which divides the entropy term. None:
            `tokens`.
    """

    tokens: Tensor | float
    sequences: Tensor | float
    max_completion_length: int | None = None
    high_entropy_tokens: Tensor | float | None = None


MEANS: Mapping[str, str] = MappingProxyType(
    {
        "kl": "kl_tokens",
        "approx_kl": "known_tokens",
        "ratio": "known_tokens",
        "entropy": "entropy_tokens",
        "clip_low": "tokens",
        "clip_high": "tokens",
        "mismatch_kl": "sampled_tokens",
        "mismatch_abs": "sampled_tokens",
        "correction": "corrected_tokens",
        "oob_frac": "corrected_tokens",
        "off_policy_frac": "tokens",
    }
)
"""Metrics: maps each sum that `policy_terms` returns to the count that divides it.

kl               estimator k3 of KL(π ‖ π_ref)
approx_kl        estimator k3 of KL(π_old ‖ π)
ratio            r at the level of importance sampling
entropy          entropy of the distribution after temperature, top-k and top-p
clip_low         share of tokens without gradient because π became too small (TRL counts sequences at sequence level)
clip_high        share of tokens without gradient because π became too large
mismatch_kl      estimator k3 of KL(π_sampler ‖ π_old)
mismatch_abs     |log π_sampler/π_old|
correction       weight for this mismatch
oob_frac         share of tokens whose weight was outside the bounds
off_policy_frac  share of tokens in sequences that off_policy_mask_threshold masks
"""


def means(totals: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of `MEANS`, given the sums and counts of a global batch (tensors or floats).

    The mean over zero tokens is 0.

    Example:
        >>> means({"kl": 3.0, "kl_tokens": 6.0})
        {'kl': 0.5}
    """
    metrics = {}
    for name, count_name in MEANS.items():
        if name in totals:
            metrics[name] = totals[name] / _or_one(totals[count_name])
    return metrics


def policy_terms(
    spec: PolicySpec,
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    counts: Counts,
    *,
    ref_logps: Tensor | None = None,
    sampling_logps: Tensor | None = None,
    entropies: Tensor | None = None,
    entropy_threshold: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute this micro-batch's part of the loss and of the metrics.

    Everything is computed in max(float32, the dtype of `logps`), except the KL divergences of the metrics, which are
    computed in float64.

    Infinite log-probabilities mean that top-k or top-p excludes a token now, although it was sampled:

    - -inf in `logps` or `old_logps`: the token has ratio 0 and no gradient, counts as log ratio 0 in its sequence, and
      is left out of the metrics.
    - -inf in `ref_logps`: the token has no KL term.
    - -inf or NaN in `sampling_logps`: the sampler has not reported the token, and its weight is 1.

    Any other NaN at a trained token makes the loss NaN. Values at untrained tokens are never read and may be NaN.

    Args:
        spec: The loss.
        logps: log π, [n, S]. Differentiable.
        old_logps: log π_old of the policy that the update started from, [n, S]. None: that is π.
        advantages: [n, S].
        mask: [n, S], True at trained tokens. If there is none, the gradient is 0.
        sequences: Sums over the sequences of the micro-batch.
        counts: Counts over the global batch.
        ref_logps: log π_ref of the reference, [n, S]. Required if β is not 0.
        sampling_logps: log π_sampler, [n, S]. None: no correction.
        entropies: [n, S]. Differentiable. Required for `entropy_coef` and `top_entropy_quantile`.
        entropy_threshold: `top_entropy_threshold` of the global batch. Required for `top_entropy_quantile`.

    Returns:
        The part of the loss, a differentiable scalar, and the sums and counts for `means`.

    Raises:
        ValueError: If a required argument is missing.

    Collectives:
        Those of `sequences`, the same number on every rank.
    """
    tokens = _tokens(spec, logps, old_logps, advantages, mask.bool(), sequences, ref_logps, sampling_logps, entropies)
    options_of_loss = {name: spec.options[name] for name in spec.loss.options}
    surrogate = _formula_of(spec.loss)(tokens, **options_of_loss)
    tokens_of_loss = _loss_of_tokens(spec, tokens, surrogate.loss, entropy_threshold)
    loss = tokens_of_loss.loss
    if spec.loss.normalisation == "sequences":
        loss = loss / sequences.to_tokens(sequences.lengths.clamp(min=1))
    total = torch.where(tokens.mask, loss, 0.0).sum() / spec.divisor(counts)
    if spec.options["entropy_coef"]:
        num_tokens = counts.tokens if counts.high_entropy_tokens is None else counts.high_entropy_tokens
        entropies = _required(tokens.entropies, _NEEDS_ENTROPIES)
        mean_entropy = torch.where(tokens_of_loss.has_high_entropy, entropies, 0.0).sum() / _or_one(num_tokens)
        total = total - spec.options["entropy_coef"] * mean_entropy
    return total, _metric_totals(tokens, surrogate, tokens_of_loss.is_on_policy)


def _formula_of(loss: PolicyLoss) -> Callable[..., Surrogate]:
    """Return the function of a loss. A user's function is wrapped: its result is checked, and made a `Surrogate`."""
    if isinstance(loss.function, str):
        return FORMULAS[loss.function]
    function = loss.function

    def user_formula(tokens: Tokens, **options: Any) -> Surrogate:
        result = function(tokens, **options)
        surrogate = result if isinstance(result, Surrogate) else Surrogate(result)
        check_loss_values(getattr(function, "__name__", str(function)), surrogate.loss, tokens.logps.shape, "token")
        return surrogate

    return user_formula


def _tokens(
    spec: PolicySpec,
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    sequences: Sequences,
    ref_logps: Tensor | None,
    sampling_logps: Tensor | None,
    entropies: Tensor | None,
) -> Tokens:
    """Return the inputs of the surrogates: masked streams in one dtype, ratios, and weights of the correction."""

    def masked(values: Tensor, mask: Tensor) -> Tensor:
        """Return values [n, S] in the compute dtype, with 0 where the mask [n, S] is False."""
        return torch.where(mask, values.to(dtype), 0.0)

    options = spec.options
    dtype = torch.promote_types(logps.dtype, torch.float32)
    old_logps = logps if old_logps is None else old_logps
    possible = is_known(old_logps, is_known(logps, mask))
    logps = masked(logps, possible)
    old_logps = masked(old_logps.detach(), possible)
    log_ratio = logps - old_logps
    level = options["importance_sampling_level"] or spec.loss.level

    has_reference = is_known(ref_logps, possible)
    reference = None if ref_logps is None else masked(ref_logps.detach(), has_reference)

    is_sampled = is_known(sampling_logps, possible)
    sampler = weights = None
    if sampling_logps is not None:
        is_sampled = is_sampled & ~sampling_logps.isnan()
        sampler = masked(sampling_logps.detach(), is_sampled)
        weights = correction(
            old_logps,
            sampler,
            is_sampled,
            sequences,
            options["sampling_correction"],
            options["sampling_clip_min"],
            options["sampling_clip_max"],
        )
    return Tokens(
        logps=logps,
        old_logps=old_logps,
        log_ratio=log_ratio,
        ratio=_ratio(level, logps, log_ratio, possible, sequences),
        advantages=masked(advantages.detach(), mask),
        mask=mask,
        possible=possible,
        sequences=sequences,
        clip=spec.clip,
        correction=weights,
        reference=reference,
        has_reference=has_reference,
        sampler=sampler,
        is_sampled=is_sampled,
        entropies=None if entropies is None else masked(entropies, possible),
    )


class _LossOfTokens(NamedTuple):
    """The loss of each token, and the tokens that two options select.

    Attributes:
        loss: [n, S].
        has_high_entropy: The trained tokens that `top_entropy_quantile` selects, [n, S] bool.
        is_on_policy: The tokens that `off_policy_mask_threshold` leaves, [n, S] bool. None if that option is off.
    """

    loss: Tensor
    has_high_entropy: Tensor
    is_on_policy: Tensor | None


def _loss_of_tokens(
    spec: PolicySpec, tokens: Tokens, loss: Tensor, entropy_threshold: Tensor | float | None
) -> _LossOfTokens:
    """Apply the masks and weights of `spec` to a surrogate's loss [n, S], and add the KL terms."""
    options = spec.options
    is_on_policy = None
    if options["off_policy_mask_threshold"] is not None:
        # Without the sampler's log-probabilities, π_old is the policy that the tokens were sampled from.
        sampling_logps, known = tokens.old_logps, tokens.possible
        if tokens.sampler is not None:
            sampling_logps, known = tokens.sampler, tokens.is_sampled
        is_on_policy = off_policy_mask(
            tokens.logps,
            sampling_logps,
            tokens.advantages,
            known,
            tokens.sequences,
            options["off_policy_mask_threshold"],
        )
        loss = torch.where(is_on_policy, loss, 0.0)
    has_high_entropy = tokens.mask
    if options["top_entropy_quantile"] < 1:
        entropies = _required(tokens.entropies, _NEEDS_ENTROPIES)
        if entropy_threshold is None:
            raise ValueError("top_entropy_quantile needs entropy_threshold: top_entropy_threshold of the global batch")
        has_high_entropy = tokens.mask & (entropies >= entropy_threshold)
        loss = torch.where(has_high_entropy, loss, 0.0)
    if tokens.correction is not None and not spec.loss.corrects_itself:
        loss = loss * tokens.correction.weights
    if spec.beta:
        ref_logps = _required(tokens.reference, f"beta={spec.beta} needs ref_logps")
        kl = kl_term(tokens.logps, ref_logps, tokens.ratio, options["kl_estimator"], options["kl_gradient"])
        loss = loss + spec.beta * torch.where(tokens.has_reference, kl, 0.0)
    if options["old_kl_coef"]:
        loss = loss + options["old_kl_coef"] * tokens.log_ratio.square()
    return _LossOfTokens(loss, has_high_entropy, is_on_policy)


@torch.no_grad()
def _metric_totals(tokens: Tokens, surrogate: Surrogate, is_on_policy: Tensor | None) -> dict[str, Tensor]:
    """Return the sums and counts of `MEANS`.

    Args:
        tokens: Inputs of the loss.
        surrogate: The loss. Only the tokens that the clip bounds are read.
        is_on_policy: The tokens that `off_policy_mask_threshold` leaves, [n, S]. None if that option is off.
    """
    zeros = torch.zeros_like(tokens.ratio)
    clip_low = zeros if surrogate.clipped_low is None else surrogate.clipped_low.to(zeros)
    clip_high = zeros if surrogate.clipped_high is None else surrogate.clipped_high.to(zeros)
    old_logps, logps = tokens.old_logps, tokens.logps
    totals = _totals(tokens.possible, "known_tokens", ratio=tokens.ratio, approx_kl=k3_of(old_logps, logps))
    totals |= _totals(tokens.mask, "tokens", clip_low=clip_low, clip_high=clip_high)
    if tokens.reference is not None:
        totals |= _totals(tokens.has_reference, "kl_tokens", kl=k3_of(logps, tokens.reference))
    if tokens.entropies is not None:
        totals |= _totals(tokens.possible, "entropy_tokens", entropy=tokens.entropies)
    if tokens.sampler is not None:
        mismatch_abs = (tokens.sampler - old_logps).abs()
        mismatch_kl = k3_of(tokens.sampler, old_logps)
        totals |= _totals(tokens.is_sampled, "sampled_tokens", mismatch_abs=mismatch_abs, mismatch_kl=mismatch_kl)
    if tokens.correction is not None:
        weights = tokens.correction.weights
        is_outside = tokens.correction.outside.to(logps.dtype)
        totals |= _totals(tokens.mask, "corrected_tokens", correction=weights, oob_frac=is_outside)
    if is_on_policy is not None:
        totals |= _totals(tokens.mask, "tokens", off_policy_frac=(~is_on_policy).to(logps.dtype))
    return totals


def top_entropy_threshold(entropies: Tensor, quantile: float) -> tuple[Tensor, Tensor]:
    """Return the entropy above which the top share of the tokens is, and the number of these tokens.

    Between two entropies the threshold is interpolated linearly, as in TRL and in torch.quantile, which is not used
    because it limits N.

    Args:
        entropies: Entropies of all tokens of the global batch in any order, [N].
        quantile: The share of the tokens, from 0 (only the highest entropy) to 1 (all).

    Returns:
        The threshold and the number of tokens that reach it, both scalars. Infinity and 0 if there are no tokens.

    Example:
        >>> top_entropy_threshold(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), quantile=0.5)
        (tensor(3.), tensor(3))

    Reference:
        arXiv:2506.01939.
    """
    ordered = entropies.flatten().to(torch.promote_types(entropies.dtype, torch.float32)).sort().values
    if ordered.numel() == 0:
        return ordered.new_full((), torch.inf), ordered.new_zeros((), dtype=torch.int64)
    position = (1 - quantile) * (ordered.numel() - 1)  # in the sorted entropies, between two indices
    below = int(position)
    above = min(below + 1, ordered.numel() - 1)
    threshold = torch.lerp(ordered[below], ordered[above], position - below)
    return threshold, (ordered >= threshold).sum()


def _ratio(level: str, logps: Tensor, log_ratio: Tensor, possible: Tensor, sequences: Sequences) -> Tensor:
    """Return r at a level of importance sampling, [n, S]. "sequence_token" has the token's gradient (GSPO-token)."""
    if level == "token":
        return torch.where(possible, bounded_exp(log_ratio), 0.0)
    mean = mean_by_sequence(log_ratio, sequences)
    if level == "sequence_token":
        mean = mean.detach() + logps - logps.detach()  # the same value
    return bounded_exp(mean)


def _totals(mask: Tensor, count_name: str, **values: Tensor) -> dict[str, Tensor]:
    """Return the sums of values [n, S] over masked tokens, and the number of these tokens under `count_name`."""
    totals = {}
    for name, value in values.items():
        totals[name] = torch.where(mask, value, 0.0).sum()
        if count_name not in totals:
            totals[count_name] = mask.sum().to(value)  # in the dtype of the first value
    return totals


_NEEDS_ENTROPIES = "entropy_coef and top_entropy_quantile need entropies"


def _required(value: Tensor | None, message: str) -> Tensor:
    """Return the value, or raise ValueError with the message if it is None."""
    if value is None:
        raise ValueError(message)
    return value


def _or_one(count: Any) -> Any:
    """Return a count to divide by: 1 instead of 0."""
    if isinstance(count, Tensor):
        return torch.where(count == 0, 1, count)  # without reading the number, for which the host would wait
    return 1 if count == 0 else count


def policy_loss(
    name: str,
    logps: Tensor,
    old_logps: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    ref_logps: Tensor | None = None,
    beta: float = 0.0,
    sampling_logps: Tensor | None = None,
    entropies: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    max_completion_length: int | None = None,
    entropy_threshold: Tensor | float | None = None,
    entropy_tokens: Tensor | float | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute a policy loss over B completions, and its metrics. No collectives.

    Args:
        name: A key of `options.LOSSES`.
        logps: log π, [B, T]. `policy_terms` describes the streams and the meaning of infinities.
        old_logps: log π_old, [B, T]. None: that is π.
        advantages: [B] or [B, T].
        mask: [B, T], True or 1 at tokens of the completions.
        clip: ε_low and ε_high.
        ref_logps: log π_ref, [B, T]. Required if `beta` is not 0.
        beta: Weight of the KL term.
        sampling_logps: log π_sampler, [B, T]. None: no correction.
        entropies: [B, T]. Required for `entropy_coef` and `top_entropy_quantile`.
        normalizer: Divisor of the sum, if this batch is a part of a larger one: its number of tokens (bnpo, dapo,
            cispo, vespo, dppo_tv, dppo_kl, reinforce), its number of sequences (grpo, gspo, gspo_token, sapo, luspo,
            gmpo), or that times the longest completion (dr_grpo). None: that of this batch.
        max_completion_length: The longest completion, for dr_grpo. None: T.
        entropy_threshold: `top_entropy_threshold` of the larger batch. None: that of this batch.
        entropy_tokens: The number of tokens that reach the threshold in the larger batch, which divides the entropy
            term.
        options: Options of the loss and of `options.SHARED`.

    Returns:
        The loss, a scalar, and the metrics of `MEANS` as means over this batch, without gradient.

    Raises:
        ValueError: For an unknown name or option, a value out of its range, or a missing argument.

    Example:
        Two tokens with ratio 1, and advantages 1 and 3:

        >>> logps = torch.tensor([[-1.0], [-2.0]])
        >>> loss, metrics = policy_loss("dapo", logps, logps, torch.tensor([1.0, 3.0]), torch.ones(2, 1))
        >>> loss, metrics["ratio"]
        (tensor(-2.), tensor(1.))
    """
    spec = PolicySpec(name, clip, beta, options)
    for key, value in (("logps", logps), ("mask", mask)):
        if value.dim() != 2 or value.shape != logps.shape:
            raise ValueError(f"{key} {tuple(value.shape)}: logps and mask must be [B, T] of one shape")
    if advantages.shape not in (logps.shape[:1], logps.shape):
        raise ValueError(f"advantages {tuple(advantages.shape)}: [B] or [B, T] with logps {tuple(logps.shape)}")
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand(logps.shape)
    is_token = mask.bool()
    if spec.options["top_entropy_quantile"] < 1 and entropies is not None and entropy_threshold is None:
        entropy_threshold, entropy_tokens = top_entropy_threshold(
            entropies.detach()[is_token], spec.options["top_entropy_quantile"]
        )
    length = logps.shape[1] if max_completion_length is None else max_completion_length
    counts = Counts(
        tokens=is_token.sum(),
        sequences=logps.shape[0],
        max_completion_length=length,
        high_entropy_tokens=entropy_tokens,
    )
    if normalizer is not None:
        # dr_grpo divides by sequences · max_completion_length, and its normalizer is that product.
        counts = counts._replace(max_completion_length=1)
        if spec.loss.normalisation == "tokens":
            counts = counts._replace(tokens=normalizer)
        else:
            counts = counts._replace(sequences=normalizer)
    loss, totals = policy_terms(
        spec,
        logps,
        old_logps,
        advantages,
        is_token,
        RowSequences(is_token),
        counts,
        ref_logps=ref_logps,
        sampling_logps=sampling_logps,
        entropies=entropies,
        entropy_threshold=entropy_threshold,
    )
    return loss, means(totals)
