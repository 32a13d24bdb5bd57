"""Preference losses by name: over the pairs of a call, in weighted combinations, and as the weights that each
log-probability of a global batch has in the gradient. `formulas` has the functions, `options` the table.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtrain.base.batch import IGNORE
from dtrain.base.ranges import hint
from dtrain.losses.preference import formulas
from dtrain.losses.preference.formulas import Pairs
from dtrain.losses.preference.options import DIVERGENCE, LOSSES, problems


def preference_loss(
    name: str,
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The loss of each pair, [B], by the loss's name in `LOSSES`; each entry's function has the formula and its paper.

    chosen_logps, rejected_logps [B]: log-probabilities of the completions under the policy, summed over their tokens;
    ref_...: under the reference, both None for none (then zeros). lengths [B]: tokens of the completions; the losses
    per token need them, the others leave them unread. options: those of the loss (`LOSSES[name].options`), among them,
    where the loss has a margin of scores, f_divergence: reverse_kl | forward_kl | js_divergence | alpha_divergence (the
    last with f_alpha_divergence_coef). Computed in max(float32, the dtype), and returned so. No collective.

    Raises ValueError for an unknown name or option, a value out of its range, an option that the loss does not read
    and that is not switched off, missing lengths, half a reference, another divergence than reverse_kl without a
    reference, and tensors of unequal shapes.
    """
    return combined_preference_loss(
        name,
        chosen_logps,
        rejected_logps,
        ref_chosen_logps,
        ref_rejected_logps,
        beta=beta,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        label_smoothing=label_smoothing,
        **options,
    )


def combined_preference_loss(
    names: str | Sequence[str],
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    *,
    beta: float,
    loss_weights: Sequence[float] | None = None,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Σ weight · preference_loss(name, ..) over the names, [B]; weights are 1 where none are given.

    An option goes to the losses that read it; one that none reads is a ValueError. A divergence other than reverse_kl
    is for all of the names or, as a ValueError, for none.
    """
    names = [names] if isinstance(names, str) else list(names)
    weights = [1.0] * len(names) if loss_weights is None else list(loss_weights)
    if not names or len(weights) != len(names):
        raise ValueError(f"loss_weights: {len(weights)} weights for {len(names)} losses; one each is needed")
    for name in names:
        if name not in LOSSES:
            raise ValueError(f"{name!r} is no preference loss{hint(name, LOSSES)}")
    losses = [LOSSES[name] for name in names]
    # Reading a tensor's value would make a GPU wait: 0.25, which is in every range, is checked in its place.
    seen = {key: 0.25 if isinstance(value, Tensor) else value for key, value in {"beta": beta, **options}.items()}
    if errors := problems(names, seen, has_reference=ref_chosen_logps is not None):
        raise ValueError(str(errors[0]))
    logps = (chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    pairs = _pairs(names, logps, (chosen_lengths, rejected_lengths), options)
    total = torch.zeros((), dtype=pairs.chosen.dtype, device=chosen_logps.device)
    for loss, weight in zip(losses, weights, strict=True):
        own = {key: options.get(key, default) for key, default in loss.options.items() if key not in DIVERGENCE}
        total = total + weight * getattr(formulas, loss.function)(pairs, beta=beta, **own)
    return total


class PreferenceWeights(NamedTuple):
    """losses [N]; chosen, rejected [N]: the derivatives of the losses' mean by the policy's log-probabilities."""

    losses: Tensor
    chosen: Tensor
    rejected: Tensor


def preference_weights(
    names: str | Sequence[str],
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    **options: Any,
) -> PreferenceWeights:
    """Return for N pairs, the whole global batch, the losses, and the derivatives of their mean by each
    log-probability, [N].

    Arguments as in `combined_preference_loss`, which has the errors; no gradient flows in or out. The gradient of the
    mean loss by the parameters is that of Σ chosen · log p(chosen) + rejected · log p(rejected), which may be summed in
    any micro-batches on any ranks: exact for every loss, those over the whole batch included.
    """
    chosen, rejected = (logps.detach().requires_grad_() for logps in (chosen_logps, rejected_logps))
    with torch.enable_grad():
        losses = combined_preference_loss(names, chosen, rejected, ref_chosen_logps, ref_rejected_logps, **options)
        slopes = torch.autograd.grad(losses.sum() / max(len(losses), 1), (chosen, rejected))
    return PreferenceWeights(losses.detach(), *slopes)


def running_mean(mean: float | Tensor, count: int, batch_mean: Tensor) -> tuple[Tensor, int]:
    """The mean, a scalar, of `count` values so far and of one more, and how many they are: bco_pair's moving shift as
    TRL 0.24 has it, batch_mean being the mean of a global batch's rewards, chosen and rejected. Start from (0.0, 0)."""
    return mean + (batch_mean - mean) / (count + 1), count + 1


class PreferenceRewards(NamedTuple):
    """[B] each, without gradient. accuracy is 1 where the chosen completion's reward is larger, else 0."""

    chosen: Tensor
    rejected: Tensor
    margin: Tensor
    accuracy: Tensor


def preference_rewards(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    *,
    beta: float,
) -> PreferenceRewards:
    """The implicit rewards β · log(π/π_ref) of B pairs, [B] (arXiv:2305.18290, section 4), for metrics. Arguments as in
    `preference_loss`; a divergence or a normalisation by length does not enter."""
    with torch.no_grad():
        chosen = beta * (chosen_logps if ref_chosen_logps is None else chosen_logps - ref_chosen_logps)
        rejected = beta * (rejected_logps if ref_rejected_logps is None else rejected_logps - ref_rejected_logps)
        return PreferenceRewards(chosen, rejected, chosen - rejected, (chosen > rejected).to(chosen.dtype))


def length_desensitised_weights(document_ids: Tensor, labels: Tensor, ld_alpha: float) -> Tensor:
    """The weights of the labels' log-probabilities under LD-DPO (Liu et al., arXiv:2409.06411), float64, of labels'
    shape: 1 up to the length of the pair's shorter completion, ld_alpha beyond it, 0 where there is no label.

    document_ids, labels: int64 of one shape, [B, S] padded or packed. Documents 2i and 2i + 1 are a pair; the ids count
    from 0 through the batch, −1 is padding, a document's positions stand in their order. labels are already shifted,
    −100 where there is none; a completion's tokens are its document's labels, counted from the first.

    The weights are for policy and reference alike, as in TRL 1.16; TRL 0.24 left the reference whole and counted
    positions from the row's beginning, the prompt included. Raises ValueError for ld_alpha outside [0, 1] and for a
    document without its partner. Reads the number of documents on the host.
    """
    if not 0 <= ld_alpha <= 1:
        raise ValueError(f"ld_alpha={ld_alpha}: from 0 to 1")
    if labels.numel() == 0:
        return torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
    documents = int(document_ids.max()) + 1
    if documents % 2:
        raise ValueError(f"{documents} documents are no pairs: the last has no partner")
    ids = document_ids.flatten() + 1  # padding is 0
    has_label = (labels.flatten() != IGNORE) & (ids > 0)
    counted = has_label.cumsum(0)  # labels up to here, this one among them
    before = torch.full((documents + 1,), labels.numel(), device=labels.device)
    before = before.scatter_reduce(0, ids, counted - has_label.long(), "amin")
    lengths = torch.zeros_like(before).index_add(0, ids, has_label.long())[1:]
    shorter = lengths.view(-1, 2).amin(1).repeat_interleave(2)  # [documents]
    shorter = torch.cat([shorter.new_zeros(1), shorter])
    position = counted - before[ids]  # 1 at the completion's first token
    weights = has_label.to(torch.float64)
    weights = torch.where(position > shorter[ids], ld_alpha * weights, weights)
    return weights.view(labels.shape)


def _pairs(
    names: Sequence[str],
    logps: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    lengths: tuple[Tensor | None, Tensor | None],
    options: Mapping[str, Any],
) -> Pairs:
    chosen, _, ref_chosen, ref_rejected = logps
    divergence = {key: options.get(key, default) for key, default in DIVERGENCE.items()}
    if (ref_chosen is None) != (ref_rejected is None):
        missing = "ref_chosen_logps" if ref_chosen is None else "ref_rejected_logps"
        raise ValueError(f"{missing} is missing: the reference is given for both completions or for none")
    for name in names:
        if LOSSES[name].needs_lengths and any(length is None for length in lengths):
            raise ValueError(f"{name} is a loss per token: it needs chosen_lengths and rejected_lengths")
    shapes = [tuple(tensor.shape) for tensor in (*logps, *lengths) if tensor is not None]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise ValueError(f"log-probabilities and lengths are one number per pair, [B] each; their shapes are {shapes}")
    dtype = torch.promote_types(chosen.dtype, torch.float32)
    zeros, ones = torch.zeros_like(chosen, dtype=dtype), torch.ones_like(chosen)
    known = [zeros if logp is None else logp.to(chosen.device, dtype) for logp in logps]
    counts = [ones if length is None else length for length in lengths]
    return Pairs(known[0], known[1], known[2], known[3], counts[0], counts[1], **divergence)
