"""Table of the preference losses: for each name its function, its requirements, its options, their defaults and ranges.

The losses and the checks of a recipe both read it, so it imports no torch. The functions are in `formulas`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dtrain.base.errors import Problem, UserError
from dtrain.base.ranges import NOT_NEGATIVE, NUMBER, POSITIVE, Range, closest_name, is_number, magnitude_hint, one_of
from dtrain.losses.user_losses import import_loss, is_user_loss

# In a list of losses, as in TRL: the negative log-likelihood of the chosen completions, like dpo.sft_weight.
SFT = "sft"
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


@dataclass(frozen=True)
class PreferenceLoss:
    """A preference loss.

    Attributes:
        function: Key of `formulas.FORMULAS`, or a user's function of the same signature.
        options: The function's options, except β, and their defaults.
        needs_reference: Whether it reads the log-probabilities of the reference.
        needs_lengths: Whether it reads the lengths of the completions.
        whole_batch: Whether the loss of a pair depends on the other pairs of the global batch. For bco_pair, only with
            bco_shift="batch" (`over_the_batch`).
    """

    function: str | Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    needs_reference: bool = True
    needs_lengths: bool = False
    whole_batch: bool = False

    @property
    def f_divergence(self) -> bool:
        """True if the loss reads `f_divergence`."""
        return "f_divergence" in self.options


DIVERGENCE: Mapping[str, Any] = MappingProxyType({"f_divergence": "reverse_kl", "f_alpha_divergence_coef": 0.5})
_SMOOTHING = {"label_smoothing": 0.0}

LOSSES: Mapping[str, PreferenceLoss] = MappingProxyType(
    {
        "sigmoid": PreferenceLoss("sigmoid", {**_SMOOTHING, **DIVERGENCE}),
        "hinge": PreferenceLoss("hinge", DIVERGENCE),
        "ipo": PreferenceLoss("ipo", DIVERGENCE, needs_lengths=True),
        "ipo_sum": PreferenceLoss("ipo_sum", DIVERGENCE),
        "robust": PreferenceLoss("robust", {**_SMOOTHING, **DIVERGENCE}),
        "exo_pair": PreferenceLoss("exo_pair", {**_SMOOTHING, **DIVERGENCE}),
        "nca_pair": PreferenceLoss("nca_pair"),
        "bco_pair": PreferenceLoss("bco_pair", {"bco_shift": 0.0}, whole_batch=True),
        "sppo_hard": PreferenceLoss("sppo_hard"),
        "aot": PreferenceLoss("aot", _SMOOTHING, whole_batch=True),
        "aot_unpaired": PreferenceLoss("aot_unpaired", _SMOOTHING, whole_batch=True),
        "aot_pair": PreferenceLoss("aot_unpaired", _SMOOTHING, whole_batch=True),
        "apo_zero": PreferenceLoss("apo_zero"),
        "apo_down": PreferenceLoss("apo_down"),
        "discopop": PreferenceLoss("discopop", {"discopop_tau": 0.05, **DIVERGENCE}),
        "sigmoid_norm": PreferenceLoss("sigmoid_norm", DIVERGENCE, needs_lengths=True),
        "simpo": PreferenceLoss("simpo", {**_SMOOTHING, "simpo_gamma": 0.5}, needs_reference=False, needs_lengths=True),
        "orpo": PreferenceLoss("orpo", needs_reference=False, needs_lengths=True),
    }
)

OFF: Mapping[str, Any] = MappingProxyType({"label_smoothing": 0.0, "f_divergence": "reverse_kl"})
"""Values that switch an option off. Every loss accepts them, also if it does not read the option."""


def is_loss_name(name: str) -> bool:
    """Check for a value of `dpo.loss`: a name of `LOSSES`, or a user's loss."""
    return name in LOSSES or is_user_loss(name, "dpo.loss")


def find_loss(name: str) -> PreferenceLoss:
    """Return the row of a known loss. Raises UserError if a user's loss cannot be used."""
    if name in LOSSES:
        return LOSSES[name]
    return import_loss(name, "dpo.loss", PreferenceLoss, ("beta",))


def usable_losses(names: Iterable[str]) -> dict[str, PreferenceLoss]:
    """Return the rows of the names that are losses. Users' losses that cannot be used are left out."""
    rows = {}
    for name in names:
        if is_loss_name(name):
            with suppress(UserError):
                rows[name] = find_loss(name)
    return rows


def over_the_batch(names: Iterable[str], options: Mapping[str, Any]) -> list[str]:
    """Return the losses that, with these options, compare a pair with the other pairs of the global batch.

    Example:
        >>> over_the_batch(["sigmoid", "aot", "bco_pair"], {"bco_shift": 0.0})
        ['aot']
    """
    over_batch = []
    for name, loss in usable_losses(names).items():
        is_constant_shift = name == "bco_pair" and options.get("bco_shift") != "batch"
        if loss.whole_batch and not is_constant_shift:
            over_batch.append(name)
    return over_batch


KWARGS = frozenset[str]().union(*(loss.options for loss in LOSSES.values())) - OFF.keys()
"""Options without a key of their own in the recipe's schema. They are set in `dpo.kwargs`."""

RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "beta": POSITIVE,
        "label_smoothing": (lambda v: is_number(v) and 0 <= v < 0.5, "at least 0 and below 0.5"),
        "f_divergence": one_of(DIVERGENCES),
        "f_alpha_divergence_coef": NUMBER,
        "discopop_tau": POSITIVE,
        "simpo_gamma": NOT_NEGATIVE,
        "bco_shift": (lambda v: v == "batch" or is_number(v), "a finite number or batch"),
    }
)
"""Ranges of options. Options that are not listed accept any finite number."""


def problems(
    names: Collection[str], options: Mapping[str, Any], *, has_reference: bool, section: str = "", kwargs: str = ""
) -> list[Problem]:
    """Check β and the other options of losses.

    Every option has to be read by at least one loss, and an `f_divergence` other than reverse_kl by all of them.

    Args:
        names: Names of the losses.
        options: Their options.
        has_reference: Whether there is a reference.
        section: In a recipe, the prefix of keys of the section, such as "dpo.".
        kwargs: In a recipe, the prefix of keys without an entry in the section, such as "dpo.kwargs.".

    Returns:
        The problems, an empty list if there are none.
    """

    def key_of(option: str) -> str:
        is_in_section = option in OFF or option == "beta"
        return f"{section}{option}" if is_in_section else f"{kwargs}{option}"

    read = frozenset({"beta"}).union(*(find_loss(name).options for name in names))
    has_user_loss = any(name not in LOSSES for name in names)
    found = []
    for option, value in options.items():
        key = key_of(option)
        is_good, words = RANGES.get(option, NUMBER)
        if has_user_loss and option in read and option not in RANGES:
            continue  # the function itself decides which values it accepts
        is_switched_off = option in OFF and value == OFF[option]
        if (option in RANGES or option in read) and not is_good(value):
            found.append(Problem(key, f"{key}={value} must be {words}{magnitude_hint(value)}"))
        elif names and option not in read and not is_switched_off:
            near = closest_name(option, read)
            fix = f"Did you mean {key_of(near)}?" if near else f"Options that are read: {', '.join(sorted(read))}"
            found.append(Problem(key, f"{key} is not read by {' + '.join(names)}", fix))
    key = f"{section}f_divergence"
    divergence = options.get("f_divergence", OFF["f_divergence"])
    if divergence in DIVERGENCES and divergence != OFF["f_divergence"]:
        without = [name for name in names if not find_loss(name).f_divergence]
        if without and "f_divergence" in read:
            found.append(Problem(key, f"{key}={divergence} has no meaning for {without[0]}"))
        if not has_reference:
            fix = f"Set {section}reference=start" if section else ""
            found.append(Problem(key, f"{key}={divergence} needs a reference to diverge from", fix))
    if "f_alpha_divergence_coef" in options and divergence != "alpha_divergence":
        coefficient = f"{kwargs}f_alpha_divergence_coef"
        found.append(Problem(coefficient, f"{coefficient} is read only with {key}=alpha_divergence"))
    if "exo_pair" in names and not options.get("label_smoothing"):
        key = f"{section}label_smoothing"
        text = f"{key}=0: exo_pair needs more than 0 and less than 0.5"
        found.append(Problem(key, text, "Its paper uses 1e-3"))
    return found
