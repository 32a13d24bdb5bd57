"""Every method by the name that a recipe calls it by."""

from collections.abc import Callable

from dtrain.config.schema import Recipe
from dtrain.methods.distill import DistillMethod
from dtrain.methods.dpo import DpoMethod
from dtrain.methods.grpo import GrpoMethod
from dtrain.methods.kto import KtoMethod
from dtrain.methods.method import Method
from dtrain.methods.on_policy import OnPolicyDistillMethod
from dtrain.methods.reward import RewardMethod
from dtrain.methods.sft import SftMethod


def _distill(recipe: Recipe) -> Method:
    draws = recipe.distill.samples == "student"
    return OnPolicyDistillMethod(recipe) if draws else DistillMethod(recipe)


METHODS: dict[str, Callable[[Recipe], Method]] = {
    "sft": SftMethod,
    "dpo": DpoMethod,
    "kto": KtoMethod,
    "grpo": GrpoMethod,
    "distill": _distill,
    "reward": RewardMethod,
}
