"""Formulas of preference losses: log-probabilities of chosen and rejected completions to a loss per pair.

There is one function per loss, listed in `FORMULAS`. `options` is the table of the losses, with their requirements and
options.

Notation: the log-probability of a completion is the sum over its tokens. c and r are log(π/π_ref) of the chosen and of
the rejected completion, and β·c and β·r their rewards. The margin m is the difference of the scores of the chosen and
the rejected completion. The score is log(π/π_ref), or f'(π/π_ref) of another f-divergence (`score`). ε is the label
smoothing, σ the logistic function. All functions return [B], one number per pair.

Example: chosen -10, reference -11, rejected -12, reference -10 and β = 0.1. c = 1, r = -2 and m = 3, so the DPO loss is
-log σ(0.3) = 0.554.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """Inputs of a preference loss for B pairs.

    Attributes:
        chosen: log π of the chosen completions, [B].
        rejected: log π of the rejected completions, [B].
        ref_chosen: log π_ref of the chosen completions, [B]. 0 without a reference.
        ref_rejected: log π_ref of the rejected completions, [B]. 0 without a reference.
        chosen_lengths: Tokens of the chosen completions, [B]. 1 if they are not given.
        rejected_lengths: Tokens of the rejected completions, [B]. 1 if they are not given.
        f_divergence: See `score`.
        f_alpha_divergence_coef: See `score`.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    f_divergence: str
    f_alpha_divergence_coef: float

    @property
    def chosen_ratio(self) -> Tensor:
        """c: log(π/π_ref) of the chosen completions, [B]."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        """r: log(π/π_ref) of the rejected completions, [B]."""
        return self.rejected - self.ref_rejected

    @property
    def margin(self) -> Tensor:
        """m: the difference of the scores of chosen and rejected completions, [B]."""
        return self._score(self.chosen_ratio) - self._score(self.rejected_ratio)

    @property
    def margin_per_token(self) -> Tensor:
        """m with each score divided by the length of its completion, [B]."""
        chosen, rejected = self._score(self.chosen_ratio), self._score(self.rejected_ratio)
        return _per_token(chosen, self.chosen_lengths) - _per_token(rejected, self.rejected_lengths)

    def _score(self, ratio: Tensor) -> Tensor:
        return score(ratio, self.f_divergence, self.f_alpha_divergence_coef)


def sigmoid(pairs: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """Compute -(1 - ε)·log σ(β·m) - ε·log σ(-β·m), which is -log σ(β·m) for ε = 0.

    TRL 0.24 has label smoothing in this loss, TRL 1.16 does not.

    Reference:
        DPO: Rafailov et al., arXiv:2305.18290, equation 7. Label smoothing (cDPO): Mitchell, "A note on DPO with noisy
        preferences", 2023.
    """
    return _smoothed(beta * pairs.margin, label_smoothing)


def hinge(pairs: Pairs, *, beta: float) -> Tensor:
    """Compute max(0, 1 - β·m).

    Reference:
        SLiC: Zhao et al., arXiv:2305.10425. Relative to a reference: RSO, Liu et al., arXiv:2309.06657.
    """
    return torch.relu(1 - beta * pairs.margin)


def ipo(pairs: Pairs, *, beta: float) -> Tensor:
    """Compute (m - 1/(2β))² with m per token.

    TRL calls this ipo. According to TRL, the authors of the paper used it in their experiments. `ipo_sum` is the
    formula of the paper.
    """
    return (pairs.margin_per_token - 1 / (2 * beta)).square()


def ipo_sum(pairs: Pairs, *, beta: float) -> Tensor:
    """Compute (m - 1/(2β))².

    Reference:
        IPO: Azar et al., arXiv:2310.12036, equation 17, where β is called τ.
    """
    return (pairs.margin - 1 / (2 * beta)).square()


def robust(pairs: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """Compute (-(1 - ε)·log σ(β·m) + ε·log σ(-β·m)) / (1 - 2ε).

    Its expectation is the sigmoid loss of the true labels if a share ε of the labels is flipped.

    Reference:
        Robust DPO: Chowdhury et al., arXiv:2403.00409.
    """
    z = beta * pairs.margin
    loss = label_smoothing * F.logsigmoid(-z) - (1 - label_smoothing) * F.logsigmoid(z)
    return loss / (1 - 2 * label_smoothing)


def exo_pair(pairs: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """Compute KL(p ‖ q) with p = (σ(β·m), σ(-β·m)) and q = (1 - ε, ε).

    The loss is infinite for ε = 0, so ε has to be set. The paper uses 1e-3. TRL 0.24 replaces 0 by 1e-3, TRL 1.16
    refuses it.

    Reference:
        EXO: Ji et al., arXiv:2402.00856, equation 16.
    """
    z = _finite(beta * pairs.margin)  # finite, so that σ · log σ is 0 where σ is 0, and not NaN
    chosen = torch.sigmoid(z) * (F.logsigmoid(z) - math.log1p(-label_smoothing))
    return chosen + torch.sigmoid(-z) * (F.logsigmoid(-z) - math.log(label_smoothing))


def nca_pair(pairs: Pairs, *, beta: float) -> Tensor:
    """Compute -log σ(β·c) - ½·log σ(-β·c) - ½·log σ(-β·r).

    Reference:
        NCA: Chen et al., arXiv:2402.05369.
    """
    chosen, rejected = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(pairs: Pairs, *, beta: float, bco_shift: float | Tensor | str) -> Tensor:
    """Compute -log σ(β·c - δ) - log σ(δ - β·r).

    In the paper and in TRL 0.24, δ is a running mean of rewards. This function has no state: a caller can pass the
    value of `losses.running_mean`, TRL's mean over all batches so far, including the current one. TRL counts each
    micro-batch of each rank as a batch. Here a batch is the global batch, so that δ does not depend on how the batch is
    divided.

    Args:
        pairs: Inputs.
        beta: β.
        bco_shift: δ. 0 is the loss of TRL 1.16. "batch": the mean of all rewards of this call, chosen and rejected,
            without gradient.

    Reference:
        BCO: Jung et al., arXiv:2404.04656.
    """
    chosen, rejected = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    shift = torch.cat([chosen, rejected]).detach().mean() if isinstance(bco_shift, str) else bco_shift
    return -F.logsigmoid(chosen - shift) - F.logsigmoid(shift - rejected)


def sppo_hard(pairs: Pairs, *, beta: float) -> Tensor:
    """Compute (c - 1/(2β))² + (r + 1/(2β))².

    Reference:
        SPPO: Wu et al., arXiv:2405.00675, equation 4.7, with probability 1 that the chosen completion is preferred.
    """
    return (pairs.chosen_ratio - 0.5 / beta).square() + (pairs.rejected_ratio + 0.5 / beta).square()


def aot(pairs: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """Compute the sigmoid loss of the policy's margins relative to the reference's margins of the same rank.

    A margin is log π(chosen)/π(rejected). The k-th smallest margin of the policy in the batch is compared with the k-th
    smallest margin of the reference. For example, with the margins (3, 1) of the policy and (0, 2) of the reference,
    the differences are 3 - 2 and 1 - 0.

    The loss of a pair is at the index of its policy margin. TRL returns losses sorted by margin. The means are equal.

    Reference:
        AOT paired: Melnyk et al., arXiv:2406.05882.
    """
    policy_margin = pairs.chosen - pairs.rejected
    reference_margin = pairs.ref_chosen - pairs.ref_rejected
    difference = policy_margin - _of_same_rank(policy_margin, reference_margin)
    return _smoothed(beta * difference, label_smoothing)


def aot_unpaired(pairs: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """Compute the sigmoid loss of c relative to the r of the same rank in the batch.

    The k-th smallest c is compared with the k-th smallest r. A loss is at the index of its chosen completion. TRL 0.24
    calls this loss aot_pair.

    Reference:
        AOT unpaired: Melnyk et al., arXiv:2406.05882.
    """
    chosen, rejected = pairs.chosen_ratio, pairs.rejected_ratio
    return _smoothed(beta * (chosen - _of_same_rank(chosen, rejected)), label_smoothing)


def apo_zero(pairs: Pairs, *, beta: float) -> Tensor:
    """Compute 1 - σ(β·c) + σ(β·r): raises the chosen completion and lowers the rejected one.

    Reference:
        APO-zero: D'Oosterlinck et al., arXiv:2408.06266, equation 7.
    """
    return torch.sigmoid(-beta * pairs.chosen_ratio) + torch.sigmoid(beta * pairs.rejected_ratio)


def apo_down(pairs: Pairs, *, beta: float) -> Tensor:
    """Compute σ(β·c) + 1 - σ(β·(c - r)): lowers both completions, the rejected one more.

    Reference:
        APO-down: D'Oosterlinck et al., arXiv:2408.06266, equation 8.
    """
    margin = pairs.chosen_ratio - pairs.rejected_ratio
    return torch.sigmoid(beta * pairs.chosen_ratio) + torch.sigmoid(-beta * margin)


def discopop(pairs: Pairs, *, beta: float, discopop_tau: float) -> Tensor:
    """Compute (1 - w)·(-log σ(z)) + w·exp(-z) with z = β·m and w = σ(z/τ), the log-ratio modulated loss.

    Reference:
        DiscoPOP: Lu et al., arXiv:2406.08414, equation 5.
    """
    z = _finite(beta * pairs.margin)
    modulation = z / discopop_tau
    # w · exp(-z) with one exponent, because exp(-z) overflows where w is 0.
    exponential = (F.logsigmoid(modulation) - z).exp()
    return -F.logsigmoid(z) * torch.sigmoid(-modulation) + exponential


def sigmoid_norm(pairs: Pairs, *, beta: float) -> Tensor:
    """Compute -log σ(β·m) with m per token: DPO with the length normalisation of SimPO.

    Reference:
        Meng et al., arXiv:2405.14734. Lambert et al., arXiv:2411.15124.
    """
    return -F.logsigmoid(beta * pairs.margin_per_token)


def simpo(pairs: Pairs, *, beta: float, label_smoothing: float, simpo_gamma: float) -> Tensor:
    """Compute -log σ(β·d - γ), where d is the difference of the log-probabilities per token. No reference.

    The paper uses β from 2 to 2.5, and a γ of about half of it. Label smoothing is that of `sigmoid`, as in TRL's CPO
    trainer.

    Reference:
        SimPO: Meng et al., arXiv:2405.14734, equation 6.
    """
    margin = _per_token(pairs.chosen, pairs.chosen_lengths) - _per_token(pairs.rejected, pairs.rejected_lengths)
    return _smoothed(beta * margin - simpo_gamma, label_smoothing)


def orpo(pairs: Pairs, *, beta: float) -> Tensor:
    """Compute -β·log σ(log odds(chosen) - log odds(rejected)). No reference.

    odds is p/(1 - p), where p is the probability per token (the geometric mean). Equation 6 of the paper adds the
    negative log-likelihood of the chosen completions, which is dpo.sft_weight = 1. TRL's includes the prompts' tokens.

    Reference:
        ORPO: Hong et al., arXiv:2403.07691, equation 7, where β is called λ.
    """
    chosen = _log_odds(_per_token(pairs.chosen, pairs.chosen_lengths))
    rejected = _log_odds(_per_token(pairs.rejected, pairs.rejected_lengths))
    return -beta * F.logsigmoid(chosen - rejected)


# The functions by name. `options.LOSSES` refers to them by name, because it must not import torch.
FORMULAS: dict[str, Callable[..., Tensor]] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "ipo_sum": ipo_sum,
    "robust": robust,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
    "sigmoid_norm": sigmoid_norm,
    "simpo": simpo,
    "orpo": orpo,
}


def _smoothed(z: Tensor, label_smoothing: float) -> Tensor:
    """Return -(1 - ε)·log σ(z) - ε·log σ(-z). For ε = 0 the second term is left out, because 0 · inf is NaN."""
    loss = -F.logsigmoid(z)
    if label_smoothing == 0:
        return loss
    return (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-z)


def _of_same_rank(values: Tensor, others: Tensor) -> Tensor:
    """Return for each entry of `values` [B] the entry of `others` [B] with the same rank, [B].

    Equal numbers are ranked by index.

    Example:
        >>> _of_same_rank(torch.tensor([3, 1, 2]), torch.tensor([10, 30, 20]))
        tensor([30, 10, 20])
    """
    ranks = values.argsort(stable=True).argsort()
    return others.sort(stable=True).values[ranks]


def _per_token(logps: Tensor, lengths: Tensor) -> Tensor:
    """Divide sums over tokens by the number of tokens, [B]."""
    return logps / lengths.clamp(min=1).to(logps)


def _finite(z: Tensor) -> Tensor:
    """Clamp to the finite numbers of the dtype."""
    largest = torch.finfo(z.dtype).max
    return z.clamp(-largest, largest)


def _log_odds(logp: Tensor) -> Tensor:
    """Return log p - log(1 - p), given log p <= 0.

    p = 1 is replaced by 1 - eps⁴, because otherwise the gradient would be 0 · inf, which is NaN.
    """
    logp = logp - torch.finfo(logp.dtype).eps ** 4
    # log(1 - p) is log(-expm1(log p)) for p near 1 and log1p(-p) for small p. Each loses digits in the other range. The
    # unused branch gets a harmless input, because its gradient is multiplied by 0 and must be finite.
    near_one = logp > -math.log(2)
    log1m_near = torch.where(near_one, -torch.expm1(logp), 0.5).log()
    log1m_far = torch.log1p(-torch.where(near_one, -1.0, logp).exp())
    return logp - torch.where(near_one, log1m_near, log1m_far)


# Largest exponents. The exponential is finite, also if it is multiplied by a few orders of magnitude.
_LARGEST_EXPONENT = {torch.float32: 80.0, torch.float64: 700.0}


def score(log_ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """Return f'(t) for t = π/π_ref, up to a constant.

    f-DPO replaces log(π/π_ref) of DPO by f'(π/π_ref), where f defines the divergence between policy and reference.
    Constants are left out: only differences of two scores of the same prompt are meaningful.

        reverse_kl          log t
        forward_kl          1 - 1/t
        js_divergence       log(2t/(1 + t))
        alpha_divergence    (t^(α - 1) - 1)/(α - 1). It equals forward_kl for α = 0, and reverse_kl in the limit α = 1

    Args:
        log_ratio: log t, [...], float32 or float64.
        divergence: See above.
        alpha: α as in TRL 1.16. The paper and TRL 0.24 use 1 - α.

    Returns:
        [...]. Exponents are at most 80 in float32 (as in TRL) and 700 in float64. Beyond that the gradient is 0.

    Reference:
        f-DPO: Wang et al., arXiv:2309.16240.
    """
    if divergence == "reverse_kl" or (divergence == "alpha_divergence" and abs(alpha - 1) < 1e-6):
        return log_ratio
    if divergence == "js_divergence":
        return math.log(2) + F.logsigmoid(log_ratio)
    power = -1.0 if divergence == "forward_kl" else alpha - 1
    exponent = (power * log_ratio).clamp(max=_LARGEST_EXPONENT[log_ratio.dtype])
    return torch.expm1(exponent) / power


def kto(rewards: Tensor, divergence: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the losses 1 - σ(r - z) of desirable replies, and 1 - σ(z - r) of undesirable ones.

    Args:
        rewards: r = β · log(π/π_ref) of each reply, [replies].
        divergence: z = β · KL(π ‖ π_ref), a scalar without gradient.

    Returns:
        The loss of each reply if it is desirable, and if it is undesirable, [replies] each.

    Reference:
        KTO: Ethayarajh et al., arXiv:2402.01306, equation 8, without the weights λ.
    """
    return (divergence - rewards).sigmoid(), (rewards - divergence).sigmoid()


def apo_zero_unpaired(rewards: Tensor, divergence: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the losses 1 - σ(r) of desirable replies, and σ(r) of undesirable ones. Arguments as in `kto`.

    `divergence` is not read.

    Reference:
        The two terms of APO-zero: D'Oosterlinck et al., arXiv:2408.06266.
    """
    return (-rewards).sigmoid(), rewards.sigmoid()
