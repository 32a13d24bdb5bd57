"""Checks of a recipe's `kto` section and of what surrounds it, and the method's spec. No torch."""

from types import MappingProxyType

from dtrain.methods import dpo_section
from dtrain.methods.spec import MethodSpec
from dtrain.recipe.schema import Recipe


class KtoSpec(MethodSpec):
    kind = "labelled"
    adapter_rates = (5e-6, "1e-5")  # full tuning takes 5e-7 to 5e-6
    curves = MappingProxyType({**MethodSpec.curves, "rewards_margin": "margin of rewards"})

    def problems(self, recipe: Recipe) -> list[str]:
        section, errors = recipe.kto, dpo_section.base_problems(recipe, "kto", recipe.kto.reference)
        if section.reference in (None, "none"):
            errors.append("kto.reference=none: a reply's reward is measured against a reference; set it to start")
        if section.desirable_weight == section.undesirable_weight == 0:
            errors.append("kto.desirable_weight and kto.undesirable_weight are both 0: nothing would be learned")
        if recipe.data.loss_on != "assistant":
            errors.append(dpo_section.no_loss_on(recipe))
        return errors

    def refuses(self, recipe: Recipe, format: str) -> str | None:
        if format in ("text", "question"):
            return "method=kto trains on replies with a label; give it prompt, completion and label"
        return None

    def other_models(self, recipe: Recipe) -> list[tuple[str, str]]:
        return dpo_section.other_reference("kto", recipe.kto.reference)

    def needs_reference(self, recipe: Recipe) -> bool:
        return True


def spec(recipe: Recipe | None = None) -> KtoSpec:
    """The spec of this method."""
    return KtoSpec()
