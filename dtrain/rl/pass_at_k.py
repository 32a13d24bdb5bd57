"""pass@k (arXiv:2107.03374, section 2.1): the chance that one of k answers to a prompt passes."""

import math


def passes(samples: int) -> list[int]:
    """Return the k of the pass@k that so many answers to a prompt give: powers of two, and their number."""
    return sorted({*(2**power for power in range(samples.bit_length()) if 2**power <= samples), samples})


def pass_at(k: int, samples: int, right: int) -> float:
    """Return the chance that k of `samples` completions, of which `right` pass, have one that does."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)
