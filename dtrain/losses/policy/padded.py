"""Policy losses by name over padded completions. `formulas` has the functions, `terms` puts them together."""

from typing import Any

from torch import Tensor

from dtrain.losses.policy.formulas import RowSequences
from dtrain.losses.policy.terms import Counts, PolicySpec, means, policy_terms, top_entropy_threshold


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

    metrics: `terms.MEANS` as means over this batch, without gradient. Computed in max(float32, the dtype of
    logps). No collective. Raises ValueError for an unknown name or option, a value out of its range, and what the loss
    needs and is not given.
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
