"""The plan of a run, worked out beside it: the run goes on meanwhile, and shows it when it is there."""

from dataclasses import replace
from functools import partial

from dtrain.config.schema import Recipe
from dtrain.errors import UserError
from dtrain.plan.children import Child
from dtrain.plan.hardware import GPUS
from dtrain.plan.plan import make_plan
from dtrain.plan.report import gib

_BEHIND_THE_RUN = 5


class PlannedPeak(Child[str]):
    """What a rank's tensors need at their peak, by the plan of `recipe` on `world_size` devices of type `device_type`.

    It is worked out in a process of lower priority, forked from this one, which ends with the context or with this
    process. To be made before this process has a process group or has touched CUDA: neither survives a fork.
    """

    def __init__(self, recipe: Recipe, world_size: int, device_type: str):
        recipe = replace(recipe, launch=replace(recipe.launch, device="cuda" if device_type == "cuda" else "cpu"))
        super().__init__(partial(_planned, recipe, world_size), niceness=_BEHIND_THE_RUN)
        self._told: str | None = None

    def tell(self, wait: float = 0.0) -> str | None:
        """The peak in words, or why there is none; None where that is not known within `wait` seconds."""
        if self._told is None and self.is_done(wait):
            outcome = self.outcome()
            self._told = _no_plan(outcome) if isinstance(outcome, Exception) else outcome
        return self._told


def _planned(recipe: Recipe, world_size: int) -> str:
    try:
        plan = make_plan(recipe, world_size, next(iter(GPUS.values())))
        return "; ".join([f"planned peak {gib(plan.step.peak)}", *plan.assumed])
    except UserError as error:  # what a plan does not follow, offloading say
        return _no_plan(error)


def _no_plan(error: Exception) -> str:
    return f"no plan ({' '.join(str(error).split())})"
