"""Preference losses by name, weighted sums of several, and their derivatives by the log-probabilities.

`preference_weights` is for training with micro-batches. A loss may compare a pair with all other pairs of the global
batch (for example `aot`), so it cannot be computed from one micro-batch. Therefore a first pass computes the
log-probabilities of all pairs without gradient, and from these the derivative w_i of the loss by each of them. In the
second pass each micro-batch differentiates Σ w_i · log p_i, which has the gradient of the loss. `formulas` has the
functions, `options` the table.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtrain.base.batch import IGNORE_INDEX
from dtrain.base.ranges import name_hint
from dtrain.losses.preference.formulas import FORMULAS, Pairs
from dtrain.losses.preference.options import DIVERGENCE, LOSSES, PreferenceLoss, find_loss, is_loss_name, problems
from dtrain.losses.value_checks import check_loss_values


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
    """Compute a preference loss of each pair. No collectives.

    Args:
        name: A key of `options.LOSSES`, whose function in `formulas` has the formula and the paper. Or the import path
            of a loss of your own (`losses.user_losses`).
        chosen_logps: log π of the chosen completions, summed over their tokens, [B].
        rejected_logps: log π of the rejected completions, [B].
        ref_chosen_logps: log π_ref of the chosen completions, [B]. None for both completions: 0.
        ref_rejected_logps: log π_ref of the rejected completions, [B].
        beta: β.
        label_smoothing: ε.
        chosen_lengths: Tokens of the chosen completions, [B]. Required by losses per token.
        rejected_lengths: Tokens of the rejected completions, [B].
        options: Options of the loss, `LOSSES[name].options`. For losses of a margin these include `f_divergence`
            (reverse_kl, forward_kl, js_divergence or alpha_divergence) and `f_alpha_divergence_coef`.

    Returns:
        [B], in max(float32, the dtype).

    Raises:
        ValueError: For an unknown name or option, a value out of its range, an option that the loss does not read
            (unless its value switches it off), missing lengths, log-probabilities of the reference for one completion
            only, an `f_divergence` other than reverse_kl without a reference, or shapes that differ.

    Example:
        The pair of the docstring of `formulas`:

        >>> logps = [torch.tensor([value]) for value in (-10.0, -12.0, -11.0, -10.0)]
        >>> preference_loss("sigmoid", *logps, beta=0.1)
        tensor([0.5544])
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
    """Compute a weighted sum of preference losses of each pair. No collectives.

    Args:
        names: One or several keys of `options.LOSSES`.
        chosen_logps: log π of the chosen completions, summed over their tokens, [B].
        rejected_logps: log π of the rejected completions, [B].
        ref_chosen_logps: log π_ref of the chosen completions, [B]. None for both completions: 0.
        ref_rejected_logps: log π_ref of the rejected completions, [B].
        beta: β.
        loss_weights: Weights of the losses. None: 1.
        chosen_lengths: Tokens of the chosen completions, [B]. Required by losses per token.
        rejected_lengths: Tokens of the rejected completions, [B].
        options: Options of the losses. Each option is passed to the losses that read it.

    Returns:
        [B], in max(float32, the dtype).

    Raises:
        ValueError: As in `preference_loss`, if no loss reads an option, or if an `f_divergence` other than reverse_kl
            is not read by all losses.
    """
    names = [names] if isinstance(names, str) else list(names)
    weights = [1.0] * len(names) if loss_weights is None else list(loss_weights)
    if not names or len(weights) != len(names):
        raise ValueError(f"loss_weights has {len(weights)} weights for {len(names)} losses: pass one per loss")
    for name in names:
        if not is_loss_name(name):
            raise ValueError(f"{name!r} is no preference loss{name_hint(name, LOSSES)}")
    _check_options(names, {"beta": beta, **options}, has_reference=ref_chosen_logps is not None)
    pairs = _make_pairs(
        names,
        chosen_logps,
        rejected_logps,
        ref_chosen_logps,
        ref_rejected_logps,
        chosen_lengths,
        rejected_lengths,
        options,
    )
    total = torch.zeros((), dtype=pairs.chosen.dtype, device=chosen_logps.device)
    for name, weight in zip(names, weights, strict=True):
        loss = find_loss(name)
        options_of_loss = {}
        for key, default in loss.options.items():
            if key not in DIVERGENCE:  # those are in `pairs`
                options_of_loss[key] = options.get(key, default)
        losses = _formula_of(loss)(pairs, beta=beta, **options_of_loss)
        if name not in LOSSES:
            check_loss_values(name, losses, pairs.chosen.shape, "pair")
        total = total + weight * losses
    return total


def _check_options(names: Sequence[str], options: Mapping[str, Any], *, has_reference: bool) -> None:
    """Raise ValueError for the first problem of the options of losses."""
    values = {}
    for key, value in options.items():
        # To read the value of a tensor, the host would have to wait for the device. Check 0.25 instead, which every
        # range includes.
        values[key] = 0.25 if isinstance(value, Tensor) else value
    found = problems(names, values, has_reference=has_reference)
    if found:
        raise ValueError(str(found[0]))


def _formula_of(loss: PreferenceLoss) -> Callable[..., Tensor]:
    """Return the function of a loss."""
    if not isinstance(loss.function, str):
        return loss.function
    return FORMULAS[loss.function]


class PreferenceWeights(NamedTuple):
    """Losses of pairs, and the derivatives of their mean.

    Attributes:
        losses: [N].
        chosen: Derivatives by the policy's log-probabilities of the chosen completions, [N].
        rejected: Derivatives by the policy's log-probabilities of the rejected completions, [N].
    """

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
    """Compute the losses of all pairs of the global batch, and the derivatives of their mean by the log-probabilities.

    The gradient of the mean loss by the parameters is that of Σ chosen · log p(chosen) + rejected · log p(rejected).
    This sum can be divided over micro-batches and ranks, and is exact for every loss.

    Args:
        names: One or several keys of `options.LOSSES`.
        chosen_logps: log π of the chosen completions, summed over their tokens, [N].
        rejected_logps: log π of the rejected completions, [N].
        ref_chosen_logps: log π_ref of the chosen completions, [N]. None for both completions: 0.
        ref_rejected_logps: log π_ref of the rejected completions, [N].
        options: All further arguments of `combined_preference_loss`.

    Returns:
        The losses and the derivatives, without gradient.

    Raises:
        ValueError: As in `combined_preference_loss`.

    Example:
        One pair with m = 3 and β = 0.5: the loss is (3 - 1)², and its derivative by m is 2 · (3 - 1).

        >>> logps = [torch.tensor([value]) for value in (-10.0, -12.0, -11.0, -10.0)]
        >>> preference_weights("ipo_sum", *logps, beta=0.5)
        PreferenceWeights(losses=tensor([4.]), chosen=tensor([4.]), rejected=tensor([-4.]))
    """
    chosen = chosen_logps.detach().requires_grad_()
    rejected = rejected_logps.detach().requires_grad_()
    with torch.enable_grad():
        losses = combined_preference_loss(names, chosen, rejected, ref_chosen_logps, ref_rejected_logps, **options)
        mean = losses.sum() / max(len(losses), 1)
        by_chosen, by_rejected = torch.autograd.grad(mean, (chosen, rejected))
    return PreferenceWeights(losses.detach(), by_chosen, by_rejected)


def running_mean(mean: float | Tensor, count: int, batch_mean: Tensor) -> tuple[Tensor, int]:
    """Add a value to a running mean, for example to the shift δ of bco_pair as TRL 0.24 computes it.

    Args:
        mean: The mean so far. Start with 0.0.
        count: The number of values so far. Start with 0.
        batch_mean: The new value. For bco_pair the mean of all rewards of a global batch, chosen and rejected.

    Returns:
        The new mean, a scalar, and the new count.

    Example:
        >>> running_mean(2.0, 1, torch.tensor(4.0))
        (tensor(3.), 2)
    """
    return mean + (batch_mean - mean) / (count + 1), count + 1


class PreferenceRewards(NamedTuple):
    """Implicit rewards of pairs, without gradient.

    Attributes:
        chosen: Rewards of the chosen completions, [B].
        rejected: Rewards of the rejected completions, [B].
        margin: chosen - rejected, [B].
        accuracy: 1 if the reward of the chosen completion is larger, else 0, [B].
    """

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
    """Compute the implicit rewards β · log(π/π_ref) of B pairs, for metrics.

    The rewards do not depend on `f_divergence`, and are not divided by lengths.

    Args:
        chosen_logps: log π of the chosen completions, summed over their tokens, [B].
        rejected_logps: log π of the rejected completions, [B].
        ref_chosen_logps: log π_ref of the chosen completions, [B]. None: 0.
        ref_rejected_logps: log π_ref of the rejected completions, [B]. None: 0.
        beta: β.

    Reference:
        DPO: Rafailov et al., arXiv:2305.18290, section 4.
    """
    with torch.no_grad():
        chosen_ratio = chosen_logps if ref_chosen_logps is None else chosen_logps - ref_chosen_logps
        rejected_ratio = rejected_logps if ref_rejected_logps is None else rejected_logps - ref_rejected_logps
        chosen, rejected = beta * chosen_ratio, beta * rejected_ratio
        accuracy = (chosen > rejected).to(chosen.dtype)
        return PreferenceRewards(chosen, rejected, chosen - rejected, accuracy)


def length_desensitised_weights(document_ids: Tensor, labels: Tensor, ld_alpha: float) -> Tensor:
    """Compute the weights of tokens in LD-DPO, which count less beyond the length of the shorter completion.

    A label has the weight 1 up to the length of the shorter completion of its pair, and `ld_alpha` beyond it. For
    example, one row with a completion of 2 tokens (document 0), one of 3 tokens (document 1), and ld_alpha=0.3:

        document_ids    0 0 0 1 1 1 1
        labels          - x x - x x x        (-: -100)
        weights         0 1 1 0 1 1 0.3

    The weights apply to policy and reference, as in TRL 1.16. TRL 0.24 does not weight the reference, and counts
    positions from the beginning of the row, including the prompt.

    Args:
        document_ids: int64 [B, S], of padded or packed rows. Documents 2i and 2i + 1 are a pair. Ids count from 0 over
            all rows, and -1 is padding. The host reads their number.
        labels: Shifted labels, int64 [B, S], -100 at positions without a label. The labels of a document are the tokens
            of its completion.
        ld_alpha: The weight beyond the shorter length.

    Returns:
        [B, S] float64. 0 at positions without a label.

    Raises:
        ValueError: If `ld_alpha` is not in [0, 1], or the number of documents is odd.

    Reference:
        LD-DPO: Liu et al., arXiv:2409.06411.
    """
    if not 0 <= ld_alpha <= 1:
        raise ValueError(f"ld_alpha={ld_alpha} must be from 0 to 1")
    if labels.numel() == 0:
        return torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
    documents = int(document_ids.max()) + 1
    if documents % 2:
        raise ValueError(f"{documents} documents are not pairs: the last one has no partner")
    ids = document_ids.flatten() + 1  # padding becomes 0, and document i becomes i + 1
    has_label = (labels.flatten() != IGNORE_INDEX) & (ids > 0)
    num_labels = has_label.cumsum(0)  # labels up to and including this token, over all rows
    num_before = torch.full((documents + 1,), labels.numel(), device=labels.device)  # labels before each document
    num_before = num_before.scatter_reduce(0, ids, num_labels - has_label.long(), "amin")
    lengths = torch.zeros_like(num_before).index_add(0, ids, has_label.long())[1:]
    shorter = lengths.view(-1, 2).amin(1).repeat_interleave(2)  # [documents]
    shorter = torch.cat([shorter.new_zeros(1), shorter])  # indexed by ids
    position = num_labels - num_before[ids]  # in the completion, 1 at its first token
    weights = has_label.to(torch.float64)
    weights = torch.where(position > shorter[ids], ld_alpha * weights, weights)
    return weights.view(labels.shape)


def _make_pairs(
    names: Sequence[str],
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None,
    ref_rejected_logps: Tensor | None,
    chosen_lengths: Tensor | None,
    rejected_lengths: Tensor | None,
    options: Mapping[str, Any],
) -> Pairs:
    """Return the inputs of losses in one dtype: 0 for a missing reference, and 1 for missing lengths.

    Raises:
        ValueError: If an argument that a loss needs is missing, or if shapes differ.
    """
    if (ref_chosen_logps is None) != (ref_rejected_logps is None):
        missing = "ref_chosen_logps" if ref_chosen_logps is None else "ref_rejected_logps"
        raise ValueError(f"{missing} is missing: pass the reference for both completions or for neither")
    has_lengths = chosen_lengths is not None and rejected_lengths is not None
    for name in names:
        if find_loss(name).needs_lengths and not has_lengths:
            raise ValueError(f"{name} is a loss per token: pass chosen_lengths and rejected_lengths")
    logps = [chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps]
    tensors = [*logps, chosen_lengths, rejected_lengths]
    shapes = [tuple(tensor.shape) for tensor in tensors if tensor is not None]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise ValueError(f"log-probabilities and lengths must all be [B], and have the shapes {shapes}")

    device = chosen_logps.device
    dtype = torch.promote_types(chosen_logps.dtype, torch.float32)
    zeros = torch.zeros_like(chosen_logps, dtype=dtype)
    ones = torch.ones_like(chosen_logps)
    divergence = {key: options.get(key, default) for key, default in DIVERGENCE.items()}
    return Pairs(
        chosen=chosen_logps.to(device, dtype),
        rejected=rejected_logps.to(device, dtype),
        ref_chosen=zeros if ref_chosen_logps is None else ref_chosen_logps.to(device, dtype),
        ref_rejected=zeros if ref_rejected_logps is None else ref_rejected_logps.to(device, dtype),
        chosen_lengths=ones if chosen_lengths is None else chosen_lengths,
        rejected_lengths=ones if rejected_lengths is None else rejected_lengths,
        **divergence,
    )
