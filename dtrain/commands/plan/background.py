"""The plan of a run, computed in the background. It checks the run's memory, and its peak is shown once it is known."""

import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch

from dtrain.base.errors import UserError
from dtrain.base.hardware import DeviceFacts
from dtrain.commands.plan.choose import TooLarge, choose
from dtrain.commands.plan.hardware import GPUS, USABLE_MEMORY, Hardware, gib, hardware_of
from dtrain.commands.plan.plan import Plan, make_plan, resolve_plan
from dtrain.commands.plan.processes import Child
from dtrain.commands.plan.report import too_much
from dtrain.recipe import Recipe
from dtrain.recipe.world import replace_keys, unresolved_auto_keys
from dtrain.training.sizing import Peak

PLAN_SECONDS = 120.0  # time that a run waits for its plan before it reads weights
_NICENESS = 5  # niceness of the planning process (`os.nice`), so that the run itself has priority


@dataclass(frozen=True)
class _Decision:
    """Facts that the run learns after the planning process has started. They are sent to that process once.

    Attributes:
        values: Values for the keys that are `auto`, if they were chosen without the plan. None if the plan is to
            choose them, or if there are no such keys.
        memory: Bytes of a device, for the plan's choice. 0 if it has nothing to choose.
        device: The GPU. None on CPUs.
        host: Bytes of the host's memory for each rank, for the plan's choice. 0 if it has nothing to choose.
    """

    values: Mapping[str, Any] | None = None
    memory: int = 0
    device: DeviceFacts | None = None
    host: int = 0


class PlannedPeak(Child[Peak]):
    """The planned peak of a rank, computed in a forked process of lower priority.

    The process ends with the context or with this process. It must be created before this process has a process group
    or has started CUDA, because neither survives a fork. The devices are therefore passed later: to `choose` if the
    recipe has keys that are `auto`, or else to `peak_if_too_large`. If the values were chosen without a plan, they are
    passed to `settle`.

    Args:
        recipe: The recipe.
        world_size: Number of devices.
        device_type: "cpu" or "cuda".
    """

    def __init__(self, recipe: Recipe, world_size: int, device_type: str):
        recipe = replace(recipe, launch=replace(recipe.launch, device="cuda" if device_type == "cuda" else "cpu"))
        self._decisions: SimpleQueue[_Decision] = multiprocessing.get_context("fork").SimpleQueue()
        if device_type != "cuda" and not unresolved_auto_keys(recipe):
            self._decisions.put(_Decision())  # nothing more is decided later
        super().__init__(partial(_compute_peak, recipe, world_size, self._decisions), niceness=_NICENESS)
        self._peak: Peak | None = None

    def peak(self, wait: float = 0.0) -> Peak | None:
        """Return the peak, or the reason why there is none. None if it is not known within `wait` seconds."""
        if self._peak is None and self.is_done(wait):
            outcome = self.outcome()
            self._peak = Peak(_no_plan(outcome)) if isinstance(outcome, Exception) else outcome
        return self._peak

    def choose(self, memory: int, device: DeviceFacts | None, host: int) -> Peak:
        """Choose values for the keys that are `auto`, and return the peak with them. Can be called once.

        Args:
            memory: Bytes of a device.
            device: The GPU. None on CPUs.
            host: Bytes of the host's memory for each rank.

        Returns:
            The peak. Its choice is None if the recipe cannot be planned, or not within PLAN_SECONDS, after which the
            process is ended.

        Raises:
            UserError: If nothing fits.
        """
        self._decisions.put(_Decision(memory=memory, device=device, host=host))
        peak = self.peak(PLAN_SECONDS)
        if peak is None:
            self._process.kill()
            peak = self._peak = Peak(f"no plan (it took longer than {PLAN_SECONDS:.0f} s)")
        if peak.too_much is not None:
            raise UserError(f"{peak.too_much}. (metrics.plan=false starts it anyway, with the least memory)")
        return peak

    def settle(self, values: Mapping[str, Any]) -> None:
        """Pass values for the keys that are `auto`, if they were chosen without the plan, instead of `choose`."""
        self._decisions.put(_Decision(dict(values)))

    def peak_if_too_large(self, device: DeviceFacts) -> Peak | None:
        """Return the peak if it does not fit on devices like `device`. Can be called once.

        None if it fits, or if there is no plan within PLAN_SECONDS.
        """
        self._decisions.put(_Decision(device=device))
        peak = self.peak(PLAN_SECONDS)
        if peak is None or peak.too_much is None:
            return None
        return peak._replace(too_much=f"{peak.too_much}. (metrics.plan=false starts it anyway)")


def _compute_peak(recipe: Recipe, world_size: int, decisions: "SimpleQueue[_Decision]") -> Peak:
    """Compute the peak, in the forked process.

    Args:
        recipe: The recipe.
        world_size: Number of devices.
        decisions: Receives one decision. If the recipe has no keys that are `auto`, the plan is computed before the
            decision is read.
    """
    try:
        if not unresolved_auto_keys(recipe):
            plan = make_plan(recipe, world_size, next(iter(GPUS.values())))
            return _compare_with_device(plan, recipe, world_size, decisions.get().device)
        decision = decisions.get()
        if decision.values is None:
            return _choose_values(recipe, world_size, decision)
        return _as_peak(make_plan(replace_keys(recipe, decision.values), world_size, next(iter(GPUS.values()))))
    except TooLarge as error:
        return Peak(str(error), too_much=str(error))
    except UserError as error:  # the recipe has settings that a plan does not support
        return Peak(_no_plan(error))


def _choose_values(recipe: Recipe, world_size: int, decision: _Decision) -> Peak:
    """Choose values for the keys that are `auto`, and return the peak with them."""
    hardware: Hardware | None = None
    lines: tuple[str, ...] = ()
    if decision.device is not None:
        hardware, lines = hardware_of(decision.device)
    spec = resolve_plan(recipe, world_size, recipe.launch.device, hardware)
    choice = choose(spec, decision.memory, hardware, decision.host)
    choice = replace(choice, lines=(*choice.lines, *lines))
    return Peak(f"planned peak {gib(choice.peak)}", choice.peak, choice=choice)


def _compare_with_device(plan: Plan, recipe: Recipe, world_size: int, device: DeviceFacts | None) -> Peak:
    """Return the peak of a recipe's plan, with an error if the GPU is too small. `device` is None on CPUs."""
    if device is None:
        return _as_peak(plan)
    hardware, _ = hardware_of(device)
    if torch.bfloat16 not in hardware.arithmetic:
        # Such a device has no flash attention, which needs more memory.
        plan = make_plan(recipe, world_size, hardware)
    budget = int(device.memory * USABLE_MEMORY)
    peak = _as_peak(plan)
    if plan.step.peak <= device.memory * USABLE_MEMORY:
        return peak
    return peak._replace(too_much=too_much(replace(plan, budget=budget)))


def _as_peak(plan: Plan) -> Peak:
    return Peak("; ".join([f"planned peak {gib(plan.step.peak)}", *plan.assumptions]), plan.step.peak)


def _no_plan(error: Exception) -> str:
    message = " ".join(str(error).split())  # on one line
    return f"no plan ({message})"
