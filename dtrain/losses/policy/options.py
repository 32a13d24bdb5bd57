"""Table of the policy losses: for each name its function, its normalisation, its options, their defaults and ranges.

The losses and the checks of a recipe both read it, so it imports no torch. The functions are in `formulas`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from dtrain.base.errors import Problem
from dtrain.base.ranges import NOT_NEGATIVE, NUMBER, POSITIVE, Range, is_number, magnitude_hint, name_hint, one_of
from dtrain.losses.user_losses import import_loss, is_user_loss

LEVELS = ("token", "sequence", "sequence_token")
KL_ESTIMATORS = ("k1", "k2", "k3")
KL_GRADIENTS = ("importance", "direct", "reward", "k2")
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "seq_mask_tis", "none")

Normalisation = Literal["tokens", "sequences", "sequence_sums", "longest"]


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss.

    The normalisations, with all counts over the global batch:

        tokens           Σ over tokens / number of tokens
        sequences        Σ over sequences of the mean over their tokens / number of sequences
        sequence_sums    Σ over tokens / number of sequences
        longest          Σ over tokens / (number of sequences · max_completion_length)

    Attributes:
        function: Key of `formulas.FORMULAS`, or a user's function of the same signature, which may also return
            only the loss, [n, S].
        options: The function's options, except the clip, and their defaults.
        normalisation: See above.
        level: Default of importance_sampling_level.
        corrects_itself: Whether the function reads the weights for the sampler's probabilities. Otherwise they multiply
            the loss.
        by_sequence: Whether the loss is one number per sequence, so that single tokens cannot be left out.
    """

    function: str | Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    normalisation: Normalisation = "tokens"
    level: str = "token"
    corrects_itself: bool = False
    by_sequence: bool = False


_CLIP = {"delta": None, "dual_clip": None}
_SAPO = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
_VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
_DPPO = {"dppo_ratio_cap": 20.0}

# Differences from TRL:
#
# - grpo: TRL averages over the sequences of a micro-batch, and then over micro-batches. The result is the same if all
#   micro-batches have the same number of sequences.
# - bnpo: TRL averages over the tokens of a device's micro-batch, and then over micro-batches. Here bnpo equals dapo.
# - dapo, cispo, vespo: TRL divides each step by the mean number of tokens per step of a generation batch. Here each
#   step is divided by its own number of tokens.
LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(
    {
        "grpo": PolicyLoss("clipped", _CLIP, "sequences"),  # Shao et al., arXiv:2402.03300
        "bnpo": PolicyLoss("clipped", _CLIP),  # as dapo; TRL's name for the mean over a batch's tokens
        "dr_grpo": PolicyLoss("clipped", _CLIP, "longest"),  # Liu et al., arXiv:2503.20783
        "dapo": PolicyLoss("clipped", _CLIP),  # Yu et al., arXiv:2503.14476
        "gspo": PolicyLoss("clipped", _CLIP, "sequences", "sequence"),  # Zheng et al., arXiv:2507.18071, equation 5
        "gspo_token": PolicyLoss("clipped", _CLIP, "sequences", "sequence_token"),  # the same, equation 13
        "luspo": PolicyLoss("clipped", _CLIP, "sequence_sums", "sequence"),  # arXiv:2602.05261
        "cispo": PolicyLoss("cispo", {"cispo_lower_clip": False}),
        "sapo": PolicyLoss("sapo", _SAPO, "sequences"),
        "vespo": PolicyLoss("vespo", _VESPO, corrects_itself=True),
        "dppo_tv": PolicyLoss("dppo_tv", _DPPO),
        "dppo_kl": PolicyLoss("dppo_kl", _DPPO),
        "gmpo": PolicyLoss("gmpo", {}, "sequences", by_sequence=True),
        "reinforce": PolicyLoss("reinforce"),
    }
)


def is_loss_name(name: str) -> bool:
    """Check for a value of `grpo.loss`: a name of `LOSSES`, or a user's loss."""
    return name in LOSSES or is_user_loss(name, "grpo.loss")


def find_loss(name: str) -> PolicyLoss:
    """Return the row of a known loss. Raises UserError if a user's loss cannot be used."""
    if name in LOSSES:
        return LOSSES[name]
    return import_loss(name, "grpo.loss", PolicyLoss)


SHARED: Mapping[str, Any] = MappingProxyType(
    {
        "importance_sampling_level": None,
        "kl_estimator": "k3",
        "kl_gradient": "importance",
        "old_kl_coef": 0.0,
        "entropy_coef": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "sampling_correction": "sequence_mask",
        "sampling_clip_min": None,
        "sampling_clip_max": 3.0,
    }
)
"""Options of every loss, and their defaults: those of TRL 1.16 if it has the option. losses/README.md describes them.

importance_sampling_level (GSPO, arXiv:2507.18071, equations 7 and 14) also applies to r in the KL term. The entropy
term is a mean over the tokens that top_entropy_quantile keeps, whatever the loss's normalisation. The KL term is over
all tokens.
"""

_BOUND: Range = (lambda v: v is None or (is_number(v) and v > 0), "a finite number above 0, or null")
_CAP: Range = (lambda v: v is None or (is_number(v) and v > 1), "a finite number above 1, or null")

RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "importance_sampling_level": (lambda v: v is None or v in LEVELS, f"one of {', '.join(LEVELS)}"),
        "kl_estimator": one_of(KL_ESTIMATORS),
        "kl_gradient": one_of(KL_GRADIENTS),
        "old_kl_coef": NOT_NEGATIVE,
        "top_entropy_quantile": (lambda v: is_number(v) and 0 <= v <= 1, "from 0 to 1"),
        "off_policy_mask_threshold": _BOUND,
        "sampling_correction": one_of(CORRECTIONS),
        "sampling_clip_min": _BOUND,
        "sampling_clip_max": _BOUND,
        "delta": _CAP,
        "dual_clip": _CAP,
        "cispo_lower_clip": (lambda v: isinstance(v, bool), "true or false"),
        "dppo_ratio_cap": POSITIVE,
        "sapo_temperature_pos": POSITIVE,
        "sapo_temperature_neg": POSITIVE,
        "vespo_k_pos": NOT_NEGATIVE,
        "vespo_lambda_pos": POSITIVE,
        "vespo_k_neg": NOT_NEGATIVE,
        "vespo_lambda_neg": POSITIVE,
    }
)
"""Ranges of options. Options that are not listed accept any finite number."""


def problems(
    loss: str, clip: Sequence[float], beta: float, options: Mapping[str, Any], section: str = "", kwargs: str = ""
) -> list[Problem]:
    """Check the clip, β and the options of a loss.

    Args:
        loss: Name of the loss.
        clip: ε_low and ε_high.
        beta: Weight of the KL term.
        options: Options of the loss and of `SHARED`.
        section: In a recipe, the prefix of the keys of `clip` and `beta`, such as "grpo.".
        kwargs: In a recipe, the prefix of the keys of `options`, such as "grpo.kwargs.".

    Returns:
        The problems, an empty list if there are none.
    """
    found = []
    if not (len(clip) == 2 and all(is_number(bound) and bound >= 0 for bound in clip)):
        sizes = next((sizes for bound in clip if (sizes := magnitude_hint(bound))), "")
        key = f"{section}clip"
        text = f"{key}={clip} must be two numbers of at least 0: how far below and above 1 the ratio may go{sizes}"
        found.append(Problem(key, text))
    if not (is_number(beta) and beta >= 0):
        key = f"{section}beta"
        found.append(Problem(key, f"{key}={beta} must be a finite number, at least 0{magnitude_hint(beta)}"))
    row = find_loss(loss)
    read = {**SHARED, **row.options}
    for name, value in options.items():
        key = f"{kwargs}{name}"
        is_good, words = RANGES.get(name, NUMBER)
        if name not in read:
            found.append(Problem(key, f"{key} is not read by {loss}{name_hint(name, read, kwargs)}"))
        elif loss not in LOSSES and name in row.options:
            continue  # the function itself decides which values it accepts
        elif not is_good(value):
            found.append(Problem(key, f"{key}={value} must be {words}{magnitude_hint(value)}"))
    return found or _problems_together(loss, read | dict(options), kwargs)


def _problems_together(loss: str, options: Mapping[str, Any], kwargs: str) -> list[Problem]:
    """Check combinations of options that are each in their range."""
    found = []
    if options.get("delta") is not None and options.get("dual_clip") is not None:
        text = f"{kwargs or 'options'}: delta and dual_clip bound the same ratio"
        found.append(Problem(f"{kwargs}delta", text, "Set only one of them"))
    if find_loss(loss).by_sequence and options["top_entropy_quantile"] < 1:
        key = f"{kwargs}top_entropy_quantile"
        found.append(Problem(key, f"{key}: {loss} is a loss of complete sequences, which keep all tokens"))
    smallest, largest = options["sampling_clip_min"], options["sampling_clip_max"]
    if smallest is not None and largest is not None and smallest >= largest:
        key = f"{kwargs}sampling_clip_min"
        found.append(Problem(key, f"{key}={smallest} must be below sampling_clip_max={largest}"))
    return found
