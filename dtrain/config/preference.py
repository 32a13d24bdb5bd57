"""What the preference losses can do, for a recipe's `dpo` section: names, what each needs and reads, ranges. No torch.

The losses themselves are in `dtrain.losses.preference`, which has the same table beside the functions; a test holds the
two equal.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dtrain.config.numbers import is_number, sizes_for

SFT = "sft"  # a name in a list of losses, TRL's: the chosen completions' negative log-likelihood, as dpo.sft_weight
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


@dataclass(frozen=True)
class Ability:
    """whole_batch: a pair's loss depends on the other pairs of the global batch. options: what it reads beside β."""

    needs_reference: bool = True
    needs_lengths: bool = False
    whole_batch: bool = False
    options: frozenset[str] = frozenset()


_SMOOTHING = frozenset({"label_smoothing"})
_DIVERGENCE = frozenset({"f_divergence", "f_alpha_divergence_coef"})

LOSSES: Mapping[str, Ability] = MappingProxyType(
    {
        "sigmoid": Ability(options=_SMOOTHING | _DIVERGENCE),
        "hinge": Ability(options=_DIVERGENCE),
        "ipo": Ability(needs_lengths=True, options=_DIVERGENCE),
        "ipo_sum": Ability(options=_DIVERGENCE),
        "robust": Ability(options=_SMOOTHING | _DIVERGENCE),
        "exo_pair": Ability(options=_SMOOTHING | _DIVERGENCE),
        "nca_pair": Ability(),
        "bco_pair": Ability(whole_batch=True, options=frozenset({"bco_shift"})),
        "sppo_hard": Ability(),
        "aot": Ability(whole_batch=True, options=_SMOOTHING),
        "aot_unpaired": Ability(whole_batch=True, options=_SMOOTHING),
        "aot_pair": Ability(whole_batch=True, options=_SMOOTHING),
        "apo_zero": Ability(),
        "apo_down": Ability(),
        "discopop": Ability(options=_DIVERGENCE | {"discopop_tau"}),
        "sigmoid_norm": Ability(needs_lengths=True, options=_DIVERGENCE),
        "simpo": Ability(needs_reference=False, needs_lengths=True, options=_SMOOTHING | {"simpo_gamma"}),
        "orpo": Ability(needs_reference=False, needs_lengths=True),
    }
)

KWARGS = frozenset[str]().union(*(loss.options for loss in LOSSES.values())) - {"label_smoothing", "f_divergence"}
"""Options without a key of their own in the schema: they stand in `dpo.kwargs`."""

_NUMBER = (lambda v: is_number(v), "a finite number")

# What an option may be, and that in words; one that is not named here is any finite number.
RANGES: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "beta": (lambda v: is_number(v) and v > 0, "a finite number above 0"),
        "label_smoothing": (lambda v: is_number(v) and 0 <= v < 0.5, "from 0 up to 0.5, without 0.5 itself"),
        "f_divergence": (lambda v: v in DIVERGENCES, f"one of {', '.join(DIVERGENCES)}"),
        "f_alpha_divergence_coef": _NUMBER,
        "discopop_tau": (lambda v: is_number(v) and v > 0, "a finite number above 0"),
        "simpo_gamma": (lambda v: is_number(v) and v >= 0, "a finite number, at least 0"),
        "bco_shift": (lambda v: v == "batch" or is_number(v), "a finite number or batch"),
    }
)


def problems(
    names: str | Sequence[str],
    loss_weights: Sequence[float] | None,
    *,
    has_reference: bool,
    beta: float,
    label_smoothing: float = 0.0,
    f_divergence: str = "reverse_kl",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[str]:
    """What is wrong with a `dpo` section, one line each, keys as the recipe has them. `options`: the section's others.

    An option has to be read by one loss of the list at least; another divergence than reverse_kl by all of them.
    """
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        return ["dpo.loss: no loss is named"]
    found = [_unknown(name) for name in names if name not in LOSSES and name != SFT]
    if loss_weights is not None:
        if len(loss_weights) != len(names):
            found.append(f"dpo.loss_weights has {len(loss_weights)} numbers for {len(names)} losses; it needs one each")
        found.extend(f"dpo.loss_weights: {w} is not a finite number" for w in loss_weights if not is_number(w))
    losses = {name: LOSSES[name] for name in names if name in LOSSES}
    given = {"beta": beta, "label_smoothing": label_smoothing, "f_divergence": f_divergence, **options}
    read = frozenset({"beta"}).union(*(loss.options for loss in losses.values()))
    for key, value in given.items():
        within = "kwargs." if key in options else ""
        is_off = (key, value) in (("label_smoothing", 0), ("f_divergence", "reverse_kl"))
        good, words = RANGES.get(key, _NUMBER)
        if (key in RANGES or key in read) and not good(value):
            found.append(f"dpo.{within}{key}={value} must be {words}{sizes_for(value)}")
        elif key not in read and not is_off and losses:
            near = difflib.get_close_matches(key, read, n=1)
            hint = f"; did you mean dpo.{'kwargs.' if near[0] in KWARGS else ''}{near[0]}?" if near else ""
            found.append(f"dpo.{within}{key} is not read by {' + '.join(losses)}{hint}")
    if f_divergence in DIVERGENCES and f_divergence != "reverse_kl":
        without = [name for name, loss in losses.items() if "f_divergence" not in loss.options]
        if without and "f_divergence" in read:
            found.append(f"dpo.f_divergence={f_divergence} has no meaning for {without[0]}")
        if not has_reference:
            found.append(f"dpo.f_divergence={f_divergence} needs a reference to diverge from; dpo.reference is none")
    if "f_alpha_divergence_coef" in options and f_divergence != "alpha_divergence":
        found.append("dpo.kwargs.f_alpha_divergence_coef is read only with dpo.f_divergence=alpha_divergence")
    if "exo_pair" in names and label_smoothing == 0:
        found.append("dpo.label_smoothing=0: exo_pair needs more than 0 and less than 0.5; its paper uses 1e-3")
    return found


def _unknown(name: str) -> str:
    known = [*LOSSES, SFT]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return f"dpo.loss={name} is no preference loss; {hint}"
