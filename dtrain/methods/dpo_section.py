"""Checks of a recipe's `dpo` section and of what surrounds it. No torch, no file is read."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dtrain.base.ranges import NUMBER, is_number, nearest, shown, sizes_for
from dtrain.losses.preference.options import DIVERGENCES, KWARGS, LOSSES, OFF, RANGES, SFT, over_the_batch
from dtrain.methods.spec import MethodSpec
from dtrain.recipe import key_aliases
from dtrain.recipe.schema import Recipe


def problems(recipe: Recipe) -> list[str]:
    """Return what is wrong with a recipe of method dpo, beside its ranges, one line each."""
    section = recipe.dpo
    has_reference = section.reference not in (None, "none")
    errors = loss_problems(
        section.loss,
        section.loss_weights,
        has_reference=has_reference,
        beta=section.beta,
        label_smoothing=section.label_smoothing,
        f_divergence=section.f_divergence,
        options=section.kwargs,
    )
    names = [section.loss] if isinstance(section.loss, str) else list(section.loss)
    if section.use_weighting and (across := over_the_batch(names, section.kwargs)):
        errors.append(
            f"dpo.use_weighting=true weighs each pair, and dpo.loss={across[0]} compares pairs with one another: set "
            "dpo.use_weighting=false, or another loss"
        )
    if section.use_weighting and set(names) == {SFT}:
        errors.append("dpo.use_weighting=true weighs losses that compare two completions, and dpo.loss=sft does not")
    if section.sync_every is not None and section.precompute:
        errors.append(
            "dpo.sync_every moves the reference, so dpo.precompute cannot score with it once: set dpo.sync_every=null "
            "or dpo.precompute=false"
        )
    errors += base_problems(recipe, "dpo", section.reference)
    if recipe.data.loss_on != "assistant":
        errors.append(no_loss_on(recipe))
    for key, value in (("sync_every", section.sync_every), ("precompute", section.precompute or None)):
        if value is not None and not has_reference:
            errors.append(f"dpo.{key}={shown(value)} needs a reference, and dpo.reference is none: set it to start")
    return errors


def no_loss_on(recipe: Recipe) -> str:
    """Return the error text for `data.loss_on` where it plays no part."""
    return (
        f"data.loss_on={recipe.data.loss_on} plays no part under method={recipe.method}: what follows the prompt is "
        "trained; leave it out"
    )


def other_reference(method: str, reference: str | None) -> list[tuple[str, str]]:
    """Key and path of a reference that is another model, in the section of a method."""
    own = reference in (None, "none", "start", "base")
    return [] if own else [(f"{method}.reference", str(reference))]


def base_problems(recipe: Recipe, method: str, reference: str | None) -> list[str]:
    """Return what is wrong with `reference: base`, the model without its adapter, in the section of a method."""
    if reference != "base" or recipe.lora is not None:
        return []
    return [
        f"{method}.reference=base is the model without its adapter, and there is none: set {method}.reference=start, "
        "or lora={}"
    ]


def loss_problems(
    names: str | Sequence[str],
    loss_weights: Sequence[float] | None,
    *,
    has_reference: bool,
    beta: float,
    label_smoothing: float = 0.0,
    f_divergence: str = "reverse_kl",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[str]:
    """Return what is wrong with the section's losses, one line each, by the recipe's keys. `options`: its kwargs.

    An option has to be read by one loss of the list at least; another divergence than reverse_kl by all of them.
    """
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        return ["dpo.loss: no loss is named"]
    known = (*LOSSES, SFT)
    unknown = [name for name in names if name not in known]
    errors = [f"dpo.loss={name} is no preference loss{key_aliases.hint('dpo.loss', name, known)}" for name in unknown]
    if loss_weights is not None:
        if len(loss_weights) != len(names):
            errors.append(
                f"dpo.loss_weights has {len(loss_weights)} numbers for {len(names)} losses; it needs one each"
            )
        errors.extend(f"dpo.loss_weights: {w} is not a finite number" for w in loss_weights if not is_number(w))
    losses = {name: LOSSES[name] for name in names if name in LOSSES}
    values = {"beta": beta, "label_smoothing": label_smoothing, "f_divergence": f_divergence, **options}
    read = frozenset({"beta"}).union(*(loss.options for loss in losses.values()))
    for key, value in values.items():
        within = "kwargs." if key in options else ""
        is_off = key in OFF and value == OFF[key]
        good, sentence = RANGES.get(key, NUMBER)
        if (key in RANGES or key in read) and not good(value):
            errors.append(f"dpo.{within}{key}={value} must be {sentence}{sizes_for(value)}")
        elif key not in read and not is_off and losses:
            near = nearest(key, read)
            suggestion = f"; did you mean dpo.{'kwargs.' if near in KWARGS else ''}{near}?" if near else ""
            errors.append(f"dpo.{within}{key} is not read by {' + '.join(losses)}{suggestion}")
    if f_divergence in DIVERGENCES and f_divergence != "reverse_kl":
        without = [name for name, loss in losses.items() if not loss.f_divergence]
        if without and "f_divergence" in read:
            errors.append(f"dpo.f_divergence={f_divergence} has no meaning for {without[0]}")
        if not has_reference:
            errors.append(f"dpo.f_divergence={f_divergence} needs a reference to diverge from; dpo.reference is none")
    if "f_alpha_divergence_coef" in options and f_divergence != "alpha_divergence":
        errors.append("dpo.kwargs.f_alpha_divergence_coef is read only with dpo.f_divergence=alpha_divergence")
    if "exo_pair" in names and label_smoothing == 0:
        errors.append("dpo.label_smoothing=0: exo_pair needs more than 0 and less than 0.5; its paper uses 1e-3")
    return errors


class DpoSpec(MethodSpec):
    kind = "pairs"
    adapter_rates = (5e-6, "1e-5")  # full tuning takes 5e-7 to 1e-6
    curves = MappingProxyType({**MethodSpec.curves, "accuracy": "accuracy"})

    def problems(self, recipe: Recipe) -> list[str]:
        return problems(recipe)

    def refuses(self, recipe: Recipe, format: str) -> str | None:
        if format == "question":
            return super().refuses(recipe, format)
        if format not in ("auto", "preference", "tokenized"):
            return "method=dpo trains on pairs; set it to preference, or method=sft"
        return None

    def other_models(self, recipe: Recipe) -> list[tuple[str, str]]:
        return other_reference("dpo", recipe.dpo.reference)

    def needs_reference(self, recipe: Recipe) -> bool:
        """Return False also where every loss of the list goes without."""
        section = recipe.dpo
        names = [section.loss] if isinstance(section.loss, str) else section.loss
        reads = any(LOSSES[name].needs_reference for name in names if name in LOSSES)
        return reads and section.reference not in (None, "none")

    def holds_reference(self, recipe: Recipe) -> bool:
        return self.needs_reference(recipe) and not recipe.dpo.precompute


def spec(recipe: Recipe | None = None) -> DpoSpec:
    """The spec of this method."""
    return DpoSpec()
