"""Checks of a recipe's `sft` section, and the method's spec. No torch."""

from types import MappingProxyType

from dtrain.base.ranges import NUMBER, shown
from dtrain.losses.token import options as token_options
from dtrain.methods.spec import MethodSpec
from dtrain.recipe import key_aliases
from dtrain.recipe.schema import Recipe


class SftSpec(MethodSpec):
    curves = MappingProxyType({**MethodSpec.curves, "token_accuracy": "token accuracy"})

    def problems(self, recipe: Recipe) -> list[str]:
        """Check `sft.loss`, its options and label smoothing."""
        section, losses = recipe.sft, token_options.LOSSES
        if section.loss not in losses:
            return [f"sft.loss={section.loss} is no loss of tokens{key_aliases.hint('sft.loss', section.loss, losses)}"]
        named, errors = losses[section.loss], []
        for key, value in section.kwargs.items():
            allowed, sentence = token_options.RANGES.get(key, NUMBER)
            if key not in named.options:
                errors.append(f"sft.kwargs.{key} is not read by {section.loss}; leave it out")
            elif not allowed(value):
                errors.append(f"sft.kwargs.{key}={shown(value)} must be {sentence}")
        if section.label_smoothing and not named.smooths:
            smoothing = [name for name, loss in losses.items() if loss.smooths]
            errors.append(
                f"sft.label_smoothing={section.label_smoothing} has no meaning for sft.loss={section.loss}: leave it "
                f"out, or set sft.loss={' or '.join(smoothing)}"
            )
        return errors


def spec(recipe: Recipe | None = None) -> SftSpec:
    """The spec of this method."""
    return SftSpec()
