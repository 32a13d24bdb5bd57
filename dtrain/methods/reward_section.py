"""Checks of a recipe's `reward` section and of what surrounds it, and the method's spec. No torch."""

from types import MappingProxyType

from dtrain.data.formats.labels import Label
from dtrain.methods.spec import MethodSpec
from dtrain.recipe.schema import Recipe

HEAD = "score"
"""The module of a classifier that gives its outputs."""


class RewardSpec(MethodSpec):
    """Spec of a head that rates or classifies labelled texts."""

    curves = MappingProxyType({**MethodSpec.curves, "accuracy": "accuracy"})

    def missing(self, recipe: Recipe) -> list[str]:
        if recipe.reward.task != "classes" or recipe.reward.num_labels is not None:
            return []
        return ["reward.num_labels is missing: set it to the number of classes, which are 0, 1, .. in the rows' label"]

    def problems(self, recipe: Recipe) -> list[str]:
        section, errors = recipe.reward, []
        if section.task == "classes" and section.num_labels == 1:
            errors.append("reward.num_labels=1: there is nothing to tell from one class; set it to 2 or more")
        if section.task != "classes" and section.num_labels not in (None, 1):
            errors.append(
                f"reward.num_labels={section.num_labels}: reward.task={section.task} has one output; leave it out, or "
                "set reward.task=classes"
            )
        if section.task != "pairs" and section.center_rewards_coefficient is not None:
            errors.append("reward.center_rewards_coefficient is read with reward.task=pairs alone: leave it out")
        if recipe.lora is not None and recipe.lora.path is None and HEAD not in recipe.lora.modules_to_save:
            named = ", ".join([*recipe.lora.modules_to_save, HEAD])
            errors.append(
                f"lora: the head of rewards is trained whole beside the adapter: set lora.modules_to_save=[{named}]"
            )
        if recipe.eval is not None:
            errors.append("eval draws answers, and a model with a head of rewards gives none: leave it out")
        if recipe.data.loss_on != "assistant":
            errors.append(
                f"data.loss_on={recipe.data.loss_on} plays no part under method=reward, which reads a text at its last "
                "token: leave it out"
            )
        return errors

    def refuses(self, recipe: Recipe, format: str) -> str | None:
        if format in ("preference", "question"):
            return f"reward.task={recipe.reward.task} reads texts with a label; set reward.task=pairs for preferences"
        return None

    def labels(self, recipe: Recipe) -> int | None:
        return recipe.reward.num_labels or 1

    def label(self, recipe: Recipe) -> Label | None:
        return Label("label", recipe.reward.num_labels if recipe.reward.task == "classes" else None)


class RewardPairSpec(RewardSpec):
    """Spec of a head that rates pairs of a better and a worse answer."""

    kind = "pairs"

    def refuses(self, recipe: Recipe, format: str) -> str | None:
        if format not in ("auto", "preference", "tokenized"):
            return "reward.task=pairs reads preferences; set it to preference, or reward.task=classes or numbers"
        return None

    def label(self, recipe: Recipe) -> Label | None:
        return Label("margin")


def spec(recipe: Recipe | None = None) -> RewardSpec:
    """The spec of reward models by pairs, or of labelled texts."""
    return RewardPairSpec() if recipe is not None and recipe.reward.task == "pairs" else RewardSpec()
