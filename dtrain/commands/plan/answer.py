"""The output of `dtrain plan`, and its error for a plan that does not fit."""

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace

from dtrain.base.errors import RecipeError, UserError
from dtrain.commands.plan import report
from dtrain.commands.plan.hardware import GPUS, Hardware
from dtrain.commands.plan.plan import Plan, make_plan, problems, ready
from dtrain.commands.plan.search import on_a_mesh_that_fits, search, smallest_change
from dtrain.methods import recipe_and_problems
from dtrain.recipe.schema import Recipe
from dtrain.run.preflight import with_local_model


def read_recipe(name: str, overrides: Sequence[str], world_size: int | None) -> Recipe:
    """Return the recipe, read as by `dtrain run`.

    Raises RecipeError with all errors that a plan sees; of the files it reads config.json alone.
    """
    loaded, errors = recipe_and_problems(name, overrides)
    recipe = with_local_model(loaded)
    if errors:
        more = problems(ready(recipe), world_size or recipe.launch.nproc)
        raise RecipeError(list(dict.fromkeys([*errors, *more])))
    return recipe


def answer(recipe: Recipe, arguments: Namespace, say: Callable[[str], None]) -> None:
    """Plan `recipe` and print the plan. arguments: the command's. Raises UserError if the plan does not fit, with a
    change that would.

    A search begins with the recipe's own mesh and micro-batch, or, if so many ranks refuse these, with some that fit.
    """
    world_size, hardware = arguments.world_size or recipe.launch.nproc, _hardware(arguments)
    if arguments.search:
        if recipe.launch.device == "cpu":
            raise UserError("launch.device=cpu: --search ranks meshes by the estimate, which knows GPUs only")
        recipe = on_a_mesh_that_fits(ready(recipe), world_size, hardware.per_node)
    plan = make_plan(recipe, world_size, hardware, arguments.memory and int(arguments.memory * 2**30))
    result = search(plan.recipe, plan.config, world_size, hardware, plan.budget) if arguments.search else None
    if arguments.json:
        more = {"search": report.search_as_json(result, plan)} if result else {}
        say(json.dumps(report.as_json(plan, arguments.step_time) | more, indent=2))
    else:
        say(report.text(plan, arguments.step_time))
        if result:
            say("\n" + report.search_text(result, plan))
    if plan.device == "cuda" and not plan.fits:
        raise UserError(too_much(plan))


def _hardware(arguments: Namespace) -> Hardware:
    """Return the device of `arguments`, whose links are in GB/s."""
    known = GPUS[arguments.gpu]
    return replace(
        known,
        per_node=arguments.gpus_per_node or known.per_node,
        inside=arguments.link_inside * 1e9 if arguments.link_inside else known.inside,
        between=arguments.link_between * 1e9 if arguments.link_between else known.between,
    )


def too_much(plan: Plan) -> str:
    """Return the error for a plan that does not fit: by how much, the largest part, and a change that fits."""
    if plan.evaluation > max(plan.budget, plan.step.peak):
        return (
            f"this does not fit: an evaluation takes {report.gib(plan.evaluation)} at least, and the budget is "
            f"{report.gib(plan.budget)}: lower eval.sampling.max_new_tokens, or share the weights among more ranks"
        )
    over = plan.step.peak - plan.budget
    name, size = max(plan.step.parts.items(), key=lambda entry: entry[1])
    change = smallest_change(plan)
    fix = (
        "none of the changes that were tried fits (micro_batch, activation_checkpointing, tp, cp, up to 128 times the "
        "ranks): take a smaller model, shorter rows, or devices with more memory"
        if change is None
        else f"the smallest change that fits is {change[0]}, with a peak of {report.gib(change[1].peak)}, which "
        f"leaves {report.gib(plan.budget - change[1].peak)}"
    )
    return (
        f"this does not fit: the peak is {report.gib(plan.step.peak)}, {report.gib(over)} more than the budget of "
        f"{report.gib(plan.budget)}; the largest part is {name} ({report.gib(size)}); {fix}"
    )
