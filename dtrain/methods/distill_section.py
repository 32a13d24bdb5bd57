"""Checks of a recipe's `distill` section and of what surrounds it, and the method's spec. No torch."""

from dataclasses import fields
from operator import attrgetter

from dtrain.base.ranges import shown
from dtrain.data.formats.prompts import PromptOptions
from dtrain.methods import grpo_section
from dtrain.methods.spec import MethodSpec
from dtrain.recipe.schema import Distill, Recipe, Sampling


class DistillSpec(MethodSpec):
    def missing(self, recipe: Recipe) -> list[str]:
        if recipe.distill.teacher:
            return []
        return ["distill.teacher is missing: set it to the directory of a model with the student's vocabulary"]

    def problems(self, recipe: Recipe) -> list[str]:
        """Return keys that are read where the student draws."""
        section, default = recipe.distill, Distill()
        named = [key for key in ("student_share", "prompts_per_step") if getattr(section, key) != getattr(default, key)]
        drawn = (f"sampling.{field.name}" for field in fields(Sampling))
        named += [key for key in drawn if attrgetter(key)(section) != attrgetter(key)(default)]
        return [
            f"distill.{key} says how the student draws, and distill.samples=data trains on the data's own completions: "
            "leave it out, or set distill.samples=student"
            for key in named
        ] + self.unread(section)

    def unread(self, section: Distill) -> list[str]:
        """Return keys of the divergence that the recipe's divergence does not read."""
        readers = {
            "jsd_beta": (section.kl == "jsd", "distill.kl=jsd"),
            "mixed_kl_weight": (section.kl == "mixed", "distill.kl=mixed"),
            "zero_outside_topk": (section.top_k is not None, "distill.top_k"),
        }
        return [
            f"distill.{key}={shown(getattr(section, key))} is read with {reader} alone: leave it out, or set that"
            for key, (is_read, reader) in readers.items()
            if not is_read and getattr(section, key) != getattr(Distill(), key)
        ]

    def other_models(self, recipe: Recipe) -> list[tuple[str, str]]:
        return [("distill.teacher", recipe.distill.teacher)] if recipe.distill.teacher else []

    def teacher(self, recipe: Recipe) -> str | None:
        return recipe.distill.teacher


class OnPolicySpec(DistillSpec):
    """Spec of distillation where the student draws its samples."""

    kind = "prompts"

    def problems(self, recipe: Recipe) -> list[str]:
        section, errors = recipe.distill, self.unread(recipe.distill)
        rollout, batch, longest = section.prompts_per_step, recipe.train.global_batch, recipe.data.max_length
        if rollout is not None and isinstance(batch, int) and rollout >= 1 and batch >= 1 and rollout % batch:
            errors.append(
                f"train.global_batch={batch} does not divide a rollout of distill.prompts_per_step={rollout} prompts: "
                f"set distill.prompts_per_step={-(-rollout // batch) * batch}, or leave it out"
            )
        if longest >= 2 and section.sampling.max_new_tokens >= longest:
            errors.append(grpo_section.no_room("distill", section.sampling.max_new_tokens, longest))
        if section.student_share == 1 and recipe.data.loss_on != "assistant":
            errors.append(
                f"data.loss_on={recipe.data.loss_on} plays no part where the student draws every sample: what it draws "
                "is trained; leave it out, or lower distill.student_share"
            )
        return errors

    def refuses(self, recipe: Recipe, format: str) -> str | None:
        if format in ("preference", "text"):
            return (
                "distill.samples=student draws its own answers to prompts; give it messages, question or "
                "prompt_completion, or set distill.samples=data"
            )
        if format == "question" and recipe.distill.student_share < 1:
            return "a question has no answer for the data's part of the samples: set distill.student_share=1"
        return None

    def prompts(self, recipe: Recipe) -> PromptOptions:
        section = recipe.distill
        loss_on = recipe.data.loss_on if section.student_share < 1 else None
        return PromptOptions.within(recipe.data.max_length, section.sampling.max_new_tokens, None, loss_on=loss_on)

    def longest_row(self, recipe: Recipe) -> int:
        """Packed, a micro-batch is one row."""
        return recipe.data.max_length * (recipe.train.micro_batch if recipe.data.packing else 1)

    def automatic_batch(self, recipe: Recipe, rows: int) -> int:
        return recipe.distill.prompts_per_step or super().automatic_batch(recipe, rows)


def spec(recipe: Recipe | None = None) -> DistillSpec:
    """The spec of distillation on the data's completions, or on the student's own."""
    return OnPolicySpec() if recipe is not None and recipe.distill.samples == "student" else DistillSpec()
