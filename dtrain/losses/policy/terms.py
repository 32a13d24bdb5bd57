"""A policy loss over one micro-batch, as sums: what the ranks and micro-batches of a global batch add up.

`PolicySpec` says which loss; `policy_terms` computes it over padded rows, packed rows, or a context-parallel rank's
part of either. Every term is a sum over this rank's own tokens (a sequence's quantities stand at each of its tokens),
divided by counts of the global batch, so that the sum over micro-batches and over dp and cp ranks is the value of the
whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtrain.base.ranges import hint
from dtrain.losses.policy import formulas
from dtrain.losses.policy.formulas import (
    RowSequences,
    Sequences,
    Tokens,
    bounded_exp,
    correction,
    is_known,
    k3_of,
    kl_term,
    mean_by_sequence,
    off_policy_mask,
)
from dtrain.losses.policy.options import LOSSES, SHARED, PolicyLoss, problems


@dataclass(frozen=True)
class PolicySpec:
    """A policy loss by name with its clip, β and options, checked once.

    clip: (ε_low, ε_high); beta: weight of the KL term; options: the loss's own and those of `SHARED`, completed with
    the defaults. Raises ValueError for an unknown name or option and a value out of its range.
    """

    name: str = "dapo"
    clip: Sequence[float] = (0.2, 0.2)
    beta: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in LOSSES:
            raise ValueError(f"{self.name!r} is no policy loss{hint(self.name, LOSSES)}")
        if errors := problems(self.name, self.clip, self.beta, self.options):
            raise ValueError(str(errors[0]))
        object.__setattr__(self, "clip", tuple(float(bound) for bound in self.clip))
        whole = {**SHARED, **self.loss.options, **self.options}
        object.__setattr__(self, "options", MappingProxyType(whole))

    @property
    def loss(self) -> PolicyLoss:
        return LOSSES[self.name]

    def divisor(self, counts: "Counts") -> Tensor | float:
        """Return the divisor of the sum over the global batch, a scalar."""
        if self.loss.normalisation == "tokens":
            return _or_one(counts.tokens)
        if self.loss.normalisation != "longest":
            return _or_one(counts.sequences)
        if counts.max_completion_length is None:
            raise ValueError(f"{self.name} divides by max_completion_length, which is not given")
        return _or_one(counts.sequences) * counts.max_completion_length


class Counts(NamedTuple):
    """Counts over the global batch: tokens that count, sequences (those without a token too, as in TRL), the longest
    completion that might have been (dr_grpo), and the tokens above the entropy threshold (with top_entropy_quantile and
    an entropy term; None: `tokens`)."""

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
"""Sum of `policy_terms` -> the count that makes it a mean.

kl             k3 of KL(π ‖ π_ref)
approx_kl      k3 of KL(π_old ‖ π)
ratio          r at the level of importance sampling
entropy        of the distribution drawn from
clip_low, ..   tokens that got no gradient because π had fallen, risen too far (TRL counts sequences at sequence level)
mismatch_kl    k3 of KL(π_sampler ‖ π_old); mismatch_abs: |log π_sampler/π_old|
correction     the weights for that mismatch; oob_frac: tokens whose weight the bounds cut or made 0
off_policy_frac  tokens of sequences left out by off_policy_mask_threshold
"""


def means(sums: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics from their sums over a global batch (tensors or floats); a mean over nothing is 0."""
    return {name: sums[name] / _or_one(sums[count]) for name, count in MEANS.items() if name in sums}


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
    """This micro-batch's share of the loss, a scalar to differentiate, and of the sums that `MEANS` is made from.

    logps [n, S]: log π of the tokens, with gradient; old_logps, ref_logps, sampling_logps: of the policy that the
    update started from (None: π itself), of the reference, of the sampler; entropies [n, S]: with gradient where
    entropy_coef is not 0; advantages [n, S]; mask [n, S]: the tokens that count. What stands at other places is never
    read, NaN and infinities included; logps and entropies alone get a gradient. sequences: where the sequences of the
    micro-batch lie; sums over them are its collectives, the same number on every rank. entropy_threshold:
    `top_entropy_threshold` of the global batch.

    Computed in max(float32, the dtype of logps), the divergences of the metrics in float64. A token with log −inf,
    which a filter left out since it was drawn, has ratio 0 and no gradient, counts as a log ratio of 0 in its
    sequence's, and the metrics leave it out; so it is where old_logps has −inf. Where ref_logps has −inf there is no KL
    term, and where sampling_logps has −inf or NaN (the sampler does not know) the weight is 1. Any other NaN reaches
    the loss. The gradient of a mask without a token is zero. Raises ValueError for what `spec` needs and is not given.
    """
    tokens = _tokens(spec, logps, old_logps, advantages, mask.bool(), sequences, ref_logps, sampling_logps, entropies)
    own = {name: spec.options[name] for name in spec.loss.options}
    surrogate = getattr(formulas, spec.loss.function)(tokens, **own)
    loss, kept, is_near = _loss_of_tokens(spec, tokens, surrogate.loss, entropy_threshold)
    if spec.loss.normalisation == "sequences":
        loss = loss / sequences.spread(sequences.lengths.clamp(min=1))
    total = torch.where(tokens.mask, loss, 0.0).sum() / spec.divisor(counts)
    if spec.options["entropy_coef"]:
        among = counts.tokens if counts.high_entropy_tokens is None else counts.high_entropy_tokens
        bonus = torch.where(kept, _given(tokens.entropies, _NEEDS_ENTROPIES), 0.0).sum() / _or_one(among)
        total = total - spec.options["entropy_coef"] * bonus
    return total, _metric_sums(tokens, surrogate[1:], is_near)


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
    """Return what the surrogates read: the streams, ratios at the level of importance sampling, and the weights for the
    mismatch of the sampler, where it is known."""

    def at(where: Tensor, values: Tensor) -> Tensor:
        """`values` [n, S] in the dtype of arithmetic where `where` [n, S] holds, 0 elsewhere."""
        return torch.where(where, values.to(dtype), 0.0)

    options, dtype = spec.options, torch.promote_types(logps.dtype, torch.float32)
    old_logps = logps if old_logps is None else old_logps
    possible = is_known(old_logps, is_known(logps, mask))
    has_reference, is_sampled = is_known(ref_logps, possible), is_known(sampling_logps, possible)
    reference = None if ref_logps is None else at(has_reference, ref_logps.detach())
    logps, old_logps = at(possible, logps), at(possible, old_logps.detach())
    sampler = weights = None
    if sampling_logps is not None:
        is_sampled = is_sampled & ~sampling_logps.isnan()
        sampler = at(is_sampled, sampling_logps.detach())
        bounds = options["sampling_clip_min"], options["sampling_clip_max"]
        weights = correction(old_logps, sampler, is_sampled, sequences, options["sampling_correction"], *bounds)
    log_ratio = logps - old_logps
    return Tokens(
        logps=logps,
        old_logps=old_logps,
        log_ratio=log_ratio,
        ratio=_ratio(options["importance_sampling_level"] or spec.loss.level, logps, log_ratio, possible, sequences),
        advantages=at(mask, advantages.detach()),
        mask=mask,
        possible=possible,
        sequences=sequences,
        clip=spec.clip,
        correction=weights,
        reference=reference,
        has_reference=has_reference,
        sampler=sampler,
        is_sampled=is_sampled,
        entropies=None if entropies is None else at(possible, entropies),
    )


def _loss_of_tokens(
    spec: PolicySpec, tokens: Tokens, loss: Tensor, entropy_threshold: Tensor | float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the loss [n, S] of a surrogate with what `spec` masks, weighs and adds; the tokens kept [n, S]; and those
    of sequences near enough to the sampler [n, S], None where none is left out."""
    options, kept, is_near = spec.options, tokens.mask, None
    if options["off_policy_mask_threshold"] is not None:
        drawn, by = tokens.old_logps, tokens.possible
        if tokens.sampler is not None:
            drawn, by = tokens.sampler, tokens.is_sampled
        threshold = options["off_policy_mask_threshold"]
        is_near = off_policy_mask(tokens.logps, drawn, tokens.advantages, by, tokens.sequences, threshold)
        loss = torch.where(is_near, loss, 0.0)
    if options["top_entropy_quantile"] < 1:
        deciding = _given(tokens.entropies, _NEEDS_ENTROPIES)
        if entropy_threshold is None:
            raise ValueError("top_entropy_quantile needs entropy_threshold: top_entropy_threshold of the global batch")
        kept = tokens.mask & (deciding >= entropy_threshold)
        loss = torch.where(kept, loss, 0.0)
    if tokens.correction is not None and not spec.loss.corrects_itself:
        loss = loss * tokens.correction.weights
    if spec.beta:
        ref_logps = _given(tokens.reference, f"beta={spec.beta} needs ref_logps")
        kl = kl_term(tokens.logps, ref_logps, tokens.ratio, options["kl_estimator"], options["kl_gradient"])
        loss = loss + spec.beta * torch.where(tokens.has_reference, kl, 0.0)
    if options["old_kl_coef"]:
        loss = loss + options["old_kl_coef"] * tokens.log_ratio.square()
    return loss, kept, is_near


@torch.no_grad()
def _metric_sums(tokens: Tokens, clipped: Sequence[Tensor | None], is_near: Tensor | None) -> dict[str, Tensor]:
    """Return the sums that `MEANS` is made from; clipped: the tokens [n, S] that a bound below and above cut."""
    nowhere = torch.zeros_like(tokens.ratio)
    low, high = (nowhere if part is None else part.to(nowhere) for part in clipped)
    old_logps, logps, weights = tokens.old_logps, tokens.logps, tokens.correction
    sums = _sums(tokens.possible, "known_tokens", ratio=tokens.ratio, approx_kl=k3_of(old_logps, logps))
    sums |= _sums(tokens.mask, "tokens", clip_low=low, clip_high=high)
    if tokens.reference is not None:
        sums |= _sums(tokens.has_reference, "kl_tokens", kl=k3_of(logps, tokens.reference))
    if tokens.entropies is not None:
        sums |= _sums(tokens.possible, "entropy_tokens", entropy=tokens.entropies)
    if tokens.sampler is not None:
        gap, drift = (tokens.sampler - old_logps).abs(), k3_of(tokens.sampler, old_logps)
        sums |= _sums(tokens.is_sampled, "sampled_tokens", mismatch_abs=gap, mismatch_kl=drift)
    if weights is not None:
        outside = weights.outside.to(logps.dtype)
        sums |= _sums(tokens.mask, "corrected_tokens", correction=weights.weights, oob_frac=outside)
    if is_near is not None:
        sums |= _sums(tokens.mask, "tokens", off_policy_frac=(~is_near).to(logps.dtype))
    return sums


def top_entropy_threshold(entropies: Tensor, quantile: float) -> tuple[Tensor, Tensor]:
    """The entropy that the top `quantile` of the tokens reach, and how many tokens reach it (arXiv:2506.01939).

    entropies [N]: of all tokens of the global batch, in any order; quantile from 0 (the highest alone, and its equals)
    to 1 (all). Interpolates between neighbours as torch.quantile and TRL do, at any N. No token: infinity and 0.
    """
    ordered = entropies.flatten().to(torch.promote_types(entropies.dtype, torch.float32)).sort().values
    if ordered.numel() == 0:
        return ordered.new_full((), torch.inf), ordered.new_zeros((), dtype=torch.int64)
    place = (1 - quantile) * (ordered.numel() - 1)
    below = int(place)
    above = min(below + 1, ordered.numel() - 1)
    threshold = torch.lerp(ordered[below], ordered[above], place - below)
    return threshold, (ordered >= threshold).sum()


def _ratio(level: str, logps: Tensor, log_ratio: Tensor, possible: Tensor, sequences: Sequences) -> Tensor:
    if level == "token":
        return torch.where(possible, bounded_exp(log_ratio), 0.0)
    mean = mean_by_sequence(log_ratio, sequences)
    return bounded_exp(mean if level == "sequence" else mean.detach() + logps - logps.detach())


def _sums(where: Tensor, count: str, **values: Tensor) -> dict[str, Tensor]:
    sums = {name: torch.where(where, value, 0.0).sum() for name, value in values.items()}
    return sums | {count: where.sum().to(next(iter(values.values())))}


_NEEDS_ENTROPIES = "entropy_coef and top_entropy_quantile need entropies"


def _given(value: Tensor | None, needs: str) -> Tensor:
    if value is None:
        raise ValueError(needs)
    return value


def _or_one(count: Any) -> Any:
    """A count to divide by: 1 in the place of 0."""
    return torch.where(count == 0, 1, count) if isinstance(count, Tensor) else count or 1


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
    """The loss of B completions, a scalar, and its metrics, by the loss's name in `options.LOSSES`.

    logps, old_logps, ref_logps, sampling_logps, entropies [B, T]; advantages [B] or [B, T]; mask [B, T], true or 1 at
    the completions' tokens. `policy_terms` says what each is, which may be None, and what infinities mean. clip is
    (ε_low, ε_high), beta the weight of the KL term, options those of the loss and of `options.SHARED`.

    normalizer: what the loss's sum is divided by, for a batch that is a part of a larger one: its tokens (bnpo, dapo,
    cispo, vespo, dppo_tv, dppo_kl, reinforce), its sequences (grpo, gspo, gspo_token, sapo, luspo, gmpo), or its
    sequences times the longest completion (dr_grpo). Default: this batch's own; dr_grpo's length is
    max_completion_length, T by default. entropy_threshold, entropy_tokens: of the larger batch, by
    `top_entropy_threshold`, for top_entropy_quantile; entropy_tokens also divides the entropy term.

    metrics: `terms.MEANS` as means over this batch, without gradient. Computed in max(float32, the dtype of logps),
    divergences among the metrics in float64. No collective. Raises ValueError for an unknown name or option, a value
    out of its range, and what the loss needs and is not given.
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
    counts = Counts(is_token.sum(), logps.shape[0], length, entropy_tokens)
    if normalizer is not None:
        by_tokens = spec.loss.normalisation == "tokens"
        counts = counts._replace(max_completion_length=1, **{"tokens" if by_tokens else "sequences": normalizer})
    loss, sums = policy_terms(
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
    return loss, means(sums)
