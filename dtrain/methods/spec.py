"""Specs of the methods, known before anything is built: what the recipe's check, the preview, a plan and the start of a
run must know of it. A class per method; nobody outside this package asks for a method's name. No torch.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from dtrain.recipe.schema import Recipe
from dtrain.recipe.world import automatic_batch

if TYPE_CHECKING:
    from dtrain.data.formats.labels import Label
    from dtrain.data.formats.prompts import PromptOptions

REWARD_MODEL = "grpo.reward_model.path"
"""The key of a model with another head than the vocabulary's."""


class MethodSpec:
    """Spec of a method without a section, a second model or rows of its own.

    kind: what a sample of the data is: examples, pairs, labelled (replies that are wanted or not) or prompts. best:
    what of `recipe.schema.BEST` it measures. adapter_rates: the learning rate below which a fresh adapter hardly
    learns, and a usual one. curves: the fields of metrics.jsonl that tell what was learned, and their names for a
    reader. more_steps: what of its section makes a pass more steps.
    """

    kind = "examples"
    best: tuple[str, ...] = ("val_loss", "loss")
    more_steps: str | None = None
    adapter_rates = (5e-5, "2e-4")
    curves: Mapping[str, str] = MappingProxyType({"loss": "loss", "val_loss": "validation loss"})

    def missing(self, recipe: Recipe) -> list[str]:
        """Return what the section must say and does not, one line each."""
        return []

    def problems(self, recipe: Recipe) -> list[str]:
        """Return what is wrong in the section and around it, beside its ranges, one line each."""
        return []

    def refuses(self, recipe: Recipe, format: str) -> str | None:
        """Return why rows of a format (`data.*.format`) are not for this method; None: they are."""
        if format == "question":
            return "a question has no answer to train on; method=grpo draws its own"
        return f"method={recipe.method} does not train on pairs; set method=dpo" if format == "preference" else None

    def other_models(self, recipe: Recipe) -> list[tuple[str, str]]:
        """Key and path of the models that are needed beside the one that is trained."""
        return []

    def code(self, recipe: Recipe) -> list[tuple[str, str | None, str]]:
        """(key, name or import path, what it is) of the code that the section may name."""
        return []

    def prompts(self, recipe: Recipe) -> "PromptOptions | None":
        """Return how the data's prompts are made, where it is prompts. Raises UserError for tools whose source does
        not tell."""
        return None

    def labels(self, recipe: Recipe) -> int | None:
        """Outputs of the head that the model has in place of the vocabulary's; None: it has that one."""
        return None

    def label(self, recipe: Recipe) -> "Label | None":
        """The number of each of the data's rows that the loss reads."""
        return None

    def rows_of_a_sample(self, recipe: Recipe) -> int:
        """Rows of a batch that one of `train.global_batch` is: a pair that is not packed is two."""
        return 2 if self.kind == "pairs" and not recipe.data.packing else 1

    def is_dynamic(self, recipe: Recipe) -> bool:
        """Return whether a number of tokens bounds a micro-batch, not one of rows."""
        return recipe.train.dynamic_batch

    def automatic_batch(self, recipe: Recipe, rows: int) -> int:
        """Return what `train.global_batch=auto` is, where the first pass over the data has so many rows."""
        return automatic_batch(rows)

    def row_length(self, recipe: Recipe) -> int:
        """Tokens of a full row: a packed row of pairs holds two sequences' worth."""
        return recipe.data.max_length * (2 if self.kind == "pairs" and recipe.data.packing else 1)

    def longest_row(self, recipe: Recipe) -> int:
        """Tokens of the longest row that a forward may be given."""
        return self.row_length(recipe)

    def needs_reference(self, recipe: Recipe) -> bool:
        """Return whether the loss compares with a reference."""
        return False

    def holds_reference(self, recipe: Recipe) -> bool:
        """Return whether the reference's weights stay on the devices beside the policy's."""
        return self.needs_reference(recipe)

    def teacher(self, recipe: Recipe) -> str | None:
        """The path of a teacher that stays on the devices beside the policy."""
        return None

    def reward_model(self, recipe: Recipe) -> str | None:
        """The path of a reward model that stays on the devices beside the policy."""
        return None

    def sends_weights(self, recipe: Recipe) -> bool:
        """Return whether updated weights leave the run over a process group that reaches beyond this host."""
        return False


SECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "sft": "sft_section",
        "dpo": "dpo_section",
        "kto": "kto_section",
        "grpo": "grpo_section",
        "distill": "distill_section",
        "reward": "reward_section",
    }
)
"""Method -> the module of this package whose `spec` knows it, loaded when a recipe asks for the method."""


def spec_of(recipe: Recipe) -> MethodSpec:
    """The spec of the method that `recipe` names."""
    return spec_by_name(recipe.method, recipe)


def spec_by_name(method: str, recipe: Recipe | None = None) -> MethodSpec:
    """The spec of a method by its name; of its usual form where no recipe says which."""
    return import_module(f"dtrain.methods.{SECTIONS[method]}").spec(recipe)
