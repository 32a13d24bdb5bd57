"""Setup of the schedule: the learning rate over the steps, and runs that would train nothing."""

from functools import partial
from typing import TYPE_CHECKING

import torch

from dtrain.base.errors import Problem, UserError
from dtrain.base.ranges import plural
from dtrain.data.rows.rows import Rows
from dtrain.optim.update import build_scheduler
from dtrain.recipe import Recipe
from dtrain.recipe.schema import SCHEDULES, Scheduler, Stage
from dtrain.training.host import DryHost
from dtrain.training.inputs import RunInputs
from dtrain.training.setup.code import unknown_name

if TYPE_CHECKING:
    from dtrain.methods import Method

MIN_STEPS = 5  # a run of fewer steps is refused if the number follows from train.epochs
SHORTER_WARMUP = "Set scheduler.warmup=0.03, a share of the steps, and scheduler.warmup_steps=null"


def stages_of(section: Scheduler | list[Stage]) -> list[Scheduler] | list[Stage]:
    """Return the stages of a recipe's `scheduler`: the section itself if it lists none."""
    return section if isinstance(section, list) else [section]


def check_keys(inputs: RunInputs) -> list[Problem]:
    """Check the section `scheduler`."""
    section = inputs.recipe.scheduler
    if not isinstance(section, list):
        return unknown_name("scheduler.name", section.name, SCHEDULES)
    if not section:
        return [Problem("scheduler", "scheduler=[] has no stages", "Use a list of {name, steps}, or one {name}")]
    problems = []
    for index, stage in enumerate(section):
        key = f"scheduler[{index}]"
        problems += unknown_name(f"{key}.name", stage.name, SCHEDULES)
        if stage.steps is None and index < len(section) - 1:
            fix = "Set it; only the last stage may leave it out"
            problems.append(Problem(f"{key}.steps", f"{key}.steps is missing", fix, is_missing=True))
    return problems


def check_schedule(recipe: Recipe, steps: int | None, optimizer: torch.optim.Optimizer | None, host: DryHost) -> None:
    """Build the schedule in a dry run, unless it needs code that only a run imports.

    A run builds the schedule with its policy's optimizer.

    Args:
        recipe: The recipe.
        steps: Steps of the run, if they are known.
        optimizer: The optimizer on the meta device. None: the recipe names one by an import path.
        host: Collects the problems.
    """
    if any(stage.name not in SCHEDULES for stage in stages_of(recipe.scheduler)):
        return
    if optimizer is None:
        optimizer = torch.optim.SGD([torch.zeros(())], lr=recipe.optimizer.lr)
    host.attempt("scheduler", partial(build_scheduler, recipe.scheduler, optimizer, steps or 1000))


def refuse_idle(recipe: Recipe, method: "Method", rows: Rows, steps: int) -> None:
    """Refuse a run that would train nothing, or almost nothing.

    A run whose learning rate stays at 0, or whose warm-up is longer than the run, is always refused. If the number of
    steps follows from `train.epochs`, a run is also refused if it has fewer than 5 steps, or if all its steps are
    warm-up. With `train.steps` such runs are allowed, because the user has chosen the number.

    Args:
        recipe: The recipe with its batch.
        method: The recipe's method.
        rows: The training rows.
        steps: Steps of the run.

    Raises:
        UserError: If the run is refused.
    """
    warmup = warmup_of(recipe.scheduler, steps)
    is_intended = recipe.train.steps is not None
    if steps == 1 and warmup >= 1:
        raise UserError(
            f"the run has 1 step, and {_warmup_setting(recipe)} begins with a learning rate of 0, so nothing would be "
            "trained. Set scheduler.warmup_steps=0, or train longer."
        )
    if is_intended:
        if warmup > steps:
            raise UserError(_endless_warmup(recipe, steps, warmup))
        return
    epochs, rows_per_pass = recipe.train.epochs, rows.rows_in_epoch(0)
    if steps < MIN_STEPS:
        raise UserError(
            f"train.epochs={epochs} is {steps} {plural(steps, 'step')} here ({rows_per_pass} "
            f"{plural(rows_per_pass, 'row')} a pass, train.global_batch={recipe.train.global_batch} of them a step), "
            f"which trains almost nothing. Set {_more_steps(recipe, method, rows)}, or train.steps={steps} in place "
            "of train.epochs if this is intended."
        )
    if warmup >= steps:
        raise UserError(_endless_warmup(recipe, steps, warmup))


def warmup_notes(recipe: Recipe, steps: int) -> list[str]:
    """Return a note if all steps are warm-up, which `refuse_idle` accepts for `train.steps`."""
    warmup, lr = warmup_of(recipe.scheduler, steps), recipe.optimizer.lr
    if warmup < steps:
        return []
    return [
        f"note: all {steps} steps are warm-up ({_warmup_setting(recipe)}): the learning rate rises to "
        f"{lr * (steps - 1) / warmup:.2g} and not to optimizer.lr={lr:g}. {SHORTER_WARMUP}"
    ]


def _endless_warmup(recipe: Recipe, steps: int, warmup: int) -> str:
    """Return the error for a warm-up that does not end within the run."""
    return (
        f"the run has {steps} steps, and its warm-up {warmup} ({_warmup_setting(recipe)}), so the learning rate would "
        f"never reach optimizer.lr. {SHORTER_WARMUP}, or train longer."
    )


def _warmup_setting(recipe: Recipe) -> str:
    """Return the recipe's setting of the warm-up, for messages."""
    schedule = recipe.scheduler
    if isinstance(schedule, list):
        return "scheduler"
    if schedule.warmup_steps is None:
        return f"scheduler.warmup={schedule.warmup}"
    return f"scheduler.warmup_steps={schedule.warmup_steps}"


def warmup_of(schedule: Scheduler | list[Stage], steps: int) -> int:
    """Return the number of warm-up steps. 0 for a list of stages and for a schedule that is named by import path."""
    if isinstance(schedule, list) or schedule.name not in SCHEDULES:
        return 0
    return schedule.num_warmup_steps(steps)


def _more_steps(recipe: Recipe, method: "Method", rows: Rows) -> str:
    """Return settings that would give more steps, the best first."""
    settings = []
    rows_per_pass, batch = rows.rows_in_epoch(0), recipe.train.num_batch_rows
    automatic = method.automatic_batch(rows_per_pass)
    if method.more_steps_hint is not None:
        settings.append(method.more_steps_hint)
    elif automatic < batch:
        settings.append(f"train.global_batch=auto ({automatic} a step)")
    if rows.packing and rows.samples_in_epoch(0) > rows_per_pass:
        settings.append(f"data.packing=false ({rows.samples_in_epoch(0)} rows a pass)")
    if method.more_steps_hint is not None:
        epochs = "a larger train.epochs"
    else:
        epochs = f"train.epochs={-(-MIN_STEPS * batch // rows_per_pass)} or more"
    settings.append(f"or {epochs}" if settings else epochs)
    return ", ".join(settings)
