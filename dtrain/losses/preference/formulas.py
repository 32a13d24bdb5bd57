"""From the log-probabilities of chosen and rejected completions to a preference loss per pair: one small function per
loss. `options` has the table of them, with what each needs and its options' defaults.

A log-probability here is a completion's, summed over its tokens. β scales the reward β · log(π/π_ref). A loss that
compares the completions reads the margin m, the chosen one's score less the rejected one's; a score is f'(π/π_ref) of
the divergence asked for, log(π/π_ref) by default.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """Inputs of a preference loss for B pairs, [B] each. The reference's log-probabilities are zeros where there is
    none, lengths ones where none are given."""

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
        """[B]: log(π/π_ref)."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        """[B]"""
        return self.rejected - self.ref_rejected

    @property
    def margin(self) -> Tensor:
        """[B]"""
        return self._score(self.chosen_ratio) - self._score(self.rejected_ratio)

    @property
    def margin_per_token(self) -> Tensor:
        """Return the `margin` [B] with each score divided by its completion's length."""
        chosen, rejected = self._score(self.chosen_ratio), self._score(self.rejected_ratio)
        return _per_token(chosen, self.chosen_lengths) - _per_token(rejected, self.rejected_lengths)

    def _score(self, ratio: Tensor) -> Tensor:
        return score(ratio, self.f_divergence, self.f_alpha_divergence_coef)


def sigmoid(pairs: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """[B]: −log σ(β·m) (DPO: Rafailov et al., arXiv:2305.18290, equation 7).

    With label smoothing ε, −(1 − ε)·log σ(β·m) − ε·log σ(−β·m) (cDPO: Mitchell, "A note on DPO with noisy preferences",
    2023). TRL 0.24 has it so; TRL 1.16's sigmoid reads no label smoothing.
    """
    return _smoothed(beta * pairs.margin, label_smoothing)


def hinge(pairs: Pairs, *, beta: float) -> Tensor:
    """[B]: max(0, 1 − β·m): SLiC's hinge (Zhao et al., arXiv:2305.10425) on likelihoods relative to the reference, as
    in RSO (Liu et al., arXiv:2309.06657)."""
    return torch.relu(1 - beta * pairs.margin)


def ipo(pairs: Pairs, *, beta: float) -> Tensor:
    """[B]: `ipo_sum` on margins per token: what TRL calls ipo, and what the paper's authors told TRL they ran."""
    return (pairs.margin_per_token - 1 / (2 * beta)).square()


def ipo_sum(pairs: Pairs, *, beta: float) -> Tensor:
    """[B]: (m − 1/(2β))² (IPO: Azar et al., arXiv:2310.12036, equation 17; β is its τ)."""
    return (pairs.margin - 1 / (2 * beta)).square()


def robust(pairs: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """[B]: (−(1 − ε)·log σ(β·m) + ε·log σ(−β·m)) / (1 − 2ε): the sigmoid loss without bias when a share ε of the labels
    is flipped (Robust DPO: Chowdhury et al., arXiv:2403.00409)."""
    z = beta * pairs.margin
    return (label_smoothing * F.logsigmoid(-z) - (1 - label_smoothing) * F.logsigmoid(z)) / (1 - 2 * label_smoothing)


def exo_pair(pairs: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """[B]: KL(p ‖ q), p = (σ(β·m), σ(−β·m)) and q = (1 − ε, ε) (EXO: Ji et al., arXiv:2402.00856, equation 16).

    ε is infinite loss at 0, so it has to be given; the paper uses 1e-3. (TRL 0.24 takes 1e-3 for 0, 1.16 refuses 0.)
    """
    z = _finite(beta * pairs.margin)  # so that 0·log 0 is 0
    chosen = torch.sigmoid(z) * (F.logsigmoid(z) - math.log1p(-label_smoothing))
    return chosen + torch.sigmoid(-z) * (F.logsigmoid(-z) - math.log(label_smoothing))


def nca_pair(pairs: Pairs, *, beta: float) -> Tensor:
    """[B]: −log σ(c) − ½·log σ(−c) − ½·log σ(−r), c and r the rewards (NCA: Chen et al., arXiv:2402.05369)."""
    chosen, rejected = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(pairs: Pairs, *, beta: float, bco_shift: float | Tensor | str) -> Tensor:
    """[B]: −log σ(c − δ) − log σ(δ − r), c and r the rewards (BCO: Jung et al., arXiv:2404.04656, with its reward shift
    δ).

    bco_shift is δ: a number (0, TRL 1.16's loss, by default), or "batch": the mean of all rewards of this call, chosen
    and rejected, without gradient. The paper and TRL 0.24 move δ from batch to batch, TRL as the plain mean of the
    batches' means so far, this one's among them; `running_mean` keeps it, and the caller hands it in, for this function
    has no state. TRL counts each micro-batch of each rank as a batch; here a batch is the global one, at any split.
    """
    chosen, rejected = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    shift = torch.cat([chosen, rejected]).detach().mean() if isinstance(bco_shift, str) else bco_shift
    return -F.logsigmoid(chosen - shift) - F.logsigmoid(shift - rejected)


def sppo_hard(pairs: Pairs, *, beta: float) -> Tensor:
    """[B]: (c − 1/(2β))² + (r + 1/(2β))², c and r the log ratios (SPPO: Wu et al., arXiv:2405.00675, equation 4.7, with
    the preference taken as certain)."""
    return (pairs.chosen_ratio - 0.5 / beta).square() + (pairs.rejected_ratio + 0.5 / beta).square()


def aot(pairs: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """[B]: The sigmoid loss between the policy's margins log π(chosen)/π(rejected) and the reference's, k-th smallest
    of the batch with k-th smallest (AOT paired: Melnyk et al., arXiv:2406.05882).

    A pair's loss stands in its own place: that of its policy margin (TRL's are in the order of size; the mean is one).
    """
    policy, reference = pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected
    return _smoothed(beta * (policy - _of_same_rank(policy, reference)), label_smoothing)


def aot_unpaired(pairs: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """[B]: The sigmoid loss between the log ratios of the chosen completions and those of the rejected ones, k-th
    smallest of the batch with k-th smallest (AOT unpaired: Melnyk et al., arXiv:2406.05882). TRL 0.24 calls it
    aot_pair.

    A loss stands in the place of its chosen completion.
    """
    chosen, rejected = pairs.chosen_ratio, pairs.rejected_ratio
    return _smoothed(beta * (chosen - _of_same_rank(chosen, rejected)), label_smoothing)


def apo_zero(pairs: Pairs, *, beta: float) -> Tensor:
    """[B]: 1 − σ(c) + σ(r), c and r the rewards: chosen up, rejected down (APO-zero: D'Oosterlinck et al.,
    arXiv:2408.06266, equation 7)."""
    return torch.sigmoid(-beta * pairs.chosen_ratio) + torch.sigmoid(beta * pairs.rejected_ratio)


def apo_down(pairs: Pairs, *, beta: float) -> Tensor:
    """[B]: σ(c) + 1 − σ(c − r), c and r the rewards: both down, rejected further (APO-down: D'Oosterlinck et al.,
    arXiv:2408.06266, equation 8)."""
    margin = pairs.chosen_ratio - pairs.rejected_ratio
    return torch.sigmoid(beta * pairs.chosen_ratio) + torch.sigmoid(-beta * margin)


def discopop(pairs: Pairs, *, beta: float, discopop_tau: float) -> Tensor:
    """[B]: (1 − w)·(−log σ(z)) + w·exp(−z), z = β·m and w = σ(z/τ): the log-ratio modulated loss (DiscoPOP: Lu et al.,
    arXiv:2406.08414, equation 5)."""
    z = _finite(beta * pairs.margin)
    modulation = z / discopop_tau
    exponential = (F.logsigmoid(modulation) - z).exp()  # as one exponent: exp(−z) alone overflows where w is 0
    return -F.logsigmoid(z) * torch.sigmoid(-modulation) + exponential


def sigmoid_norm(pairs: Pairs, *, beta: float) -> Tensor:
    """[B]: −log σ(β·m), m per token: DPO with SimPO's length normalisation (Meng et al., arXiv:2405.14734; Lambert et
    al., arXiv:2411.15124)."""
    return -F.logsigmoid(beta * pairs.margin_per_token)


def simpo(pairs: Pairs, *, beta: float, label_smoothing: float, simpo_gamma: float) -> Tensor:
    """[B]: −log σ(β·(c − r) − γ), c and r the log-probabilities per token, no reference (SimPO: Meng et al.,
    arXiv:2405.14734, equation 6). The paper's β is 2 to 2.5, its γ about half of it. Label smoothing as in `sigmoid`,
    as TRL's CPO trainer has it."""
    margin = _per_token(pairs.chosen, pairs.chosen_lengths) - _per_token(pairs.rejected, pairs.rejected_lengths)
    return _smoothed(beta * margin - simpo_gamma, label_smoothing)


def orpo(pairs: Pairs, *, beta: float) -> Tensor:
    """[B]: β · (−log σ(log odds(chosen) − log odds(rejected))), odds(y) = p/(1 − p) of the probability per token p, no
    reference (ORPO: Hong et al., arXiv:2403.07691, equation 7; β is its λ).

    Equation 6 adds the chosen completions' negative log-likelihood: that is the SFT term, dpo.sft_weight = 1, over the
    completions' tokens. (TRL's takes the mean over the prompts' tokens too.)
    """
    chosen = _log_odds(_per_token(pairs.chosen, pairs.chosen_lengths))
    rejected = _log_odds(_per_token(pairs.rejected, pairs.rejected_lengths))
    return -beta * F.logsigmoid(chosen - rejected)


def _smoothed(z: Tensor, label_smoothing: float) -> Tensor:
    """−(1 − ε)·log σ(z) − ε·log σ(−z); at ε = 0 the second term, infinite at +∞, is not there."""
    loss = -F.logsigmoid(z)
    return loss if label_smoothing == 0 else (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-z)


def _of_same_rank(values: Tensor, others: Tensor) -> Tensor:
    """[B]: for each of `values` the one of `others` that has the same place by size; ties in their own order."""
    return others.sort(stable=True).values[values.argsort(stable=True).argsort()]


def _per_token(logps: Tensor, lengths: Tensor) -> Tensor:
    return logps / lengths.clamp(min=1).to(logps)


def _finite(z: Tensor) -> Tensor:
    largest = torch.finfo(z.dtype).max
    return z.clamp(-largest, largest)


def _log_odds(logp: Tensor) -> Tensor:
    """log p − log(1 − p) from log p ≤ 0. A p of 1 counts as 1 − ε⁴, so that the odds ratio's gradient, which is finite
    there, does not become 0·∞."""
    logp = logp - torch.finfo(logp.dtype).eps ** 4
    near_one = logp > -math.log(2)
    log1m_near = torch.where(near_one, -torch.expm1(logp), 0.5).log()
    log1m_far = torch.log1p(-torch.where(near_one, -1.0, logp).exp())
    return logp - torch.where(near_one, log1m_near, log1m_far)


# The largest exponent taken: its exponential, times a few orders of magnitude, is still a number.
_LARGEST_EXPONENT = {torch.float32: 80.0, torch.float64: 700.0}


def score(log_ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """f'(t) [...] for t = π/π_ref from log t [...], float32 or float64; a constant may be missing.

    The score of an f-divergence that holds a policy to its reference: f-DPO (Wang et al., arXiv:2309.16240) puts
    f'(π/π_ref) where DPO has log(π/π_ref); only differences of scores of one prompt mean anything, for a constant of
    the prompt is left out.

    losses/README.md has the scores by name. alpha_divergence is forward_kl at α = 0, and reverse_kl, the limit, at
    α = 1; the paper's α, and that of TRL 0.24, is 1 − this one, TRL 1.16's. Exponents beyond the dtype's range count as
    its largest, 80 in float32 (as in TRL) and 700 in float64, with a zero gradient there.
    """
    if divergence == "reverse_kl" or (divergence == "alpha_divergence" and abs(alpha - 1) < 1e-6):
        return log_ratio
    if divergence == "js_divergence":
        return math.log(2) + F.logsigmoid(log_ratio)
    power = -1.0 if divergence == "forward_kl" else alpha - 1
    return torch.expm1((power * log_ratio).clamp(max=_LARGEST_EXPONENT[log_ratio.dtype])) / power


def kto(rewards: Tensor, divergence: Tensor) -> tuple[Tensor, Tensor]:
    """1 − σ(r − z) where the reply is wanted, 1 − σ(z − r) where it is not, [replies] each (Ethayarajh et al.,
    arXiv:2402.01306, equation 8 with λ apart).

    rewards r = β · log(p / p_ref) of the reply [replies]; divergence z = β · KL, a scalar and a constant.
    """
    return (divergence - rewards).sigmoid(), (rewards - divergence).sigmoid()


def apo_zero_unpaired(rewards: Tensor, divergence: Tensor) -> tuple[Tensor, Tensor]:
    """1 − σ(r) where the reply is wanted, σ(r) where it is not (D'Oosterlinck et al., arXiv:2408.06266, APO-zero's two
    terms). `divergence` is not read."""
    return (-rewards).sigmoid(), rewards.sigmoid()
