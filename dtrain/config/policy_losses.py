"""What the policy losses can do, for a recipe's `grpo` section: names, options with their defaults, ranges. No torch.

The losses themselves are in `dtrain.losses.policy_losses`, the options' meanings in `dtrain.losses.policy_core`, which
have the same tables; a test holds them equal.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dtrain.config.numbers import is_number, sizes_for

LEVELS = ("token", "sequence", "sequence_token")
KL_ESTIMATORS = ("k1", "k2", "k3")
KL_GRADIENTS = ("importance", "direct", "reward", "k2")
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none")

_CLIPPED: Mapping[str, Any] = {"delta": None, "dual_clip": None}
_DPPO: Mapping[str, Any] = {"dppo_ratio_cap": 20.0}

LOSSES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "grpo": _CLIPPED,
        "bnpo": _CLIPPED,
        "dr_grpo": _CLIPPED,
        "dapo": _CLIPPED,
        "gspo": _CLIPPED,
        "gspo_token": _CLIPPED,
        "luspo": _CLIPPED,
        "cispo": {},
        "sapo": {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
        "vespo": {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
        "dppo_tv": _DPPO,
        "dppo_kl": _DPPO,
        "gmpo": {},
        "reinforce": {},
    }
)
"""Name -> the options of its own, with their defaults."""

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
"""Options of every loss, with their defaults."""

_BY_SEQUENCE = frozenset({"gmpo"})  # losses of whole sequences: no token can be left out
_READ_WITH_BETA = ("kl_estimator", "kl_gradient")


def _one_of(choices: Sequence[str]) -> tuple[Callable[[Any], bool], str]:
    return (lambda v: v in choices, f"one of {', '.join(choices)}")


_NUMBER = (lambda v: is_number(v), "a finite number")
_POSITIVE = (lambda v: is_number(v) and v > 0, "a finite number above 0")
_NOT_NEGATIVE = (lambda v: is_number(v) and v >= 0, "a finite number, at least 0")
_BOUND = (lambda v: v is None or (is_number(v) and v > 0), "a finite number above 0, or null")
_CAP = (lambda v: v is None or (is_number(v) and v > 1), "a finite number above 1, or null")

# What an option may be, and that in words; one that is not named here is any finite number.
RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "importance_sampling_level": (lambda v: v is None or v in LEVELS, f"one of {', '.join(LEVELS)}"),
        "kl_estimator": _one_of(KL_ESTIMATORS),
        "kl_gradient": _one_of(KL_GRADIENTS),
        "old_kl_coef": _NOT_NEGATIVE,
        "top_entropy_quantile": (lambda v: is_number(v) and 0 <= v <= 1, "from 0 to 1"),
        "off_policy_mask_threshold": _BOUND,
        "sampling_correction": _one_of(CORRECTIONS),
        "sampling_clip_min": _BOUND,
        "sampling_clip_max": _BOUND,
        "delta": _CAP,
        "dual_clip": _CAP,
        "dppo_ratio_cap": _POSITIVE,
        "sapo_temperature_pos": _POSITIVE,
        "sapo_temperature_neg": _POSITIVE,
        "vespo_k_pos": _NOT_NEGATIVE,
        "vespo_lambda_pos": _POSITIVE,
        "vespo_k_neg": _NOT_NEGATIVE,
        "vespo_lambda_neg": _POSITIVE,
    }
)


def problems(loss: str, clip: Sequence[float], beta: float, options: Mapping[str, Any]) -> list[str]:
    """What is wrong with a `grpo` section's loss, one line each, keys as the recipe has them; options: its kwargs."""
    if loss not in LOSSES:
        return [f"grpo.loss={loss} is no policy loss{_hint(loss, LOSSES)}"]
    found = []
    if not (len(clip) == 2 and all(is_number(one) and one >= 0 for one in clip)):
        found.append(f"grpo.clip={clip} must be two numbers of at least 0: how far below and above 1 the ratio may go"
                     + next((words for one in clip if (words := sizes_for(one))), ""))  # fmt: skip
    elif loss == "cispo" and clip[1] < 1:
        found.append(f"grpo.clip={clip}: cispo's second number caps the ratio itself, so below 1 it cuts every token's "
                     "weight; its papers take 5")  # fmt: skip
    if not (is_number(beta) and beta >= 0):
        found.append(f"grpo.beta={beta} must be a finite number, at least 0{sizes_for(beta)}")
    read = {**SHARED, **LOSSES[loss]}
    for key, value in options.items():
        if key not in read:
            found.append(f"grpo.kwargs.{key} is not read by {loss}{_hint(key, read, 'grpo.kwargs.')}")
        elif not (allowed := RANGES.get(key, _NUMBER))[0](value):
            found.append(f"grpo.kwargs.{key}={value} must be {allowed[1]}{sizes_for(value)}")
        elif key in _READ_WITH_BETA and not beta:
            found.append(f"grpo.kwargs.{key} says how the divergence is measured, and grpo.beta=0 leaves it out")
    return found or _combinations(loss, read | dict(options))


def _combinations(loss: str, options: Mapping[str, Any]) -> list[str]:
    found = []
    if options.get("delta") is not None and options.get("dual_clip") is not None:
        found.append("grpo.kwargs: delta and dual_clip bound the same ratio; give one of them")
    if loss in _BY_SEQUENCE and options["top_entropy_quantile"] < 1:
        found.append(f"grpo.kwargs.top_entropy_quantile: {loss} is a loss of whole sequences, which keep all tokens")
    smallest, largest = options["sampling_clip_min"], options["sampling_clip_max"]
    if smallest is not None and largest is not None and smallest >= largest:
        found.append(f"grpo.kwargs.sampling_clip_min={smallest} must be below sampling_clip_max={largest}")
    return found


def _hint(word: str, known: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else f"; there are {', '.join(known)}"
