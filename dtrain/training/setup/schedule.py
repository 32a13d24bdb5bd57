"""Stage schedule: the learning rate over the steps, and runs that would train nothing."""

import torch

from dtrain.base.errors import UserError
from dtrain.data import Rows
from dtrain.optim.update import build_scheduler
from dtrain.recipe.schema import SCHEDULES, Scheduler, Stage
from dtrain.training.host import Host
from dtrain.training.setup.code import unknown_name
from dtrain.training.spec import RunSpec

FEWEST_STEPS = 5
SHARE = "scheduler.warmup=0.03, a share of the steps, and scheduler.warmup_steps=null"


def stages_of(section: Scheduler | list[Stage]) -> list:
    """Return the stages of a recipe's `scheduler`, one of itself where it lists none."""
    return section if isinstance(section, list) else [section]


def check_keys(spec: RunSpec) -> list[str]:
    """Check the section `scheduler`."""
    section, problems = spec.recipe.scheduler, []
    stages, is_listed = stages_of(section), isinstance(section, list)
    if not stages:
        problems.append("scheduler=[] has no stages: give a list of {name, steps}, or one {name}")
    for index, stage in enumerate(stages):
        key = f"scheduler[{index}]" if is_listed else "scheduler"
        problems += unknown_name(f"{key}.name", stage.name, SCHEDULES)
        if is_listed and stage.steps is None and index < len(stages) - 1:
            problems.append(f"{key}.steps is missing: only the last stage may leave it out")
    return problems


def resolve(spec: RunSpec, host: Host) -> bool:
    """Refuse a run of next to no steps; in a dry run build the schedule, where no stranger's code is needed for it. A
    rank builds it over its policy's optimizer, and writes the notes where the run opens."""
    rows, steps, section = spec.rows.get("train"), spec.steps or spec.recipe.train.steps, spec.recipe.scheduler
    if rows is not None and spec.steps is not None:
        host.ask(refuse_idle, spec, rows, spec.steps)
    if host.is_dry and steps is not None:
        spec.notes += warmup_notes(spec, steps)
    if host.is_dry and spec.model is not None and all(stage.name in SCHEDULES for stage in stages_of(section)):
        optimizer = spec.optimizer or torch.optim.SGD([torch.zeros(())], lr=spec.recipe.optimizer.lr)
        host.ask(build_scheduler, section, optimizer, steps or 1000)
    return True


def refuse_idle(spec: RunSpec, rows: Rows, steps: int) -> None:
    """Raise UserError for a run of `steps` steps that would train nothing, or next to nothing.

    One whose learning rate stays at 0, or whose warm-up is longer than the run, is refused; one of fewer
    than 5 steps, or whose warm-up takes them all, where its steps follow from `train.epochs`:
    `train.steps` asks for it by name.
    """
    recipe = spec.recipe
    warmup, is_asked = warmup_of(recipe.scheduler, steps), recipe.train.steps is not None
    if steps == 1 <= warmup:
        raise UserError(
            f"the run has 1 step, and {_asked_for(spec)} begins with a learning rate of 0: nothing would be trained; "
            "set scheduler.warmup_steps=0, or train longer"
        )
    if warmup > steps and is_asked:
        raise UserError(_endless(spec, steps, warmup))
    if is_asked:
        return
    epochs, per_pass = recipe.train.epochs, rows.rows_in_epoch(0)
    of_pass = f"{per_pass} row{'s' if per_pass != 1 else ''} a pass"
    if steps < FEWEST_STEPS:
        raise UserError(
            f"train.epochs={epochs} makes {steps} step{'s' if steps != 1 else ''} here ({of_pass}, "
            f"train.global_batch={recipe.train.global_batch} of them a step), which trains next to nothing. Set "
            f"{_more_steps(spec, rows)}; train.steps={steps} in place of train.epochs asks for so few"
        )
    if warmup >= steps:
        raise UserError(_endless(spec, steps, warmup))


def warmup_notes(spec: RunSpec, steps: int) -> list[str]:
    """Return notes on a run of `steps` steps that `refuse_idle` lets pass, since its steps were asked for."""
    recipe = spec.recipe
    warmup, lr = warmup_of(recipe.scheduler, steps), recipe.optimizer.lr
    if warmup < steps:
        return []
    return [
        f"note: all {steps} steps are warm-up ({_asked_for(spec)}): the learning rate rises to "
        f"{lr * (steps - 1) / warmup:.2g} and not to optimizer.lr={lr:g}. To let it, set {SHARE}"
    ]


def _endless(spec: RunSpec, steps: int, warmup: int) -> str:
    return (
        f"the run has {steps} steps, and its warm-up {warmup} ({_asked_for(spec)}): the learning rate would never "
        f"reach optimizer.lr; set {SHARE}, or train longer"
    )


def _asked_for(spec: RunSpec) -> str:
    """The key of the warm-up, as the recipe has it."""
    schedule = spec.recipe.scheduler
    if isinstance(schedule, list) or schedule.warmup_steps is None:
        return "scheduler" if isinstance(schedule, list) else f"scheduler.warmup={schedule.warmup}"
    return f"scheduler.warmup_steps={schedule.warmup_steps}"


def warmup_of(schedule: Scheduler | list[Stage], steps: int) -> int:
    """Steps of warm-up of a schedule that dtrain knows; of stages, and of one by an import path, 0."""
    return 0 if isinstance(schedule, list) or schedule.name not in SCHEDULES else schedule.warmup_of(steps)


def _more_steps(spec: RunSpec, rows: Rows) -> str:
    """Return what would make more steps, the best first."""
    recipe, method = spec.recipe, spec.method
    ways, per_pass, batch = [], rows.rows_in_epoch(0), recipe.train.batch
    automatic = method.automatic_batch(per_pass)
    if method.more_steps is not None:
        ways.append(method.more_steps)
    elif automatic < batch:
        ways.append(f"train.global_batch=auto ({automatic} a step)")
    if rows.packing and rows.samples_in_epoch(0) > per_pass:
        ways.append(f"data.packing=false ({rows.samples_in_epoch(0)} rows a pass)")
    enough = f"train.epochs={-(-FEWEST_STEPS * batch // per_pass)} or more"
    epochs = "a larger train.epochs" if method.more_steps is not None else enough
    return ", ".join([*ways, f"or {epochs}" if ways else epochs])
