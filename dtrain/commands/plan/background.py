"""The plan of a run, computed beside it: checks the run's memory, and is shown once it is there."""

import multiprocessing
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from dtrain.base.errors import UserError
from dtrain.commands.plan.choose import Choice, TooLarge, choose
from dtrain.commands.plan.hardware import GPUS, USABLE_MEMORY, gib, hardware_of
from dtrain.commands.plan.plan import make_plan, resolve_plan
from dtrain.commands.plan.processes import Child
from dtrain.commands.plan.report import too_much
from dtrain.launch.devices import DeviceFacts
from dtrain.recipe import Recipe
from dtrain.recipe.world import replace_keys, unresolved_auto_keys

PLAN_SECONDS = 120.0  # that a run waits for its plan, before it reads weights
_BEHIND_THE_RUN = 5  # of `os.nice`


class Peak(NamedTuple):
    """Peak of a plan. words: the peak as text, or why there is none. size: its bytes. too_much: the error for a device
    that does not hold it, with the smallest change that would help. choice: of what the recipe leaves to `auto`."""

    words: str
    size: int = 0
    too_much: str | None = None
    choice: Choice | None = None


class PlannedPeak(Child[Peak]):
    """Planned peak of a rank's tensors: the plan of `recipe` on `world_size` devices of type `device_type`.

    It is computed in a process of lower priority, forked from this one, which ends with the context or with this
    process. Must be created before this process has a process group or has touched CUDA: neither survives a fork. What
    the devices are is therefore given later: to `choose` where the recipe leaves keys to `auto`, or their
    values to `settle`, else to `too_much`.
    """

    def __init__(self, recipe: Recipe, world_size: int, device_type: str):
        recipe = replace(recipe, launch=replace(recipe.launch, device="cuda" if device_type == "cuda" else "cpu"))
        self._facts: Any = multiprocessing.get_context("fork").SimpleQueue()
        if device_type != "cuda" and not unresolved_auto_keys(recipe):
            self._facts.put(None)
        super().__init__(partial(_planned, recipe, world_size, self._facts), niceness=_BEHIND_THE_RUN)
        self._peak: Peak | None = None

    def peak(self, wait: float = 0.0) -> Peak | None:
        """Return the peak, or why there is none; None if that is not known within `wait` seconds."""
        if self._peak is None and self.is_done(wait):
            outcome = self.outcome()
            self._peak = Peak(_no_plan(outcome)) if isinstance(outcome, Exception) else outcome
        return self._peak

    def choose(self, memory: int, device: DeviceFacts | None, host: int) -> Peak:
        """Return the peak on devices of `memory` bytes with what was chosen for `auto`; its choice is None where there
        is no plan of the recipe, or none within PLAN_SECONDS, after which the process ends.

        device: the GPU, None on CPUs. host: bytes of the host's memory for each rank. Can be called once. Raises
        UserError where nothing fits."""
        self._facts.put((memory, device, host))
        peak = self.peak(PLAN_SECONDS)
        if peak is None:
            self._process.kill()
            peak = self._peak = Peak(f"no plan (it took longer than {PLAN_SECONDS:.0f} s)")
        if peak.too_much is not None:
            raise UserError(f"{peak.too_much}. (metrics.plan=false starts it anyway, with the least memory)")
        return peak

    def settle(self, values: Mapping[str, Any]) -> None:
        """Give values for what the recipe leaves to `auto` that were chosen without the plan, in place of `choose`."""
        self._facts.put(dict(values))

    def peak_if_too_large(self, device: DeviceFacts) -> Peak | None:
        """Return the peak where devices like `device` do not hold it; None if they do, or if there is no plan within
        PLAN_SECONDS. Can be called once."""
        self._facts.put(device)
        peak = self.peak(PLAN_SECONDS)
        if peak is None or peak.too_much is None:
            return None
        return peak._replace(too_much=f"{peak.too_much}. (metrics.plan=false starts it anyway)")


def _planned(recipe: Recipe, world_size: int, facts_queue: Any) -> Peak:
    try:
        values = facts_queue.get() if unresolved_auto_keys(recipe) else None
        if isinstance(values, tuple):
            memory, device, host = values
            hardware, lines = (None, ()) if device is None else hardware_of(device)
            choice = choose(resolve_plan(recipe, world_size, recipe.launch.device, hardware), memory, hardware, host)
            choice = replace(choice, lines=(*choice.lines, *lines))
            return Peak(f"planned peak {gib(choice.peak)}", choice.peak, choice=choice)
        hardware = next(iter(GPUS.values()))
        plan = make_plan(replace_keys(recipe, values or {}), world_size, hardware)
        device = facts_queue.get() if values is None else None
        if device is not None and torch.bfloat16 not in (own := hardware_of(device)[0]).arithmetic:
            plan = make_plan(recipe, world_size, own)  # without flash attention
        peak = Peak("; ".join([f"planned peak {gib(plan.step.peak)}", *plan.assumptions]), plan.step.peak)
        if device is None or plan.step.peak <= device.memory * USABLE_MEMORY:
            return peak
        return peak._replace(too_much=too_much(replace(plan, budget=int(device.memory * USABLE_MEMORY))))
    except TooLarge as error:
        return Peak(str(error), too_much=str(error))
    except UserError as error:  # for what a plan does not cover, offloading for example
        return Peak(_no_plan(error))


def _no_plan(error: Exception) -> str:
    return f"no plan ({' '.join(str(error).split())})"
