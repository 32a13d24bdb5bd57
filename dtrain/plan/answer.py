"""What `dtrain plan` was asked, and what it prints."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dtrain.config import read
from dtrain.config.schema import Recipe
from dtrain.errors import RecipeError, UserError
from dtrain.plan import report
from dtrain.plan.hardware import GPUS, Hardware
from dtrain.plan.plan import Plan, make_plan, problems, ready
from dtrain.plan.search import on_a_mesh_that_fits, search, smallest_change
from dtrain.preflight import with_local_model


@dataclass(frozen=True)
class Options:
    """world_size None: launch.nproc. memory: GiB for tensors. Links in GB/s. step_time: measured seconds."""

    world_size: int | None = None
    gpu: str = "h100"
    memory: float | None = None
    gpus_per_node: int | None = None
    link_inside: float | None = None
    link_between: float | None = None
    step_time: float | None = None
    search: bool = False
    as_json: bool = False

    @property
    def hardware(self) -> Hardware:
        found = GPUS[self.gpu]
        changes = {
            "per_node": self.gpus_per_node,
            "inside": self.link_inside and self.link_inside * 1e9,
            "between": self.link_between and self.link_between * 1e9,
        }
        return replace(found, **{name: value for name, value in changes.items() if value})

    @property
    def budget(self) -> int | None:
        return None if self.memory is None else int(self.memory * 2**30)


def read_recipe(name: str, overrides: Sequence[str], world_size: int | None) -> Recipe:
    """The recipe, as `dtrain run` reads it. Raises RecipeError with all that a plan sees, which reads config.json alone
    of the files."""
    recipe, found = read(name, overrides)
    recipe = with_local_model(recipe)
    if found:
        more = problems(ready(recipe), world_size or recipe.launch.nproc)
        raise RecipeError(list(dict.fromkeys([*found, *more])))
    return recipe


def answer(recipe: Recipe, options: Options, say: Callable[[str], None]) -> None:
    """Plan `recipe` and say what came out. Raises UserError where it does not fit, with what would.

    A search begins with the recipe's own mesh and micro-batch, or where so many ranks refuse these, with some that fit.
    """
    world_size = options.world_size or recipe.launch.nproc
    if options.search:
        if recipe.launch.device == "cpu":
            raise UserError("launch.device=cpu: --search ranks meshes by the estimate, which knows GPUs only")
        recipe = on_a_mesh_that_fits(ready(recipe), world_size, options.hardware.per_node)
    plan = make_plan(recipe, world_size, options.hardware, options.budget)
    found = None
    if options.search:
        found = search(plan.recipe, plan.config, world_size, plan.hardware, plan.budget)
    if options.as_json:
        shown = report.as_json(plan, options.step_time)
        say(json.dumps(shown if found is None else shown | {"search": report.search_as_json(found, plan)}, indent=2))
    else:
        say(report.text(plan, options.step_time))
        if found is not None:
            say("\n" + report.search_text(found, plan))
    if plan.device == "cuda" and not plan.fits:
        raise UserError(_too_much(plan))


def _too_much(plan: Plan) -> str:
    """By how much a plan does not fit, on which part, and what would."""
    over = plan.step.peak - plan.budget
    name, size = max(plan.step.parts.items(), key=lambda entry: entry[1])
    found = smallest_change(plan.recipe, plan.sizes.world_size, plan.hardware, plan.budget)
    fix = (
        "none of the changes that were tried fits (micro_batch, activation_checkpointing, tp, cp, up to 128 times the "
        "ranks): take a smaller model, shorter rows, or devices with more memory"
        if found is None
        else f"the smallest change that fits is {found[0]}, with a peak of {report.gib(found[1].peak)}, which "
        f"leaves {report.gib(plan.budget - found[1].peak)}"
    )
    return (
        f"this does not fit: the peak is {report.gib(plan.step.peak)}, {report.gib(over)} more than the budget of "
        f"{report.gib(plan.budget)}; the largest part is {name} ({report.gib(size)}); {fix}"
    )
