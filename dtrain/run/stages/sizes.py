"""Stage sizes: the method, and what the data decide: `train.global_batch=auto`, the steps, runs that would train
nothing."""

from dataclasses import replace
from typing import TYPE_CHECKING

from dtrain import recipe as config
from dtrain.base.errors import UserError
from dtrain.data import Cursor
from dtrain.data.rows.rows import Rows
from dtrain.methods import method_of
from dtrain.methods.spec import spec_of
from dtrain.recipe.schema import SCHEDULES, Recipe, Scheduler, Stage
from dtrain.run.host import Host

if TYPE_CHECKING:
    from dtrain.run.spec import RunSpec

FEWEST_STEPS = 5
SHARE = "scheduler.warmup=0.03, a share of the steps, and scheduler.warmup_steps=null"


def resolve(spec: "RunSpec", host: Host) -> bool:
    """Give the recipe its sizes, make its method, and refuse a run of next to no steps."""
    rows, world_size = spec.rows.get("train"), spec.world.size
    recipe = spec.recipe if rows is None else host.ask(resolve_batch_size, spec.recipe, rows, world_size)
    method = None if recipe is None else host.ask(method_of, recipe)
    if recipe is None or method is None:
        return False
    spec.recipe, spec.method = recipe, method
    if rows is not None:
        spec.steps = host.ask(_steps, spec, rows)
    steps = spec.steps or recipe.train.steps
    if steps is not None:
        host.note(notes(recipe, steps))
    if spec.is_data_read:
        samples = {split: len(rows_of.samples) for split, rows_of in spec.rows.items()}
        host.first(lambda: method.examine(spec.columns, samples))  # it may start a process
    spec.sizes = config.sizes(recipe, world_size)
    return True


def _steps(spec: "RunSpec", rows: Rows) -> int:
    steps = spec.recipe.train.steps or spec.method.source.steps_left(rows, Cursor(), {})
    refuse_idle(spec.recipe, rows, steps)
    return steps


def resolve_batch_size(recipe: Recipe, rows: Rows, world_size: int) -> Recipe:
    """Return `recipe` with a number in place of `train.global_batch=auto`, by the rows of the first pass over them.

    The number is a function of the data and the recipe alone, so every mesh has the same; a micro-batch that does not
    divide a rank's part of it becomes the next smaller one that does. Raises UserError where the data-parallel ranks do
    not divide it.
    """
    if recipe.train.global_batch != "auto":
        return recipe
    per_pass = rows.rows_in_epoch(0)
    total = spec_of(recipe).automatic_batch(recipe, per_pass)
    dp = config.sizes(recipe, world_size).dp
    if total % dp:
        raise UserError(
            f"train.global_batch=auto comes to {total} for this data ({per_pass} rows a pass), which {dp} "
            f"data-parallel ranks cannot share: set train.global_batch={-(-total // dp) * dp}, or train on "
            f"{_fewer(total, dp)} of them (launch.nproc)"
        )
    micro = max(n for n in range(1, min(recipe.train.micro_batch, total // dp) + 1) if total // dp % n == 0)
    return replace(recipe, train=replace(recipe.train, global_batch=total, micro_batch=micro))


def _fewer(total: int, dp: int) -> int:
    return max(n for n in range(1, dp) if total % n == 0)


def refuse_idle(recipe: Recipe, rows: Rows, steps: int) -> None:
    """Raise UserError for a run of `steps` steps that would train nothing, or next to nothing.

    One whose learning rate stays at 0, or whose warm-up is longer than the run, is refused; one of fewer
    than 5 steps, or whose warm-up takes them all, where its steps follow from `train.epochs`:
    `train.steps` asks for it by name.
    """
    warmup, is_asked = warmup_of(recipe.scheduler, steps), recipe.train.steps is not None
    if steps == 1 <= warmup:
        raise UserError(
            f"the run has 1 step, and {_asked_for(recipe)} begins with a learning rate of 0: nothing would be trained; "
            "set scheduler.warmup_steps=0, or train longer"
        )
    if warmup > steps and is_asked:
        raise UserError(_endless(recipe, steps, warmup))
    if is_asked:
        return
    epochs, per_pass = recipe.train.epochs, rows.rows_in_epoch(0)
    of_pass = f"{per_pass} row{'s' if per_pass != 1 else ''} a pass"
    if steps < FEWEST_STEPS:
        raise UserError(
            f"train.epochs={epochs} makes {steps} step{'s' if steps != 1 else ''} here ({of_pass}, "
            f"train.global_batch={recipe.train.global_batch} of them a step), which trains next to nothing. Set "
            f"{_more_steps(recipe, rows)}; train.steps={steps} with train.epochs=null asks for so few"
        )
    if warmup >= steps:
        raise UserError(_endless(recipe, steps, warmup))


def notes(recipe: Recipe, steps: int) -> list[str]:
    """Return notes on a run of `steps` steps that `refuse_idle` lets pass, since its steps were asked for."""
    warmup, lr = warmup_of(recipe.scheduler, steps), recipe.optimizer.lr
    if warmup < steps:
        return []
    return [
        f"note: all {steps} steps are warm-up ({_asked_for(recipe)}): the learning rate rises to "
        f"{lr * (steps - 1) / warmup:.2g} and not to optimizer.lr={lr:g}. To let it, set {SHARE}"
    ]


def _endless(recipe: Recipe, steps: int, warmup: int) -> str:
    return (
        f"the run has {steps} steps, and its warm-up {warmup} ({_asked_for(recipe)}): the learning rate would never "
        f"reach optimizer.lr; set {SHARE}, or train longer"
    )


def _asked_for(recipe: Recipe) -> str:
    """The key of the warm-up, as the recipe has it."""
    schedule = recipe.scheduler
    if isinstance(schedule, list) or schedule.warmup_steps is None:
        return "scheduler" if isinstance(schedule, list) else f"scheduler.warmup={schedule.warmup}"
    return f"scheduler.warmup_steps={schedule.warmup_steps}"


def warmup_of(schedule: Scheduler | list[Stage], steps: int) -> int:
    """Steps of warm-up of a schedule that dtrain knows; of stages, and of one by an import path, 0."""
    return 0 if isinstance(schedule, list) or schedule.name not in SCHEDULES else schedule.warmup_of(steps)


def _more_steps(recipe: Recipe, rows: Rows) -> str:
    """Return what would make more steps, the best first."""
    ways, per_pass, batch, spec = [], rows.rows_in_epoch(0), recipe.train.batch, spec_of(recipe)
    automatic = spec.automatic_batch(recipe, per_pass)
    if spec.more_steps is not None:
        ways.append(spec.more_steps)
    elif automatic < batch:
        ways.append(f"train.global_batch=auto ({automatic} a step)")
    if rows.packing and rows.samples_in_epoch(0) > per_pass:
        ways.append(f"data.packing=false ({rows.samples_in_epoch(0)} rows a pass)")
    enough = f"train.epochs={-(-FEWEST_STEPS * batch // per_pass)} or more"
    epochs = "a larger train.epochs" if spec.more_steps is not None else enough
    return ", ".join([*ways, f"or {epochs}" if ways else epochs])
