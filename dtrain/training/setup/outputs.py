"""Setup of the outputs: the run's directory, its metrics, its export, and the metric by which its saves are kept."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

from dtrain import recipe as config
from dtrain.base.errors import Problem, RecipeError, Stopped, UserError
from dtrain.base.files import check_can_publish
from dtrain.base.ranges import format_value, name_hint
from dtrain.base.ranks import Ranks
from dtrain.recipe import Recipe
from dtrain.recipe.schema import BEST_METRICS
from dtrain.training import metrics
from dtrain.training.directory import End
from dtrain.training.eval_sets import EvalSet, list_eval_sets, rankable_fields
from dtrain.training.inputs import RunInputs
from dtrain.training.metrics import Recorder

_NAME_BYTES = 200  # largest size of `run.name`: file systems allow 255 bytes, and some files have longer names


def check_keys(inputs: RunInputs) -> list[Problem]:
    """Check `run.name`, `checkpoint.keep_best` and `train.patience`."""
    return _check_name(inputs.recipe.run.name) + _check_best(inputs)


def _check_name(name: str | None) -> list[Problem]:
    """Check that `run.name` is the name of a directory."""
    if name is None:
        return []
    key = "run.name"
    if not name.strip() or "/" in name or name in (".", ".."):
        text = f"run.name={name} is not the name of one directory"
        return [Problem(key, text, "Set run.name to a name without slashes, and run.dir to the directory of the runs")]
    if not name.isprintable() or len(name.encode()) > _NAME_BYTES:
        text = f"run.name={name[:40]!r} has characters that cannot be printed, or more than {_NAME_BYTES} bytes"
        return [Problem(key, text, "Choose a shorter name of printable characters")]
    return []


def _check_best(inputs: RunInputs) -> list[Problem]:
    """Check `checkpoint.keep_best` and `train.patience`.

    `keep_best` compares saves by a field, so the field must be measured at every save. `patience` counts the values of
    the same field, so the field must be measured during the run.
    """
    recipe = inputs.recipe
    best, every, patience = recipe.checkpoint.keep_best, recipe.checkpoint.every, recipe.train.patience
    key = "checkpoint.keep_best"
    if best is None:
        if patience is None:
            return []
        text = f"train.patience={patience} counts values of checkpoint.keep_best, which is null"
        return [Problem("train.patience", text, "Set checkpoint.keep_best to a field")]
    set_of = _set_of_field(inputs)
    problems = _check_is_measured(inputs, best, set_of)
    if problems or best == "loss":  # the training loss is measured at every step
        return problems
    if best in BEST_METRICS and recipe.data.val is None:
        text = f"checkpoint.keep_best={best} needs a validation set"
        return [Problem(key, text, "Set data.val.path, or data.val=0.05 for a share of the training rows")]
    if best in BEST_METRICS and recipe.train.validate_every == "auto":
        return []  # then there is a validation at every save
    interval_key, interval = "train.validate_every", recipe.train.validate_every
    if best in set_of:
        interval_key, interval = f"{set_of[best].key}.every", set_of[best].section.every
    is_measured_at_saves = isinstance(interval, int) and every is not None and every % interval == 0
    if every is not None and not is_measured_at_saves:
        text = (
            f"checkpoint.keep_best={best} needs a value at every save, and checkpoint.every={every} is not a multiple "
            f"of {interval_key}={format_value(interval)}"
        )
        problems.append(Problem(key, text, f"Set {interval_key}={every}"))
    if patience is not None and interval is None:
        text = f"train.patience={patience} counts values of {best}, and {interval_key} is null"
        problems.append(Problem("train.patience", text, f"Set {interval_key}"))
    return problems


def _set_of_field(inputs: RunInputs) -> dict[str, EvalSet]:
    """Return the set of `eval` for each field of an evaluation that keep_best can name."""
    set_of = {}
    for eval_set in list_eval_sets(inputs.recipe.eval):
        for name in rankable_fields(eval_set):
            set_of[name] = eval_set
    return set_of


def _check_is_measured(inputs: RunInputs, best: str, set_of: Mapping[str, EvalSet]) -> list[Problem]:
    """Check that the run measures the field of keep_best.

    Args:
        inputs: The run's inputs.
        best: The value of `checkpoint.keep_best`.
        set_of: The set of `eval` for each field of an evaluation.
    """
    key = "checkpoint.keep_best"
    measured = [name for name in BEST_METRICS if name in inputs.method.best]
    measured += set_of
    if best in measured:
        return []
    if best in BEST_METRICS:
        text = f"checkpoint.keep_best={best} is not measured by method={inputs.recipe.method}"
        return [Problem(key, text, f"Use {' or '.join(measured)}")]
    known = ", ".join([*BEST_METRICS, *set_of])
    near = name_hint(best, measured, otherwise="")
    return [Problem(key, f"checkpoint.keep_best={best} is not one of {known} or null{near}")]


def check_files(inputs: RunInputs) -> list[Problem]:
    """Check that the export replaces no directory that the run reads."""
    recipe = inputs.recipe
    if recipe.checkpoint.export == "none":
        return []
    target = os.path.realpath(inputs.run.export)  # returns a path even for a loop of links
    paths = [("model.path", recipe.model.path), *inputs.method.other_models()]
    if recipe.lora is not None:
        paths.append(("lora.path", recipe.lora.path))
    problems = []
    for key, path in paths:
        if path and Path(os.path.realpath(path)).is_relative_to(target):
            text = f"{key}={path} is inside {target}, which this run's export replaces"
            problems.append(Problem(key, text, "Choose another run.name, or checkpoint.export=none"))
    return problems


def open_outputs(inputs: RunInputs, ranks: Ranks, is_main: bool, stack: ExitStack) -> Recorder:
    """Lock the run's directory and open the sinks of its metrics, until `stack` closes.

    Raises:
        UserError: On every rank, if another run uses the directory, if a tracker cannot be used as the recipe says, or
            if the export could not be written.

    Collectives:
        Three broadcasts over `ranks`.
    """
    recipe, run = inputs.recipe, inputs.run

    def lock() -> None:
        run.acquire(print_line=print)  # the recorder, which prints the other lines, needs the directory first

    def release(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        run.record_end(_describe_end(error, recipe))
        run.release()

    ranks.run_on_first(lock)
    if is_main:
        stack.push(release)

    def check_trackers() -> None:
        problems = metrics.option_problems(recipe.metrics)
        if problems:
            raise RecipeError(problems)

    ranks.run_on_first(check_trackers)
    recorder = metrics.build(recipe.metrics, run.path, config.to_yaml(recipe), is_main)
    recorder.redact = partial(config.redact, recipe=recipe)
    stack.callback(recorder.close)
    ranks.run_on_first(lambda: refuse_unwritable_export(inputs))
    return recorder


def _describe_end(error: BaseException | None, recipe: Recipe) -> End:
    """Describe the end of a run that raised `error`, or none."""
    if error is None:
        return End("finished")
    if isinstance(error, Stopped | KeyboardInterrupt):
        return End("stopped")
    # The message of an error of Python itself, such as KeyError, says little without its name.
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return End("failed", config.redact(text.strip().partition("\n")[0], recipe))


def refuse_unwritable_export(inputs: RunInputs) -> None:
    """Raise UserError if the run's directory exists and the run could not write its export there."""
    if inputs.recipe.checkpoint.export != "none" and inputs.run.path.is_dir():
        check_can_publish(inputs.run.export)
