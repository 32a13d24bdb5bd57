"""Stage outputs: the run's directory, its metrics, its export, and the measures that its saves are kept by."""

import os
from pathlib import Path

from dtrain.base.files import refuse_unwritable
from dtrain.base.ranges import hint, shown
from dtrain.recipe.schema import BEST
from dtrain.training.eval_sets import fields, sets
from dtrain.training.host import Host
from dtrain.training.spec import RunSpec


def check_keys(spec: RunSpec) -> list[str]:
    """Check `run.name`, `checkpoint.keep_best` and `train.patience`."""
    problems, name = [], spec.recipe.run.name
    if name is not None and (not name.strip() or "/" in name or name in (".", "..")):
        problems.append(f"run.name={name} must be the name of one directory; run.dir says where it lies")
    elif name is not None and (not name.isprintable() or len(name.encode()) > 200):
        problems.append(f"run.name={name[:40]!r} must have at most 200 bytes, and no character that is not printed")
    return problems + _best(spec)


def _best(spec: RunSpec) -> list[str]:
    """Return what is wrong with `checkpoint.keep_best` and `train.patience`, one line each.

    keep_best compares saves, so each save needs a value of its own; patience counts values.
    """
    recipe = spec.recipe
    best, every, patience = recipe.checkpoint.keep_best, recipe.checkpoint.every, recipe.train.patience
    if best is None:
        asks = f"train.patience={patience} counts values of checkpoint.keep_best, which is null: name a field there"
        return [asks] if patience is not None else []
    set_of = {name: each for each in sets(recipe.eval) for name in fields(each)}
    measured = [*(name for name in BEST if name in spec.method.best), *set_of]
    if best in BEST and best not in measured:
        return [f"checkpoint.keep_best={best} is not measured by method={recipe.method}; it has {', '.join(measured)}"]
    if best not in measured:
        known, meant = ", ".join([*BEST, *set_of]), hint(best, measured, otherwise="")
        return [f"checkpoint.keep_best={best} is none of {known}, nor null{meant}"]
    if best == "loss":
        return []
    if best in BEST and recipe.data.val is None:
        return [f"checkpoint.keep_best={best} needs a validation set: set data.val.path, or data.val=0.05"]
    if best in BEST and recipe.train.validate_every == "auto":
        return []  # it validates at every save
    key, often = "train.validate_every", recipe.train.validate_every
    if best in set_of:
        key, often = f"{set_of[best].key}.every", set_of[best].section.every
    problems = []
    if every is not None and not (isinstance(often, int) and every % often == 0):
        problems.append(
            f"checkpoint.keep_best={best} needs a measure at every save, and checkpoint.every={every} is no multiple "
            f"of {key}={shown(often)}: set {key}={every}"
        )
    if patience is not None and often is None:
        problems.append(f"train.patience={patience} counts values of {best}, and {key}=null: set {key}")
    return problems


def check_files(spec: RunSpec) -> list[str]:
    """An export takes the place of its whole directory."""
    recipe = spec.recipe
    if recipe.checkpoint.export == "none":
        return []
    target = os.path.realpath(spec.run.export)  # of a loop of links it gives something
    read = [("model.path", recipe.model.path), *spec.method.other_models()]
    read += [] if recipe.lora is None else [("lora.path", recipe.lora.path)]
    return [
        f"{key}={path} lies where this run puts its export ({target}), which would take its place: choose another "
        "run.name, or checkpoint.export=none"
        for key, path in read
        if path and Path(os.path.realpath(path)).is_relative_to(target)
    ]


def resolve(spec: RunSpec, host: Host) -> bool:
    """Take the run's directory, or look whether it could be taken; refuse an export that cannot be written."""
    host.open_outputs(spec)
    if spec.recipe.checkpoint.export != "none":
        host.first(lambda: _refuse_unwritable(spec))
    return True


def _refuse_unwritable(spec: RunSpec) -> None:
    if spec.run.path.is_dir():
        refuse_unwritable(spec.run.export)
