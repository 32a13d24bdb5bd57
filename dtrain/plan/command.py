"""The options of `dtrain plan`, and what it prints."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dtrain.config.schema import Recipe
from dtrain.errors import UserError
from dtrain.plan import report
from dtrain.plan.hardware import GPUS, Hardware
from dtrain.plan.plan import Plan, make_plan


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


def run(recipe: Recipe, options: Options, say: Callable[[str], None]) -> None:
    """Plan `recipe` and say what came out. Raises UserError where it does not fit, with what would."""
    world_size = options.world_size or recipe.launch.nproc
    plan = make_plan(recipe, world_size, options.hardware, options.budget)
    if options.as_json:
        say(json.dumps(report.as_json(plan, options.step_time), indent=2))
    else:
        say(report.text(plan, options.step_time))
    if plan.device == "cuda" and not plan.fits:
        raise UserError(too_much(plan))


def too_much(plan: Plan) -> str:
    """By how much a plan does not fit, and on which part."""
    over = plan.step.peak - plan.budget
    name, size = max(plan.step.parts.items(), key=lambda entry: entry[1])
    return (
        f"this does not fit: the peak is {report.gib(plan.step.peak)}, {report.gib(over)} more than the budget of "
        f"{report.gib(plan.budget)}; the largest part is {name} ({report.gib(size)})"
    )
