"""Scores of the f-divergences that may hold a policy to its reference in preference losses.

f-DPO (Wang et al., arXiv:2309.16240) puts f'(π/π_ref) where DPO has log(π/π_ref); only differences of scores of one
prompt mean anything, for a constant of the prompt is left out.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# The largest exponent taken: its exponential, times a few orders of magnitude, is still a number.
_LARGEST_EXPONENT = {torch.float32: 80.0, torch.float64: 700.0}


def score(log_ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """f'(t) for t = π/π_ref from log t, any shape, float32 or float64; a constant may be missing.

    reverse_kl        log t
    forward_kl        1 − 1/t
    js_divergence     log(2t/(1 + t))
    alpha_divergence  (t^(α − 1) − 1)/(α − 1): forward_kl at α = 0, reverse_kl, the limit, at α = 1

    α as in TRL 1.16, f_alpha_divergence_coef. The paper's α, and that of TRL 0.24, is 1 − this one. Exponents beyond
    the dtype's range count as its largest, 80 in float32 (as in TRL) and 700 in float64, with a zero gradient there.
    """
    if divergence == "reverse_kl" or (divergence == "alpha_divergence" and abs(alpha - 1) < 1e-6):
        return log_ratio
    if divergence == "js_divergence":
        return math.log(2) + F.logsigmoid(log_ratio)
    power = -1.0 if divergence == "forward_kl" else alpha - 1
    return torch.expm1((power * log_ratio).clamp(max=_LARGEST_EXPONENT[log_ratio.dtype])) / power
